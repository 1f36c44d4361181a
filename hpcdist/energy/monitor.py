"""The energy of a job: one rank of each node reads the sensors, windows say what was done meanwhile.

`Monitor.window("training")` is a context manager; one of "checkpoint" inside it takes its joules out of training's.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from hpcdist.comm.communicator import Communicator
from hpcdist.energy import report as reports
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.report import Contribution, Source
from hpcdist.energy.sampler import Sampler
from hpcdist.energy.sources import Sources, claim, of_node
from hpcdist.energy.store import NodeRows
from hpcdist.energy.windows import Windows

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def _nothing() -> None:
    return None


def this_host() -> str:
    """Return what all processes under this kernel, in containers too, and no others have in common (local)."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


class Monitor:
    """Measures between `start` and `stop`, or as a context manager. Construction is collective over ``comm``.

    ``bus_id`` is the PCI address of the GPU on which this rank computes (None: the processor), and ``synchronise``
    waits for it at the edges of windows. Sensors are read by the first rank of each ``host``, for the GPUs of all of
    its ranks, each once. Where nothing can be read no thread runs, and a window costs two looks at the clock.

    A host is a running kernel, and the nodes in reports are hosts: the nodes of the communicator may be declared, and
    two of them on one machine would count it twice.
    """

    def __init__(
        self,
        comm: Communicator,
        config: EnergyConfig,
        *,
        bus_id: str | None = None,
        synchronise: Callable[[], None] = _nothing,
        environment: Mapping[str, str] = os.environ,
        host: str | None = None,
    ) -> None:
        self._comm = comm
        host = this_host() if host is None else host
        ranks = comm.allgather_object((host, claim(config, bus_id, environment), bus_id is not None))
        hosts = [name for name, _, _ in ranks]
        self._node = list(dict.fromkeys(hosts)).index(host)
        self._leads = hosts.index(host) == comm.rank
        self._leaders = comm.split(0 if self._leads else None, comm.rank, "energy")
        self._sources = Sources()
        if self._leads:
            claims = [one for name, one, _ in ranks if name == host]
            self._sources = of_node(config, claims, any(on_gpu for name, _, on_gpu in ranks if name == host))
        measured = set(comm.allgather_object((self._node, bool(self._sources.counters))))
        self.measures = any(found for _, found in measured)  # somewhere in the job: the same on every rank
        self._synchronise = synchronise if (self._node, True) in measured else _nothing
        self.sampler = Sampler(self._sources.counters, config.interval_s)
        self._windows = Windows(len(self._sources.counters))
        self._stored = 0
        self._earlier: dict[str, Any] | None = None

    def __enter__(self) -> "Monitor":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to sample (local)."""
        self.sampler.start()

    def stop(self) -> None:
        """End the sampler and give the sensors back; what was measured stays (local)."""
        self.sampler.stop()
        self._sources.close()

    @contextmanager
    def window(self, phase: str) -> Iterator[None]:
        """Give what is used inside to ``phase``, but for what windows inside take (local; every rank should call)."""
        if not self._leads:
            self._synchronise()
            yield
            self._synchronise()
            return
        self._windows.enter(phase, *self._look())
        try:
            yield
        finally:
            self._windows.leave(*self._look())

    def _look(self) -> tuple[int, list[int | None]]:
        self._synchronise()
        return self.sampler.read()

    def report(self) -> dict[str, Any]:
        """Return the joules of the job until now, with those of its earlier starts: see `report.merge`. Collective."""
        contributions = self._comm.allgather_object(self._contribution() if self._leads else None)
        return reports.merge([one for one in contributions if one is not None], self._earlier)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that the next start of the run goes on counting. Collective.

        Open windows count until now.
        """
        if self._leads:
            self._windows.edge(*self._look())
        return reports.state(self.report())

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from the `state` of an earlier start of the run (local; the same on every rank)."""
        self._earlier = state

    def _contribution(self) -> Contribution:
        found = [
            Source(track.name, track.kind, track.pace.update_s, track.failed_reads, track.explain())
            for track in self.sampler.tracks
        ]
        return Contribution(
            self._node,
            found,
            self._windows.phases(),
            self._windows.totals(),
            self._sources.missing,
            frozenset(self._sources.needed),
            frozenset(self._sources.unused),
        )

    def collect(self) -> list[NodeRows]:
        """Return the samples and the closed windows of all nodes since the last call, on the first rank of each node.

        The other ranks get an empty list. Collective over the first ranks of the nodes, rank 0 among them.
        """
        if not self.measures or self._leaders is None:
            return []
        windows = self._windows.closed[self._stored :]
        self._stored += len(windows)
        sources = [(track.kind, track.name) for track in self.sampler.tracks]
        own = NodeRows(self._node, sources, self.sampler.drain(), windows)
        return self._leaders.allgather_object(own)
