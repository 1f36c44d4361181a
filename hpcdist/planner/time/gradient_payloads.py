"""Gradients in messages: data types, sizes of compressed gradients, and the time of compressed sums.

Megatron-LM sums in the type of its main gradients. hpcdist sends 16-bit gradients to servers and ZeRO owners, who sum
them in float32. Its allreduce sends float32 sums.

**Payloads** in bytes, for n values and p ranks:

    bfloat16    2 n                        owned
    int8        n + 4 ceil(n / 256)        owned
    int4        n / 2 + 4 ceil(n / 256)    owned
    onebit      n / 8 + 4 p                owned: signs, and a scale for each of p chunks
    topk        8 ceil(n / 100)            gathered
    powersgd    4 r (a + b), r = 4         summed, for each matrix (a, b)

**Compressed sums** (`Payload`): with c payload bytes per value, a rank sends

    owned       2 (p-1)/p c n    half for a reduce-scatter
    gathered    (p-1) c n
    summed      2 (p-1)/p c n
"""

from functools import lru_cache
from typing import Final, NamedTuple

from hpcdist.errors import UsageError
from hpcdist.planner.cluster.hardware import ITEM_BYTES, Cluster
from hpcdist.planner.layout import COMPRESSIONS, ParallelLayout
from hpcdist.planner.time.network import GroupSpan, MessageCost, collective, group, repeated_cost, span

STORED_ITEM_BYTES: Final = ITEM_BYTES  # of stored gradients and parameters


def gradient_item_bytes(layout: ParallelLayout) -> int:
    """Return the bytes per element of uncompressed gradients in the messages of the strategy of ``layout``."""
    if layout.kernels.sends_stored_gradients and layout.strategy != "allreduce":
        return STORED_ITEM_BYTES[layout.precision]
    return summed_item_bytes(layout)


def summed_item_bytes(layout: ParallelLayout) -> int:
    """Return the bytes per element of uncompressed gradients in the messages of an allreduce."""
    working = STORED_ITEM_BYTES[layout.precision]
    is_narrow = layout.kernels.has_main_gradients and layout.main_gradients == "working"
    return working if is_narrow else max(4, working)


TOPK_DENSITY: Final = 0.01
POWERSGD_RANK: Final = 4
QUANTISE_BLOCK: Final = 256
_ENCODE_BYTES: Final = 12  # per value: read value and residual, write residual

Matrices = tuple[tuple[int, int, int], ...]  # (rows, columns, count)


class Payload(NamedTuple):
    """Compressed gradients of a device: size, cost of encoding, and ``method`` of summation over the ranks."""

    nbytes: float
    # "owned": each rank decodes and sums the gradients of its shard; ranks then gather the encoded sums.
    # "gathered": each rank gathers, decodes and sums the gradients of all ranks.
    # "summed": an allreduce sums the encoded gradients, and each rank decodes the sum.
    method: str
    touched_bytes: float  # memory traffic of encoding and decoding
    flops: float = 0.0
    flags: tuple[str, ...] = ()

    def seconds(self, cluster: Cluster) -> float:
        """Return the seconds that a device of ``cluster`` needs to encode and decode the payload."""
        device = cluster.device
        moved_s = self.touched_bytes / (device.memory_bytes_per_s * device.memory_share)
        peak = device.peak_flops.get("float32", 0.0)
        return max(moved_s, self.flops / peak) if peak else moved_s


@lru_cache(maxsize=1 << 14)
def payload(compression: str, values: float, ranks: int, layers: int = 1, matrices: Matrices = ()) -> Payload | None:
    """Return the `Payload` for ``values`` gradient elements, or None if ``compression`` is "none". Raises UsageError.

    ``ranks``: number of ranks whose gradients are summed. ``layers``: number of model layers. ``matrices``: shapes of
    the weights as (rows, columns, number of weights of this shape).
    """
    if compression == "none":
        return None
    if compression not in COMPRESSIONS:
        raise UsageError(f"unknown compression {compression!r}; choose one of {', '.join(COMPRESSIONS)}")
    if compression == "topk":
        nbytes = 8 * TOPK_DENSITY * values
        return Payload(nbytes, "gathered", _ENCODE_BYTES * values + nbytes + ranks * nbytes + 4 * values)
    if compression == "powersgd":
        return _low_rank(values, layers, matrices)
    scales = 4 * values / QUANTISE_BLOCK
    nbytes = {
        "bfloat16": 2 * values,
        "int8": values + scales,
        "int4": values / 2 + scales,
        "onebit": values / 8 + 4 * ranks * layers,
    }[compression]
    # Encoded for the owners, who read, sum and encode the sums; then decoded.
    return Payload(nbytes, "owned", _ENCODE_BYTES * values + 3 * nbytes + 2 * 4 * values)


def _low_rank(values: float, units: int, matrices: Matrices) -> Payload:
    flags: tuple[str, ...] = ()
    if matrices:
        inside = sum(a * b * count for a, b, count in matrices)
        sent = sum(POWERSGD_RANK * (a + b) * count for a, b, count in matrices) + max(0.0, values - inside)
    else:
        side = (values / units) ** 0.5
        sent = units * POWERSGD_RANK * 2 * side
        flags = ("powersgd: each unit is assumed to be a single square matrix",)
    # Read for M Q, for M^T P and for the residual; the residual and P Q^T are written.
    return Payload(4 * sent, "summed", 5 * 4 * values, 3 * 2 * POWERSGD_RANK * values, flags)


_FLOAT32: Final = 4


class CompressedGradients(NamedTuple):
    """Gradients that a device compresses: numbers of elements and layers, and shapes of the weights."""

    values: float  # number of elements
    units: int  # number of model layers
    matrices: Matrices  # shapes of the weights


def compressed_sum(
    operation: str,
    gradients: CompressedGradients,
    layout: ParallelLayout,
    axis: str,
    cluster: Cluster,
    buckets: int = 1,
) -> MessageCost:
    """Return the cost of a sum of compressed ``gradients`` over the ranks of ``axis``, with encoding and decoding.

    ``operation``: "allreduce" or "reduce_scatter". ``buckets``: number of messages for all ``gradients``.
    """
    whole = span(layout, axis, cluster)
    flat = _over(operation, gradients, layout, whole, cluster, buckets)
    inside = _inside(whole, cluster)
    if inside in (1, whole.size) or flat.algorithm.endswith("allreduce"):
        return flat
    # Within a node, uncompressed gradients are exchanged if this is faster.
    total = layout.devices - layout.servers
    near = group(inside, whole.stride, total, cluster.levels, layout.channels)
    far = group(whole.size // inside, whole.stride * inside, total, cluster.levels, layout.channels)
    halves = ("reduce_scatter", "all_gather") if operation == "allreduce" else ("reduce_scatter",)
    sums = [
        repeated_cost(collective(half, _FLOAT32 * gradients.values / buckets, near, cluster), buckets)
        for half in halves
    ]
    between = _over(operation, gradients._replace(values=gradients.values / inside), layout, far, cluster, buckets)
    nodes = MessageCost(
        between.seconds + sum(half_cost.seconds for half_cost in sums),
        between.nbytes + sum(half_cost.nbytes for half_cost in sums),
        f"{between.algorithm} between nodes",
        between.flags,
    )
    return min(flat, nodes, key=lambda cost: cost.seconds)


def _inside(whole: GroupSpan, cluster: Cluster) -> int:
    inside = 1
    for tier in whole.tiers:
        level_devices = cluster.levels[tier.outer].devices
        if level_devices and level_devices <= cluster.node.devices:
            inside = tier.lanes * tier.fan
    return inside


def _over(
    operation: str,
    gradients: CompressedGradients,
    layout: ParallelLayout,
    ranks: GroupSpan,
    cluster: Cluster,
    messages: int,
) -> MessageCost:
    sent = payload(layout.compression, gradients.values, ranks.size, gradients.units, gradients.matrices)
    assert sent is not None, "compression is not 'none'"
    each = sent._replace(nbytes=sent.nbytes / messages)
    cost = repeated_cost(_sent(operation, each, ranks, layout, cluster), messages)
    return MessageCost(
        cost.seconds + sent.seconds(cluster),
        cost.nbytes,
        f"{layout.compression} {'allreduce' if sent.method == 'summed' else sent.method}",
        (*cost.flags, *sent.flags),
    )


def _sent(operation: str, payload: Payload, ranks: GroupSpan, layout: ParallelLayout, cluster: Cluster) -> MessageCost:
    if payload.method == "gathered":
        return collective("all_gather", ranks.size * payload.nbytes, ranks, cluster, layout.algorithm)
    if payload.method == "summed":
        return collective("allreduce", payload.nbytes, ranks, cluster, layout.algorithm)
    there = collective("all_to_all", payload.nbytes, ranks, cluster, layout.algorithm)
    often = 2 if operation == "allreduce" else 1
    return there._replace(seconds=often * there.seconds, nbytes=often * there.nbytes)
