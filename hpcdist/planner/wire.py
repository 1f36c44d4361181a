"""The types in which gradients travel: what is really sent, which is not always what is kept.

Megatron sums in the type of its main gradients, everywhere. hpcdist keeps 16-bit gradients and sends them as they are
to servers and to the owners of ZeRO, who sum them in float32 (`hpcdist.collectives.sharded`); partial sums of its
allreduce travel in float32 (`hpcdist.collectives.calls`: none of the algorithms that are planned sums 16 bits).
"""

from typing import Final

from hpcdist.planner.cluster import ITEM_BYTES
from hpcdist.planner.layout import Layout

BYTES: Final = ITEM_BYTES  # as kept


def gradient_bytes(layout: Layout) -> int:
    """Return the bytes of a gradient on the data axis, without compression."""
    if layout.implementation == "hpcdist" and layout.strategy != "allreduce":
        return BYTES[layout.precision]
    return summed_bytes(layout)


def summed_bytes(layout: Layout) -> int:
    """Return the bytes of a gradient in an allreduce, of any axis."""
    working = BYTES[layout.precision]
    is_narrow = layout.implementation == "megatron" and layout.main_gradients == "working"
    return working if is_narrow else max(4, working)
