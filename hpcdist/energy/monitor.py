"""Energy monitor of a job: one rank of each node reads the sensors, and windows attribute joules to phases.

`EnergyWatch` needs no job: one process reads this machine, for `hpcdist energy watch`.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.config import CommunicationConfig
from hpcdist.comm.failure.rank_failures import barrier_with_deadline
from hpcdist.comm.launch.environment import boot_id
from hpcdist.constants import ENERGY_GROUP, VISIBLE_GPUS
from hpcdist.energy import report as reports
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.node_rows import LiveFigures, MeanPower, NodeRows, PhaseWindows, append_rows
from hpcdist.energy.report import NODE, NodeContribution, SourceResult
from hpcdist.energy.sampler import DrainedSamples, EnergySampler
from hpcdist.energy.sources import nvml
from hpcdist.energy.sources.discovery import GpuClaim, NodeSources, claim_gpus, open_node_sources
from hpcdist.energy.sources.utilisation import NodeUtilisation, this_process
from hpcdist.errors import MissingCapabilityError, StorageError
from hpcdist.hdf5 import files

SCHEMA: Final = "hpcdist.energy"
VERSION: Final = 1
WINDOW: Final = "watched"


@dataclass(frozen=True)
class WatchInterval:
    """Mean power and utilisation of a machine in one interval of an `EnergyWatch`."""

    seconds: float  # from the start of the watch to the end of the interval
    watts: Mapping[str, float]  # by energy source
    by_kind: Mapping[str, float]
    total_w: float
    utilisation: Mapping[str, float]


class EnergyWatch:
    """Measurement of this machine's energy until `finish`. It writes samples to ``output``. Raises HpcdistError."""

    def __init__(self, config: EnergyConfig, output: Path | None = None) -> None:
        self.sources = open_node_sources(config, [_claim_visible()], computing=False)
        if not self.sources.counters:
            reasons = "; ".join(f"{kind}: {reason}" for kind, reason in self.missing().items())
            raise MissingCapabilityError(
                "no energy source of this machine is readable, so the energy measurement was not started (see "
                f"`hpcdist energy sources`). Reasons by kind of source: {reasons}"
            )
        look = NodeUtilisation([this_process()], self.sources.sensors).look if config.utilisation_s else None
        self.sampler = EnergySampler(self.sources.counters, config.interval_s, look, config.utilisation_s)
        self._windows = PhaseWindows(len(self.sources.counters))
        self._power, self._live = MeanPower(), LiveFigures()
        self._output, self.lost_output = output, ""  # `lost_output`: text on a later write error
        self._session = 0 if output is None else _next_session(output)
        self._began_ns = time.monotonic_ns()
        self.sampler.start()
        self._windows.enter(WINDOW, *_read_edge(self.sampler, self._windows))

    def missing(self) -> dict[str, str]:
        """Return a dict from each kind of energy that is not measured, such as "cpu", to the reason."""
        kinds = {counter.kind for counter in self.sources.counters}
        return {} if NODE in kinds else {k: why for k, why in self.sources.missing.items() if k not in kinds}

    def moment(self) -> WatchInterval:
        """Return the `WatchInterval` from the last call to now, and append its samples to the output file."""
        now_ns, _ = self.sampler.read()
        tracks, drained = self.sampler.tracks, self.sampler.drain()
        watts = self._power.by_source(len(tracks), drained)
        row = _node_rows(0, self.sampler, self._windows, drained, watts)
        self._live.see([row])
        self._keep(row)
        return WatchInterval(
            (now_ns - self._began_ns) / 1e9,
            {track.name: power for track, power in zip(tracks, watts, strict=True)},
            row.watts,
            row.watts.get(NODE, math.fsum(row.watts.values())),
            self._live.utilisation(),
        )

    def _keep(self, row: NodeRows) -> None:
        if self._output is None:
            return
        try:
            with files.edit(self._output, SCHEMA, VERSION) as file:
                append_rows(file, self._session, [row])
        except StorageError as error:
            self._output, self.lost_output = None, str(error)

    def finish(self) -> dict[str, Any]:
        """Stop measuring. Return the dict of `report.merge`, with the duration of the measurement as ``seconds``."""
        self._windows.leave(*_read_edge(self.sampler, self._windows))
        seconds = (time.monotonic_ns() - self._began_ns) / 1e9
        ended = self.sampler.stop()
        try:
            self.moment()
            return {**reports.merge([_contribution(0, self.sampler, self._windows, self.sources)]), "seconds": seconds}
        finally:
            if ended:
                self.sources.close()


def _read_edge(sampler: EnergySampler, windows: PhaseWindows) -> tuple[int, list[int | None]]:
    reading = sampler.read()
    for source in sampler.gaps_since_edge():
        windows.forget(source)
    return reading


def _contribution(
    node: int, sampler: EnergySampler, windows: PhaseWindows, sources: NodeSources, needed: Iterable[str] = ()
) -> NodeContribution:
    busy_s, lasted_s = sampler.overhead()
    return NodeContribution(
        node,
        [
            SourceResult(t.name, t.kind, t.pace.update_s, t.failed_reads, t.explain(), t.about.note, t.about.declared)
            for t in sampler.tracks
        ],
        windows.phases(),
        windows.totals(),
        sources.missing,
        frozenset(needed),
        frozenset(sources.unused),
        busy_s if lasted_s else math.nan,
        lasted_s if lasted_s else math.nan,
    )


def _node_rows(
    node: int,
    sampler: EnergySampler,
    windows: PhaseWindows,
    drained: DrainedSamples,
    watts: Sequence[float],
    lacking: frozenset[str] = frozenset(),
) -> NodeRows:
    sources = [(track.kind, track.name, track.about) for track in sampler.tracks]
    by_kind = {
        kind: math.fsum(power for power, (source_kind, *_) in zip(watts, sources, strict=True) if source_kind == kind)
        for kind in dict.fromkeys(kind for kind, *_ in sources)
    }
    return NodeRows(node, sources, drained, windows.take(), time.monotonic_ns(), *sampler.overhead(), by_kind, lacking)


def _claim_visible() -> GpuClaim:
    try:
        with nvml.NvmlDriver() as driver:
            named = nvml.gpus_in_use(driver, None, os.environ) if os.environ.get(VISIBLE_GPUS) else ()
            uuids = named or tuple(gpu.uuid for gpu in driver.gpus())
    except MissingCapabilityError as error:
        return GpuClaim(reason=str(error))
    return GpuClaim(uuids) if uuids else GpuClaim(reason="the NVIDIA driver shows no GPU to this process")


def _next_session(output: Path) -> int:
    with files.edit(output, SCHEMA, VERSION) as file:
        if ENERGY_GROUP not in file:
            return 0
        sessions = np.asarray(file[f"{ENERGY_GROUP}/sources/session"])
    return int(sessions.max(initial=-1)) + 1


class EnergyMonitor:
    """Energy monitor of a job. The first rank of each node reads the node's sensors. Construction is collective."""

    def __init__(
        self,
        comm: Communicator,
        config: EnergyConfig,
        *,
        bus_id: str | None = None,
        synchronise: Callable[[], None] = lambda: None,
        environment: Mapping[str, str] = os.environ,
        host: str | None = None,
        deadline_s: float = CommunicationConfig.deadline_s,
    ) -> None:
        # `bus_id` is the PCI address of this rank's GPU; None: CPU. A `window` calls `synchronise`, which waits for
        # this GPU, at its begin and end. Ranks with equal `host` (None: the boot id) form a node. Construction,
        # `report` and `state` raise DeadlineError if a rank is missing after `deadline_s`.
        self.comm, self._deadline_s = comm, deadline_s
        self._wait_for_ranks("the construction of EnergyMonitor")
        host = boot_id() if host is None else host
        claim_of_rank = claim_gpus(config, bus_id, environment, this_process() if config.utilisation_s else None)
        ranks = comm.allgather_object((host, claim_of_rank, bus_id is not None))
        hosts = [name for name, _, _ in ranks]
        self._node = list(dict.fromkeys(hosts)).index(host)
        self._leads = hosts.index(host) == comm.rank
        self._leaders = comm.split(0 if self._leads else None, comm.rank, "energy")
        self._sources, look = NodeSources(), None
        if self._leads:
            claims = [claim for name, claim, _ in ranks if name == host]
            self._sources = open_node_sources(config, claims, any(on_gpu for name, _, on_gpu in ranks if name == host))
            processes = [claim.process for claim in claims if claim.process is not None]
            look = NodeUtilisation(processes, self._sources.sensors).look if config.utilisation_s else None
        measured = set(comm.allgather_object((self._node, bool(self._sources.counters))))
        self.measures = any(can_measure for _, can_measure in measured)  # on any node; equal on every rank
        self._watches = self.measures or config.utilisation_s > 0
        self._synchronise = synchronise if (self._node, True) in measured else lambda: None
        self.sampler = EnergySampler(self._sources.counters, config.interval_s, look, config.utilisation_s)
        self._windows = PhaseWindows(len(self._sources.counters))
        self._stopped = False
        self._power, self.live = MeanPower(), LiveFigures()  # `live`: figures of all nodes
        self._earlier: dict[str, Any] | None = None

    def _wait_for_ranks(self, call: str) -> None:
        if math.isfinite(self._deadline_s):
            barrier_with_deadline(self.comm, call, self._deadline_s)

    def __enter__(self) -> "EnergyMonitor":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the sampler thread. Local."""
        self.sampler.start()

    def stop(self) -> None:
        """Stop the sampler thread and close the sensors. The measured energy stays available. Local."""
        self._stopped = True
        if self.sampler.stop():
            self._sources.close()

    def close(self) -> None:
        """Free the communicator of the first ranks of the nodes. Do not call `collect` afterwards. Collective."""
        if self._leaders is not None:
            self._leaders.free()
            self._leaders = None

    @contextmanager
    def window(self, phase: str) -> Iterator[None]:
        """Attribute this node's energy in the ``with`` block to ``phase``. Every rank must enter the block. Local."""
        if not self._leads:
            self._synchronise()
            yield
            self._synchronise()
            return
        self._windows.enter(phase, *self._look())
        is_left = True
        try:
            yield
        except GeneratorExit:  # the interpreter ends inside the block
            is_left = False
            raise
        finally:
            if is_left:
                self._windows.leave(*self._look())

    def _look(self) -> tuple[int, list[int | None]]:
        self._synchronise()
        return _read_edge(self.sampler, self._windows)

    def report(self) -> dict[str, Any]:
        """Return the job's energy report, a dict as in `report.merge`, including earlier starts. Collective."""
        self._wait_for_ranks("EnergyMonitor.report")
        node_share = _contribution(self._node, self.sampler, self._windows, self._sources, self._sources.needed)
        contributions = self.comm.allgather_object(node_share if self._leads else None)
        return reports.merge(
            [contribution for contribution in contributions if contribution is not None], self._earlier
        )

    def state(self) -> dict[str, Any]:
        """Return the job's energy as a JSON dict for a checkpoint, with earlier starts and open windows. Collective."""
        if self._leads and not self._stopped:
            self._windows.edge(*self._look())
        return reports.state(self.report())

    def restore(self, state: dict[str, Any] | None) -> None:
        """Add the energy ``state`` from before a restart to later reports. ``state``: equal on all ranks. Local."""
        self._earlier = state

    def collect(self) -> list[NodeRows]:
        """On the first ranks of the nodes, return new energy data, one `NodeRows` per node; else []. Collective."""
        if not self._watches or self._leaders is None:
            return []
        drained = self.sampler.drain()
        watts = self._power.by_source(len(self.sampler.tracks), drained)
        lacking = frozenset(self._sources.missing) - frozenset(self._sources.unused)
        node_rows = _node_rows(self._node, self.sampler, self._windows, drained, watts, lacking)
        rows = self._leaders.allgather_object(node_rows)
        self.live.see(rows)
        return rows
