"""What a parameter takes with its gradient and the state of Adam: 16, 18, 6 + 12/d, 4 + 12/d bytes ..., and why.

Rajbhandari et al. (arXiv:1910.02054, section 3 and table 1) count 2 bytes for a 16-bit parameter, 2 for its gradient
and K = 12 for the optimizer: a float32 master and two moments. ZeRO cuts the optimizer (stage 1), the gradients as well
(2), the parameters as well (3), each over d data ranks:

    parameter   gradient   optimizer    none   stage 1      stage 2      stage 3
    16 bits     16 bits    12           16     4 + 12/d     2 + 14/d     16/d       the paper; ours
    16 bits     float32    12           18     6 + 12/d     2 + 16/d     18/d       Megatron-LM
    float32     float32     8           16     8 +  8/d     4 + 12/d     16/d       ours, and anybody's

Megatron-LM adds micro-batches up in a float32 gradient ("main gradient") and its distributed optimizer cuts as stage 1
does. This toolkit keeps and adds them up in 16 bits, whatever ``main_gradients`` says, which is about what an allreduce
sends (`hpcdist.planner.wire`). The gradient of a micro-batch is float32 for one unit at a time only,
and so is a bucket that is summed: the one is counted as scratch, the other with messages. Experts that lie on different
data ranks are replicated less often: their d is smaller.

Compression keeps what it has lost of a gradient (error feedback): 4 bytes of each parameter of a worker, whatever ZeRO
cuts, 8 beside 16-bit parameters, and with onebit 4/d more for the sums. They count with the optimizer.

A worker of a parameter server has parameters and gradients; a server has for its part of them the optimizer, the
parameters and a sum of gradients, and no activations. Where every worker serves, it has all but the sum already.
"""

from functools import lru_cache
from typing import Final, NamedTuple

from hpcdist.planner.layout import HALVES, Layout

FLOAT32: Final = 4  # bytes


class Bytes(NamedTuple):
    """Bytes a parameter, before anything is cut."""

    parameter: int
    gradient: int
    optimizer: int


class States(NamedTuple):
    """Bytes on a device for each parameter that its stage has, after cuts, and the rule that they follow."""

    parameter: float
    gradient: float
    optimizer: float
    rule: str

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameter + self.gradient + self.optimizer


def whole(layout: Layout) -> Bytes:
    """Return the bytes of a parameter, of its gradient and of its optimizer state where nothing is cut (local)."""
    slots = layout.optimizer_slots
    if layout.precision in ("float32", "float64"):
        size = 4 if layout.precision == "float32" else 8
        return Bytes(size, size, slots * size)
    is_wide = layout.implementation == "megatron" and layout.main_gradients == "float32"
    return Bytes(2, 4 if is_wide else 2, 4 * (1 + slots))


def stage_of(strategy: str) -> int:
    """Return the stage of ZeRO that a ``strategy`` is; 0: it cuts nothing."""
    return {"zero1": 1, "zero2": 2, "zero3": 3}.get(strategy, 0)


def states(layout: Layout, *, experts: bool = False) -> States:
    """Return what one device, a worker where there are servers, has of each parameter of its stage (local).

    ``experts``: of the parameters that the expert axis cuts, whose copies are fewer.
    """
    replicas = layout.data * layout.context
    return _states(
        whole(layout),
        stage_of(layout.strategy),
        max(1, replicas // layout.expert) if experts else replicas,
        layout.strategy == "parameter_server",
        layout.servers,
        layout.precision,
        layout.compression,
    )


@lru_cache(maxsize=4096)
def _states(
    each: Bytes, stage: int, replicas: int, is_served: bool, servers: int, precision: str, compression: str
) -> States:
    found = _uncompressed(each, stage, replicas, is_served, servers, precision)
    if compression == "none":
        return found
    owed = _owed(compression, precision, replicas)
    rule = f"{found.rule}, and {owed:.4g} of what {compression} has lost"
    return found._replace(optimizer=found.optimizer + owed, rule=rule)


def _owed(compression: str, precision: str, replicas: int) -> float:
    """Return the bytes of a parameter that error feedback keeps, as `hpcdist.training.partitioning` counts them."""
    if compression == "onebit":
        return FLOAT32 + FLOAT32 / replicas
    return FLOAT32 * (2 if precision in HALVES else 1)


def _uncompressed(each: Bytes, stage: int, replicas: int, is_served: bool, servers: int, precision: str) -> States:
    parameter, gradient, optimizer = each
    if is_served:
        part = optimizer / replicas
        if servers:
            rule = f"worker {parameter} + {gradient}, server {parameter} + {gradient} + {optimizer} of its 1/{servers}"
            return States(parameter, gradient, 0.0, f"{rule} bytes a parameter ({precision}; dedicated servers)")
        rule = f"{parameter + gradient} + {optimizer}/d = {parameter + gradient + part:.4g} bytes a parameter, d ="
        return States(parameter, gradient, part, f"{rule} {replicas} ({precision}; every rank serves its part)")
    cut = [replicas if stage >= least else 1 for least in (3, 2, 1)]
    found = (parameter / cut[0], gradient / cut[1], optimizer / cut[2])
    return States(*found, _rule(each, stage, replicas, sum(found), precision))


def _rule(each: Bytes, stage: int, replicas: int, total: float, precision: str) -> str:
    parameter, gradient, optimizer = each
    parts = f"{precision}: parameter {parameter}, gradient {gradient}, optimizer {optimizer}"
    if stage == 0:
        return f"{parameter + gradient + optimizer} bytes a parameter ({parts}; nothing is cut)"
    rest = (0, parameter + gradient, parameter, 0)[stage]
    divided = parameter + gradient + optimizer - rest
    formula = f"{rest} + {divided}/d" if rest else f"{divided}/d"
    return f"{formula} = {total:.4g} bytes a parameter, d = {replicas} ({parts}; ZeRO stage {stage}, arXiv:1910.02054)"
