"""What an exchange takes beside parameters, gradients and optimizer: buffers of collectives, whole units, servers."""

import math
from dataclasses import replace
from typing import Final

from hpcdist.comm.config import BUCKET_BYTES
from hpcdist.planner.description import Description
from hpcdist.planner.estimate import Memory
from hpcdist.planner.layout import Layout
from hpcdist.planner.payloads import payload
from hpcdist.planner.states import stage_of, whole

AHEAD: Final = 4  # gradients that a server has on their way, `hpcdist.strategies.parameter_server.messages`
WIDE: Final = 4  # bytes of a number in which our kernels compute for 16-bit parameters


def whole_units(layout: Layout, longest: float) -> float:
    """Return the bytes of a unit of ``longest`` parameters that is whole while it computes, cut as it is otherwise.

    ZeRO gathers its parameters (stage 3) and sums its gradients (2 and 3); in this toolkit 16-bit parameters are
    float32 meanwhile, and the gradient of a micro-batch is (`hpcdist.strategies.core.mixed_precision`).
    """
    size, stage, each = whole(layout), stage_of(layout.strategy), 0
    if layout.data * layout.context > 1:
        each += size.parameter * (stage >= 3) + size.gradient * (stage >= 2)
    if layout.implementation == "hpcdist" and layout.computes_in != layout.precision:
        each += 2 * WIDE
    return each * longest / layout.tensor


def exchanged(layout: Layout, parameters: float, longest: float, bucket_bytes: float = BUCKET_BYTES) -> float:
    """Return what our collectives over the data axis take, for ``parameters`` on this device.

    ``bucket_bytes`` are those of gradients that an allreduce sums at a time, as they are kept. It has what arrives
    beside a bucket: half of it by recursive halving, a share by the ring, which is the same on two ranks. Where it
    sends float32 sums of 16-bit gradients the bucket is there in float32, too, and so is what arrives. ZeRO does so
    with a unit of ``longest`` parameters, as it is. A server has a few gradients under way.
    With compression there are payloads, one that goes and one that comes, in the place of those.
    """
    replicas = layout.data * layout.context
    size, unit = whole(layout).gradient, longest / layout.tensor
    coded = 0.0 if layout.compression == "none" else _coded(layout, parameters, unit, replicas, bucket_bytes)
    if replicas == 1 or layout.compression not in ("none", "onebit"):  # whose first steps are not compressed
        return coded
    if layout.strategy == "parameter_server":
        return coded if layout.servers else coded + AHEAD * size * unit / replicas
    share = {"auto": 2, "tree": 1}.get(layout.algorithm, replicas)
    if stage_of(layout.strategy):
        return coded + size * unit / share
    bucket = min(bucket_bytes, size * parameters)
    if size >= WIDE:
        return coded + bucket / share
    return coded + WIDE / size * bucket * (1 + 1 / share)


def with_buckets(needed: Memory, layout: Layout, bucket_bytes: float) -> Memory:
    """Return what is ``needed`` with buckets of ``bucket_bytes`` in place of the default, where they are longer."""
    if bucket_bytes <= BUCKET_BYTES or layout.implementation != "hpcdist":
        return needed
    more = exchanged(layout, math.inf, 0.0, bucket_bytes) - exchanged(layout, math.inf, 0.0)
    return replace(needed, terms={**needed.terms, "messages": needed.terms["messages"] + more})


def _coded(layout: Layout, parameters: float, unit: float, replicas: int, bucket_bytes: float) -> float:
    """Return the bytes of payloads that are there at once: of a bucket, a unit, or all that a worker pushes."""
    size = whole(layout).gradient
    is_served = layout.strategy == "parameter_server"
    values = min(bucket_bytes / WIDE, parameters)  # buckets of what is compressed are as long as float32 ones
    if is_served or stage_of(layout.strategy):
        values = parameters if is_served else unit
    coded = payload(layout.compression, values, replicas)
    nbytes = 0.0 if coded is None else coded.nbytes * (1 if is_served else 2)
    return nbytes + (WIDE * values / replicas if size < WIDE else 0.0)  # 16-bit gradients are widened first


def server(description: Description, layout: Layout) -> dict[str, float]:
    """Return the bytes of a dedicated server, by what they are (local)."""
    size = whole(layout)
    part = description.parameters / layout.servers
    longest = max(unit.parameters for unit in description.units) / layout.servers
    return {
        "parameters": part * size.parameter,
        "gradients": part * size.gradient,
        "optimizer": part * size.optimizer,
        "activations": 0.0,
        "messages": AHEAD * longest * size.gradient,
        "scratch": 0.0,
    }
