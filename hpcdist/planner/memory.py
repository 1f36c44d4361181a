"""Bytes on the device of a layout that needs most: states, activations, messages, scratch, and what is reserved.

Of the ranks of a pipeline that have the same units the first and the last are looked at: those between them have, in
every schedule, no more micro-batches than one of the two.
"""

from collections.abc import Sequence
from functools import lru_cache

from hpcdist.planner.activations import Activations, itemsize, layers_again, of_units, scratch_of
from hpcdist.planner.cluster import Cluster
from hpcdist.planner.cut import Chunk, Share, chunks, stages
from hpcdist.planner.description import Description
from hpcdist.planner.estimate import Memory
from hpcdist.planner.inflight import in_flight
from hpcdist.planner.layout import Layout
from hpcdist.planner.states import stage_of, states, whole
from hpcdist.strategies.partition_memory import IN_MESSAGES, Moment


def memory(description: Description, layout: Layout, cluster: Cluster, global_batch: int) -> Memory:
    """Return the memory of the fullest device, and how its parameters are counted (local).

    Raises ConfigurationError where a pipeline has more parts than the model has units.
    """
    microbatches = layout.microbatches(global_batch)
    best: dict[str, float] = {}
    fullest, most = 0, -1.0
    for rank in _looked_at(stages(description, layout)):
        terms = rank_terms(description, layout, microbatches, rank)
        total = sum(terms.values())
        if total > most:
            best, fullest, most = terms, rank, total
    if layout.strategy == "parameter_server" and layout.servers:
        served = _server(description, layout)
        if sum(served.values()) > most:
            best, fullest = served, -1
    best["reserved"] = cluster.device.reserved_bytes
    return Memory(terms=best, limit_bytes=cluster.device.memory_bytes, rule=states(layout).rule, stage=max(fullest, 0))


def rank_terms(description: Description, layout: Layout, microbatches: int, rank: int) -> dict[str, float]:
    """Return the bytes of a device on one pipeline rank, by what they are (local)."""
    own = _chunks_of(description, layout, rank)
    present = tuple(sorted({share.place for chunk in own for share in chunk.shares}))
    parameters, experts, copied = _parameters(description, layout, own, rank)
    each, fewer = states(layout), states(layout, experts=True)
    units = of_units(description, layout)
    is_ours = layout.implementation == "hpcdist" or description.shape is None
    again = is_ours and layout.recompute == "full"
    pipelined = layout.pipeline > 1
    moments = in_flight(
        layout.schedule, layout.pipeline, microbatches, layout.chunks, rank, recompute=again and pipelined
    )
    if again and not pipelined:
        alive = layers_again(description, layout)
    else:
        alive = _alive(own, units, moments)
    scratch = _whole_layers(description, layout, own)
    if is_ours:
        scratch += scratch_of(description, layout, present)
    else:
        scratch += layout.microbatch * max(units[place].again for place in present)
    size = whole(layout)
    return {
        "parameters": parameters * each.parameter + experts * fewer.parameter + copied * size.parameter,
        "gradients": parameters * each.gradient + experts * fewer.gradient + copied * size.gradient,
        "optimizer": parameters * each.optimizer + experts * fewer.optimizer,
        "activations": layout.microbatch * alive,
        "messages": layout.microbatch * _messages(description, layout, own) if pipelined else 0.0,
        "scratch": scratch,
    }


@lru_cache(maxsize=8192)
def _looked_at(parts: tuple[tuple[Share, ...], ...]) -> tuple[int, ...]:
    """Return the ranks where the worst may be: the first and the last of those that have the same units."""
    ends: dict[tuple[Share, ...], tuple[int, int]] = {}
    for rank, own in enumerate(parts):
        ends[own] = ends.get(own, (rank, rank))[0], rank
    return tuple(sorted({rank for both in ends.values() for rank in both}))


def _chunks_of(description: Description, layout: Layout, rank: int) -> tuple[Chunk, ...]:
    if layout.pipeline == 1 and layout.chunks == 1:
        return chunks(description, layout)
    return tuple(chunk for chunk in chunks(description, layout) if chunk.rank == rank)


def _parameters(
    description: Description, layout: Layout, own: tuple[Chunk, ...], rank: int
) -> tuple[float, float, float]:
    """Return the parameters of a device: those that all of its data axis has, experts, and copies of tied ones."""
    dense = experts = 0.0
    for chunk in own:
        for unit, count, _ in chunk.shares:
            cut = unit.cut_parameters - unit.expert_parameters if unit.expert_parameters else unit.cut_parameters
            dense += count * (unit.parameters - unit.expert_parameters - max(0, cut) + max(0, cut) / layout.tensor)
            experts += count * unit.expert_parameters / (layout.tensor * layout.expert)
    copied = 0.0
    if description.tied_parameters and layout.pipeline > 1:
        has_head = any(share.place == len(description.units) - 1 for chunk in own for share in chunk.shares)
        has_table = any(share.place == 0 for chunk in own for share in chunk.shares)
        copied = description.tied_parameters / layout.tensor if has_head and not has_table else 0.0
    return dense, experts, copied


def _alive(own: Sequence[Chunk], units: Sequence[Activations], moments: Sequence[Moment]) -> float:
    """Return the bytes of a sample's activations at the worst of ``moments``."""
    sizes = [
        (
            units[chunk.shares[0].place].border,
            sum(count * units[place].kept for _, count, place in chunk.shares),
            sum(count * units[place].held for _, count, place in chunk.shares),
        )
        for chunk in own
    ]
    return max(
        sum(
            live.inputs * border + live.kept * kept + live.held * held
            for live, (border, kept, held) in zip(moment, sizes, strict=True)
        )
        for moment in moments
    )


def _messages(description: Description, layout: Layout, own: Sequence[Chunk]) -> float:
    """Return the bytes of a sample's messages that are there at once: on their way, and posted ahead."""
    size = itemsize(layout) * description.tokens / layout.context * description.width
    if layout.sequence_parallel:
        size /= layout.tensor
    last = len(description.units) - 1
    borders = sum((chunk.shares[0].place != 0) + (chunk.shares[-1].place != last) for chunk in own)
    return IN_MESSAGES * borders * size


def _whole_layers(description: Description, layout: Layout, own: Sequence[Chunk]) -> float:
    """Return the bytes of units that are whole for a moment: where ZeRO cuts them, or float32 beside 16 bits."""
    longest = max(
        share.unit.parameters - share.unit.expert_parameters * (1 - 1 / layout.expert)
        for chunk in own
        for share in chunk.shares
    )
    size, stage = whole(layout), stage_of(layout.strategy)
    each = 0.0
    if layout.data * layout.context > 1:
        each += size.parameter * (stage >= 3) + size.gradient * (stage >= 2)
    if layout.implementation == "hpcdist" and layout.precision not in ("float32", "float64"):
        each += 2 * 4
    return each * longest / layout.tensor


def _server(description: Description, layout: Layout) -> dict[str, float]:
    each = whole(layout)
    part = description.parameters / layout.servers
    return {
        "parameters": part * each.parameter,
        "gradients": part * each.gradient,
        "optimizer": part * each.optimizer,
        "activations": 0.0,
        "messages": part * each.gradient,  # what a worker pushes, before it is added
        "scratch": 0.0,
    }
