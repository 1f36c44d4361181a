"""Load of a pipeline rank for one micro-batch: the seconds of its units, and the collectives that it calls.

Of b samples of s tokens and width h the tensor axis sends, in a region of products from columns to rows of its
weights (M. Shoeybi et al., arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2), with b s h numbers in each:

    forward         an allreduce behind the region; with sequence parallelism an all-gather before it and a
                    reduce-scatter behind it
    back            an allreduce for the input of the region; with sequence parallelism an all-gather of the gradient of
                    its output, a reduce-scatter for its input, and the input gathered once more

An embedding whose vocabulary is cut is the end of a region, a head the beginning of one; the loss of a cut vocabulary
sums three float32 numbers a token. The allreduce, or the reduce-scatter, that goes back may run while the gradients
of the weights at the beginning of the region are computed, and the second gathering while those of the input are
(arXiv:2205.05198, section 6.2): `Layout.tensor_overlap`. The context axis gathers keys and values forward, and
scatters the sums of their gradients back (arXiv:2407.21783, section 3.3.2); in hpcdist they travel round a ring beside
the tiles of attention, and once more in the backward with their gradients, or heads are exchanged for tokens, as
`hpcdist.strategies.context` chooses, and routers tell each other how often they chose which expert. The expert axis
sends each token to its experts and back, and so its gradient (`hpcdist.planner.time.expert_rows`). What is recomputed
(`hpcdist.planner.model.stage_split`) sends again what its forward sent.
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
from hpcdist.strategies.expert import costs as expert_costs

FORWARD: Final = 0
BACKWARD: Final = 1
OVERLAPPED: Final = 2  # back, and while gradients are computed that do not wait for it
RECOMPUTE: Final = 3
_PLACES: Final = (0, 1, 1, 2)  # of a time in the waits of `Sent`
LOSS_SUMS: Final = 3  # the maximum, the sum of exponentials, the logit of the right token


class AxisCollective(NamedTuple):
    """A collective of a micro-batch: when, over which axis, what, and on how many bytes.

    Of the expert axis it is a turn of `hpcdist.planner.time.expert_rows`.
    So many ``passes`` round a ring run beside ``tiles_s`` of attention; None: nothing is computed beside.
    """

    when: int
    axis: str
    operation: str
    nbytes: float
    tiles_s: float | None = None
    passes: int = 0


class StageLoad(NamedTuple):
    """Computation of a micro-batch on one rank, or in one chunk; its collectives, and how often; what lies there.

    ``cover_s`` is the computation that collectives may run behind; ``uncut`` are the parameters that all ranks of the
    tensor axis have.
    """

    forward_s: float
    input_s: float
    weight_s: float
    again_s: float
    add_s: float
    cover_s: float
    calls: tuple[tuple[AxisCollective, int], ...]
    parameters: float
    expert_parameters: float
    uncut: float
    units: int
    flags: tuple[str, ...]


class CollectiveWait(NamedTuple):
    """Seconds that a micro-batch waits for its collectives, by axis; bytes, and by which algorithm most of them go.

    ``hidden_s`` is what passes round a ring take behind attention.
    """

    forward_s: dict[str, float]
    back_s: dict[str, float]
    again_s: dict[str, float]
    nbytes: dict[str, float]
    algorithms: dict[str, str]
    flags: tuple[str, ...]
    hidden_s: float = 0.0


def loads(description: ModelDescription, layout: ParallelLayout, cluster: Cluster) -> tuple[tuple[StageLoad, int], ...]:
    """Return the different loads that ranks of the pipeline have, and how many ranks have each (local)."""
    known = cached(cluster, "loads")
    key = load_key(description, layout)
    different: tuple[tuple[StageLoad, int], ...] | None = known.get(key)
    if different is None:
        of_ranks = stages(description, layout)
        repeats: list[Counter[int]] = [Counter() for _ in of_ranks]
        for rank, shares in recomputed(description, layout):
            repeats[rank].update({share.place: share.times for share in shares})
        composed = [
            (tuple((share.place, share.times) for share in shares), tuple(sorted(own.items())))
            for shares, own in zip(of_ranks, repeats, strict=True)
        ]
        alike, often = dict(zip(composed, of_ranks, strict=True)), Counter(composed)
        different = tuple(
            (_load(alike[composition], dict(composition[1]), description, layout, cluster), often[composition])
            for composition in often
        )
        known[key] = different
    return different


def chunk_loads(description: ModelDescription, layout: ParallelLayout, cluster: Cluster) -> tuple[StageLoad, ...]:
    """Return the load of each chunk, in the order of the model (local)."""
    return tuple(
        _load(chunk.shares, {share.place: share.times for share in again.shares}, description, layout, cluster)
        for chunk, again in zip(chunks(description, layout), recomputed(description, layout), strict=True)
    )


def combined(load: StageLoad, other: StageLoad) -> StageLoad:
    """Return the sum of two loads: that of a rank that has both (local)."""
    pairs: Iterator[tuple[Any, Any]] = zip(load, other, strict=True)
    return StageLoad(*(own + more for own, more in pairs))._replace(
        flags=tuple(dict.fromkeys(load.flags + other.flags))
    )


def collective_wait(
    load: StageLoad,
    layout: ParallelLayout,
    cluster: Cluster,
    known: dict[tuple[str, str, float], MessageCost] | None = None,
) -> CollectiveWait:
    """Return the waits of a micro-batch for the collectives of ``load`` (local); ``known`` has costs of this layout."""
    known = {} if known is None else known
    waits: tuple[dict[str, float], dict[str, float], dict[str, float]] = {}, {}, {}
    nbytes: dict[str, float] = {}
    algorithms: dict[str, str] = {}
    flags: tuple[str, ...] = ()
    most: dict[str, float] = {}
    behind_s = hidden_s = 0.0
    for call, often in load.calls:
        when, axis, operation, size, tiles_s, passes = call
        cost = known.get((axis, operation, size))
        if cost is None:
            if axis == "expert":
                cost = row_turn(operation, size, layout, cluster)
            else:
                cost = collective(operation, size, span(layout, axis, cluster), cluster)
            known[axis, operation, size] = cost
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
    if behind_s and layout.tensor_overlap:
        waits[1]["tensor"] -= layout.tensor_overlap * min(behind_s, load.cover_s)
    return CollectiveWait(*waits, nbytes, algorithms, tuple(dict.fromkeys(flags)), hidden_s)


def _exposed_s(gathered_s: float, tiles_s: float, passes: int, *, back: bool) -> float:
    """Return the seconds of ``passes`` round the ring that no tiles hide, given those of a gathering.

    Back there are two of these, of keys and of gradients: each has half of what both leave.
    """
    blocks = passes + 1
    exposed_s = ring_exposed_s(blocks, tiles_s / blocks, gathered_s / passes, back=back)
    return exposed_s / 2 if back else exposed_s


def load_key(description: ModelDescription, layout: ParallelLayout) -> tuple[object, ...]:
    """Return the key of the cache of `loads`: all that they depend on (local)."""
    return (description, layout.pipeline, layout.chunks, layout.schedule, *timed_fields(layout))


def _load(
    shares: Sequence[UnitGroup],
    repeats: Mapping[int, int],
    description: ModelDescription,
    layout: ParallelLayout,
    cluster: Cluster,
) -> StageLoad:
    """Return the sum of ``shares``; ``repeats``: how many of the units at a place are computed again."""
    sums, again_s = [0.0] * 8, 0.0
    calls: Counter[AxisCollective] = Counter()
    flags: dict[str, None] = {}
    left = dict(repeats)
    for unit, count, place in shares:
        seconds = unit_seconds(unit, layout, cluster)
        again = min(count, left.get(place, 0))
        left[place] = left.get(place, 0) - again
        again_s += again * seconds.again_s
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
            if call.when == FORWARD and again and layout.recompute == "full":
                calls[call._replace(when=RECOMPUTE)] += again
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
    """Yield the collectives of one unit; ``attention_s``: the seconds of its attention, forward and back."""
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
    if layout.context > 1 and layout.implementation == "hpcdist":
        counts = counts_bytes(layout.context, layout.microbatch, first.experts)
        yield AxisCollective(FORWARD, "context", "all_gather", counts)
    if layout.expert > 1:
        # Ours route all tokens on each tensor rank, the published ones those of its own rows.
        by_rows = layout.sequence_parallel and layout.implementation == "megatron"
        tokens = first.rows * first.experts * first.share / (layout.tensor if by_rows else 1)
        if layout.implementation == "hpcdist":
            yield AxisCollective(FORWARD, "expert", "counts", expert_costs.counts_bytes(first.experts))
        turns = (FORWARD, "rows"), (FORWARD, "results"), (BACKWARD, "gradients"), (BACKWARD, "results")
        for when, turn in turns:
            yield AxisCollective(when, "expert", turn, tokens * first.inner * each)


def _context(
    unit: ModelUnit, layout: ParallelLayout, attention: AttentionShape, item: int, attention_s: tuple[float, float]
) -> Iterator[AxisCollective]:
    """Yield what one attention exchanges over the context axis.

    Passes round a ring cost as much as a gathering, of what the rank that gets most of it sees with a window, and run
    beside the tiles of attention.
    """
    # The whole buffer: of all tokens.
    whole = layout.microbatch * attention.context * 2 * attention.kv_heads / layout.tensor * attention.size * item
    if layout.implementation == "hpcdist":
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
    """Yield the collectives of the regions that the tensor axis cuts; ``each``: bytes of a number of all samples."""
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
