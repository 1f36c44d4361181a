"""MPI windows: data that is put is visible after a flush and a message, and a get returns the stored data."""

import numpy as np
import pytest


@pytest.mark.parametrize("kib", [1, 700])
def test_rank_put_flush_message_and_get(comm, kib, rng):
    values = rng.standard_normal((comm.size, comm.size, kib << 7))
    row = values[0, 0].nbytes
    window = comm.window(comm.size * row if comm.rank != 1 else comm.size * row + 24)
    output, others = np.zeros(1, np.uint8), [rank for rank in range(comm.size) if rank != comm.rank]
    for kept in (-values, values):  # the second time over what the first has left there
        for peer in range(comm.size):
            window.put(kept[comm.rank, peer], peer, comm.rank * row)
        for peer in range(comm.size):
            window.flush(peer)
    for peer in others:
        comm.send(output, peer)
    for peer in others:
        comm.recv(output, peer)
    window.sync()
    held = window.memory[: comm.size * row].view(np.float64).reshape(comm.size, -1)
    np.testing.assert_array_equal(held, values[:, comm.rank])
    back = np.zeros_like(values[:, 0])
    for peer in range(comm.size):
        window.get(back[peer], peer, comm.rank * row)
    for peer in range(comm.size):
        window.flush(peer)
    np.testing.assert_array_equal(back, values[comm.rank])
    comm.barrier()
    window.close()
