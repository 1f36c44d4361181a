"""One-sided windows: puts and gets complete at the flush, and never leave the window."""

import numpy as np
import pytest

from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import MissingCapabilityError, UsageError


@pytest.mark.parametrize("size", range(1, 9))
def test_every_rank_puts_to_and_gets_from_all_ranks(size, rng):
    values = rng.standard_normal((size, size, 5)).astype("float32")

    def body(comm):
        window = comm.window(comm.size * 20 if comm.rank % 2 == 0 else comm.size * 24)
        with count_traffic(comm) as traffic:
            for peer in range(size):
                window.put(values[comm.rank, peer], peer, 20 * comm.rank)
            for peer in range(size):
                window.flush(peer)
        assert traffic.sent_bytes == 20 * size and traffic.calls["put"] == traffic.calls["flush"] == size
        comm.barrier()
        window.sync()
        local_data = window.memory[: 20 * size].view(np.float32).reshape(size, 5)
        np.testing.assert_array_equal(local_data, values[:, comm.rank])
        back = np.zeros((size, 5), np.float32)
        for peer in range(size):
            window.get(back[peer], peer, 20 * comm.rank)
            window.flush(peer)
        comm.barrier()
        window.close()
        return back

    for rank, back in enumerate(run_threads(size, body)):
        np.testing.assert_array_equal(back, values[rank])


def test_threads_move_no_data_before_flush():
    window = solo().window(8)
    value, back = np.array([1.5]), np.zeros(1)
    window.put(value, 0, 0)
    assert not window.memory.any()
    window.flush(0)
    assert window.memory.view(np.float64)[0] == 1.5
    window.get(back, 0, 0)
    assert back[0] == 0
    window.flush(0)
    assert back[0] == 1.5


@pytest.mark.parametrize(("peer", "at", "size"), [(0, 8, 1), (0, -8, 1), (0, 0, 2), (1, 0, 1), (-1, 0, 1)])
def test_access_outside_the_window_is_rejected(peer, at, size):
    window = solo().window(8)
    for move in (window.put, window.get):
        with pytest.raises(UsageError, match="use offsets inside the window"):
            move(np.zeros(size), peer, at)


def test_arrays_that_are_not_1d_contiguous_are_rejected():
    window = solo().window(64)
    with pytest.raises(UsageError, match="1-D contiguous"):
        window.put(np.zeros((2, 2)), 0, 0)
    with pytest.raises(UsageError, match="1-D contiguous"):
        window.get(np.zeros(8)[::2], 0, 0)


class BrokenMpi:
    """An MPI library without one-sided communication."""

    class Exception(RuntimeError):  # noqa: A001, N818 (its name in mpi4py)
        pass

    class Win:
        @staticmethod
        def Allocate(nbytes, unit, comm):
            raise BrokenMpi.Exception("MPI_ERR_WIN")


def test_library_without_windows_is_reported():
    from hpcdist.comm import window

    class Alone:
        def allgather(self, value):
            return [value]

    with pytest.raises(MissingCapabilityError, match="rank 0: no window can be made: MPI_ERR_WIN"):
        window.allocate(BrokenMpi, Alone(), 8)
