"""Allreduce by all-to-all: every rank gets one chunk from everybody, sums it in rank order, and hands the sum on.

    2 (p-1) α + 2 (p-1)/p n β + (p-1)/p n γ

The bytes of the ring, but whole addends travel instead of partial sums. So 16-bit floats stay 16 bits on the wire and
are still summed in float32 and rounded once: half the bytes of every other algorithm for them. The price is n bytes of
scratch, and p-1 messages at once in the network. The sum is in rank order, whatever the size of the buffer.
"""

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.low_precision import round_into
from hpcdist.collectives.reduction import check_buffer, ufunc
from hpcdist.collectives.ring import all_gather
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Communicator


def all_to_all_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer``, 16-bit floats included, in place to the same bits on every rank. Collective over ``comm``."""
    check_buffer(buffer)
    ufunc(buffer, op)  # an unknown op is refused before anything is sent
    chunks = split(buffer.size, comm.size, buffer.itemsize)
    own = chunks[comm.rank]
    rows = [Range(own.size * peer, own.size * (peer + 1)) for peer in range(comm.size)]
    addends = scratch("all to all", own.size * comm.size, buffer.dtype, buffer)  # (ranks * own chunk,)
    comm.all_to_all(buffer, addends, chunks, rows)
    _reduce_rows([addends[row.slice] for row in rows], buffer[own.slice], op)
    all_gather(comm, buffer, chunks)


def _reduce_rows(rows: list[Array], result: Array, op: str) -> None:
    """Reduce ``rows`` in their order, in the dtype for sums, and round into ``result`` once."""
    wide = accumulation_dtype(result.dtype)
    total = scratch("all to all total", result.size, wide, result)
    combine = ufunc(total, op)
    total[...] = rows[0]
    for row in rows[1:]:
        if row.dtype != wide:
            widened = scratch("all to all addend", row.size, wide, row)
            widened[...] = row
            row = widened
        combine(total, row, total)
    round_into(result, total)
