"""Bytes on the device of a layout that needs most: states, activations, messages, scratch, and what is reserved.

"messages" are buffers on their way: activations between the ranks of a pipeline
(`hpcdist.strategies.pipeline.memory`), and for our own exchanges what a collective or a server takes beside the
gradients (`hpcdist.planner.buffers`). "scratch" are units that are whole for a moment, and what the kernels write and
forget. Batches, what a BLAS takes and cracks of an allocator are with the device's ``reserved_bytes``.

A search asks for the memory of many layouts that differ in little. What lasts for a step depends on the strategy, and
not on the micro-batches; what passes with a micro-batch depends on these, and not on the strategy: each is known once
it was asked for.
"""

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

from hpcdist.planner.activations import Activations, again_one_by_one, itemsize, of_units, scratch_of
from hpcdist.planner.buffers import exchanged, server, whole_units
from hpcdist.planner.cluster import Cluster
from hpcdist.planner.cut import Cut
from hpcdist.planner.description import Description
from hpcdist.planner.estimate import Memory
from hpcdist.planner.inflight import in_flight
from hpcdist.planner.layout import Layout
from hpcdist.planner.parts import Part, part_of, parts
from hpcdist.planner.states import stage_of, states, whole
from hpcdist.strategies.pipeline.memory import IN_MESSAGES

# The fields that decide, beside the cut, about what lasts, and about what passes.
_LASTING: Final = (
    *("data", "tensor", "context", "expert", "strategy", "servers", "compression", "algorithm"),
    *("precision", "main_gradients", "activations", "optimizer_slots"),
)
_PASSING: Final = (
    *("tensor", "context", "pipeline", "schedule", "chunks", "microbatch", "recompute", "sequence_parallel"),
    *("precision", "activations", "implementation"),
)
_lasting_of, _passing_of = attrgetter(*_LASTING), attrgetter(*_PASSING)


Count = tuple[int, int, int]  # of units that are alike: inputs, kept, held
Alive = tuple[tuple[int, Count], ...]  # by their place


class Lasting(NamedTuple):
    """Bytes of a part that are there whatever the micro-batches; ``messages`` and ``scratch`` of the exchange."""

    parameters: float
    gradients: float
    optimizer: float
    messages: float
    scratch: float
    total: float


class Passing(NamedTuple):
    """Bytes of a part that come and go with micro-batches; ``added`` is more scratch where these are added up."""

    activations: float
    messages: float
    scratch: float
    added: float
    total: float  # without what is added


def memory(description: Description, layout: Layout, cluster: Cluster, global_batch: int) -> Memory:
    """Return the memory of the fullest device, and how its parameters are counted (local).

    Raises ConfigurationError where a pipeline has more parts than the model has units, and for a schedule that is that
    of a file.
    """
    many, cut = layout.microbatches(global_batch), Cut.of(layout)
    lasting = _lasting(description, cut, _lasting_of(layout))
    passing = _passing(description, _passing_of(layout), many)
    adds = _accumulates(layout, many)
    totals = [lasts.total + passes.total + adds * passes.added for lasts, passes in zip(lasting, passing, strict=True)]
    most = max(totals)
    place = totals.index(most)
    terms, fullest = _terms(lasting[place], passing[place], adds=adds), parts(description, cut)[place].rank
    if layout.strategy == "parameter_server" and layout.servers:
        served = server(description, layout)
        if sum(served.values()) > most:
            terms, fullest = served, 0
    terms["reserved"] = cluster.device.reserved_bytes
    return Memory(terms=terms, limit_bytes=cluster.device.memory_bytes, rule=states(layout).rule, stage=fullest)


def by_rank(description: Description, layout: Layout, global_batch: int) -> tuple[dict[str, float], ...]:
    """Return the terms of each pipeline rank, without what is reserved (local). Raises what `memory` does."""
    many, cut = layout.microbatches(global_batch), Cut.of(layout)
    found = []
    for rank in range(layout.pipeline):
        part = part_of(description, cut, rank)
        alive = _moments(cut, part, layout.schedule, many, _repeats(description, layout))
        passes = _passes(description, layout, part, alive, _scratch(description, layout, part.present))
        found.append(_terms(_lasts(description, layout, part), passes, adds=_accumulates(layout, many)))
    return tuple(found)


def _terms(lasts: Lasting, passes: Passing, *, adds: bool) -> dict[str, float]:
    return {
        "parameters": lasts.parameters,
        "gradients": lasts.gradients,
        "optimizer": lasts.optimizer,
        "activations": passes.activations,
        "messages": passes.messages + lasts.messages,
        "scratch": lasts.scratch + passes.scratch + adds * passes.added,
    }


def _accumulates(layout: Layout, microbatches: int) -> bool:
    """Whether micro-batches are added up: stages 2 and 3 of ZeRO reduce the gradient of each at once."""
    return microbatches > 1 and stage_of(layout.strategy) < 2


@lru_cache(maxsize=1 << 15)
def _lasting(description: Description, cut: Cut, fields: tuple[Any, ...]) -> tuple[Lasting, ...]:
    layout = cut.layout.but(**dict(zip(_LASTING, fields, strict=True)))
    return tuple(_lasts(description, layout, part) for part in parts(description, cut))


def _lasts(description: Description, layout: Layout, part: Part) -> Lasting:
    """Return the states of a part, and what its exchange takes."""
    is_ours = layout.implementation == "hpcdist" or description.shape is None
    tensor, each, kept = layout.tensor, whole(layout), states(layout)
    numbers, copied = part.whole + part.cut / tensor, part.copied / tensor
    parameters = numbers * kept.parameter + copied * each.parameter
    gradients = numbers * kept.gradient + copied * each.gradient
    optimizer = numbers * kept.optimizer
    if part.experts:
        fewer, own = states(layout, experts=True), part.experts / (tensor * layout.expert)
        parameters += own * fewer.parameter
        gradients += own * fewer.gradient
        optimizer += own * fewer.optimizer
    longest = part.longest + part.longest_experts / layout.expert
    messages = exchanged(layout, numbers, longest) if is_ours else 0.0
    scratch = whole_units(layout, longest)
    return Lasting(
        parameters, gradients, optimizer, messages, scratch, parameters + gradients + optimizer + messages + scratch
    )


@lru_cache(maxsize=1 << 15)
def _passing(description: Description, fields: tuple[Any, ...], microbatches: int) -> tuple[Passing, ...]:
    layout = Layout(**dict(zip(_PASSING, fields, strict=True)))
    cut = Cut.of(layout)
    alive = _alive(description, cut, layout.schedule, microbatches, _repeats(description, layout))
    of_parts = parts(description, cut)
    scratch = {present: _scratch(description, layout, present) for present in {part.present for part in of_parts}}
    return tuple(
        _passes(description, layout, part, moments, scratch[part.present])
        for part, moments in zip(of_parts, alive, strict=True)
    )


def _scratch(description: Description, layout: Layout, present: tuple[int, ...]) -> tuple[float, float]:
    """Return what is written and forgotten in the units at ``present``, and how much more where gradients add up."""
    if layout.implementation == "hpcdist" or description.shape is None:
        once = scratch_of(description, layout, present, accumulates=False)
        return once, scratch_of(description, layout, present, accumulates=True) - once
    units = of_units(description, layout)
    return layout.microbatch * max([units[place].again for place in present]), 0.0


def _passes(
    description: Description, layout: Layout, part: Part, alive: Sequence[Alive], scratch: tuple[float, float]
) -> Passing:
    """Return what the micro-batches take of a part whose units are ``alive`` so."""
    samples, units = layout.microbatch, of_units(description, layout)
    if layout.pipeline == 1 and _repeats(description, layout):
        activations = samples * again_one_by_one(description, layout)
    else:
        activations = samples * max([_bytes_of(moment, units) for moment in alive], default=0.0)
    messages = samples * _on_their_way(description, layout, part, units) if part.borders else 0.0
    return Passing(activations, messages, *scratch, activations + messages + scratch[0])


def _repeats(description: Description, layout: Layout) -> bool:
    """Whether chunks keep their inputs only."""
    return layout.recompute == "full" and (layout.implementation == "hpcdist" or description.shape is None)


@lru_cache(maxsize=1 << 15)
def _alive(
    description: Description, cut: Cut, schedule: str, microbatches: int, recompute: bool
) -> tuple[tuple[Alive, ...], ...]:
    """Return the moments of all parts."""
    return tuple(_moments(cut, part, schedule, microbatches, recompute) for part in parts(description, cut))


def _moments(cut: Cut, part: Part, schedule: str, microbatches: int, recompute: bool) -> tuple[Alive, ...]:
    """Return how many units of a part are alive at the moments when it may need most."""
    found = []
    for moment in in_flight(schedule, cut.pipeline, microbatches, cut.chunks, part.rank, recompute=recompute):
        counts: dict[int, Count] = {}
        for live, (first, shares) in zip(moment, part.chunks, strict=True):
            inputs, kept, held = counts.get(first, (0, 0, 0))
            counts[first] = inputs + live.inputs, kept, held
            for place, times in shares:
                inputs, kept, held = counts.get(place, (0, 0, 0))
                counts[place] = inputs, kept + live.kept * times, held + live.held * times
        found.append(tuple(counts.items()))
    return tuple(found)


def _bytes_of(moment: Alive, units: Sequence[Activations]) -> float:
    """Return the bytes of a sample's activations at one moment."""
    return sum(
        [
            inputs * units[place].border + kept * units[place].kept + held * units[place].held
            for place, (inputs, kept, held) in moment
        ]
    )


def _on_their_way(description: Description, layout: Layout, part: Part, units: Sequence[Activations]) -> float:
    """Return the bytes of a sample that are sent, or posted ahead, at the borders of its chunks."""
    if layout.implementation == "hpcdist" or description.shape is None:
        return IN_MESSAGES * sum([units[place].border for place in part.borders])
    size = itemsize(layout) * description.tokens / layout.context * description.width
    return IN_MESSAGES * len(part.borders) * (size / layout.tensor if layout.sequence_parallel else size)
