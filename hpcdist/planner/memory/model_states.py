"""Model states and exchange buffers: bytes of a parameter, its gradient and optimizer state, under each strategy.

Rajbhandari et al. (arXiv:1910.02054, section 3 and table 1) count 2 bytes for a 16-bit parameter, 2 for its gradient
and K = 12 for the optimizer: a float32 master and two moments. ZeRO cuts the optimizer (stage 1), the gradients as
well (2), the parameters as well (3), each over d data ranks:

    parameter   gradient   optimizer    none   stage 1      stage 2      stage 3
    16 bits     16 bits    12           16     4 + 12/d     2 + 14/d     16/d       the paper; ours
    16 bits     float32    12           18     6 + 12/d     2 + 16/d     18/d       Megatron-LM
    float32     float32     8           16     8 +  8/d     4 + 12/d     16/d       ours, and anybody's

Megatron-LM adds micro-batches up in a float32 gradient ("main gradient") and its distributed optimizer cuts as stage
1 does. This toolkit keeps and adds them up in 16 bits, whatever ``main_gradients`` says, which is about what an
allreduce sends (`hpcdist.planner.time.gradient_payloads`). The gradient of a micro-batch is float32 for one unit at a
time only, and so is a bucket that is summed: the one is counted as scratch, the other with messages. Experts that lie
on different data ranks are replicated less often: their d is smaller.

Compression stores what it has lost of a gradient (error feedback): 4 bytes of each parameter of a worker, whatever
ZeRO cuts, 8 beside 16-bit parameters, and with onebit 4/d more for the sums. They count with the optimizer.

A worker of a parameter server has parameters and gradients; a server has for its part of them the optimizer, the
parameters and a sum of gradients, and no activations. Where every worker serves, it has all but the sum already.

Beside the states an exchange takes buffers of collectives, units that are whole while they compute (ZeRO-3), and the
memory of dedicated servers: `whole_units`, `exchanged`, `with_buckets`, `server`.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

from hpcdist.comm.config import BUCKET_BYTES
from hpcdist.planner.estimate import MemoryEstimate
from hpcdist.planner.layout import HALVES, ParallelLayout
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.time.gradient_payloads import payload

FLOAT32: Final = 4  # bytes


class ParameterBytes(NamedTuple):
    """Bytes a parameter, before anything is cut."""

    parameter: int
    gradient: int
    optimizer: int


class ModelStates(NamedTuple):
    """Bytes on a device for each parameter that its stage has, after cuts, and the rule that they follow."""

    parameter: float
    gradient: float
    optimizer: float
    rule: str

    @property
    def total(self) -> float:
        """Bytes a parameter in all."""
        return self.parameter + self.gradient + self.optimizer


def unsharded(layout: ParallelLayout) -> ParameterBytes:
    """Return the bytes of a parameter, of its gradient and of its optimizer state where nothing is cut (local)."""
    slots = layout.optimizer_slots
    if layout.precision in ("float32", "float64"):
        size = 4 if layout.precision == "float32" else 8
        return ParameterBytes(size, size, slots * size)
    is_wide = layout.implementation == "megatron" and layout.main_gradients == "float32"
    return ParameterBytes(2, 4 if is_wide else 2, 4 * (1 + slots))


def stage_of(strategy: str) -> int:
    """Return the stage of ZeRO that a ``strategy`` is; 0: it cuts nothing."""
    return {"zero1": 1, "zero2": 2, "zero3": 3}.get(strategy, 0)


def states(layout: ParallelLayout, *, experts: bool = False) -> ModelStates:
    """Return the bytes on one device (a worker, with servers) for each parameter of its stage (local).

    ``experts``: of the parameters that the expert axis cuts, whose copies are fewer.
    """
    replicas = layout.data * layout.context
    return _states(
        unsharded(layout),
        stage_of(layout.strategy),
        max(1, replicas // layout.expert) if experts else replicas,
        layout.strategy == "parameter_server",
        layout.servers,
        layout.precision,
        layout.compression,
    )


@lru_cache(maxsize=4096)
def _states(
    each: ParameterBytes, stage: int, replicas: int, is_served: bool, servers: int, precision: str, compression: str
) -> ModelStates:
    plain = _uncompressed(each, stage, replicas, is_served, servers, precision)
    if compression == "none":
        return plain
    owed = _owed(compression, precision, replicas)
    rule = f"{plain.rule}, and {owed:.4g} of what {compression} has lost"
    return plain._replace(optimizer=plain.optimizer + owed, rule=rule)


def _owed(compression: str, precision: str, replicas: int) -> float:
    """Return the bytes of a parameter that error feedback keeps, as `hpcdist.training.build.pipeline` counts them."""
    if compression == "onebit":
        return FLOAT32 + FLOAT32 / replicas
    return FLOAT32 * (2 if precision in HALVES else 1)


def _uncompressed(
    each: ParameterBytes, stage: int, replicas: int, is_served: bool, servers: int, precision: str
) -> ModelStates:
    parameter, gradient, optimizer = each
    if is_served:
        part = optimizer / replicas
        if servers:
            rule = f"worker {parameter} + {gradient}, server {parameter} + {gradient} + {optimizer} of its 1/{servers}"
            return ModelStates(parameter, gradient, 0.0, f"{rule} bytes a parameter ({precision}; dedicated servers)")
        rule = f"{parameter + gradient} + {optimizer}/d = {parameter + gradient + part:.4g} bytes a parameter, d ="
        return ModelStates(parameter, gradient, part, f"{rule} {replicas} ({precision}; every rank serves its part)")
    cut = [replicas if stage >= least else 1 for least in (3, 2, 1)]
    shares = (parameter / cut[0], gradient / cut[1], optimizer / cut[2])
    return ModelStates(*shares, _rule(each, stage, replicas, sum(shares), precision))


def _rule(each: ParameterBytes, stage: int, replicas: int, total: float, precision: str) -> str:
    parameter, gradient, optimizer = each
    parts = f"{precision}: parameter {parameter}, gradient {gradient}, optimizer {optimizer}"
    if stage == 0:
        return f"{parameter + gradient + optimizer} bytes a parameter ({parts}; nothing is cut)"
    rest = (0, parameter + gradient, parameter, 0)[stage]
    divided = parameter + gradient + optimizer - rest
    formula = f"{rest} + {divided}/d" if rest else f"{divided}/d"
    return f"{formula} = {total:.4g} bytes a parameter, d = {replicas} ({parts}; ZeRO stage {stage}, arXiv:1910.02054)"


AHEAD: Final = 4  # gradients that a server has on their way, `hpcdist.strategies.parameter_server.messages`
WIDE: Final = 4  # bytes of a number in which our kernels compute for 16-bit parameters


def whole_units(layout: ParallelLayout, longest: float) -> float:
    """Return the bytes of a unit of ``longest`` parameters that is whole while it computes, cut as it is otherwise.

    ZeRO gathers its parameters (stage 3) and sums its gradients (2 and 3); in this toolkit 16-bit parameters are
    float32 meanwhile, and the gradient of a micro-batch is (`hpcdist.strategies.core.mixed_precision`).
    """
    size, stage, each = unsharded(layout), stage_of(layout.strategy), 0
    if layout.data * layout.context > 1:
        each += size.parameter * (stage >= 3) + size.gradient * (stage >= 2)
    if layout.implementation == "hpcdist" and layout.computes_in != layout.precision:
        each += 2 * WIDE
    return each * longest / layout.tensor


def exchanged(layout: ParallelLayout, parameters: float, longest: float, bucket_bytes: float = BUCKET_BYTES) -> float:
    """Return the bytes of buffers of our collectives over the data axis, for ``parameters`` on this device.

    ``bucket_bytes`` are those of gradients that an allreduce sums at a time, as they are kept. It has what arrives
    beside a bucket: half of it by recursive halving, a share by the ring, which is the same on two ranks. Where it
    sends float32 sums of 16-bit gradients the bucket is there in float32, too, and so is what arrives. ZeRO does so
    with a unit of ``longest`` parameters, as it is. A server has a few gradients under way.
    With compression there are payloads, one that goes and one that comes, in the place of those.
    """
    replicas = layout.data * layout.context
    size, unit = unsharded(layout).gradient, longest / layout.tensor
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


def with_buckets(needed: MemoryEstimate, layout: ParallelLayout, bucket_bytes: float) -> MemoryEstimate:
    """Return the memory ``needed`` with buckets of ``bucket_bytes`` in place of the default, where they are longer."""
    if bucket_bytes <= BUCKET_BYTES or layout.implementation != "hpcdist":
        return needed
    more = exchanged(layout, math.inf, 0.0, bucket_bytes) - exchanged(layout, math.inf, 0.0)
    return replace(needed, terms={**needed.terms, "messages": needed.terms["messages"] + more})


def _coded(layout: ParallelLayout, parameters: float, unit: float, replicas: int, bucket_bytes: float) -> float:
    """Return the bytes of payloads that are there at once: of a bucket, a unit, or all that a worker pushes."""
    size = unsharded(layout).gradient
    is_served = layout.strategy == "parameter_server"
    values = min(bucket_bytes / WIDE, parameters)  # buckets of what is compressed are as long as float32 ones
    if is_served or stage_of(layout.strategy):
        values = parameters if is_served else unit
    coded = payload(layout.compression, values, replicas)
    nbytes = 0.0 if coded is None else coded.nbytes * (1 if is_served else 2)
    return nbytes + (WIDE * values / replicas if size < WIDE else 0.0)  # 16-bit gradients are widened first


def server_bytes(description: ModelDescription, layout: ParallelLayout) -> dict[str, float]:
    """Return the bytes of a dedicated server, by what they are (local)."""
    size = unsharded(layout)
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
