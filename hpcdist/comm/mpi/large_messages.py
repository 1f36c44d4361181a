"""Messages of more than 2^31 - 1 elements, for MPI libraries without the large counts of MPI-4.

A collective is split into `pieces`. A message is sent as one element of a derived datatype.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.ranges import Range
from hpcdist.comm.transport import LARGEST_TAG

LARGEST_COUNT = 2**31 - 1  # elements of one call; tests lower it on all ranks
PAIR_TAG: Final = LARGEST_TAG - 2  # messages of a large all-to-all


def pieces(size: int, largest: int | None = None) -> list[Range]:
    """Split ``size`` elements into ranges of at most ``largest`` elements (default `LARGEST_COUNT`). Local."""
    largest = largest or LARGEST_COUNT
    return [Range(start, min(start + largest, size)) for start in range(0, size, largest)]


def within(piece: Range, ranges: Sequence[Range]) -> list[Range]:
    """Return the intersection of each of ``ranges`` with ``piece``, relative to ``piece.start``. Local."""
    return [part.intersect(piece).shift(-piece.start) for part in ranges]


def as_one_element(mpi: Any, message: Array) -> list[Any]:
    """Return an mpi4py buffer specification of ``message`` as one element of a derived datatype. Local."""
    return [message, 1, _datatype(mpi, message.dtype.char, message.size, LARGEST_COUNT)]


@functools.cache  # a program has few sizes; the datatypes live as long as MPI
def _datatype(mpi: Any, code: str, size: int, largest: int) -> Any:
    starts, itemsize = range(0, size, largest), np.dtype(code).itemsize
    counts = [min(largest, size - start) for start in starts]
    return mpi.Datatype.fromcode(code).Create_hindexed(counts, [start * itemsize for start in starts]).Commit()


def scratch_for(buffer: Array, ranges: Sequence[Range], largest: int) -> tuple[Array, list[Range]]:
    """Return a new scratch buffer for copies of ``ranges`` of ``buffer``, and each copy's range in it. Local.

    Ranges of more than ``largest`` elements have no copy: their returned range is empty.
    """
    sizes = [part.size if part.size <= largest else 0 for part in ranges]
    slots = [Range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
    return namespace(buffer).empty(slots[-1].stop, buffer.dtype), slots
