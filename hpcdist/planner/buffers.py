"""What an exchange takes beside parameters, gradients and optimizer: buffers of collectives, whole units, servers."""

from typing import Final

from hpcdist.planner.description import Description
from hpcdist.planner.layout import Layout
from hpcdist.planner.states import stage_of, whole

BUCKET_BYTES: Final = 4 << 20  # what an allreduce sends at a time, `hpcdist.comm.config`
AHEAD: Final = 4  # gradients that a server has on their way, `hpcdist.strategies.parameter_server.messages`
WIDE: Final = 4  # bytes of a number in which our kernels compute for 16-bit parameters


def whole_units(layout: Layout, longest: float) -> float:
    """Return the bytes of a unit of ``longest`` parameters that is whole while it computes, cut as it is otherwise.

    ZeRO gathers its parameters (stage 3) and sums its gradients (2 and 3); in this toolkit 16-bit parameters are
    float32 meanwhile, and the gradient of a micro-batch is (`hpcdist.strategies.working`).
    """
    size, stage, each = whole(layout), stage_of(layout.strategy), 0
    if layout.data * layout.context > 1:
        each += size.parameter * (stage >= 3) + size.gradient * (stage >= 2)
    if layout.implementation == "hpcdist" and layout.computes_in != layout.precision:
        each += 2 * WIDE
    return each * longest / layout.tensor


def exchanged(layout: Layout, parameters: float, longest: float) -> float:
    """Return what our collectives over the data axis take, for ``parameters`` on this device.

    An allreduce of a bucket has what arrives beside it: half of it by recursive halving, a share by the ring, which is
    the same on two ranks. ZeRO does so with a unit of ``longest`` parameters. A server has a few gradients under way.
    """
    replicas = layout.data * layout.context
    if replicas == 1:
        return 0.0
    size, unit = whole(layout).gradient, longest / layout.tensor
    if layout.strategy == "parameter_server":
        return 0.0 if layout.servers else AHEAD * size * unit / replicas
    share = replicas if layout.algorithm in ("ring", "hierarchical") else 2
    if stage_of(layout.strategy):
        return size * unit / share
    return min(BUCKET_BYTES, size * parameters) / share


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
