"""Prometheus sink: a file for a site's node_exporter, an HTTP port of this machine, or a Pushgateway.

- textfile: ``hpcdist_<jobid or run name>.prom``, removed when the run ends. A killed run leaves the file, so sites
  should remove it in the epilog (``rm -f DIRECTORY/hpcdist_$SLURM_JOB_ID.prom DIRECTORY/hpcdist_$SLURM_JOB_ID-*.prom``:
  a run on a part of the job's ranks also has its name in the file name).
- http: on 127.0.0.1 only, because there is no password. ``prometheus/targets.json`` in the run directory has the
  address in the format of ``file_sd_configs``.
- push: one group per job, deleted after a regular end, and kept with the last values after a failure.
"""

import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, Protocol

from hpcdist.errors import ConfigurationError, MissingCapabilityError, StorageError
from hpcdist.reporting import atomic, regular
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.event_stream import RunInfo
from hpcdist.telemetry.metrics import quantities
from hpcdist.telemetry.metrics.observations import RunEvent
from hpcdist.telemetry.metrics.quantities import COUNTER, QUANTITIES

# Totals that a resumed run restores from its checkpoint; other totals begin at zero with each start.
RESTORED: Final = frozenset(
    ("steps_total", "tokens_total", "skipped_steps_total", "energy_joules_total", "emissions_grams_total")
)
INFO: Final = quantities.PREFIX + "job_info"


class CounterTotals:
    """Totals of the counters, stored in the file ``path``, so that exported counters do not fall after a restart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: dict[str, float] = {}
        with suppress(OSError, ValueError, AttributeError, TypeError, OverflowError):
            self._before = {key: float(value) for key, value in regular.json_value(path).items()}
        self.shown = dict(self._before)

    def show(self, key: str, value: float) -> float:
        """Return the total to export for counter ``key``. The total does not fall when ``value`` restarts from 0."""
        if quantities.split(key)[0] not in RESTORED:
            value += self._before.get(key, 0.0)
        self.shown[key] = max(value, self.shown.get(key, 0.0))
        return self.shown[key]

    def keep(self) -> None:
        """Write the totals of all counters to the file. The next start reads this file. Raises StorageError."""
        write_atomically(self._path, json.dumps(self.shown).encode(), "free space, or set telemetry.prometheus = 'off'")


class LatestFigures:
    """Collector for prometheus_client with the latest values of all metrics. Another thread may read these values."""

    # Metrics have the labels ``run``, ``jobid`` (without a job, the run's name), and at most one other label. Only the
    # metric `INFO` has labels with the owner of the job.
    def __init__(self, run: RunInfo, totals: CounterTotals) -> None:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        self._counter: Any = CounterMetricFamily
        self._gauge: Any = GaugeMetricFamily
        self._labels = {"jobid": job_identity(run), "run": run.name}
        self._owner = run.owner
        self._totals = totals
        self._values: Mapping[str, float] = dict(totals.shown)

    def update(self, events: Sequence[RunEvent]) -> None:
        """Store the latest values from the list ``events``. A gauge whose value is NaN is no longer exported."""
        values = dict(self._values)
        for event in events:
            for key, value in event.values.items():
                quantity = QUANTITIES.get(quantities.split(key)[0])
                if quantity is None or isinstance(value, str):
                    continue
                if not math.isnan(value):
                    values[key] = self._totals.show(key, value) if quantity.kind == COUNTER else float(value)
                elif quantity.kind != COUNTER:
                    values.pop(key, None)
        self._values = values  # one assignment, no lock: another thread reads the old mapping or the new one

    def collect(self) -> Iterator[Any]:
        """Yield the metric family with the job's owner, then all other families in the order of `QUANTITIES`."""
        if self._owner:
            about = self._gauge(INFO, "Owner of the job, in the labels (1)", labels=[*self._labels, *self._owner])
            about.add_metric([*self._labels.values(), *self._owner.values()], 1.0)
            yield about
        by_name: dict[str, list[tuple[str | None, float]]] = {}
        for key, value in self._values.items():
            name, label = quantities.split(key)
            by_name.setdefault(name, []).append((label, value))
        for name, quantity in QUANTITIES.items():
            if name not in by_name:
                continue
            labels = [*self._labels, *([quantity.label] if quantity.label else [])]
            family = self._counter if quantity.kind == COUNTER else self._gauge
            metric = family(quantity.prometheus, f"{quantity.meaning} ({quantity.unit})", labels=labels)
            for label, value in by_name[name]:
                metric.add_metric([*self._labels.values(), *([label] if label is not None else [])], value)
            yield metric

    def describe(self) -> Iterable[Any]:
        """Return no metric descriptions to the Prometheus registry, because metrics are known only when collected."""
        return ()


def job_identity(run: RunInfo) -> str:
    """Return the job id of ``run``, or the run's name if the run is not part of a batch job."""
    return run.jobid or run.name


def write_atomically(path: Path, content: bytes, cure: str) -> None:
    """Replace the file ``path`` atomically by ``content``. Raises StorageError, whose message ends with ``cure``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path) as file:
            os.fchmod(file.fileno(), 0o644)  # an exporter runs as another user
            file.write(content)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}; {cure}") from error


DIRECTORY: Final = "prometheus"  # in the run directory
TOTALS: Final = "counters.json"
TARGETS: Final = "targets.json"
ADDRESS: Final = "127.0.0.1"
PUSH_JOB: Final = "hpcdist"  # job name at the Pushgateway
PUSH_S: Final = 5.0  # timeout of a push


class _Exporter(Protocol):
    where: str

    def publish(self) -> None: ...

    def close(self, normal: bool) -> None: ...


class PrometheusSink:
    """Sink that exports the latest metrics of a run to Prometheus. Raises HpcdistError if the export fails."""

    name = "Prometheus"

    def __init__(self, run: RunInfo, config: TelemetryConfig) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise MissingCapabilityError(
                "telemetry.prometheus needs the package prometheus_client: pip install 'hpcdist[prometheus]', or set "
                f"telemetry.prometheus = 'off' ({error})"
            ) from error
        self._totals = CounterTotals(run.directory / DIRECTORY / TOTALS)
        self._figures = LatestFigures(run, self._totals)
        registry = CollectorRegistry()  # a separate registry, without metrics of the process
        registry.register(self._figures)
        self._way = EXPORTERS[config.prometheus](run, config, registry)
        self.where = self._way.where

    def write(self, events: Sequence[RunEvent]) -> None:
        self._figures.update(events)
        try:
            self._way.publish()
        finally:
            self._totals.keep()

    def close(self, normal: bool) -> None:
        self._way.close(normal)


class _TextFile:
    def __init__(self, run: RunInfo, config: TelemetryConfig, registry: Any) -> None:
        folder = Path(config.textfile_directory) if config.textfile_directory else run.directory / DIRECTORY
        if config.textfile_directory and not folder.is_dir():  # no exporter would read a new one
            raise StorageError(
                f"telemetry.textfile_directory = {config.textfile_directory!r} is not a directory on this node; give "
                "the directory that this node's node_exporter reads (its option --collector.textfile.directory)"
            )
        identity = f"{run.jobid}-{run.name}" if run.jobid and run.is_part else job_identity(run)
        self._path = folder / f"hpcdist_{re.sub(r'[^A-Za-z0-9_.-]', '_', identity)}.prom"
        self._registry = registry
        self._cure = "choose another telemetry.textfile_directory, or set telemetry.prometheus = 'off'"
        self.where = str(self._path)
        self.publish()  # raise errors at the start of the run

    def publish(self) -> None:
        from prometheus_client import generate_latest

        write_atomically(self._path, generate_latest(self._registry), self._cure)

    def close(self, normal: bool) -> None:
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be removed: {error.strerror}; remove this file by hand") from error


class _Server:
    def __init__(self, run: RunInfo, config: TelemetryConfig, registry: Any) -> None:
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(config.port, ADDRESS, registry)
        except OSError as error:
            raise ConfigurationError(
                f"telemetry.port = {config.port}: the address {ADDRESS}:{config.port} cannot be opened "
                f"({error.strerror}); set telemetry.port to another port, or to 0 for any free port"
            ) from error
        address = f"{ADDRESS}:{self._server.server_port}"
        self.where = f"http://{address}/metrics"
        self._targets = run.directory / DIRECTORY / TARGETS
        try:
            write_atomically(self._targets, json.dumps([{"targets": [address]}]).encode(), "free space")
        except StorageError:
            self._end()
            raise

    def publish(self) -> None:
        """Do nothing, because the server answers each request with the latest metrics."""

    def _end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def close(self, normal: bool) -> None:
        self._end()
        self._targets.unlink(missing_ok=True)


class _Gateway:
    # A thread pushes the latest figures, so pushes never queue up.
    def __init__(self, run: RunInfo, config: TelemetryConfig, registry: Any) -> None:
        self._registry, self._address = registry, config.gateway
        self._group = {"jobid": job_identity(run)} | ({"run": run.name} if run.is_part else {})
        self.where = f"{self._address}, job {PUSH_JOB!r}, jobid {job_identity(run)!r}"
        self._failure = self._push()
        if self._failure:
            raise ConfigurationError(
                f"telemetry.gateway = {config.gateway!r}: the first push failed: {self._failure}; start the "
                "Pushgateway, correct telemetry.gateway (the environment variables http_proxy and no_proxy apply), or "
                "set telemetry.prometheus = 'off'"
            )
        self._changed = threading.Condition()
        self._due = self._ends = False
        self._thread = threading.Thread(target=self._work, name="hpcdist-push", daemon=True)
        self._thread.start()

    def _push(self) -> str:
        from prometheus_client import push_to_gateway

        try:
            push_to_gateway(self._address, PUSH_JOB, self._registry, grouping_key=self._group, timeout=PUSH_S)
        except (OSError, HTTPException, ValueError) as error:
            return f"the Pushgateway at {self._address} does not accept the push ({error})"
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
        with self._changed:
            self._due = True
            self._changed.notify()
        if self._failure:
            raise StorageError(self._failure)

    def close(self, normal: bool) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join()  # waits for at most one push
        if not normal:
            failure = self._push()
            if failure:
                raise StorageError(failure)
            return
        from prometheus_client import delete_from_gateway

        try:
            delete_from_gateway(self._address, PUSH_JOB, grouping_key=self._group, timeout=PUSH_S)
        except (OSError, HTTPException, ValueError) as error:
            raise StorageError(
                f"the metrics of this run cannot be deleted from the Pushgateway at {self._address} ({error}); delete "
                f"the group {self._group} of the job {PUSH_JOB!r} by hand"
            ) from error


EXPORTERS: Final[dict[str, Callable[[RunInfo, TelemetryConfig, Any], _Exporter]]] = {
    "textfile": _TextFile,
    "http": _Server,
    "push": _Gateway,
}
