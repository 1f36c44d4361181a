"""Long copies between a GPU and places of the host that are not pinned: pageable memory, or a file.

They go in blocks through pinned memory (see `hpcdist.arrays.staging`), two at a time: while one is on the bus, the host
fills or empties the other.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hpcdist.arrays import device, staging
from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, cut

BLOCK_BYTES: Final = 4 << 20

Host = Callable[[Range, np.ndarray], None]  # (place in the array, a block of host memory): fills it, or takes it


def to_device(target: Array, fill: Host) -> None:
    """Fill ``target``, 1-D on a GPU, with what ``fill`` writes into blocks; kernels launched later see it (local)."""
    under_way: list[Any] = []
    for where in cut(Range(0, target.size), BLOCK_BYTES // target.dtype.itemsize):
        if len(under_way) == 2:
            under_way.pop(0).synchronize()
        block = staging.lease(where.size, target.dtype)
        fill(where, block)
        under_way.append(staging.to_device(block, target[where.slice]))


def to_host(source: Array, take: Host) -> None:
    """Give ``source``, 1-D on a GPU, to ``take`` block by block; all are taken when this returns (local)."""
    produced = device.record()
    arriving: tuple[Range, np.ndarray, Any] | None = None
    for where in cut(Range(0, source.size), BLOCK_BYTES // source.dtype.itemsize):
        block = staging.lease(where.size, source.dtype)
        following = (where, block, staging.begin_to_host(source[where.slice], block, produced))
        _arrive(arriving, take)
        arriving = following
    _arrive(arriving, take)


def _arrive(arriving: tuple[Range, np.ndarray, Any] | None, take: Host) -> None:
    if arriving is not None:
        where, block, event = arriving
        event.synchronize()
        take(where, block)
