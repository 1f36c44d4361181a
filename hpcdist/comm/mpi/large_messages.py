"""Messages of more than 2^31 - 1 elements, the largest count of an MPI library without the large counts of MPI-4.

A collective of a large buffer is several collectives, one for each of its `pieces`. A message between two ranks stays
one message, of one element of a derived datatype: a probe then sees its size.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.ranges import Range

LARGEST_COUNT = 2**31 - 1  # elements of one call; tests lower it on all ranks
PAIR_TAG: Final = 32765  # messages of a large all-to-all: MPI promises tags up to 32767


def pieces(size: int, largest: int | None = None) -> list[Range]:
    """Return consecutive ranges of at most ``largest`` elements that cover ``size`` elements (local).

    The default of ``largest`` is `LARGEST_COUNT`.
    """
    largest = largest or LARGEST_COUNT
    return [Range(start, min(start + largest, size)) for start in range(0, size, largest)]


def within(piece: Range, ranges: Sequence[Range]) -> list[Range]:
    """Return the parts of ``ranges`` inside ``piece``, relative to its start (local)."""
    return [part.intersect(piece).shift(-piece.start) for part in ranges]


def as_one_element(mpi: Any, message: Array) -> list[Any]:
    """Return the buffer specification of mpi4py for ``message`` as one element of a derived datatype (local)."""
    return [message, 1, _datatype(mpi, message.dtype.char, message.size, LARGEST_COUNT)]


@functools.cache  # a program has few sizes; the datatypes live as long as MPI
def _datatype(mpi: Any, code: str, size: int, largest: int) -> Any:
    starts, itemsize = range(0, size, largest), np.dtype(code).itemsize
    counts = [min(largest, size - start) for start in starts]
    return mpi.Datatype.fromcode(code).Create_hindexed(counts, [start * itemsize for start in starts]).Commit()


def scratch_for(buffer: Array, ranges: Sequence[Range], largest: int) -> tuple[Array, list[Range]]:
    """Return scratch for the parts of at most ``largest`` elements, and the range of each part in it (local).

    A larger part has an empty range.
    """
    sizes = [part.size if part.size <= largest else 0 for part in ranges]
    places = [Range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
    return namespace(buffer).empty(places[-1].stop, buffer.dtype), places
