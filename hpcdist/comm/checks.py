"""What every communicator checks of a native collective before it begins."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import FLOATS, INTEGERS, is_16bit_float, name_of
from hpcdist.arrays.ranges import Range
from hpcdist.comm.communicator import REDUCTIONS
from hpcdist.errors import BufferHandoverError, CommunicationError, UsageError

_KNOWN_TO_MPI: Final = frozenset((*INTEGERS.values(), FLOATS["float32"], FLOATS["float64"]))


def is_plain(buffer: Array) -> bool:
    """Whether messages and reductions may work on ``buffer`` as it is: nothing to refuse, nothing to stage (local).

    The hand-over, which finds out what is the matter with the others, is for those alone.
    """
    return type(buffer) is np.ndarray and buffer.ndim == 1 and buffer.flags.carray and buffer.dtype in _KNOWN_TO_MPI


def check_tiling(buffer: Array, ranges: Sequence[Range], ranks: int) -> None:
    """Raise CommunicationError unless ``ranges`` tile ``buffer`` in the order of the ranks (local)."""
    ends = [0, *(part.stop for part in ranges)]
    starts = [*(part.start for part in ranges), buffer.size]
    if len(ranges) != ranks or ends != starts:
        raise CommunicationError(
            f"the ranges must tile the buffer of {buffer.size} elements in the order of the {ranks} ranks, "
            f"got {[(part.start, part.stop) for part in ranges]}"
        )


def check_reduction(buffer: Array, op: str) -> None:
    """Raise UsageError for an unknown reduction, BufferHandoverError for what MPI must not reduce (local)."""
    if op not in REDUCTIONS:
        raise UsageError(f"reduction {op!r} is not one of {', '.join(REDUCTIONS)}")
    if is_16bit_float(np.dtype(buffer.dtype)):
        raise BufferHandoverError(
            f"{name_of(buffer.dtype)} is not reduced by the MPI library (it would be rounded at every partial sum); "
            "use hpcdist.collectives.allreduce, which sums in float32 and rounds once"
        )
