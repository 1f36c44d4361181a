"""Circulant graphs: any number of ranks in ceil(log2 p) rounds, with the bytes of the ring."""

import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.collectives import circulant_allreduce
from hpcdist.comm.record.timing import count_traffic

SIZES = [*range(1, 10), 13, 16]


def rounds(size):
    """Return ceil(log2 size)."""
    return (size - 1).bit_length()


@pytest.mark.parametrize("size", SIZES)
@on_threads("size")
def test_circulant_sends_ring_bytes_in_logarithmic_rounds(comm, size):
    buffer = np.full(16 * size, float(comm.rank), np.float32)
    with count_traffic(comm) as traffic:
        circulant_allreduce(comm, buffer)
    assert traffic.sent_bytes == 2 * (size - 1) * buffer.nbytes // size
    assert not traffic.unknown
    assert (buffer == size * (size - 1) / 2).all()
    messages = traffic.calls["sendrecv"] + traffic.calls["isend"]
    assert 2 * rounds(size) <= messages <= 4 * rounds(size)  # one message per round, or two if the blocks wrap around
