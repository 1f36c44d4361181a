"""Split the model's units over pipeline ranks by their operations, and find the units that are recomputed.

**Operations.** Appendix A of arXiv:2205.05198 (Korthikanti et al.), for L blocks of width h, vocabulary v, s tokens
and batch B:

    model                  72 B L s h^2 (1 + s / (6 h) + v / (12 h L))
    hardware, selective    72 B L s h^2 (1 + s / (3 h) + v / (12 h L))
    hardware, full         96 B L s h^2 (1 + s / (6 h) + v / (16 h L)), which is equation 3 of arXiv:2104.04473

It is 2 for each multiplication and addition of a matrix product, twice as much back as forward, and attention over
all pairs, causal or not. With "selective" the paper counts attention twice, back too, though one more forward alone
is less, s / (4.5 h); the utilisations that it prints follow the formula, and so does this module. Here it is summed
over the products of each unit, so it holds for grouped keys, gated feed-forwards and experts, too.

The kernels of this toolkit compute the scores once more in their backward, which keeps none of them
(`hpcdist.models.attention.flash`): half of attention's forward, whatever is recomputed besides, and "selective" has
nothing to add. In a pipeline they repeat whole chunks, with "full", but for a last chunk whose backward follows its
forward.

All of that is counted over all pairs, so that it compares with what is published. Operations that are "exact" are
those of the model over the pairs that are looked at, "executed" those of the hardware: the kernels of this toolkit
skip tokens that a causal attention does not look at, the published ones compute and mask them. With a window of w
tokens all pairs are s w, not s^2.

**Split.** Megatron-LM (arXiv:2104.04473) deals blocks out evenly, and puts the embedding with the first of them and
the head with the last; where they do not divide, both ends have one block fewer (arXiv:2401.10241, section 5.1;
arXiv:2407.21783, section 3.3.2). This toolkit minimises the time of the slowest rank, by operations
(`hpcdist.strategies.pipeline.partition`), which takes blocks from the rank that has the head. That dynamic programme
is quadratic in the units: for more than `MANY_UNITS` of them the best time of one chunk a rank is found by bisection.

**Recomputation.** Without a pipeline "full" repeats every unit but the first, which keeps what it has to, and the
last, whose backward follows at once: ours (`hpcdist.models.runtime.split_backward`), and the blocks of Megatron-LM
(arXiv:2205.05198, section 5), in its pipelines too. Ours repeat whole chunks in a pipeline, the ends of the model as
well, and nothing where the backward of a chunk always follows its forward at once: in the last chunk of 1f1b and of
interleaved (`hpcdist.strategies.schedule.generate.passes.expand`). "selective" repeats attention, where its scores
were in memory: ours never are. Memory counts the same of ours by their own arrays
(`hpcdist.models.counts.peak_with_recomputation`) and passes.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

from hpcdist.errors import ConfigurationError
from hpcdist.planner.estimate import FlopEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import ModelDescription, ModelUnit
from hpcdist.strategies.pipeline.costs import attention_scores
from hpcdist.strategies.pipeline.partition import StageDevices, partition
from hpcdist.strategies.schedule.generate.registry import SCHEDULES


def step_flops(description: ModelDescription, layout: ParallelLayout, global_batch: int) -> FlopEstimate:
    """Return the operations of a step of ``global_batch`` samples, on all devices together (local)."""
    is_ours = layout.implementation == "hpcdist"
    model, hardware, exact, executed = _of_sample(description, layout.recompute, is_ours)
    if is_ours and layout.recompute == "full":
        cut = layout.pipeline, layout.chunks, layout.schedule
        again, seen = _again(description, *cut)
        hardware += again
        executed += seen
    return FlopEstimate(
        model_flops=model * global_batch,
        hardware_flops=hardware * global_batch,
        exact_flops=exact * global_batch,
        executed_flops=executed * global_batch,
    )


def matrix_flops(unit: ModelUnit) -> float:
    """Return the operations of the products of one ``unit``, forward, of a sample."""
    return sum(
        2.0 * product.rows * product.inner * product.columns * product.experts * product.share
        for product in unit.products
    )


def forward_flops(unit: ModelUnit, *, exact: bool = False) -> float:
    """Return the operations of one ``unit``, forward, of a sample: of all pairs, or those that are looked at."""
    return matrix_flops(unit) + attention_flops(unit, exact=exact)


def attention_flops(unit: ModelUnit, *, exact: bool = False) -> float:
    """Return the operations of its attention, forward, of a sample: of all pairs, or those that are looked at."""
    if unit.attention is None:
        return 0.0
    attention = unit.attention
    return 4.0 * attention.heads * attention.size * (attention.pairs if exact else attention.every_pair)


@lru_cache(maxsize=4096)
def _again(description: ModelDescription, pipeline: int, chunks: int, schedule: str) -> tuple[float, float]:
    """Return what our "full" recomputation repeats of the forward of a sample: of all pairs, of those looked at."""
    layout = ParallelLayout(
        pipeline=pipeline, chunks=chunks, schedule=schedule, implementation="hpcdist", recompute="full"
    )
    shares = [share for chunk in recomputed(description, layout) for share in chunk.shares]
    every = sum([share.times * forward_flops(share.unit) for share in shares])
    return every, sum([share.times * forward_flops(share.unit, exact=True) for share in shares])


@lru_cache(maxsize=1024)
def _of_sample(description: ModelDescription, recompute: str, is_ours: bool) -> tuple[float, float, float, float]:
    model = hardware = exact = executed = 0.0
    for unit in description.units:
        matrices, scores, seen = matrix_flops(unit), attention_flops(unit), attention_flops(unit, exact=True)
        back = 1 if unit.first else 2
        published = (1 + back) * matrices + 3 * scores
        looked_at = (1 + back) * matrices + 3 * seen
        repeated = 0.0
        if is_ours:
            repeated = scores / 2
        elif unit.attention is not None and recompute != "none":
            repeated = 3 * scores if recompute == "selective" else matrices + scores
        model += unit.count * published
        hardware += unit.count * (published + repeated)
        exact += unit.count * looked_at
        executed += unit.count * (looked_at + seen / 2 if is_ours else published + repeated)
    return model, hardware, exact, executed


MANY_UNITS: Final = 1000  # beyond, the best cut is found by filling parts: a table of all parts would be too large
ROUNDING: Final = 1e-12  # of a sum of operations


class UnitGroup(NamedTuple):
    """``times`` the units ``unit`` that are alike; ``place`` is theirs among those of the description."""

    unit: ModelUnit
    times: int
    place: int


class StageChunk(NamedTuple):
    """Neighbouring units that the pipeline rank ``rank`` computes one after the other."""

    rank: int
    shares: tuple[UnitGroup, ...]


class SplitKey(NamedTuple):
    """Key of a cut into stages: of schedules and recomputation, only what moves a cut."""

    pipeline: int
    chunks: int
    schedule: str
    implementation: str
    recompute: str

    @classmethod
    def of(cls, layout: ParallelLayout) -> "SplitKey":
        """Return that of ``layout`` (local)."""
        known = SCHEDULES.get(layout.schedule)
        schedule = "1f1b" if known is not None and known.most == 1 else layout.schedule  # any with one chunk a rank
        again = "full" if layout.recompute == "full" else "none"
        return cls(layout.pipeline, layout.chunks, schedule, layout.implementation, again)

    @property
    def layout(self) -> ParallelLayout:
        """A layout that is cut so."""
        return ParallelLayout(**self._asdict())


def stages(description: ModelDescription, layout: ParallelLayout) -> tuple[tuple[UnitGroup, ...], ...]:
    """Return what each pipeline rank has, all of its chunks together, in the order of the model (local).

    Raises ConfigurationError where there are fewer units than chunks.
    """
    return stages_of_split(description, SplitKey.of(layout))


def chunks(description: ModelDescription, layout: ParallelLayout) -> tuple[StageChunk, ...]:
    """Return the chunks in the order of the model: one for each rank, or as many as the schedule has (local).

    Raises ConfigurationError where there are fewer units than chunks.
    """
    return chunks_of_split(description, SplitKey.of(layout))


@lru_cache(maxsize=4096)
def stages_of_split(description: ModelDescription, cut: SplitKey) -> tuple[tuple[UnitGroup, ...], ...]:
    """Return the `stages` of any layout that is ``cut`` so (local)."""
    if cut.pipeline == 1:
        return (tuple(UnitGroup(unit, unit.count, place) for place, unit in enumerate(description.units)),)
    by_rank: list[list[UnitGroup]] = [[] for _ in range(cut.pipeline)]
    for rank, shares in chunks_of_split(description, cut):
        by_rank[rank] += shares
    return tuple(_joined(own) for own in by_rank)


@lru_cache(maxsize=4096)
def chunks_of_split(description: ModelDescription, cut: SplitKey) -> tuple[StageChunk, ...]:
    """Return the `chunks` of any layout that is ``cut`` so (local)."""
    ranks, each, schedule, implementation, recompute = cut
    known = SCHEDULES.get(schedule)
    if known is not None and known.most is not None and ranks > 1:
        each = known.most
    folded = known is not None and known.folded
    parts = ranks * each
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
        StageChunk(owner, _joined(of_unit[start:stop]))
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
    best = partition(weights, owners, StageDevices.alike(max(owners) + 1), None)
    assert best is not None, "there is no limit to keep"
    return [0, *(chunk.stop for chunk in best.chunks)]


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
        candidate = up_to(middle)
        if candidate is None:
            low = middle
        else:
            best, high = candidate, middle
    return best


def _operations(unit: ModelUnit, *, first: bool, recompute: bool) -> float:
    """Return what `hpcdist.strategies.pipeline.costs` counts for one sample: forward and back, and forward again."""
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
    """Return neighbours that are alike as one."""
    joined: list[UnitGroup] = []
    for share in shares:
        if joined and joined[-1].place == share.place:
            joined[-1] = UnitGroup(share.unit, joined[-1].times + share.times, share.place)
        else:
            joined.append(share)
    return tuple(joined)


AT_ONCE: Final = ("1f1b", "interleaved")  # schedules whose last chunk goes back as soon as it came


def recomputes_ahead(layout: ParallelLayout) -> bool:
    """Whether chunks are computed again before the gradient is there."""
    return layout.implementation == "hpcdist" and layout.pipeline > 1 and layout.recompute == "full"


def recomputed(description: ModelDescription, layout: ParallelLayout) -> tuple[StageChunk, ...]:
    """Return what of each chunk is computed again for a micro-batch, in the order of the model (local).

    With "selective" it is the attention of these units. Raises what `hpcdist.planner.model.stage_split.chunks` raises.
    """
    return _repeated(
        description, layout.pipeline, layout.chunks, layout.schedule, layout.implementation, layout.recompute
    )


@lru_cache(maxsize=4096)
def _repeated(
    description: ModelDescription, pipeline: int, each: int, schedule: str, implementation: str, recompute: str
) -> tuple[StageChunk, ...]:
    layout = ParallelLayout(
        pipeline=pipeline, chunks=each, schedule=schedule, implementation=implementation, recompute=recompute
    )
    if pipeline == 1:
        parts: tuple[StageChunk, ...] = (StageChunk(0, stages(description, layout)[0]),)
    else:
        parts = chunks(description, layout)
    last = len(parts) - 1
    repeated = []
    for number, (rank, shares) in enumerate(parts):
        if recompute == "full" and recomputes_ahead(layout):
            own = () if schedule in AT_ONCE and number == last else shares
        elif recompute == "full":
            own = _between(shares, is_first=number == 0, is_last=number == last)
        else:
            is_kept = recompute == "none" or implementation == "hpcdist"
            own = () if is_kept else tuple(share for share in shares if share.unit.attention is not None)
        repeated.append(StageChunk(rank, own))
    return tuple(repeated)


def _between(shares: tuple[UnitGroup, ...], *, is_first: bool, is_last: bool) -> tuple[UnitGroup, ...]:
    """Return ``shares`` without the first unit of the model, and without its last."""
    times = [share.times for share in shares]
    times[0] -= is_first
    times[-1] -= is_last
    return tuple(share._replace(times=left) for share, left in zip(shares, times, strict=True) if left > 0)
