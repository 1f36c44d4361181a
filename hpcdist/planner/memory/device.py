"""Memory of the fullest device of a layout: states, activations, messages, scratch, and what is reserved.

"messages" are buffers on their way: activations between the ranks of a pipeline
(`hpcdist.strategies.pipeline.memory`), what a collective or a server of our own exchanges takes beside the gradients
(`hpcdist.planner.memory.model_states.exchanged`), and rows on their way to experts of other ranks
(`hpcdist.planner.time.expert_rows.row_buffers`). "scratch" are units that are whole for a moment, and temporary arrays
of kernels. Batches, workspaces of a BLAS and fragmentation belong to the device's ``reserved_bytes``.

A search asks for the memory of many layouts that differ in little. What lasts for a step depends on the strategy, not
on the micro-batches; what comes and goes with a micro-batch depends on these, not on the strategy: both are cached.

Of the pipeline ranks that have the same units the first and the last may need most memory: those between them have,
in every schedule, no more micro-batches in flight than one of the two. The micro-batches in flight of each chunk
follow from the closed forms of `hpcdist.strategies.schedule.generate.registry`: for 1F1B p on the first rank
(arXiv:2104.04473); for the interleaved schedule with v chunks p v + p - 1 chunks of 1/v of the layers each, which is
the (1 + (p - 1) / (p v)) of arXiv:2205.05198, section 4.2.3. Short pipelines are counted exactly from the operations
that are executed (`hpcdist.strategies.pipeline.memory.moments`), chunks of different size included.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

from hpcdist.errors import ConfigurationError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import MemoryEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.activations import (
    UnitActivations,
    itemsize,
    of_units,
    recomputed_one_by_one,
    row_bytes,
    scratch_of,
)
from hpcdist.planner.memory.model_states import exchanged, server_bytes, stage_of, states, unsharded, whole_units
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.stage_split import SplitKey, UnitGroup, chunks_of_split, stages_of_split
from hpcdist.planner.time.expert_rows import SHARED, RowRoute, row_buffers, row_route
from hpcdist.strategies.pipeline.memory import IN_MESSAGES, LiveMicroBatches, Moment, moments
from hpcdist.strategies.schedule.generate.passes import expand, interleaved_group
from hpcdist.strategies.schedule.generate.registry import FILE, SCHEDULES, check_schedule

EXACT_RANKS: Final = 16  # chunks of a pipeline whose operations are looked at
STEADY_ROUNDS: Final = 4  # times as many micro-batches as ranks: after those every schedule but gpipe repeats itself


@lru_cache(maxsize=65536)
def in_flight(
    schedule: str, ranks: int, microbatches: int, chunks: int, rank: int, *, recompute: bool
) -> tuple[Moment, ...]:
    """Return the moments at which ``rank`` may need most, each by its chunks (local).

    ``recompute``: chunks keep their input only, and are computed again. Raises ConfigurationError for another schedule
    than those of the catalogue, and for one that cannot run so.
    """
    if schedule == FILE:
        raise ConfigurationError(f"the schedule {schedule!r} has no closed form; choose one of {', '.join(SCHEDULES)}")
    chunks_per_rank = check_schedule(schedule, ranks, microbatches, chunks)
    known = SCHEDULES[schedule]
    if ranks * chunks_per_rank <= EXACT_RANKS:
        # A pipeline in its steady state repeats itself: more micro-batches bring no other peak. gpipe has none, and
        # interleaved groups of odd size end otherwise.
        steady = microbatches
        if schedule != "gpipe" and (schedule != "interleaved" or microbatches % ranks == 0):
            steady = min(microbatches, STEADY_ROUNDS * ranks)
        return _executed(schedule, ranks, steady, chunks_per_rank, rank, recompute)
    peak = known.peak(rank, ranks, microbatches, chunks_per_rank)
    # Chunks keep their inputs, and one at a time is computed again: a moment for each. The last rank of 1f1b goes from
    # a forward straight to its backward, and computes nothing again.
    if recompute and not (schedule == "1f1b" and rank == ranks - 1):
        waiting = _dealt(schedule, ranks, microbatches, chunks_per_rank, peak.both)
        return tuple(
            tuple(LiveMicroBatches(inputs=count, kept=int(number == place)) for number, count in enumerate(waiting))
            for place in range(chunks_per_rank)
        )
    both = _dealt(schedule, ranks, microbatches, chunks_per_rank, peak.both)
    live = _dealt(schedule, ranks, microbatches, chunks_per_rank, peak.live)
    return (
        tuple(
            LiveMicroBatches(inputs=all_of, kept=some, held=all_of - some)
            for all_of, some in zip(both, live, strict=True)
        ),
    )


def _dealt(schedule: str, ranks: int, microbatches: int, chunks: int, total: int) -> list[int]:
    """Return ``total`` live chunks by their number: in the order in which the first forwards come."""
    if chunks == 1:
        return [total]
    if schedule != "interleaved":  # forth and back
        return [total - total // 2, total // 2]
    size = interleaved_group(ranks, microbatches)
    counts = [min(size, max(0, total - number * size)) for number in range(chunks)]
    counts[0] += total - sum(counts)  # a second group begins with chunk 0 again
    return counts


@lru_cache(maxsize=4096)
def _executed(
    schedule: str, ranks: int, microbatches: int, chunks: int, rank: int, recompute: bool
) -> tuple[Moment, ...]:
    known = SCHEDULES[schedule]
    placement = known.place([range(unit, unit + 1) for unit in range(ranks * chunks)], ranks)
    steps = expand(known.passes(rank, ranks, microbatches, chunks), placement, rank, recompute=recompute)
    return moments(steps, placement.of(rank))


class PipelinePart(NamedTuple):
    """Contents of a pipeline rank: numbers of its parameters, and its units.

    ``cut`` parameters are divided by the tensor axis, ``experts`` by the expert axis as well, ``copied`` are tied ones
    of another rank, ``longest`` those of its largest unit, without its ``longest_experts``, and ``longest_dense`` the
    most that any unit has without experts. ``chunks`` are (place of the first unit, ((place, times), ...)), ``present``
    all places, and ``borders`` those of units whose input comes or goes as a message.
    """

    rank: int
    whole: float
    cut: float
    experts: float
    copied: float
    longest: float
    longest_experts: float
    longest_dense: float
    chunks: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    present: tuple[int, ...]
    borders: tuple[int, ...]


@lru_cache(maxsize=8192)
def parts(description: ModelDescription, cut: SplitKey) -> tuple[PipelinePart, ...]:
    """Return the parts that may be fullest: the first and the last of those that have the same units (local)."""
    ends: dict[tuple[UnitGroup, ...], tuple[int, int]] = {}
    for rank, own in enumerate(stages_of_split(description, cut)):
        ends[own] = ends.get(own, (rank, rank))[0], rank
    ranks = sorted({rank for both in ends.values() for rank in both})
    return tuple(part_of(description, cut, rank) for rank in ranks)


@lru_cache(maxsize=65536)
def part_of(description: ModelDescription, cut: SplitKey, rank: int) -> PipelinePart:
    """Return the part of one ``rank`` of the pipeline (local)."""
    own = [chunk.shares for chunk in chunks_of_split(description, cut) if chunk.rank == rank]
    shares = [share for shares in own for share in shares]
    last = len(description.units) - 1
    present = tuple(sorted({share.place for share in shares}))
    dense = [share.times * (share.unit.parameters - share.unit.expert_parameters) for share in shares]
    # Biases behind a sum are whole in an expert, too; they are counted as cut.
    divided = [share.times * max(0, share.unit.cut_parameters - share.unit.expert_parameters) for share in shares]
    tied = description.tied_parameters if last in present and 0 not in present else 0
    longest = max((share.unit for share in shares), key=lambda unit: unit.parameters)
    order = [(chunk.rank, chunk.shares[0].place) for chunk in chunks_of_split(description, cut)]
    borders = _borders(order, rank) if cut.pipeline > 1 else ()
    return PipelinePart(
        rank=rank,
        whole=sum(dense) - sum(divided),
        cut=sum(divided),
        experts=sum(share.times * share.unit.expert_parameters for share in shares),
        copied=tied,
        longest=longest.parameters - longest.expert_parameters,
        longest_experts=longest.expert_parameters,
        longest_dense=max(share.unit.parameters - share.unit.expert_parameters for share in shares),
        chunks=tuple((shares[0].place, tuple((share.place, share.times) for share in shares)) for shares in own),
        present=present,
        borders=tuple(borders),
    )


def _borders(firsts: Sequence[tuple[int, int]], rank: int) -> Iterator[int]:
    """Yield the first units of the chunks of ``rank``, and of those behind them.

    ``firsts`` are (rank, place) of all chunks, in the order of the model.
    """
    for number, (owner, place) in enumerate(firsts):
        if number and owner == rank:
            yield place
        if number and firsts[number - 1][0] == rank:
            yield place


# The fields that decide, beside the cut, about what lasts, and about what passes.
_LASTING: Final = (
    *("data", "tensor", "context", "expert", "strategy", "servers", "compression", "algorithm"),
    *("precision", "main_gradients", "activations", "optimizer_slots"),
)
_PASSING: Final = (
    *("tensor", "context", "expert", "pipeline", "schedule", "chunks", "microbatch", "recompute"),
    "sequence_parallel",
    *("precision", "activations", "implementation"),
)
_lasting_of, _passing_of = attrgetter(*_LASTING), attrgetter(*_PASSING)


# Micro-batches of a unit of which there are: the input alone, all that its backward needs, what W needs after I.
Count = tuple[int, int, int]
Alive = tuple[tuple[int, Count], ...]  # (place of a unit, its count)


class StepMemory(NamedTuple):
    """Bytes of a part that are there whatever the micro-batches; ``messages`` and ``scratch`` of the exchange."""

    parameters: float
    gradients: float
    optimizer: float
    messages: float
    scratch: float
    total: float


class MicrobatchMemory(NamedTuple):
    """Bytes of a part that come and go with micro-batches; ``added`` is more scratch where these are added up."""

    activations: float
    messages: float
    scratch: float
    added: float
    total: float  # without what is added


def memory(
    description: ModelDescription, layout: ParallelLayout, cluster: Cluster, global_batch: int
) -> MemoryEstimate:
    """Return the memory of the fullest device, and how its parameters are counted (local).

    Raises ConfigurationError where a pipeline has more parts than the model has units, and for a schedule that is that
    of a file.
    """
    many, cut = layout.microbatches(global_batch), SplitKey.of(layout)
    lasting = _lasting(description, cut, _lasting_of(layout))
    passing = _passing(description, _passing_of(layout), many, row_route(layout, cluster))
    adds = _accumulates(layout, many)
    # Sums find the fullest part, in which all terms are those of one moment; only its terms are then put together.
    totals = [lasts.total + passes.total + adds * passes.added for lasts, passes in zip(lasting, passing, strict=True)]
    most = max(totals)
    place = totals.index(most)
    terms, fullest = _terms(lasting[place], passing[place], adds=adds), parts(description, cut)[place].rank
    if layout.strategy == "parameter_server" and layout.servers:
        served = server_bytes(description, layout)
        if sum(served.values()) > most:
            terms, fullest = served, 0
    terms["reserved"] = cluster.device.reserved_bytes
    return MemoryEstimate(terms=terms, limit_bytes=cluster.device.memory_bytes, rule=states(layout).rule, stage=fullest)


def by_rank(
    description: ModelDescription, layout: ParallelLayout, cluster: Cluster, global_batch: int
) -> tuple[dict[str, float], ...]:
    """Return the terms of each pipeline rank, without what is reserved (local). Raises what `memory` does."""
    many, cut, route = layout.microbatches(global_batch), SplitKey.of(layout), row_route(layout, cluster)
    terms = []
    for rank in range(layout.pipeline):
        part = part_of(description, cut, rank)
        alive = _moments(cut, part, layout.schedule, many, _repeats(description, layout))
        passes = _passes(description, layout, part, alive, route)
        terms.append(_terms(_lasts(description, layout, part), passes, adds=_accumulates(layout, many)))
    return tuple(terms)


def _terms(lasts: StepMemory, passes: MicrobatchMemory, *, adds: bool) -> dict[str, float]:
    return {
        "parameters": lasts.parameters,
        "gradients": lasts.gradients,
        "optimizer": lasts.optimizer,
        "activations": passes.activations,
        "messages": passes.messages + lasts.messages,
        "scratch": lasts.scratch + passes.scratch + adds * passes.added,
    }


def _accumulates(layout: ParallelLayout, microbatches: int) -> bool:
    """Whether micro-batches are added up: stages 2 and 3 of ZeRO reduce the gradient of each at once."""
    return microbatches > 1 and stage_of(layout.strategy) < 2


@lru_cache(maxsize=1 << 15)
def _lasting(description: ModelDescription, cut: SplitKey, fields: tuple[Any, ...]) -> tuple[StepMemory, ...]:
    layout = cut.layout.but(**dict(zip(_LASTING, fields, strict=True)))
    return tuple(_lasts(description, layout, part) for part in parts(description, cut))


def _lasts(description: ModelDescription, layout: ParallelLayout, part: PipelinePart) -> StepMemory:
    """Return the bytes of a part's states and of its exchange."""
    is_ours = layout.implementation == "hpcdist" or description.shape is None
    tensor, whole, sharded = layout.tensor, unsharded(layout), states(layout)
    numbers, copied = part.whole + part.cut / tensor, part.copied / tensor
    parameters = numbers * sharded.parameter + copied * whole.parameter
    gradients = numbers * sharded.gradient + copied * whole.gradient
    optimizer = numbers * sharded.optimizer
    if part.experts:
        sharded_experts, experts = states(layout, experts=True), part.experts / (tensor * layout.expert)
        parameters += experts * sharded_experts.parameter
        gradients += experts * sharded_experts.gradient
        optimizer += experts * sharded_experts.optimizer
    longest = part.longest + part.longest_experts / layout.expert
    messages = _exchanged(layout, part) if is_ours else 0.0
    scratch = whole_units(layout, longest)
    return StepMemory(
        parameters, gradients, optimizer, messages, scratch, parameters + gradients + optimizer + messages + scratch
    )


def _exchanged(layout: ParallelLayout, part: PipelinePart) -> float:
    """Return the bytes of buffers of our collectives for the parameters of a part.

    Where experts are shared out, those of a layer lie behind its dense tensors, and go over other replicas: buckets end
    there.
    """
    tensor, longest_experts = layout.tensor, part.longest_experts / layout.expert
    if layout.expert == 1:
        numbers = part.whole + (part.cut + part.experts) / tensor
        return exchanged(layout, numbers, part.longest + longest_experts)
    alike = layout.but(data=layout.data * layout.context // layout.expert, context=1)
    dense = exchanged(layout, part.longest_dense / tensor, part.longest_dense)
    return max(dense, exchanged(alike, longest_experts / tensor, longest_experts))


@lru_cache(maxsize=1 << 15)
def _passing(
    description: ModelDescription, fields: tuple[Any, ...], microbatches: int, route: RowRoute
) -> tuple[MicrobatchMemory, ...]:
    layout = ParallelLayout(**dict(zip(_PASSING, fields, strict=True)))
    cut = SplitKey.of(layout)
    alive = _alive(description, cut, layout.schedule, microbatches, _repeats(description, layout))
    return tuple(
        _passes(description, layout, part, moments, route)
        for part, moments in zip(parts(description, cut), alive, strict=True)
    )


def _scratch(description: ModelDescription, layout: ParallelLayout, present: tuple[int, ...]) -> tuple[float, float]:
    """Return the temporary bytes of the units at ``present``, and how many more where gradients add up."""
    if layout.implementation == "hpcdist" or description.shape is None:
        once = scratch_of(description, layout, present, accumulates=False)
        return once, scratch_of(description, layout, present, accumulates=True) - once
    units = of_units(description, layout)
    return layout.microbatch * max([units[place].again for place in present]), 0.0


def _passes(
    description: ModelDescription,
    layout: ParallelLayout,
    part: PipelinePart,
    alive: Sequence[Alive],
    route: RowRoute,
) -> MicrobatchMemory:
    """Return the bytes of micro-batches in a part whose units are ``alive`` at these moments."""
    rows = row_buffers(row_bytes(description, layout, part.present), route)
    if route.way == SHARED:  # then rows are kept as on one rank
        layout = layout.but(expert=1)
    scratch = _scratch(description, layout, part.present)
    samples, units = layout.microbatch, of_units(description, layout)
    if layout.pipeline == 1 and _repeats(description, layout):
        activations = samples * recomputed_one_by_one(description, layout)
    else:
        activations = samples * max([_bytes_of(moment, units) for moment in alive], default=0.0)
    messages = rows + (samples * _on_their_way(description, layout, part, units) if part.borders else 0.0)
    return MicrobatchMemory(activations, messages, *scratch, activations + messages + scratch[0])


def _repeats(description: ModelDescription, layout: ParallelLayout) -> bool:
    """Whether chunks keep their inputs only, and are computed again as a whole."""
    return layout.recompute == "full" and (layout.implementation == "hpcdist" or description.shape is None)


@lru_cache(maxsize=1 << 15)
def _alive(
    description: ModelDescription, cut: SplitKey, schedule: str, microbatches: int, recompute: bool
) -> tuple[tuple[Alive, ...], ...]:
    """Return the moments of all parts."""
    return tuple(_moments(cut, part, schedule, microbatches, recompute) for part in parts(description, cut))


def _moments(cut: SplitKey, part: PipelinePart, schedule: str, microbatches: int, recompute: bool) -> tuple[Alive, ...]:
    """Return the live micro-batches of each unit of a part, at the moments when it may need most."""
    alive = []
    for moment in in_flight(schedule, cut.pipeline, microbatches, cut.chunks, part.rank, recompute=recompute):
        counts: dict[int, Count] = {}
        for live, (first, shares) in zip(moment, part.chunks, strict=True):
            inputs, saved, held = counts.get(first, (0, 0, 0))
            counts[first] = inputs + live.inputs, saved, held  # the input of a chunk is that of its first unit
            for place, times in shares:
                inputs, saved, held = counts.get(place, (0, 0, 0))
                counts[place] = inputs, saved + live.kept * times, held + live.held * times
        alive.append(tuple(counts.items()))
    return tuple(alive)


def _bytes_of(moment: Alive, units: Sequence[UnitActivations]) -> float:
    """Return the bytes of a sample's activations at one moment."""
    return sum(
        [
            inputs * units[place].border + saved * units[place].kept + held * units[place].held
            for place, (inputs, saved, held) in moment
        ]
    )


def _on_their_way(
    description: ModelDescription, layout: ParallelLayout, part: PipelinePart, units: Sequence[UnitActivations]
) -> float:
    """Return the bytes of a sample that are sent, or posted ahead, at the borders of its chunks."""
    if layout.implementation == "hpcdist" or description.shape is None:
        return IN_MESSAGES * sum([units[place].border for place in part.borders])
    size = itemsize(layout) * description.tokens / layout.context * description.width
    return IN_MESSAGES * len(part.borders) * (size / layout.tensor if layout.sequence_parallel else size)
