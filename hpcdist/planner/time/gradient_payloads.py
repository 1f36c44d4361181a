"""Gradients on the wire: their types, the payloads of compression, and the time of compressed sums.

**Types.** Megatron sums in the type of its main gradients, everywhere. hpcdist stores 16-bit gradients and sends them
unchanged to servers and to the owners of ZeRO, who sum them in float32 (`hpcdist.collectives.sharded`); partial sums
of its allreduce travel in float32 (`hpcdist.collectives.dispatch`: none of the algorithms that are planned sums 16
bits).

**Payloads.** Of n values, with the defaults of `hpcdist.strategies.compressed.config`, in bytes:

    bfloat16    2 n                        casts                 shares to their owners, sums back
    int8        n + 4 ceil(n / 256)        blockwise             the same
    int4        n / 2 + 4 ceil(n / 256)    blockwise             the same
    onebit      n / 8 + 4 p                onebit                the same: signs and a scale for each of p chunks
    topk        8 ceil(n / 100)            topk                  gathered: (p-1) payloads come to everybody
    powersgd    4 r (a + b), r = 4         powersgd              summed, for each matrix (a, b)

Modules: `hpcdist.compression`. Coding is bound by memory: every value is read and its residual read and written (12
bytes), its payload written, and on the way back payloads are read and values written; what is gathered is decoded for
every rank. The two products and the orthogonalisation of powersgd are 3 x 2 r operations a value, of float32.

**Compressed sums.** With n values, p ranks, c bytes of payload a value (`hpcdist.planner.time.gradient_payloads`), a
rank sends

    owned       2 (p-1)/p c n    shares to their owners and sums back, between all pairs; half in a reduce-scatter
    gathered    (p-1) c n        payloads of all to everybody
    summed      2 (p-1)/p c n    an allreduce of payloads

as in `hpcdist.strategies.compressed.reduction`. Where a node has l > 1 of the ranks, the first two may also go
between nodes only (`hpcdist.strategies.compressed.reduction`): float32 sums in the node, 8 n (l-1)/l bytes of its
fast links, and n / l values for p / l ranks outside. The faster of both is taken, as a recipe would.
"""

from functools import lru_cache
from typing import Final, NamedTuple

from hpcdist.errors import UsageError
from hpcdist.planner.cluster.hardware import ITEM_BYTES, Cluster
from hpcdist.planner.layout import COMPRESSIONS, ParallelLayout
from hpcdist.planner.time.network import GroupSpan, MessageCost, collective, group, repeated_cost, span

STORED_ITEM_BYTES: Final = ITEM_BYTES  # as kept


def gradient_item_bytes(layout: ParallelLayout) -> int:
    """Return the bytes of a gradient on the data axis, without compression."""
    if layout.implementation == "hpcdist" and layout.strategy != "allreduce":
        return STORED_ITEM_BYTES[layout.precision]
    return summed_item_bytes(layout)


def summed_item_bytes(layout: ParallelLayout) -> int:
    """Return the bytes of a gradient in an allreduce, of any axis."""
    working = STORED_ITEM_BYTES[layout.precision]
    is_narrow = layout.implementation == "megatron" and layout.main_gradients == "working"
    return working if is_narrow else max(4, working)


TOPK_DENSITY: Final = 0.01
POWERSGD_RANK: Final = 4
QUANTISE_BLOCK: Final = 256
_ENCODE_BYTES: Final = 12  # a value: itself, its residual, and that written

Matrices = tuple[tuple[int, int, int], ...]  # (rows, columns, how many)


class Payload(NamedTuple):
    """Bytes that stand for all gradients of a device; ``way``: "owned", "gathered" or "summed"."""

    nbytes: float
    way: str
    touched_bytes: float  # of memory, in encoding and decoding
    flops: float = 0.0
    flags: tuple[str, ...] = ()

    def seconds(self, cluster: Cluster) -> float:
        """Return the time of encoding and decoding on a device of ``cluster``."""
        device = cluster.device
        moved_s = self.touched_bytes / (device.memory_bytes_per_s * device.memory_share)
        peak = device.peak_flops.get("float32", 0.0)
        return max(moved_s, self.flops / peak) if peak else moved_s


@lru_cache(maxsize=1 << 14)
def payload(compression: str, values: float, ranks: int, units: int = 1, matrices: Matrices = ()) -> Payload | None:
    """Return the payload of ``values`` in ``units`` of one device under ``compression``; None for "none".

    Raises UsageError for a name that is none.
    """
    if compression == "none":
        return None
    if compression not in COMPRESSIONS:
        raise UsageError(f"compression {compression!r}; choose one of {', '.join(COMPRESSIONS)}")
    if compression == "topk":
        nbytes = 8 * TOPK_DENSITY * values
        return Payload(nbytes, "gathered", _ENCODE_BYTES * values + nbytes + ranks * nbytes + 4 * values)
    if compression == "powersgd":
        return _low_rank(values, units, matrices)
    scales = 4 * values / QUANTISE_BLOCK
    nbytes = {
        "bfloat16": 2 * values,
        "int8": values + scales,
        "int4": values / 2 + scales,
        "onebit": values / 8 + 4 * ranks * units,
    }[compression]
    # Encoded for the owners, who read what comes, add, and encode the sums; then decoded.
    return Payload(nbytes, "owned", _ENCODE_BYTES * values + 3 * nbytes + 2 * 4 * values)


def _low_rank(values: float, units: int, matrices: Matrices) -> Payload:
    flags: tuple[str, ...] = ()
    if matrices:
        inside = sum(a * b * count for a, b, count in matrices)
        sent = sum(POWERSGD_RANK * (a + b) * count for a, b, count in matrices) + max(0.0, values - inside)
    else:
        side = (values / units) ** 0.5
        sent = units * POWERSGD_RANK * 2 * side
        flags = ("powersgd: each unit is taken to be one square matrix",)
    # Read for M Q, for M^T P and for the residual, which is written; P Q^T is written.
    return Payload(4 * sent, "summed", 5 * 4 * values, 3 * 2 * POWERSGD_RANK * values, flags)


_FLOAT32: Final = 4


class CompressedGradients(NamedTuple):
    """``values`` of one device, in ``units``; ``matrices`` as in `payload`."""

    values: float
    units: int
    matrices: Matrices


def compressed_sum(
    operation: str,
    gradients: CompressedGradients,
    layout: ParallelLayout,
    axis: str,
    cluster: Cluster,
    messages: int = 1,
) -> MessageCost:
    """Return the cost of a compressed sum in so many ``messages``, with encoding and decoding.

    ``operation`` is allreduce or reduce_scatter.
    """
    whole = span(layout, axis, cluster)
    flat = _over(operation, gradients, layout, whole, cluster, messages)
    inside = _inside(whole, cluster)
    if inside in (1, whole.size) or flat.algorithm.endswith("allreduce"):
        return flat
    total = layout.devices - layout.servers
    near = group(inside, whole.stride, total, cluster.levels, layout.channels)
    far = group(whole.size // inside, whole.stride * inside, total, cluster.levels, layout.channels)
    halves = ("reduce_scatter", "all_gather") if operation == "allreduce" else ("reduce_scatter",)
    sums = [
        repeated_cost(collective(half, _FLOAT32 * gradients.values / messages, near, cluster), messages)
        for half in halves
    ]
    between = _over(operation, gradients._replace(values=gradients.values / inside), layout, far, cluster, messages)
    nodes = MessageCost(
        between.seconds + sum(half_cost.seconds for half_cost in sums),
        between.nbytes + sum(half_cost.nbytes for half_cost in sums),
        f"{between.algorithm} between nodes",
        between.flags,
    )
    return min(flat, nodes, key=lambda cost: cost.seconds)


def _inside(whole: GroupSpan, cluster: Cluster) -> int:
    """Return how many ranks of the group share a node."""
    inside = 1
    for tier in whole.tiers:
        box = cluster.levels[tier.outer].devices
        if box and box <= cluster.node.devices:
            inside = tier.lanes * tier.fan
    return inside


def _over(
    operation: str,
    given: CompressedGradients,
    layout: ParallelLayout,
    ranks: GroupSpan,
    cluster: Cluster,
    messages: int,
) -> MessageCost:
    sent = payload(layout.compression, given.values, ranks.size, given.units, given.matrices)
    assert sent is not None, "there is something to compress"
    each = sent._replace(nbytes=sent.nbytes / messages)
    cost = repeated_cost(_sent(operation, each, ranks, layout, cluster), messages)
    return MessageCost(
        cost.seconds + sent.seconds(cluster),
        cost.nbytes,
        f"{layout.compression} {'allreduce' if sent.way == 'summed' else sent.way}",
        (*cost.flags, *sent.flags),
    )


def _sent(operation: str, payload: Payload, ranks: GroupSpan, layout: ParallelLayout, cluster: Cluster) -> MessageCost:
    if payload.way == "gathered":
        return collective("all_gather", ranks.size * payload.nbytes, ranks, cluster, layout.algorithm)
    if payload.way == "summed":
        return collective("allreduce", payload.nbytes, ranks, cluster, layout.algorithm)
    there = collective("all_to_all", payload.nbytes, ranks, cluster, layout.algorithm)
    often = 2 if operation == "allreduce" else 1
    return there._replace(seconds=often * there.seconds, nbytes=often * there.nbytes)
