"""Spans of one step of a run by rank: the step is chosen among the last ones, on a common clock."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.comm.record import spans
from hpcdist.comm.record.spans import RankSpans, Span
from hpcdist.errors import StorageError
from hpcdist.telemetry.metrics import side_tables
from hpcdist.telemetry.trace.clock_correction import HostClock

MAX_RANKS: Final = 32  # that a picture can show
MAX_SPANS: Final = 6000  # of all ranks together, the longest
LAST_STEPS: Final = 50  # steps among which one is chosen
NO_FILES: Final = "the run kept no spans (recorder/rank-*.spans): an earlier version, or telemetry.trace = false"
NO_STEP: Final = "no step is in the spans of all ranks: it did not end, or its spans were overwritten"


@dataclass(frozen=True)
class RankLane:
    """What a rank did in the step: spans (begin_s, end_s, span) with times since the first rank began it."""

    rank: int
    host: str
    begin_s: float
    end_s: float
    spans: Sequence[tuple[float, float, Span]]


@dataclass(frozen=True)
class StepSpans:
    """A step of some ranks of ``world``; without lanes, the ``reason``. ``clocks`` says what their times are worth."""

    step: int = 0
    lanes: Sequence[RankLane] = ()
    world: int = 0
    clocks: str = ""
    left_out: int = 0  # spans that are too short to show
    reason: str = NO_FILES

    @property
    def seconds(self) -> float:
        """From the first begin to the last end."""
        return max((lane.end_s for lane in self.lanes), default=0.0)

    def totals(self) -> dict[str, float]:
        """Return the seconds of each phase, mean over the lanes; what no span covers is "not covered"."""
        found: dict[str, float] = {}
        for lane in self.lanes:
            for begin, end, span in lane.spans:
                found[span.phase] = found.get(span.phase, 0.0) + (end - begin) / len(self.lanes)
        return found


def read(run_dir: Path, metrics_path: Path | None = None, slowest: int | None = None) -> StepSpans:
    """Return a step of the run: the one of median length among the last that all ranks have.

    At most `RANKS` ranks are read, spread evenly, rank 0, the last and the ``slowest`` among them. Damaged files are
    left out. ``metrics_path`` has what is known of the nodes' clocks.
    """
    paths = {number: path for path in (run_dir / "recorder").glob("rank-*.spans") if (number := _number(path)) >= 0}
    if not paths:
        return StepSpans()
    ranks, damaged = [], []
    for number in select_evenly(sorted(paths), slowest):
        try:
            ranks.append(spans.read(paths[number]))
        except StorageError as error:
            damaged.append(str(error))
    if not ranks:
        return StepSpans(reason=damaged[0])
    newest = max(ranks, key=lambda rank: rank.wall_ns)
    ranks = [rank for rank in ranks if rank.rank < newest.world]  # a larger, earlier start may have left the others
    step = _typical(ranks)
    if step is None:
        return StepSpans(world=newest.world, reason=NO_STEP)
    offsets, worth = _offsets(ranks, step, metrics_path)
    lanes = _lanes(ranks, step, offsets)
    kept, left_out = _longest(lanes)
    return StepSpans(step, kept, newest.world, worth, left_out, "")


def select_evenly(numbers: Sequence[int], slowest: int | None, most: int = MAX_RANKS) -> list[int]:
    """Return at most ``most`` of ``numbers``, evenly: the first, the last and the ``slowest`` are among them."""
    if len(numbers) <= most:
        return list(numbers)
    found = [numbers[at] for at in np.linspace(0, len(numbers) - 1, most).round().astype(int)]
    if slowest in numbers and slowest not in found:
        assert slowest is not None
        nearest = min(found[1:-1], key=lambda number: abs(number - slowest))
        found[found.index(nearest)] = slowest
    return sorted(found)


def _number(path: Path) -> int:
    text = path.stem.removeprefix("rank-")
    return int(text) if text.isdecimal() else -1


def _steps(rank: RankSpans) -> Mapping[int, Span]:
    """Return the spans that enclose a step, by its number; of one that was made twice, the last."""
    return {span.step: span for span in rank.spans if span.phase == "step" and span.end_ns > span.begin_ns}


def _typical(ranks: Sequence[RankSpans]) -> int | None:
    """Return the step of median length among the last ones that all have; None where there is none."""
    steps = [_steps(rank) for rank in ranks]
    # A step whose first operation was overwritten would look idle.
    oldest = [min((span.begin_ns for span in rank.spans if span.phase != "step"), default=math.inf) for rank in ranks]
    common = set.intersection(
        *(
            {number for number, span in own.items() if span.begin_ns >= first or len(own) == 1}
            for own, first in zip(steps, oldest, strict=True)
        )
    )
    last = sorted(common)[-LAST_STEPS:]
    if not last:
        return None
    lasts = {number: max(own[number].end_ns - own[number].begin_ns for own in steps) for number in last}
    middle = statistics.median_low(lasts.values())
    return max(number for number in last if lasts[number] == middle)


def _offsets(ranks: Sequence[RankSpans], step: int, metrics_path: Path | None) -> tuple[dict[int, int], str]:
    """Return what to add to the clock of each rank in ``step`` for a common one, and what that is worth."""
    boots = {rank.boot_id or rank.host for rank in ranks}
    if len(boots) == 1:  # one kernel, one clock
        return {rank.rank: 0 for rank in ranks}, ""
    sessions = side_tables.read_clocks(metrics_path) if metrics_path is not None else ()
    last = sessions[-1].hosts if sessions else None
    if last is not None and all(
        rank.rank < len(last.of_rank) and last.boots[last.of_rank[rank.rank]] == rank.boot_id for rank in ranks
    ):
        found, bounds = {}, [0]
        for rank in ranks:
            host = last.of_rank[rank.rank]
            clock = HostClock([one for one in sessions[-1].readings if one.host == host])
            begin = _steps(rank)[step].begin_ns
            found[rank.rank] = clock.reference_ns(begin) - begin
            bounds.append(clock.bound_ns(begin) or 0)
        return found, f"clocks that were compared with messages, to within {max(bounds) / 1e6:.3g} ms"
    found = {rank.rank: rank.wall_ns - rank.monotonic_ns for rank in ranks}
    return found, "the nodes' wall clocks, which may differ by some milliseconds"


def _lanes(ranks: Sequence[RankSpans], step: int, offset: Mapping[int, int]) -> list[RankLane]:
    """Return the lanes of a step on one clock."""
    steps = {rank.rank: _steps(rank)[step] for rank in ranks}
    origin = min(steps[rank].begin_ns + offset[rank] for rank in steps)
    lanes = []
    for rank in ranks:
        own, shift = steps[rank.rank], offset[rank.rank] - origin
        spans = [
            ((span.begin_ns + shift) / 1e9, (span.end_ns + shift) / 1e9, span)
            for span in rank.spans
            if span.phase != "step" and span.end_ns > own.begin_ns and span.begin_ns < own.end_ns
        ]
        lanes.append(RankLane(rank.rank, rank.host, (own.begin_ns + shift) / 1e9, (own.end_ns + shift) / 1e9, spans))
    return lanes


def _longest(lanes: Sequence[RankLane]) -> tuple[list[RankLane], int]:
    """Keep the longest spans where there are more than a picture can hold."""
    lengths = sorted((end - begin for lane in lanes for begin, end, _ in lane.spans), reverse=True)
    if len(lengths) <= MAX_SPANS:
        return list(lanes), 0
    least, kept, count = lengths[MAX_SPANS], [], 0
    for lane in lanes:
        own = [row for row in lane.spans if row[1] - row[0] > least]
        kept.append(replace(lane, spans=own))
        count += len(own)
    return kept, len(lengths) - count
