"""Memory of the device with the highest use: states, activations, messages, scratch, and reserved memory.

Batches, BLAS workspaces and fragmentation are in ``reserved_bytes``. Micro-batches in flight: p on the first of p ranks
of 1F1B (arXiv:2104.04473); p v + p - 1 chunks of 1/v of the layers for interleaved with v chunks (arXiv:2205.05198,
section 4.2.3). Short pipelines are counted from their operation lists.
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
    recomputed_one_by_one,
    row_bytes,
    scratch_of,
    unit_activations,
)
from hpcdist.planner.memory.model_states import (
    buffer_bytes,
    layer_copy_bytes,
    server_bytes,
    stage_of,
    states,
    unsharded,
)
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.stage_split import SplitKey, UnitGroup, chunks_of_split, stages_of_split
from hpcdist.planner.time.expert_rows import SHARED, RowRoute, row_buffers, row_route
from hpcdist.strategies.pipeline.memory import IN_MESSAGES, LiveMicroBatches, Moment, moments
from hpcdist.strategies.schedule.passes import expand, interleaved_group
from hpcdist.strategies.schedule.registry import FILE, SCHEDULES, check_schedule

EXACT_RANKS: Final = 16  # largest number of pipeline chunks that is counted exactly
STEADY_ROUNDS: Final = 4  # micro-batches / ranks after which every schedule but gpipe repeats itself


@lru_cache(maxsize=65536)
def in_flight(
    schedule: str, ranks: int, microbatches: int, chunks: int, rank: int, *, recompute: bool
) -> tuple[Moment, ...]:
    """Return a tuple of the moments at which the activation memory of pipeline rank ``rank`` may peak.

    A moment is a tuple with one `LiveMicroBatches`, the numbers of micro-batches in flight, per model chunk of the
    rank. ``ranks``: number of pipeline ranks. ``chunks``: number of model chunks per rank.
    """
    if schedule == FILE:
        raise ConfigurationError(
            f"the planner cannot compute the activation memory of the schedule {schedule!r}, because a file defines "
            f"this schedule; choose one of {', '.join(SCHEDULES)}"
        )
    chunks_per_rank = check_schedule(schedule, ranks, microbatches, chunks)
    row = SCHEDULES[schedule]
    if ranks * chunks_per_rank <= EXACT_RANKS:
        # The steady state repeats, so more micro-batches do not raise the peak; except for gpipe, and for interleaved
        # with an incomplete last group.
        steady = microbatches
        if schedule != "gpipe" and (schedule != "interleaved" or microbatches % ranks == 0):
            steady = min(microbatches, STEADY_ROUNDS * ranks)
        return _executed(schedule, ranks, steady, chunks_per_rank, rank, recompute)
    peak = row.peak(rank, ranks, microbatches, chunks_per_rank)
    # Chunks keep their inputs, and one chunk at a time is recomputed: a moment per chunk. The last rank of 1f1b
    # recomputes nothing, because its backward follows its forward.
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
            LiveMicroBatches(inputs=total, kept=kept, held=total - kept) for total, kept in zip(both, live, strict=True)
        ),
    )


def _dealt(schedule: str, ranks: int, microbatches: int, chunks: int, total: int) -> list[int]:
    if chunks == 1:
        return [total]
    if schedule != "interleaved":  # chunks are folded: forth and back
        return [total - total // 2, total // 2]
    size = interleaved_group(ranks, microbatches)
    counts = [min(size, max(0, total - number * size)) for number in range(chunks)]
    counts[0] += total - sum(counts)  # a second group starts with chunk 0
    return counts


@lru_cache(maxsize=4096)
def _executed(
    schedule: str, ranks: int, microbatches: int, chunks: int, rank: int, recompute: bool
) -> tuple[Moment, ...]:
    row = SCHEDULES[schedule]
    placement = row.place([range(unit, unit + 1) for unit in range(ranks * chunks)], ranks)
    steps = expand(row.passes(rank, ranks, microbatches, chunks), placement, rank, recompute=recompute)
    return moments(steps, placement.of(rank))


class PipelinePart(NamedTuple):
    """Share of one pipeline rank in the model: layers, and numbers of parameters by kind."""

    # Units are given as indices in the model description. Dense parameters are all parameters outside experts.

    rank: int
    whole: float  # dense, replicated over the tensor axis
    cut: float  # dense, sharded by the tensor axis; number before sharding
    experts: float  # before sharding
    copied: float  # tied parameters that another rank also has
    longest: float  # dense parameters of the unit with the most parameters
    longest_experts: float  # expert parameters of the same unit
    longest_dense: float  # most dense parameters of a unit
    # Per chunk: (first unit, ((unit, number of identical units in the chunk), ...)).
    chunks: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    unit_indices: tuple[int, ...]  # all units of the rank
    borders: tuple[int, ...]  # units whose inputs are pipeline messages of this rank


@lru_cache(maxsize=8192)
def parts(description: ModelDescription, split_key: SplitKey) -> tuple[PipelinePart, ...]:
    """Return the `PipelinePart` of every pipeline rank on which the memory use may be the highest.

    ``description``: the model to split. ``split_key``: layout fields that determine the split.
    """
    ends: dict[tuple[UnitGroup, ...], tuple[int, int]] = {}
    for rank, shares in enumerate(stages_of_split(description, split_key)):
        # Of several ranks with equal layers, only the first and the last are included.
        ends[shares] = ends.get(shares, (rank, rank))[0], rank
    ranks = sorted({rank for both in ends.values() for rank in both})
    return tuple(part_of(description, split_key, rank) for rank in ranks)


@lru_cache(maxsize=65536)
def part_of(description: ModelDescription, split_key: SplitKey, rank: int) -> PipelinePart:
    """Return the `PipelinePart` of pipeline rank ``rank``. Raises ConfigurationError if the model has too few layers.

    ``description``: the model that is split. ``split_key``: layout fields that determine the split.
    """
    grouped = [chunk.shares for chunk in chunks_of_split(description, split_key) if chunk.rank == rank]
    shares = [share for shares in grouped for share in shares]
    last = len(description.units) - 1
    unit_indices = tuple(sorted({share.place for share in shares}))
    dense = [share.times * (share.unit.parameters - share.unit.expert_parameters) for share in shares]
    # Biases after a sum are replicated also in experts, but are counted as sharded.
    divided = [share.times * max(0, share.unit.cut_parameters - share.unit.expert_parameters) for share in shares]
    tied = description.tied_parameters if last in unit_indices and 0 not in unit_indices else 0
    longest = max((share.unit for share in shares), key=lambda unit: unit.parameters)
    order = [(chunk.rank, chunk.shares[0].place) for chunk in chunks_of_split(description, split_key)]
    borders = _borders(order, rank) if split_key.pipeline > 1 else ()
    return PipelinePart(
        rank=rank,
        whole=sum(dense) - sum(divided),
        cut=sum(divided),
        experts=sum(share.times * share.unit.expert_parameters for share in shares),
        copied=tied,
        longest=longest.parameters - longest.expert_parameters,
        longest_experts=longest.expert_parameters,
        longest_dense=max(share.unit.parameters - share.unit.expert_parameters for share in shares),
        chunks=tuple((shares[0].place, tuple((share.place, share.times) for share in shares)) for shares in grouped),
        unit_indices=unit_indices,
        borders=tuple(borders),
    )


def _borders(firsts: Sequence[tuple[int, int]], rank: int) -> Iterator[int]:
    for number, (owner, place) in enumerate(firsts):
        if number and owner == rank:
            yield place
        if number and firsts[number - 1][0] == rank:
            yield place


# Fields that, with the split, determine the lasting and the varying memory.
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


# Live micro-batches of a unit: with only the input, with all activations for backward, with W's arrays after I.
Count = tuple[int, int, int]
Alive = tuple[tuple[int, Count], ...]  # (unit index, count)


class StepMemory(NamedTuple):
    """Memory of a pipeline rank, in bytes, that does not depend on the micro-batches, such as parameters."""

    parameters: float
    gradients: float
    optimizer: float
    messages: float  # buffers of data-axis collectives
    scratch: float  # copies of parameters and gradients of the largest layer or block
    total: float


class MicrobatchMemory(NamedTuple):
    """Memory of a pipeline rank, in bytes, that depends on the size or number of micro-batches, such as activations."""

    activations: float
    messages: float  # pipeline messages and expert all-to-alls
    scratch: float  # temporary arrays
    added: float  # more temporary arrays if gradients are accumulated
    total: float  # without ``added``


def memory(
    description: ModelDescription, layout: ParallelLayout, cluster: Cluster, global_batch: int
) -> MemoryEstimate:
    """Return the memory use by purpose, such as "activations", of the device with the highest total use.

    ``description``: the model to train. ``global_batch``: number of samples per step. Raises ConfigurationError if
    ``layout`` is invalid.
    """
    many, split_key = layout.microbatches(global_batch), SplitKey.of(layout)
    lasting = _lasting(description, split_key, _lasting_of(layout))
    passing = _passing(description, _passing_of(layout), many, row_route(layout, cluster))
    adds = _accumulates(layout, many)
    # Totals find the part with the highest use; all terms are then taken at the same moment.
    totals = [lasts.total + passes.total + adds * passes.added for lasts, passes in zip(lasting, passing, strict=True)]
    most = max(totals)
    place = totals.index(most)
    terms, fullest = _terms(lasting[place], passing[place], adds=adds), parts(description, split_key)[place].rank
    if layout.strategy == "parameter_server" and layout.servers:
        served = server_bytes(description, layout)
        if sum(served.values()) > most:
            terms, fullest = served, 0
    terms["reserved"] = cluster.device.reserved_bytes
    return MemoryEstimate(terms=terms, limit_bytes=cluster.device.memory_bytes, rule=states(layout).rule, stage=fullest)


def by_rank(
    description: ModelDescription, layout: ParallelLayout, cluster: Cluster, global_batch: int
) -> tuple[dict[str, float], ...]:
    """Return a tuple of one dict {purpose, such as "activations": bytes} per pipeline rank.

    ``description``: the model to train. Raises ConfigurationError if ``layout`` is invalid.
    """
    many, split_key, route = layout.microbatches(global_batch), SplitKey.of(layout), row_route(layout, cluster)
    terms = []
    for rank in range(layout.pipeline):
        part = part_of(description, split_key, rank)
        alive = _moments(split_key, part, layout.schedule, many, _repeats(description, layout))
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
    return microbatches > 1 and stage_of(layout.strategy) < 2  # ZeRO 2 and 3 reduce after each backward


@lru_cache(maxsize=1 << 15)
def _lasting(description: ModelDescription, split_key: SplitKey, fields: tuple[Any, ...]) -> tuple[StepMemory, ...]:
    layout = split_key.layout.but(**dict(zip(_LASTING, fields, strict=True)))
    return tuple(_lasts(description, layout, part) for part in parts(description, split_key))


def _lasts(description: ModelDescription, layout: ParallelLayout, part: PipelinePart) -> StepMemory:
    is_measured = layout.kernels.measures_arrays or description.shape is None
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
    messages = _exchanged(layout, part) if is_measured else 0.0
    scratch = layer_copy_bytes(layout, longest)
    return StepMemory(
        parameters, gradients, optimizer, messages, scratch, parameters + gradients + optimizer + messages + scratch
    )


def _exchanged(layout: ParallelLayout, part: PipelinePart) -> float:
    tensor, longest_experts = layout.tensor, part.longest_experts / layout.expert
    if layout.expert == 1:
        numbers = part.whole + (part.cut + part.experts) / tensor
        return buffer_bytes(layout, numbers, part.longest + longest_experts)
    alike = layout.but(data=layout.data * layout.context // layout.expert, context=1)
    dense = buffer_bytes(layout, part.longest_dense / tensor, part.longest_dense)
    return max(dense, buffer_bytes(alike, longest_experts / tensor, longest_experts))


@lru_cache(maxsize=1 << 15)
def _passing(
    description: ModelDescription, fields: tuple[Any, ...], microbatches: int, route: RowRoute
) -> tuple[MicrobatchMemory, ...]:
    layout = ParallelLayout(**dict(zip(_PASSING, fields, strict=True)))
    split_key = SplitKey.of(layout)
    alive = _alive(description, split_key, layout.schedule, microbatches, _repeats(description, layout))
    return tuple(
        _passes(description, layout, part, moments, route)
        for part, moments in zip(parts(description, split_key), alive, strict=True)
    )


def _scratch(
    description: ModelDescription, layout: ParallelLayout, unit_indices: tuple[int, ...]
) -> tuple[float, float]:
    # Returns the bytes of temporary arrays, and the additional bytes that gradient accumulation needs.
    if layout.kernels.measures_arrays or description.shape is None:
        once = scratch_of(description, layout, unit_indices, accumulates=False)
        return once, scratch_of(description, layout, unit_indices, accumulates=True) - once
    units = unit_activations(description, layout)
    return layout.microbatch * max([units[place].again for place in unit_indices]), 0.0


def _passes(
    description: ModelDescription,
    layout: ParallelLayout,
    part: PipelinePart,
    alive: Sequence[Alive],
    route: RowRoute,
) -> MicrobatchMemory:
    rows = row_buffers(row_bytes(description, layout, part.unit_indices), route)
    if route.method == SHARED:  # rows are then stored as on one rank
        layout = layout.but(expert=1)
    scratch = _scratch(description, layout, part.unit_indices)
    samples, units = layout.microbatch, unit_activations(description, layout)
    if layout.pipeline == 1 and _repeats(description, layout):
        activations = samples * recomputed_one_by_one(description, layout)
    else:
        activations = samples * max([_bytes_of(moment, units) for moment in alive], default=0.0)
    messages = rows + (samples * _on_their_way(description, layout, part, units) if part.borders else 0.0)
    return MicrobatchMemory(activations, messages, *scratch, activations + messages + scratch[0])


def _repeats(description: ModelDescription, layout: ParallelLayout) -> bool:
    return layout.recompute == "full" and (layout.kernels.measures_arrays or description.shape is None)


@lru_cache(maxsize=1 << 15)
def _alive(
    description: ModelDescription, split_key: SplitKey, schedule: str, microbatches: int, recompute: bool
) -> tuple[tuple[Alive, ...], ...]:
    return tuple(_moments(split_key, part, schedule, microbatches, recompute) for part in parts(description, split_key))


def _moments(
    split_key: SplitKey, part: PipelinePart, schedule: str, microbatches: int, recompute: bool
) -> tuple[Alive, ...]:
    alive = []
    for moment in in_flight(
        schedule, split_key.pipeline, microbatches, split_key.chunks, part.rank, recompute=recompute
    ):
        counts: dict[int, Count] = {}
        for live, (first, shares) in zip(moment, part.chunks, strict=True):
            inputs, saved, held = counts.get(first, (0, 0, 0))
            counts[first] = inputs + live.inputs, saved, held  # a chunk's input is the input of its first unit
            for place, times in shares:
                inputs, saved, held = counts.get(place, (0, 0, 0))
                counts[place] = inputs, saved + live.kept * times, held + live.held * times
        alive.append(tuple(counts.items()))
    return tuple(alive)


def _bytes_of(moment: Alive, units: Sequence[UnitActivations]) -> float:
    return sum(
        [
            inputs * units[place].border + saved * units[place].kept + held * units[place].held
            for place, (inputs, saved, held) in moment
        ]
    )


def _on_their_way(
    description: ModelDescription, layout: ParallelLayout, part: PipelinePart, units: Sequence[UnitActivations]
) -> float:
    if layout.kernels.measures_arrays or description.shape is None:
        return IN_MESSAGES * sum([units[place].border for place in part.borders])
    size = itemsize(layout) * description.tokens / layout.context * description.width
    return IN_MESSAGES * len(part.borders) * (size / layout.tensor if layout.sequence_parallel else size)
