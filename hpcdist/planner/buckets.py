"""How long the buckets of an allreduce are: long ones begin late and take memory, latencies of short ones add up.

hpcdist sums gradients in buckets of communication.bucket_bytes, 4 MiB by default (`hpcdist.comm.config`). A plan begins
there, and takes longer ones where these leave less exposed, and memory is there for them; then a flag says which value
they need. The published implementation begins with a message for each unit.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from hpcdist.comm.config import BUCKET_BYTES
from hpcdist.planner.buffers import exchanged
from hpcdist.planner.layout import Layout
from hpcdist.planner.network import NOTHING, Cost

WORTH: Final = 0.9  # the share of what is exposed that longer buckets may leave, to be worth asking for


class Chosen(NamedTuple):
    """All messages, what of them hides, and the gradients that a bucket has, in bytes as they are kept."""

    cost: Cost
    hidden_s: float
    bucket_bytes: float


class Gradients(NamedTuple):
    """Those of a device: ``parameters`` of them, ``nbytes`` as they are kept, complete ``units`` at a time.

    They may hide in the ``backward_s`` of a micro-batch, and take ``spare_bytes`` of memory more than by default.
    """

    parameters: float
    nbytes: float
    units: int
    backward_s: float
    spare_bytes: float


def choose(given: Gradients, layout: Layout, cost_of: Callable[[int], Cost]) -> Chosen:
    """Return the fastest of the lengths of buckets; ``cost_of`` tells what so many of them take (local)."""
    is_ours = layout.implementation == "hpcdist"
    short = max(1, min(given.units, int(given.nbytes // BUCKET_BYTES)))
    count = math.ceil(given.nbytes / BUCKET_BYTES) if is_ours else short
    best, default_s = Chosen(NOTHING, -math.inf, 0.0), 0.0
    while count:
        bucket = given.nbytes / count
        if is_ours and default_s and _more(given, layout, bucket) > given.spare_bytes:
            break
        cost, parts = cost_of(count), min(count, given.units)  # nothing is left to hide the last unit behind
        may_s = layout.overlap * cost.seconds * (parts - 1) / parts
        left_s = cost.seconds - min(may_s, given.backward_s)
        default_s = default_s or left_s
        if left_s < (WORTH if is_ours else 1) * (best.cost.seconds - best.hidden_s):
            best = Chosen(cost, cost.seconds - left_s, bucket)
        # Longer ones would begin later, and all that may hide does.
        if may_s <= given.backward_s and (may_s or not is_ours):
            break
        count //= 2
    if not is_ours or best.bucket_bytes <= BUCKET_BYTES:
        return best
    flag = (
        f"allreduce in buckets of {best.bucket_bytes / 2**20:.3g} MiB, not {BUCKET_BYTES >> 20}: needs "
        f"communication.bucket_bytes = {math.ceil(best.bucket_bytes)}, and leaves "
        f"{best.cost.seconds - best.hidden_s:.3g} s exposed in place of {default_s:.3g} s"
    )
    return best._replace(cost=best.cost._replace(flags=(*best.cost.flags, flag)))


def _more(given: Gradients, layout: Layout, bucket_bytes: float) -> float:
    """Return the memory that such buckets take beyond those of the default."""
    return exchanged(layout, given.parameters, 0.0, bucket_bytes) - exchanged(layout, given.parameters, 0.0)
