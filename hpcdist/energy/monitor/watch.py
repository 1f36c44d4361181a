"""Watch the energy of this machine in one process without a job: watts now, joules in all.

Behind `hpcdist energy watch`.
"""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.energy import report
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.monitor import tables
from hpcdist.energy.monitor.live import LiveFigures, MeanPower
from hpcdist.energy.monitor.sampler import EnergySampler
from hpcdist.energy.monitor.windows import PhaseWindows
from hpcdist.energy.report import NODE, NodeContribution, SourceResult
from hpcdist.energy.sources import nvml
from hpcdist.energy.sources.discovery import GpuClaim, open_node_sources
from hpcdist.energy.sources.utilisation import NodeUtilisation, this_process
from hpcdist.errors import MissingCapabilityError, StorageError
from hpcdist.hdf5 import files

SCHEMA: Final = "hpcdist.energy"
VERSION: Final = 1
WINDOW: Final = "watched"


@dataclass(frozen=True)
class WatchInterval:
    """Power since the last look: watts by source and by kind, their total, and shares by resource."""

    seconds: float
    watts: Mapping[str, float]
    by_kind: Mapping[str, float]
    total_w: float
    utilisation: Mapping[str, float]


class EnergyWatch:
    """Measures from construction to `finish`. Raises MissingCapabilityError where there is nothing to read.

    GPUs are those that CUDA_VISIBLE_DEVICES names, and all of them where it names none. ``output`` is a file that gets
    the samples, in the tables of `hpcdist.energy.monitor.tables`; what is there already is kept, and this is one
    session more. Raises StorageError where it cannot be written; should that come later, ``lost_output`` says so.
    """

    def __init__(
        self, config: EnergyConfig, output: Path | None = None, environment: Mapping[str, str] = os.environ
    ) -> None:
        claim = _claim_visible(environment)
        self.sources = open_node_sources(config, [claim], computing=False)
        if not self.sources.counters:
            why = "; ".join(f"{kind}: {reason}" for kind, reason in self.missing().items())
            raise MissingCapabilityError(
                f"no source of energy can be read here, and nothing was started (see `hpcdist energy sources`). {why}"
            )
        look = NodeUtilisation([this_process()], self.sources.sensors).look if config.utilisation_s else None
        self.sampler = EnergySampler(self.sources.counters, config.interval_s, look, config.utilisation_s)
        self._windows = PhaseWindows(len(self.sources.counters))
        self._power, self._present = MeanPower(), LiveFigures()
        self._output, self.lost_output = output, ""
        self._session = 0 if output is None else _next_session(output)
        self._began_ns = time.monotonic_ns()
        self.sampler.start()
        self._windows.enter(WINDOW, *self._look())

    def missing(self) -> dict[str, str]:
        """Return by kind why it is not measured."""
        kinds = {counter.kind for counter in self.sources.counters}
        return {} if NODE in kinds else {k: why for k, why in self.sources.missing.items() if k not in kinds}

    def _look(self) -> tuple[int, list[int | None]]:
        found = self.sampler.read()
        for source in self.sampler.gaps_since_edge():
            self._windows.forget(source)
        return found

    def moment(self) -> WatchInterval:
        """Return what was drawn since the last call, and keep the samples in ``output``."""
        now_ns, _ = self.sampler.read()
        tracks, drained = self.sampler.tracks, self.sampler.drain()
        watts = self._power.by_source(len(tracks), drained)
        kinds = dict.fromkeys(track.kind for track in tracks)
        by_kind = {
            kind: math.fsum(one for one, track in zip(watts, tracks, strict=True) if track.kind == kind)
            for kind in kinds
        }
        busy_s, lasted_s = self.sampler.overhead()
        named = [(track.kind, track.name, track.about) for track in tracks]
        row = tables.NodeRows(0, named, drained, self._windows.take(), now_ns, busy_s, lasted_s)
        self._present.see([row])
        self._keep(row)
        return WatchInterval(
            (now_ns - self._began_ns) / 1e9,
            {track.name: one for track, one in zip(tracks, watts, strict=True)},
            by_kind,
            by_kind.get(NODE, math.fsum(by_kind.values())),
            self._present.utilisation(),
        )

    def _keep(self, row: tables.NodeRows) -> None:
        """Append the samples. Whatever is being measured must not end because a disk is full."""
        if self._output is None:
            return
        try:
            with files.edit(self._output, SCHEMA, VERSION) as file:
                tables.append(file, self._session, [row])
        except StorageError as error:
            self._output, self.lost_output = None, str(error)

    def finish(self) -> dict[str, Any]:
        """End, keep the last samples, and return what was used: as `hpcdist.energy.report.merge`, and ``seconds``."""
        self._windows.leave(*self._look())
        seconds = (time.monotonic_ns() - self._began_ns) / 1e9
        ended = self.sampler.stop()
        try:
            self.moment()
            return {**self._report(), "seconds": seconds}
        finally:
            if ended:
                self.sources.close()

    def _report(self) -> dict[str, Any]:
        found = [
            SourceResult(t.name, t.kind, t.pace.update_s, t.failed_reads, t.explain(), t.about.note, t.about.declared)
            for t in self.sampler.tracks
        ]
        missing, unused = self.sources.missing, frozenset(self.sources.unused)
        busy_s, lasted_s = self.sampler.overhead()
        own = NodeContribution(
            0, found, self._windows.phases(), self._windows.totals(), missing, frozenset(), unused, busy_s, lasted_s
        )
        return report.merge([own])


def _claim_visible(environment: Mapping[str, str]) -> GpuClaim:
    """Return the GPUs to look at, or why they cannot be."""
    try:
        with nvml.NvmlDriver() as driver:
            named = nvml.gpus_in_use(driver, None, environment) if environment.get(nvml.VISIBLE) else ()
            uuids = named or tuple(gpu.uuid for gpu in driver.gpus())
    except MissingCapabilityError as error:
        return GpuClaim(reason=str(error))
    return GpuClaim(uuids) if uuids else GpuClaim(reason="the NVIDIA driver shows no GPU to this process")


def _next_session(output: Path) -> int:
    """Return the number of this session in the file, which is made when missing. Raises StorageError."""
    with files.edit(output, SCHEMA, VERSION) as file:
        if tables.GROUP not in file:
            return 0
        sessions = np.asarray(file[f"{tables.GROUP}/sources/session"])
    return int(sessions.max(initial=-1)) + 1
