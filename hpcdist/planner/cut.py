"""Which units each rank of a pipeline computes.

Megatron-LM (arXiv:2104.04473) deals blocks out evenly, and puts the embedding with the first of them and the head with
the last; where they do not divide, both ends have one block fewer (arXiv:2401.10241, section 5.1; arXiv:2407.21783,
section 3.3.2). This toolkit makes the time of the slowest rank as small as can be, by operations
(`hpcdist.strategies.pipeline.partition`), which takes blocks from the rank that has the head. That programme is
quadratic in the units: for more than `MANY_UNITS` of them the best time of one chunk a rank is found by halving an
interval.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

from hpcdist.errors import ConfigurationError
from hpcdist.planner.description import Description, Unit
from hpcdist.planner.layout import Layout
from hpcdist.planner.work import matrix_flops
from hpcdist.strategies.pipeline.costs import attention_scores
from hpcdist.strategies.pipeline.partition import StageDevices, partition
from hpcdist.strategies.schedule.generate.registry import SCHEDULES

MANY_UNITS: Final = 1000  # beyond, the best cut is found by filling parts: a table of all parts would be too large
ROUNDING: Final = 1e-12  # of a sum of operations


class Share(NamedTuple):
    """``times`` the units ``unit`` that are alike; ``place`` is theirs among those of the description."""

    unit: Unit
    times: int
    place: int


class Chunk(NamedTuple):
    """Neighbouring units that the pipeline rank ``rank`` computes one after the other."""

    rank: int
    shares: tuple[Share, ...]


class Cut(NamedTuple):
    """What decides which units a rank has: of schedules and recomputation, only what moves a cut."""

    pipeline: int
    chunks: int
    schedule: str
    implementation: str
    recompute: str

    @classmethod
    def of(cls, layout: Layout) -> "Cut":
        """Return that of ``layout`` (local)."""
        known = SCHEDULES.get(layout.schedule)
        schedule = "1f1b" if known is not None and known.most == 1 else layout.schedule  # any with one chunk a rank
        again = "full" if layout.recompute == "full" else "none"
        return cls(layout.pipeline, layout.chunks, schedule, layout.implementation, again)

    @property
    def layout(self) -> Layout:
        """A layout that is cut so."""
        return Layout(**self._asdict())


def stages(description: Description, layout: Layout) -> tuple[tuple[Share, ...], ...]:
    """Return what each pipeline rank has, all of its chunks together, in the order of the model (local).

    Raises ConfigurationError where there are fewer units than chunks.
    """
    return stages_of_cut(description, Cut.of(layout))


def chunks(description: Description, layout: Layout) -> tuple[Chunk, ...]:
    """Return the chunks in the order of the model: one for each rank, or as many as the schedule has (local).

    Raises ConfigurationError where there are fewer units than chunks.
    """
    return chunks_of_cut(description, Cut.of(layout))


@lru_cache(maxsize=4096)
def stages_of_cut(description: Description, cut: Cut) -> tuple[tuple[Share, ...], ...]:
    """Return the `stages` of any layout that is ``cut`` so (local)."""
    if cut.pipeline == 1:
        return (tuple(Share(unit, unit.count, place) for place, unit in enumerate(description.units)),)
    found: list[list[Share]] = [[] for _ in range(cut.pipeline)]
    for rank, shares in chunks_of_cut(description, cut):
        found[rank] += shares
    return tuple(_joined(own) for own in found)


@lru_cache(maxsize=4096)
def chunks_of_cut(description: Description, cut: Cut) -> tuple[Chunk, ...]:
    """Return the `chunks` of any layout that is ``cut`` so (local)."""
    ranks, each, schedule, implementation, recompute = cut
    known = SCHEDULES.get(schedule)
    if known is not None and known.most is not None and ranks > 1:
        each = known.most
    folded = known is not None and known.folded
    parts = ranks * each
    if parts == 1:
        return (Chunk(0, tuple(Share(unit, unit.count, place) for place, unit in enumerate(description.units))),)
    owners = [number % ranks for number in range(parts)]
    if folded:
        owners = [*range(ranks), *reversed(range(ranks))]
    of_unit = [Share(unit, 1, place) for place, unit in enumerate(description.units) for _ in range(unit.count)]
    if len(of_unit) < parts:
        raise ConfigurationError(
            f"{parts} parts of a pipeline ({ranks} ranks with {each} each), and {description.name} has {len(of_unit)} "
            "units to share out; use fewer pipeline ranks or chunks"
        )
    if implementation == "megatron" and description.shape is not None:
        bounds = _even(description.units[1].count, parts)
    else:
        operations = [
            _operations(unit, first=place == 0, recompute=recompute == "full")
            for place, unit in enumerate(description.units)
        ]
        bounds = _by_operations([operations[share.place] for share in of_unit], owners)
    return tuple(
        Chunk(owner, _joined(of_unit[start:stop]))
        for owner, start, stop in zip(owners, bounds, bounds[1:], strict=False)
    )


def _even(blocks: int, parts: int) -> list[int]:
    """Return the bounds of ``parts`` with as many blocks each; the ends of the model go with the ends.

    Where blocks cannot be dealt out so, the embedding and the head count as one each: 22 blocks on 8 ranks are 2, six
    times 3, and 2.
    """
    units = blocks + 2
    if blocks % parts:
        return [units * number // parts for number in range(parts + 1)]
    return [0, *(1 + blocks // parts * number for number in range(1, parts)), units]


def _by_operations(weights: Sequence[float], owners: Sequence[int]) -> list[int]:
    """Return the bounds whose slowest rank has least to compute, of units with so many operations."""
    if len(weights) > MANY_UNITS and len(set(owners)) == len(owners):
        return _filled(weights, len(owners))
    found = partition(weights, owners, StageDevices.alike(max(owners) + 1), None)
    assert found is not None, "there is no limit to keep"
    return [0, *(chunk.stop for chunk in found.chunks)]


def _filled(weights: Sequence[float], parts: int) -> list[int]:
    """Return the bounds of ``parts`` neighbouring parts, none empty, the heaviest as light as can be (local).

    A limit is enough when parts that are filled up to it, from the end, take all; the least limit that is enough is
    found by halving, to a rounding. What is left for the first parts is less, which have most in flight.
    """
    sums = [0.0, *accumulate(weights)]

    def up_to(limit: float) -> list[int] | None:
        bounds = [len(weights)]
        for part in range(parts - 1, 0, -1):
            stop = bounds[-1]
            start = max(part, bisect_left(sums, sums[stop] - limit))  # those before need one each
            if start >= stop:
                return None
            bounds.append(start)
        return [0, *reversed(bounds)] if sums[bounds[-1]] <= limit else None

    low, high = max(sums[-1] / parts, *weights), sums[-1]
    best = up_to(high)
    assert best is not None, "one part may have all but what the others need"
    while high - low > ROUNDING * high:
        middle = (low + high) / 2
        found = up_to(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _operations(unit: Unit, *, first: bool, recompute: bool) -> float:
    """Return what `hpcdist.strategies.pipeline.costs` counts for one sample: forward and back, and forward again."""
    linear, scores = matrix_flops(unit), 0.0
    if unit.attention is not None:
        looked = unit.attention.context**2
        if unit.attention.pairs != looked:
            looked = attention_scores(unit.attention.context)
        scores = 4.0 * unit.attention.heads * unit.attention.size * looked
    additions = unit.counted.kept[0].size if unit.counted and unit.counted.kept and unit.name == "embedding" else 0
    forward = linear + scores + additions
    back = (0 if first else linear + 2.5 * scores) + linear + 2 * additions
    return forward * (2 if recompute else 1) + back


def _joined(shares: Sequence[Share]) -> tuple[Share, ...]:
    """Return neighbours that are alike as one."""
    found: list[Share] = []
    for share in shares:
        if found and found[-1].place == share.place:
            found[-1] = Share(share.unit, found[-1].times + share.times, share.place)
        else:
            found.append(share)
    return tuple(found)
