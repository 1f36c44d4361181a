"""Metrics for Prometheus: in a file for the node_exporter of a site, on a port of this machine, or at a Pushgateway.

- textfile: ``hpcdist_<jobid or name of the run>.prom``. node_exporter shows what lies in its directory as if it were of
  now, so the file goes when the run ends, however it does. One that was killed cannot remove it: sites do, in the
  epilog (``rm -f DIRECTORY/hpcdist_$SLURM_JOB_ID.prom``), and alerts compare ``hpcdist_last_step_timestamp_seconds``
  with now.
- http: on 127.0.0.1 only, since nobody is asked for a password. The address is in ``prometheus/targets.json`` of the
  run, in the format of ``file_sd_configs``, while the run goes on.
- push: one group for each job. It is deleted when the run ends in order, as the manual of the Pushgateway asks for, and
  stays with the last values when it fails, so that there is something to raise an alert from.
"""

import json
import re
import threading
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, Protocol

from hpcdist.errors import ConfigurationError, MissingCapabilityError, StorageError
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.exposition import Figures, Totals, identity, write_whole
from hpcdist.telemetry.stream import Event, Run

DIRECTORY: Final = "prometheus"  # of the run
TOTALS: Final = "counters.json"
TARGETS: Final = "targets.json"
ADDRESS: Final = "127.0.0.1"
JOB: Final = "hpcdist"  # at a Pushgateway
PUSH_S: Final = 5.0  # a gateway that has not answered by then is away


class _Way(Protocol):
    where: str

    def publish(self) -> None: ...

    def close(self, normal: bool) -> None: ...


class PrometheusSink:
    """Shows the last figures of a run in the way that the recipe names; ``where`` tells a person where they are.

    Raises MissingCapabilityError without the package, ConfigurationError for a port or a gateway that cannot be used,
    StorageError for a directory that cannot be written to.
    """

    name = "Prometheus"

    def __init__(self, run: Run, config: TelemetryConfig) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise MissingCapabilityError(
                "telemetry.prometheus needs the package prometheus_client: pip install 'hpcdist[prometheus]', or set "
                f"telemetry.prometheus = 'off' ({error})"
            ) from error
        self._totals = Totals(run.directory / DIRECTORY / TOTALS)
        self._figures = Figures(run, self._totals)
        registry = CollectorRegistry()  # our own: nothing about the process of rank 0 comes along
        registry.register(self._figures)
        self._way = WAYS[config.prometheus](run, config, registry)
        self.where = self._way.where

    def write(self, events: Sequence[Event]) -> None:
        """Take the figures of ``events``, and show them."""
        self._figures.update(events)
        try:
            self._way.publish()
        finally:
            self._totals.keep()

    def close(self, normal: bool) -> None:
        """End; see above what stays."""
        self._way.close(normal)


class _TextFile:
    def __init__(self, run: Run, config: TelemetryConfig, registry: Any) -> None:
        folder = Path(config.textfile_directory) if config.textfile_directory else run.directory / DIRECTORY
        if config.textfile_directory and not folder.is_dir():  # one that we made would be looked into by nobody
            raise StorageError(
                f"telemetry.textfile_directory = {config.textfile_directory!r}: there is no such directory on this "
                "node; give the one after --collector.textfile.directory of its node_exporter"
            )
        self._path = folder / f"hpcdist_{re.sub(r'[^A-Za-z0-9_.-]', '_', identity(run))}.prom"
        self._registry = registry
        self._cure = "choose another telemetry.textfile_directory, or set telemetry.prometheus = 'off'"
        self.where = str(self._path)
        self.publish()  # what cannot be written is told of now

    def publish(self) -> None:
        from prometheus_client import generate_latest

        write_whole(self._path, generate_latest(self._registry), self._cure)

    def close(self, normal: bool) -> None:
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be removed: {error.strerror}; remove it by hand") from error


class _Server:
    def __init__(self, run: Run, config: TelemetryConfig, registry: Any) -> None:
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(config.port, ADDRESS, registry)
        except OSError as error:
            raise ConfigurationError(
                f"telemetry.port = {config.port}: {ADDRESS}:{config.port} cannot be opened ({error.strerror}); choose "
                "another port, or 0 for any free one"
            ) from error
        address = f"{ADDRESS}:{self._server.server_port}"
        self.where = f"http://{address}/metrics"
        self._targets = run.directory / DIRECTORY / TARGETS
        try:
            write_whole(self._targets, json.dumps([{"targets": [address]}]).encode(), "free space")
        except StorageError:
            self._end()
            raise

    def publish(self) -> None:
        """Nothing to do: who asks is answered with the last figures."""

    def _end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def close(self, normal: bool) -> None:
        self._end()
        self._targets.unlink(missing_ok=True)


class _Gateway:
    """Pushes in a thread: what is due when a push ends are the figures of then, so nothing ever queues."""

    def __init__(self, run: Run, config: TelemetryConfig, registry: Any) -> None:
        self._registry, self._address = registry, config.gateway
        self._group = {"jobid": identity(run)}
        self.where = f"{self._address}, job {JOB!r}, jobid {identity(run)!r}"
        self._failure = self._push()
        if self._failure:
            raise ConfigurationError(
                f"telemetry.gateway: {self._failure}; start it, correct the address (variables such as http_proxy "
                "count, no_proxy takes hosts out), or set telemetry.prometheus = 'off'"
            )
        self._changed = threading.Condition()
        self._due = self._ends = False
        self._thread = threading.Thread(target=self._work, name="hpcdist-push", daemon=True)
        self._thread.start()

    def _push(self) -> str:
        """Push all there is; return why it failed, "" where it did not."""
        from prometheus_client import push_to_gateway

        try:
            push_to_gateway(self._address, JOB, self._registry, grouping_key=self._group, timeout=PUSH_S)
        except (OSError, HTTPException, ValueError) as error:
            return f"the Pushgateway at {self._address} does not take what is pushed ({error})"
        return ""

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._ends)
                if self._ends:
                    return
                self._due = False
            self._failure = self._push()

    def publish(self) -> None:
        """Let the thread push what there is by then; raise what became of the push before."""
        with self._changed:
            self._due = True
            self._changed.notify()
        if self._failure:
            raise StorageError(self._failure)

    def close(self, normal: bool) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join()  # no longer than a push
        if not normal:
            failure = self._push()
            if failure:
                raise StorageError(failure)
            return
        from prometheus_client import delete_from_gateway

        try:
            delete_from_gateway(self._address, JOB, grouping_key=self._group, timeout=PUSH_S)
        except (OSError, HTTPException, ValueError) as error:
            raise StorageError(
                f"the Pushgateway at {self._address} keeps the group {self._group} of job {JOB!r} ({error}); delete it"
            ) from error


WAYS: Final[dict[str, Callable[[Run, TelemetryConfig, Any], _Way]]] = {
    "textfile": _TextFile,
    "http": _Server,
    "push": _Gateway,
}
