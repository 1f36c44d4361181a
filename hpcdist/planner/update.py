"""What ends a step: the norm of all gradients, and the optimizer, both by what they read and write in memory.

Of each number that a device updates, of which ZeRO leaves it its share, with p bytes a parameter, g a gradient, and k
numbers of the optimizer:

    norm        g read, and an allreduce of one number over all devices
    step        g read, parameter and k numbers read and written: 2 p (1 + k); of 16 bits a float32 master instead,
                2 x 4 (1 + k), and the working parameter p written
    Megatron    16-bit gradients are copied to float32 first (2 read, 4 written); they are scaled back and looked
                through for infinities (8), clipped (8) and, when all is done, set to 0 (g)

Workers wait while parameter servers update, each its share: of the whole model, which dedicated ones deal out by size
(`hpcdist.strategies.parameter_server.partition`).
"""

from hpcdist.planner.cluster import Cluster
from hpcdist.planner.layout import Layout
from hpcdist.planner.network import collective
from hpcdist.planner.network_span import span
from hpcdist.planner.states import stage_of, whole

WIDE_BYTES = 4  # a master, a moment


def update_s(parameters: float, layout: Layout, cluster: Cluster, expert_parameters: float = 0.0) -> float:
    """Return the seconds of the update of a device with so many ``parameters``, experts among them (local).

    With dedicated servers they are those of the whole model.
    """
    numbers = owned(parameters - expert_parameters, layout, layout.data * layout.context)
    if expert_parameters:
        numbers += owned(expert_parameters, layout, max(1, layout.data * layout.context // layout.expert))
    norm = collective("allreduce", WIDE_BYTES, span(layout, "all", cluster), cluster)
    moves = cluster.device.memory_bytes_per_s * cluster.device.memory_share
    return numbers * bytes_each(layout) / moves + norm.seconds


def owned(parameters: float, layout: Layout, replicas: int) -> float:
    """Return how many of ``parameters`` one device, or server, updates (local)."""
    if layout.strategy == "parameter_server":
        return parameters / (layout.servers or replicas)
    return parameters / replicas if stage_of(layout.strategy) else parameters


def bytes_each(layout: Layout) -> float:
    """Return the bytes that norm and optimizer move for each number (local)."""
    parameter, gradient, _ = whole(layout)
    wide = layout.precision not in ("float32", "float64")
    kept = WIDE_BYTES if wide else parameter
    step = 2 * kept * (1 + layout.optimizer_slots) + (parameter if wide else 0)
    if layout.implementation == "megatron":
        copied = 2 + WIDE_BYTES if wide and gradient == 2 else 0
        return copied + 2 * WIDE_BYTES + WIDE_BYTES + 2 * WIDE_BYTES + WIDE_BYTES + step + gradient
    return 2 * gradient + step
