"""Model states and exchange buffers: bytes per parameter, gradient and optimizer state, for each strategy.

ZeRO (arXiv:1910.02054, section 3 and table 1) shards the optimizer (stage 1), also gradients (2), also parameters (3),
over d data ranks. The optimizer has a float32 master and two moments. Bytes per parameter:

    parameter   gradient   optimizer    none   stage 1      stage 2      stage 3
    16 bits     16 bits    12           16     4 + 12/d     2 + 14/d     16/d       the paper; hpcdist
    16 bits     float32    12           18     6 + 12/d     2 + 16/d     18/d       Megatron-LM
    float32     float32     8           16     8 +  8/d     4 + 12/d     16/d       all implementations

Experts have fewer replicas, so their d is smaller. Compression residuals count as optimizer state and are not sharded:
4 bytes per parameter, 8 with 16-bit parameters, 4 + 4/d with onebit. Workers of parameter servers have parameters and
gradients. A server has optimizer state, parameters and a gradient sum for the parameters that it owns.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

from hpcdist.comm.config import BUCKET_BYTES
from hpcdist.constants import HALVES
from hpcdist.planner.estimate import MemoryEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.time.gradient_payloads import payload

FLOAT32: Final = 4  # bytes


class ParameterBytes(NamedTuple):
    """Bytes of the model states of one parameter before sharding: value, gradient and optimizer state."""

    parameter: int
    gradient: int
    optimizer: int


class ModelStates(NamedTuple):
    """Bytes of sharded model states on a device, divided by the number of parameters of the pipeline stage."""

    parameter: float
    gradient: float
    optimizer: float
    rule: str  # formula of the bytes, as text

    @property
    def total(self) -> float:
        """Bytes per parameter of values, gradients and optimizer state together."""
        return self.parameter + self.gradient + self.optimizer


def unsharded(layout: ParallelLayout) -> ParameterBytes:
    """Return the bytes of a parameter, of the gradient and of the optimizer state before ``layout`` shards them."""
    slots = layout.optimizer_slots
    if layout.precision in ("float32", "float64"):
        size = 4 if layout.precision == "float32" else 8
        return ParameterBytes(size, size, slots * size)
    is_wide = layout.kernels.has_main_gradients and layout.main_gradients == "float32"
    return ParameterBytes(2, 4 if is_wide else 2, 4 * (1 + slots))


def stage_of(strategy: str) -> int:
    """Return the ZeRO stage (1 to 3) of ``strategy``, or 0 without ZeRO."""
    return {"zero1": 1, "zero2": 2, "zero3": 3}.get(strategy, 0)


def states(layout: ParallelLayout, *, experts: bool = False) -> ModelStates:
    """Return the bytes per parameter of sharded model states on a device. ``experts``: True for expert parameters."""
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
    residual_bytes = FLOAT32 * (2.0 if precision in HALVES else 1.0)
    if compression == "onebit":
        residual_bytes = FLOAT32 + FLOAT32 / replicas
    rule = f"{plain.rule}, and {residual_bytes:.4g} for the residuals of {compression}"
    return plain._replace(optimizer=plain.optimizer + residual_bytes, rule=rule)


def _uncompressed(
    each: ParameterBytes, stage: int, replicas: int, is_served: bool, servers: int, precision: str
) -> ModelStates:
    parameter, gradient, optimizer = each
    if is_served:
        part = optimizer / replicas
        if servers:
            rule = f"worker {parameter} + {gradient}, server {parameter} + {gradient} + {optimizer} of its 1/{servers}"
            return ModelStates(parameter, gradient, 0.0, f"{rule} bytes per parameter ({precision}; dedicated servers)")
        rule = f"{parameter + gradient} + {optimizer}/d = {parameter + gradient + part:.4g} bytes per parameter, d ="
        return ModelStates(parameter, gradient, part, f"{rule} {replicas} ({precision}; every rank serves its part)")
    cut = [replicas if stage >= least else 1 for least in (3, 2, 1)]
    shares = (parameter / cut[0], gradient / cut[1], optimizer / cut[2])
    return ModelStates(*shares, _rule(each, stage, replicas, sum(shares), precision))


def _rule(each: ParameterBytes, stage: int, replicas: int, total: float, precision: str) -> str:
    parameter, gradient, optimizer = each
    parts = f"{precision}: parameter {parameter}, gradient {gradient}, optimizer {optimizer}"
    if stage == 0:
        return f"{parameter + gradient + optimizer} bytes per parameter ({parts}; not sharded)"
    rest = (0, parameter + gradient, parameter, 0)[stage]
    divided = parameter + gradient + optimizer - rest
    formula = f"{rest} + {divided}/d" if rest else f"{divided}/d"
    return f"{formula} = {total:.4g} bytes per parameter, d = {replicas} ({parts}; ZeRO {stage}, arXiv:1910.02054)"


AHEAD: Final = 4  # gradients in flight at a server, `hpcdist.strategies.parameter_server.messages`
WIDE: Final = 4  # bytes per element in which hpcdist's kernels compute for 16-bit parameters


def layer_copy_bytes(layout: ParallelLayout, layer_parameters: float) -> float:
    """Return the bytes of temporary copies of one layer on a device, such as parameters that ZeRO-3 gathers.

    ``layer_parameters``: number of parameters of the layer before sharding.
    """
    size, stage, each = unsharded(layout), stage_of(layout.strategy), 0
    # ZeRO-3 gathers a layer's parameters. ZeRO-2 and ZeRO-3 sum its gradients. Mixed precision adds float32 copies.
    if layout.data * layout.context > 1:
        each += size.parameter * (stage >= 3) + size.gradient * (stage >= 2)
    if layout.kernels.measures_arrays and layout.computes_in != layout.precision:
        each += 2 * WIDE
    return each * layer_parameters / layout.tensor


def buffer_bytes(
    layout: ParallelLayout, parameters: float, largest_layer_parameters: float, bucket_bytes: float = BUCKET_BYTES
) -> float:
    """Return the bytes of the buffers that hpcdist's collectives on the data axis need on a device.

    ``parameters``: number of parameters on the device. ``largest_layer_parameters``: number of parameters in the
    largest layer. ``bucket_bytes``: size of a gradient bucket.
    """
    replicas = layout.data * layout.context
    size, unit = unsharded(layout).gradient, largest_layer_parameters / layout.tensor
    coded = 0.0 if layout.compression == "none" else _coded(layout, parameters, unit, replicas, bucket_bytes)
    if replicas == 1 or layout.compression not in ("none", "onebit"):  # the first steps of onebit are uncompressed
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


def with_buckets(estimate: MemoryEstimate, layout: ParallelLayout, bucket_bytes: float) -> MemoryEstimate:
    """Return a copy of ``estimate`` for gradient buckets of ``bucket_bytes`` bytes.

    ``estimate`` already includes buckets of the default size. Larger buckets need additional memory.
    """
    if bucket_bytes <= BUCKET_BYTES or not layout.kernels.grows_buckets:
        return estimate
    more = buffer_bytes(layout, math.inf, 0.0, bucket_bytes) - buffer_bytes(layout, math.inf, 0.0)
    return replace(estimate, terms={**estimate.terms, "messages": estimate.terms["messages"] + more})


def _coded(layout: ParallelLayout, parameters: float, unit: float, replicas: int, bucket_bytes: float) -> float:
    size = unsharded(layout).gradient
    is_served = layout.strategy == "parameter_server"
    values = min(bucket_bytes / WIDE, parameters)  # compressed buckets have as many elements as float32 buckets
    if is_served or stage_of(layout.strategy):
        values = parameters if is_served else unit
    coded = payload(layout.compression, values, replicas)
    nbytes = 0.0 if coded is None else coded.nbytes * (1 if is_served else 2)
    return nbytes + (WIDE * values / replicas if size < WIDE else 0.0)  # 16-bit gradients are widened first


def server_bytes(description: ModelDescription, layout: ParallelLayout) -> dict[str, float]:
    """Return the memory use {purpose, such as "gradients": bytes} of a dedicated parameter server."""
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
