"""Split the model's units over pipeline ranks by their FLOPs, and find the recomputed units.

**FLOPs** (arXiv:2205.05198, appendix A), for L blocks of width h, vocabulary v, s tokens and batch B:

    model                  72 B L s h^2 (1 + s / (6 h) + v / (12 h L))
    hardware, selective    72 B L s h^2 (1 + s / (3 h) + v / (12 h L))
    hardware, full         96 B L s h^2 (1 + s / (6 h) + v / (16 h L)), equation 3 of arXiv:2104.04473

They count attention over all pairs of tokens, and with "selective" twice, also in backward, because published
utilisations do so. "Exact" FLOPs count only the visible pairs of the model, "executed" FLOPs the pairs that the
hardware computes: hpcdist skips masked pairs. Its kernels always recompute the scores in backward.

**Split.** Megatron-LM distributes blocks evenly. If the blocks are not divisible, both ends have a block less
(arXiv:2401.10241, section 5.1). hpcdist minimises the FLOPs of the slowest rank by dynamic programming, or by bisection
for more than `MANY_UNITS` units and one chunk per rank.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

from hpcdist.errors import ConfigurationError
from hpcdist.planner.estimate import FlopEstimate
from hpcdist.planner.kernels import KERNELS
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import ModelDescription, ModelUnit
from hpcdist.strategies.pipeline.costs import attention_scores
from hpcdist.strategies.pipeline.partition import StageDevices, partition
from hpcdist.strategies.schedule.registry import SCHEDULES


def step_flops(description: ModelDescription, layout: ParallelLayout, global_batch: int) -> FlopEstimate:
    """Return the FLOPs of a training step of ``global_batch`` samples, summed over all devices."""
    is_tiled = layout.kernels.tiles_attention
    model, hardware, exact, executed = _of_sample(description, layout.recompute, is_tiled)
    if is_tiled and layout.recompute == "full":
        split = layout.pipeline, layout.chunks, layout.schedule
        repeated, repeated_exact = _again(description, *split)
        hardware += repeated
        executed += repeated_exact
    return FlopEstimate(
        model_flops=model * global_batch,
        hardware_flops=hardware * global_batch,
        exact_flops=exact * global_batch,
        executed_flops=executed * global_batch,
    )


def matrix_flops(unit: ModelUnit) -> float:
    """Return the forward FLOPs per sample of the matrix products in one of the equal layers of ``unit``."""
    return sum(
        2.0 * product.rows * product.inner * product.columns * product.experts * product.share
        for product in unit.products
    )


def forward_flops(unit: ModelUnit, *, exact: bool = False) -> float:
    """Return the forward FLOPs per sample of one layer of ``unit``, without masked query-key pairs if ``exact``."""
    return matrix_flops(unit) + attention_flops(unit, exact=exact)


def attention_flops(unit: ModelUnit, *, exact: bool = False) -> float:
    """Return the forward FLOPs per sample of attention in one layer. ``exact``: True excludes masked pairs."""
    if unit.attention is None:
        return 0.0
    attention = unit.attention
    return 4.0 * attention.heads * attention.size * (attention.pairs if exact else attention.every_pair)


@lru_cache(maxsize=4096)
def _again(description: ModelDescription, pipeline: int, chunks: int, schedule: str) -> tuple[float, float]:
    layout = ParallelLayout(
        pipeline=pipeline, chunks=chunks, schedule=schedule, implementation="hpcdist", recompute="full"
    )
    shares = [share for chunk in recomputed(description, layout) for share in chunk.shares]
    every = sum([share.times * forward_flops(share.unit) for share in shares])
    return every, sum([share.times * forward_flops(share.unit, exact=True) for share in shares])


@lru_cache(maxsize=1024)
def _of_sample(description: ModelDescription, recompute: str, is_tiled: bool) -> tuple[float, float, float, float]:
    model = hardware = exact = executed = 0.0
    for unit in description.units:
        matrices, scores, seen = matrix_flops(unit), attention_flops(unit), attention_flops(unit, exact=True)
        back = 1 if unit.first else 2
        published = (1 + back) * matrices + 3 * scores
        looked_at = (1 + back) * matrices + 3 * seen
        repeated = 0.0
        if is_tiled:
            repeated = scores / 2
        elif unit.attention is not None and recompute != "none":
            repeated = 3 * scores if recompute == "selective" else matrices + scores
        model += unit.count * published
        hardware += unit.count * (published + repeated)
        exact += unit.count * looked_at
        executed += unit.count * (looked_at + seen / 2 if is_tiled else published + repeated)
    return model, hardware, exact, executed


MANY_UNITS: Final = 1000  # above, a split is found by bisection, because the dynamic programming table is too large
ROUNDING: Final = 1e-12  # relative error of a sum


class UnitGroup(NamedTuple):
    """Group of ``times`` identical consecutive layers in one pipeline chunk."""

    unit: ModelUnit  # description of one layer
    times: int
    place: int  # index in ``ModelDescription.units``


class StageChunk(NamedTuple):
    """Pipeline chunk: consecutive layers of the model that one pipeline rank computes."""

    rank: int
    shares: tuple[UnitGroup, ...]  # groups of equal layers, in model order


class SplitKey(NamedTuple):
    """Fields of a layout that determine the split of a model into pipeline stages, for use as cache key."""

    pipeline: int
    chunks: int
    schedule: str
    implementation: str
    recompute: str

    @classmethod
    def of(cls, layout: ParallelLayout) -> "SplitKey":
        """Return the `SplitKey` of ``layout``. Layouts with an equal split have equal keys."""
        row = SCHEDULES.get(layout.schedule)
        schedule = "1f1b" if row is not None and row.most == 1 else layout.schedule  # all with one chunk per rank
        recompute = "full" if layout.recompute == "full" else "none"
        return cls(layout.pipeline, layout.chunks, schedule, layout.implementation, recompute)

    @property
    def layout(self) -> ParallelLayout:
        """A layout with the fields of this key, and default values in all other fields."""
        return ParallelLayout(**self._asdict())


def stages(description: ModelDescription, layout: ParallelLayout) -> tuple[tuple[UnitGroup, ...], ...]:
    """Return a tuple of layer groups per pipeline rank. Raises ConfigurationError if the model has too few layers."""
    return stages_of_split(description, SplitKey.of(layout))


def chunks(description: ModelDescription, layout: ParallelLayout) -> tuple[StageChunk, ...]:
    """Return all pipeline chunks, in model order. Raises ConfigurationError for fewer layers than chunks."""
    return chunks_of_split(description, SplitKey.of(layout))


@lru_cache(maxsize=4096)
def stages_of_split(description: ModelDescription, split_key: SplitKey) -> tuple[tuple[UnitGroup, ...], ...]:
    """Return the result of `stages` for a layout with the fields ``split_key``."""
    if split_key.pipeline == 1:
        return (tuple(UnitGroup(unit, unit.count, place) for place, unit in enumerate(description.units)),)
    by_rank: list[list[UnitGroup]] = [[] for _ in range(split_key.pipeline)]
    for rank, shares in chunks_of_split(description, split_key):
        by_rank[rank] += shares
    return tuple(_joined(shares_of_rank) for shares_of_rank in by_rank)


@lru_cache(maxsize=4096)
def chunks_of_split(description: ModelDescription, split_key: SplitKey) -> tuple[StageChunk, ...]:
    """Return the result of `chunks` for a layout with the fields ``split_key``."""
    ranks, chunks_per_rank, schedule, implementation, recompute = split_key
    row = SCHEDULES.get(schedule)
    if row is not None and row.most is not None and ranks > 1:
        chunks_per_rank = row.most
    folded = row is not None and row.folded
    parts = ranks * chunks_per_rank
    if parts == 1:
        return (
            StageChunk(0, tuple(UnitGroup(unit, unit.count, place) for place, unit in enumerate(description.units))),
        )
    owners = [number % ranks for number in range(parts)]
    if folded:
        owners = [*range(ranks), *reversed(range(ranks))]
    of_unit = [UnitGroup(unit, 1, place) for place, unit in enumerate(description.units) for _ in range(unit.count)]
    if len(of_unit) < parts:
        raise ConfigurationError(
            f"a pipeline of {ranks} ranks with {chunks_per_rank} chunks each needs at least {parts} model units "
            f"(embedding, layers and head), but {description.name} has {len(of_unit)} units; use fewer pipeline ranks "
            "or chunks"
        )
    if KERNELS[implementation].splits_evenly and description.shape is not None:
        bounds = _even(description.units[1].count, parts)
    else:
        operations = [
            _operations(unit, first=place == 0, recompute=recompute == "full")
            for place, unit in enumerate(description.units)
        ]
        bounds = _by_operations([operations[share.place] for share in of_unit], owners)
    return tuple(
        StageChunk(owner, _joined(of_unit[start:stop]))
        for owner, start, stop in zip(owners, bounds, bounds[1:], strict=False)
    )


def _even(blocks: int, parts: int) -> list[int]:
    # Bounds of ``parts`` even ranges of a transformer's units: embedding, blocks, head.
    units = blocks + 2
    if blocks % parts:  # the embedding and the head each count as a block
        return [units * number // parts for number in range(parts + 1)]
    return [0, *(1 + blocks // parts * number for number in range(1, parts)), units]


def _by_operations(weights: Sequence[float], owners: Sequence[int]) -> list[int]:
    if len(weights) > MANY_UNITS and len(set(owners)) == len(owners):
        return _filled(weights, len(owners))
    best = partition(weights, owners, StageDevices.alike(max(owners) + 1), None)
    assert best is not None, "without a memory limit there is a solution"
    return [0, *(chunk.stop for chunk in best.chunks)]


def _filled(weights: Sequence[float], parts: int) -> list[int]:
    # Bounds of ``parts`` ranges with the least maximum sum of weights.
    sums = [0.0, *accumulate(weights)]

    def up_to(limit: float) -> list[int] | None:
        bounds = [len(weights)]
        for part in range(parts - 1, 0, -1):
            stop = bounds[-1]
            start = max(part, bisect_left(sums, sums[stop] - limit))  # earlier parts need a unit each
            if start >= stop:
                return None
            bounds.append(start)
        return [0, *reversed(bounds)] if sums[bounds[-1]] <= limit else None

    low, high = max(sums[-1] / parts, *weights), sums[-1]
    best = up_to(high)
    assert best is not None, "the sum of all weights is a sufficient limit"
    while high - low > ROUNDING * high:
        middle = (low + high) / 2
        candidate = up_to(middle)
        if candidate is None:
            low = middle
        else:
            best, high = candidate, middle
    return best


def _operations(unit: ModelUnit, *, first: bool, recompute: bool) -> float:
    linear, scores = matrix_flops(unit), 0.0
    if unit.attention is not None:
        looked: float = unit.attention.context**2
        if unit.attention.within:
            looked = unit.attention.pairs
        elif unit.attention.pairs != looked:
            looked = attention_scores(unit.attention.context, unit.attention.window)
        scores = 4.0 * unit.attention.heads * unit.attention.size * looked
    additions = unit.counted.kept[0].size if unit.counted and unit.counted.kept and unit.name == "embedding" else 0
    forward = linear + scores + additions
    back = (0 if first else linear + 2.5 * scores) + linear + 2 * additions
    return forward * (2 if recompute else 1) + back


def _joined(shares: Sequence[UnitGroup]) -> tuple[UnitGroup, ...]:
    joined: list[UnitGroup] = []
    for share in shares:
        if joined and joined[-1].place == share.place:
            joined[-1] = UnitGroup(share.unit, joined[-1].times + share.times, share.place)
        else:
            joined.append(share)
    return tuple(joined)


AT_ONCE: Final = ("1f1b", "interleaved")  # the last chunk's backward follows its forward at once


def recomputes_ahead(layout: ParallelLayout) -> bool:
    """Return True if pipeline ranks recompute activations before the output gradient arrives."""
    return layout.kernels.recomputes_ahead and layout.pipeline > 1 and layout.recompute == "full"


def recomputed(description: ModelDescription, layout: ParallelLayout) -> tuple[StageChunk, ...]:
    """Return one `StageChunk` per pipeline chunk, in model order, which has only the recomputed layers of the chunk."""
    # Full, in Megatron-LM or on one rank: all units except the first and the last unit of the model.
    # Full, in hpcdist on several pipeline ranks: all units; with 1f1b and interleaved, not in the last chunk.
    # Selective: units with attention; in hpcdist, no units.
    return _repeated(
        description, layout.pipeline, layout.chunks, layout.schedule, layout.implementation, layout.recompute
    )


@lru_cache(maxsize=4096)
def _repeated(
    description: ModelDescription, pipeline: int, per_rank: int, schedule: str, implementation: str, recompute: str
) -> tuple[StageChunk, ...]:
    layout = ParallelLayout(
        pipeline=pipeline, chunks=per_rank, schedule=schedule, implementation=implementation, recompute=recompute
    )
    if pipeline == 1:
        parts: tuple[StageChunk, ...] = (StageChunk(0, stages(description, layout)[0]),)
    else:
        parts = chunks(description, layout)
    last = len(parts) - 1
    repeated = []
    for number, (rank, shares) in enumerate(parts):
        if recompute == "full" and recomputes_ahead(layout):
            repeated_shares = () if schedule in AT_ONCE and number == last else shares
        elif recompute == "full":
            repeated_shares = _between(shares, is_first=number == 0, is_last=number == last)
        else:
            is_kept = recompute == "none" or (layout.kernels.tiles_attention and not layout.kernels.again_share)
            repeated_shares = () if is_kept else tuple(share for share in shares if share.unit.attention is not None)
        repeated.append(StageChunk(rank, repeated_shares))
    return tuple(repeated)


def _between(shares: tuple[UnitGroup, ...], *, is_first: bool, is_last: bool) -> tuple[UnitGroup, ...]:
    times = [share.times for share in shares]
    times[0] -= is_first
    times[-1] -= is_last
    return tuple(share._replace(times=left) for share, left in zip(shares, times, strict=True) if left > 0)
