"""Load of a pipeline rank per micro-batch: the seconds of its units, and its collectives.

For b samples of s tokens and width h, the tensor axis sends b s h elements per collective in each region from a
column-sharded to a row-sharded weight (arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2). Without sequence
parallelism the collectives are an allreduce in forward and in backward. With sequence parallelism an all-gather begins
the region and a reduce-scatter ends it; backward reverses both, and gathers the input again. In backward all but the
first all-gather can overlap the gradients' computation (arXiv:2205.05198, section 6.2).

The context axis gathers keys and values in forward, and reduce-scatters their gradients (arXiv:2407.21783, section
3.3.2). In hpcdist they pass round a ring, once more in backward, or heads are exchanged for tokens.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from hpcdist.planner.cluster.hardware import ITEM_BYTES, Cluster
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.activations import context_share
from hpcdist.planner.model.description import AttentionShape, ModelDescription, ModelUnit
from hpcdist.planner.model.stage_split import UnitGroup, chunks, recomputed, stages
from hpcdist.planner.time.compute import cached, local_experts, local_parameters, timed_fields, unit_seconds
from hpcdist.planner.time.expert_rows import row_turn
from hpcdist.planner.time.network import MessageCost, collective, span
from hpcdist.strategies.context.costs import counts_bytes, exchanged_bytes, ring_exposed_s, ring_passes

FORWARD: Final = 0
BACKWARD: Final = 1
OVERLAPPED: Final = 2  # in backward, overlapping gradients that do not wait for it
RECOMPUTE: Final = 3
_PLACES: Final = (0, 1, 1, 2)  # phase -> index of the waits in `CollectiveWait`
INT64_BYTES: Final = 8  # token count per expert
LOSS_SUMS: Final = 3  # maximum, sum of exponentials, logit of the target token


class AxisCollective(NamedTuple):
    """Collective over the parallel axis ``axis``, which a rank calls for a micro-batch in one model layer."""

    when: int  # `FORWARD`, `BACKWARD`, `OVERLAPPED` (with computation, in backward) or `RECOMPUTE`
    axis: str
    operation: str  # collective or, on the expert axis, name of the sent data, such as "rows"
    nbytes: float  # size of the whole buffer
    tiles_s: float | None = None  # ring attention: seconds of computation that overlap messages
    passes: int = 0  # ring attention: number of receives of keys and values on a rank


class StageLoad(NamedTuple):
    """Work of a group of model layers for one micro-batch: computation, collectives, and numbers of parameters."""

    forward_s: float
    input_s: float
    weight_s: float
    again_s: float  # recomputation
    add_s: float  # gradient accumulation
    cover_s: float  # computation that can overlap collectives
    calls: tuple[tuple[AxisCollective, int], ...]  # (collective, number of calls)
    parameters: float
    expert_parameters: float
    uncut: float  # parameters that the tensor axis does not shard
    units: int  # number of layers
    flags: tuple[str, ...]


class CollectiveWait(NamedTuple):
    """Seconds that a rank waits for the collectives of one micro-batch, and bytes sent, by parallel axis."""

    forward_s: dict[str, float]
    back_s: dict[str, float]  # in backward
    again_s: dict[str, float]  # in recomputation
    nbytes: dict[str, float]  # sent bytes
    algorithms: dict[str, str]
    flags: tuple[str, ...]
    hidden_s: float = 0.0  # ring attention messages that overlap computation


def loads(description: ModelDescription, layout: ParallelLayout, cluster: Cluster) -> tuple[tuple[StageLoad, int], ...]:
    """Return pairs (`StageLoad`, number of pipeline ranks with this load), one pair per distinct load."""
    cache = cached(cluster, "loads")
    key = load_key(description, layout)
    distinct: tuple[tuple[StageLoad, int], ...] | None = cache.get(key)
    if distinct is None:
        of_ranks = stages(description, layout)
        repeats: list[Counter[int]] = [Counter() for _ in of_ranks]
        for rank, shares in recomputed(description, layout):
            repeats[rank].update({share.place: share.times for share in shares})
        composed = [
            (tuple((share.place, share.times) for share in shares), tuple(sorted(counts.items())))
            for shares, counts in zip(of_ranks, repeats, strict=True)
        ]
        shares_of, often = dict(zip(composed, of_ranks, strict=True)), Counter(composed)
        distinct = tuple(
            (_load(shares_of[composition], dict(composition[1]), description, layout, cluster), often[composition])
            for composition in often
        )
        cache[key] = distinct
    return distinct


def chunk_loads(description: ModelDescription, layout: ParallelLayout, cluster: Cluster) -> tuple[StageLoad, ...]:
    """Return a tuple with the `StageLoad` of each pipeline chunk, in model order."""
    return tuple(
        _load(chunk.shares, {share.place: share.times for share in repeated.shares}, description, layout, cluster)
        for chunk, repeated in zip(chunks(description, layout), recomputed(description, layout), strict=True)
    )


def combined(load: StageLoad, other: StageLoad) -> StageLoad:
    """Return the sum of the loads of two model chunks on the same pipeline rank."""
    pairs: Iterator[tuple[Any, Any]] = zip(load, other, strict=True)
    return StageLoad(*(first + second for first, second in pairs))._replace(
        flags=tuple(dict.fromkeys(load.flags + other.flags))
    )


def collective_wait(
    load: StageLoad,
    layout: ParallelLayout,
    cluster: Cluster,
    costs: dict[tuple[str, str, float], MessageCost] | None = None,
) -> CollectiveWait:
    """Return the seconds per micro-batch that a rank waits for the collectives in ``load``, by parallel axis.

    ``costs``: dict that caches costs of collectives between calls, or None.
    """
    costs = {} if costs is None else costs
    waits: tuple[dict[str, float], dict[str, float], dict[str, float]] = {}, {}, {}
    nbytes: dict[str, float] = {}
    algorithms: dict[str, str] = {}
    flags: tuple[str, ...] = ()
    most: dict[str, float] = {}
    behind_s = hidden_s = 0.0
    for call, often in load.calls:
        when, axis, operation, size, tiles_s, passes = call
        cost = costs.get((axis, operation, size))
        if cost is None:
            if axis == "expert":
                cost = row_turn(operation, size, layout, cluster)
            else:
                cost = collective(operation, size, span(layout, axis, cluster), cluster)
            costs[axis, operation, size] = cost
        nbytes[axis] = nbytes.get(axis, 0.0) + often * cost.nbytes
        if axis not in algorithms or often * size > most[axis]:
            algorithms[axis], most[axis] = cost.algorithm, often * size
        flags += cost.flags
        if when == OVERLAPPED:
            behind_s += often * cost.seconds
        taken_s = cost.seconds if tiles_s is None else _exposed_s(cost.seconds, tiles_s, passes, back=when == BACKWARD)
        hidden_s += often * (cost.seconds - taken_s)
        wait = waits[_PLACES[when]]
        wait[axis] = wait.get(axis, 0.0) + often * taken_s
    if layout.kernels.hidden_tensor and not layout.tensor_overlap:
        for wait in waits:
            hidden_s += layout.kernels.hidden_tensor * wait.get("tensor", 0.0)
            wait["tensor"] = (1 - layout.kernels.hidden_tensor) * wait.get("tensor", 0.0)
    if behind_s and layout.tensor_overlap:
        waits[1]["tensor"] -= layout.tensor_overlap * min(behind_s, load.cover_s)
    return CollectiveWait(*waits, nbytes, algorithms, tuple(dict.fromkeys(flags)), hidden_s)


def _exposed_s(gathered_s: float, tiles_s: float, passes: int, *, back: bool) -> float:
    blocks = passes + 1
    exposed_s = ring_exposed_s(blocks, tiles_s / blocks, gathered_s / passes, back=back)
    return exposed_s / 2 if back else exposed_s


def load_key(description: ModelDescription, layout: ParallelLayout) -> tuple[object, ...]:
    """Return a cache key for `loads`: a tuple of all values on which the result of `loads` depends."""
    return (description, layout.pipeline, layout.chunks, layout.schedule, *timed_fields(layout))


def _load(
    shares: Sequence[UnitGroup],
    repeats: Mapping[int, int],
    description: ModelDescription,
    layout: ParallelLayout,
    cluster: Cluster,
) -> StageLoad:
    sums, again_s = [0.0] * 8, 0.0
    calls: Counter[AxisCollective] = Counter()
    flags: dict[str, None] = {}
    remaining = dict(repeats)
    for unit, count, place in shares:
        seconds = unit_seconds(unit, layout, cluster)
        repeated = min(count, remaining.get(place, 0))
        remaining[place] = remaining.get(place, 0) - repeated
        again_s += repeated * seconds.again_s
        whole = (
            seconds.forward_s,
            seconds.input_s,
            seconds.weight_s,
            seconds.add_s,
            seconds.cover_s,
            local_parameters(unit, layout),
            local_experts(unit, layout),
            float(unit.parameters - unit.cut_parameters),
        )
        sums = [total + count * each for total, each in zip(sums, whole, strict=True)]
        for call in _calls(unit, description, layout, seconds.attention_s):
            calls[call] += count
            if call.when == FORWARD and repeated and layout.recompute == "full":
                calls[call._replace(when=RECOMPUTE)] += repeated
        flags.update(dict.fromkeys(seconds.flags))
    units = sum(share.times for share in shares)
    forward_s, input_s, weight_s, add_s, cover_s, parameters, experts, uncut = sums
    return StageLoad(
        forward_s,
        input_s,
        weight_s,
        again_s,
        add_s,
        cover_s,
        tuple(calls.items()),
        parameters,
        experts,
        uncut,
        units,
        tuple(flags),
    )


def _calls(
    unit: ModelUnit, description: ModelDescription, layout: ParallelLayout, attention_s: tuple[float, float]
) -> Iterator[AxisCollective]:
    item = ITEM_BYTES[layout.computes_in]
    each = layout.microbatch / layout.context * item
    attention = unit.attention
    if attention is not None and layout.context > 1:
        yield from _context(unit, layout, attention, item, attention_s)
    if layout.tensor > 1:
        yield from _tensor(unit, description, layout, each)
        if unit.products and unit.products[-1].cut == "columns":  # logits
            for _ in range(LOSS_SUMS):
                yield AxisCollective(FORWARD, "tensor", "allreduce", description.tokens * each / item * 4)
    if not unit.expert_parameters:
        return
    first = next(product for product in unit.products if product.experts > 1)
    if layout.context > 1 and layout.kernels.routes_rows:
        counts = counts_bytes(layout.context, layout.microbatch, first.experts)
        yield AxisCollective(FORWARD, "context", "all_gather", counts)
    if layout.expert > 1:
        by_rows = layout.sequence_parallel and layout.kernels.splits_expert_rows
        tokens = first.rows * first.experts * first.share / (layout.tensor if by_rows else 1)
        if layout.kernels.routes_rows:
            yield AxisCollective(FORWARD, "expert", "counts", INT64_BYTES * first.experts)
        turns = (FORWARD, "rows"), (FORWARD, "results"), (BACKWARD, "gradients"), (BACKWARD, "results")
        for when, turn in turns:
            yield AxisCollective(when, "expert", turn, tokens * first.inner * each)


def _context(
    unit: ModelUnit, layout: ParallelLayout, attention: AttentionShape, item: int, attention_s: tuple[float, float]
) -> Iterator[AxisCollective]:
    # Whole buffer: keys and values of all tokens.
    whole = layout.microbatch * attention.context * 2 * attention.kv_heads / layout.tensor * attention.size * item
    if layout.kernels.rotates_keys:
        share, method = context_share(unit, layout, layout.microbatch)
        if method == "all_to_all":
            for when, exchanges in zip((FORWARD, BACKWARD), exchanged_bytes(share), strict=True):
                for sent in exchanges:
                    yield AxisCollective(when, "context", "all_to_all", share.ranks / (share.ranks - 1) * sent)
            return
        passes = ring_passes(share)
        passed = whole * passes / (share.ranks - 1)
        if passes:
            yield AxisCollective(FORWARD, "context", "all_gather", passed, attention_s[0], passes)
            for _ in range(2):  # keys, and their gradients
                yield AxisCollective(BACKWARD, "context", "all_gather", passed, attention_s[1], passes)
        return
    yield AxisCollective(FORWARD, "context", "all_gather", whole)
    yield AxisCollective(BACKWARD, "context", "reduce_scatter", whole)


def _tensor(
    unit: ModelUnit, description: ModelDescription, layout: ParallelLayout, each: float
) -> Iterator[AxisCollective]:
    if unit.cut_parameters and not unit.products:  # an embedding
        yield from _ends(description.tokens * description.width * each, layout)
    inside = False
    for product in unit.products:
        if product.cut == "columns":
            if not inside:
                yield from _begins(product.rows * product.inner * each, layout)
            inside = True
        elif product.cut == "inner":
            yield from _ends(product.rows * product.columns * each, layout)
            inside = False


def _begins(nbytes: float, layout: ParallelLayout) -> Iterator[AxisCollective]:
    if layout.sequence_parallel:
        yield AxisCollective(FORWARD, "tensor", "all_gather", nbytes)
        yield AxisCollective(OVERLAPPED, "tensor", "reduce_scatter", nbytes)
        yield AxisCollective(OVERLAPPED, "tensor", "all_gather", nbytes)
    else:
        yield AxisCollective(OVERLAPPED, "tensor", "allreduce", nbytes)


def _ends(nbytes: float, layout: ParallelLayout) -> Iterator[AxisCollective]:
    if layout.sequence_parallel:
        yield AxisCollective(FORWARD, "tensor", "reduce_scatter", nbytes)
        yield AxisCollective(BACKWARD, "tensor", "all_gather", nbytes)
    else:
        yield AxisCollective(FORWARD, "tensor", "allreduce", nbytes)
