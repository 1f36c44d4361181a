"""Bytes on the device of a layout that needs most: states, activations, messages, scratch, and what is reserved.

Of the ranks of a pipeline that have the same units the first and the last are looked at: those between them have, in
every schedule, no more micro-batches than one of the two.

"messages" are buffers on their way: activations between the ranks of a pipeline
(`hpcdist.strategies.partition_memory`), and for our own exchanges what a collective or a server takes beside the
gradients (`hpcdist.planner.buffers`). "scratch" are units that are whole for a moment, and what the kernels write and
forget. Batches, what a BLAS takes and cracks of an allocator are with the device's ``reserved_bytes``.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from hpcdist.planner.activations import Activations, again_one_by_one, itemsize, of_units, scratch_of
from hpcdist.planner.buffers import exchanged, server, whole_units
from hpcdist.planner.cluster import Cluster
from hpcdist.planner.cut import Share, chunks, stages
from hpcdist.planner.description import Description
from hpcdist.planner.estimate import Memory
from hpcdist.planner.inflight import in_flight
from hpcdist.planner.layout import Layout
from hpcdist.planner.states import stage_of, states, whole
from hpcdist.strategies.partition_memory import IN_MESSAGES, Moment


class Part(NamedTuple):
    """What a pipeline rank has: numbers of its parameters, and its units.

    ``cut`` parameters are divided by the tensor axis, ``experts`` by the expert axis as well, ``copied`` are tied ones
    of another rank, and ``longest`` those of its largest unit, without its ``longest_experts``. ``chunks`` are (place
    of the first unit, ((place, times), ...)), ``present`` all places, and ``borders`` those of units whose input comes
    or goes as a message.
    """

    rank: int
    whole: float
    cut: float
    experts: float
    copied: float
    longest: float
    longest_experts: float
    chunks: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    present: tuple[int, ...]
    borders: tuple[int, ...]


def memory(description: Description, layout: Layout, cluster: Cluster, global_batch: int) -> Memory:
    """Return the memory of the fullest device, and how its parameters are counted (local).

    Raises ConfigurationError where a pipeline has more parts than the model has units, and for a schedule that is that
    of a file.
    """
    microbatches = layout.microbatches(global_batch)
    best: dict[str, float] = {}
    fullest, most = 0, -1.0
    for part in _parts(description, _Cut.of(layout)):
        terms = part_terms(description, layout, microbatches, part)
        total = sum(terms.values())
        if total > most:
            best, fullest, most = terms, part.rank, total
    if layout.strategy == "parameter_server" and layout.servers:
        served = server(description, layout)
        if sum(served.values()) > most:
            best, fullest = served, 0
    best["reserved"] = cluster.device.reserved_bytes
    return Memory(terms=best, limit_bytes=cluster.device.memory_bytes, rule=states(layout).rule, stage=fullest)


def by_rank(description: Description, layout: Layout, global_batch: int) -> tuple[dict[str, float], ...]:
    """Return the terms of each pipeline rank, without what is reserved (local). Raises what `memory` does."""
    microbatches, cut = layout.microbatches(global_batch), _Cut.of(layout)
    return tuple(
        part_terms(description, layout, microbatches, _part(description, cut, rank)) for rank in range(layout.pipeline)
    )


def part_terms(description: Description, layout: Layout, microbatches: int, part: Part) -> dict[str, float]:
    """Return the bytes of a device with this ``part`` of the model, by what they are (local)."""
    is_ours = layout.implementation == "hpcdist" or description.shape is None
    tensor, samples, each = layout.tensor, layout.microbatch, whole(layout)
    kept = states(layout)
    parameters, copied = part.whole + part.cut / tensor, part.copied / tensor
    terms = {
        "parameters": parameters * kept.parameter + copied * each.parameter,
        "gradients": parameters * kept.gradient + copied * each.gradient,
        "optimizer": parameters * kept.optimizer,
    }
    if part.experts:
        fewer, own = states(layout, experts=True), part.experts / (tensor * layout.expert)
        terms["parameters"] += own * fewer.parameter
        terms["gradients"] += own * fewer.gradient
        terms["optimizer"] += own * fewer.optimizer
    units = of_units(description, layout)
    again = is_ours and layout.recompute == "full"
    if again and layout.pipeline == 1:
        alive = again_one_by_one(description, layout)
    else:
        moments = in_flight(layout.schedule, layout.pipeline, microbatches, layout.chunks, part.rank, recompute=again)
        alive = _alive(part, units, moments)
    terms["activations"] = samples * alive
    terms["messages"] = samples * _on_their_way(description, layout, part, units) if part.borders else 0.0
    longest = part.longest + part.longest_experts / layout.expert
    terms["scratch"] = whole_units(layout, longest)
    if is_ours:
        terms["messages"] += exchanged(layout, parameters, longest)
        # Stages 2 and 3 of ZeRO reduce the gradient of each micro-batch at once.
        accumulates = microbatches > 1 and stage_of(layout.strategy) < 2
        terms["scratch"] += scratch_of(description, layout, part.present, accumulates=accumulates)
    else:
        terms["scratch"] += samples * max([units[place].again for place in part.present])
    return terms


class _Cut(NamedTuple):
    """What decides which units a rank has."""

    pipeline: int
    chunks: int
    schedule: str
    implementation: str
    recompute: str

    @classmethod
    def of(cls, layout: Layout) -> "_Cut":
        return cls(layout.pipeline, layout.chunks, layout.schedule, layout.implementation, layout.recompute)

    @property
    def layout(self) -> Layout:
        return Layout(**self._asdict())


@lru_cache(maxsize=8192)
def _parts(description: Description, cut: _Cut) -> tuple[Part, ...]:
    """Return the parts where the worst may be: the first and the last of those that have the same units."""
    ends: dict[tuple[Share, ...], tuple[int, int]] = {}
    for rank, own in enumerate(stages(description, cut.layout)):
        ends[own] = ends.get(own, (rank, rank))[0], rank
    ranks = sorted({rank for both in ends.values() for rank in both})
    return tuple(_part(description, cut, rank) for rank in ranks)


@lru_cache(maxsize=65536)
def _part(description: Description, cut: _Cut, rank: int) -> Part:
    own = [chunk.shares for chunk in chunks(description, cut.layout) if chunk.rank == rank]
    shares = [share for shares in own for share in shares]
    last = len(description.units) - 1
    present = tuple(sorted({share.place for share in shares}))
    dense = [share.times * (share.unit.parameters - share.unit.expert_parameters) for share in shares]
    # Biases behind a sum are whole in an expert, too; they are counted as cut.
    divided = [share.times * max(0, share.unit.cut_parameters - share.unit.expert_parameters) for share in shares]
    tied = description.tied_parameters if last in present and 0 not in present else 0
    longest = max((share.unit for share in shares), key=lambda unit: unit.parameters)
    order = [(chunk.rank, chunk.shares[0].place) for chunk in chunks(description, cut.layout)]
    borders = _borders(order, rank) if cut.pipeline > 1 else ()
    return Part(
        rank=rank,
        whole=sum(dense) - sum(divided),
        cut=sum(divided),
        experts=sum(share.times * share.unit.expert_parameters for share in shares),
        copied=tied,
        longest=longest.parameters - longest.expert_parameters,
        longest_experts=longest.expert_parameters,
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


def _alive(part: Part, units: Sequence[Activations], moments: Sequence[Moment]) -> float:
    """Return the bytes of a sample's activations at the worst of ``moments``."""
    sizes = []
    for first, shares in part.chunks:
        kept = held = 0.0
        for place, times in shares:
            kept += times * units[place].kept
            held += times * units[place].held
        sizes.append((units[first].border, kept, held))
    worst = 0.0
    for moment in moments:
        alive = 0.0
        for live, (border, kept, held) in zip(moment, sizes, strict=True):
            alive += live.inputs * border + live.kept * kept + live.held * held
        worst = max(worst, alive)
    return worst


def _on_their_way(description: Description, layout: Layout, part: Part, units: Sequence[Activations]) -> float:
    """Return the bytes of a sample that are sent, or posted ahead, at the borders of its chunks."""
    if layout.implementation == "hpcdist" or description.shape is None:
        return IN_MESSAGES * sum([units[place].border for place in part.borders])
    size = itemsize(layout) * description.tokens / layout.context * description.width
    return IN_MESSAGES * len(part.borders) * (size / layout.tensor if layout.sequence_parallel else size)
