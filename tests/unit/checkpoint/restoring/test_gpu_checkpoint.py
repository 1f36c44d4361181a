"""Checkpoints of cupy double arrays: only explicit copies, and the same files and values as on the CPU."""

import numpy as np
import pytest

from harness.inputs import random_store
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import split
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.checkpoint.two_phase import save
from hpcdist.comm.threads.communicator import run_threads

LAYOUT = Layout.of([TensorSpec(0, "table", (11, 7)), TensorSpec(1, "weight", (33, 19)), TensorSpec(1, "bias", (5,))])


def pieces_of(store):
    return [Piece.of("parameters", segment, where, store.range(where)) for segment, where in store.tensors()]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_cpu_and_gpu_checkpoints_are_interchangeable(gpu, dtype, tmp_path, rng):
    whole = random_store(LAYOUT, rng, dtype)

    def save_shard(comm, on):
        shard = FlatStore(LAYOUT, whole.dtype, split(LAYOUT.size, comm.size, 8)[comm.rank], on=on)
        shard.copy_from(whole)
        return save(tmp_path / on, 1, pieces_of(shard), {}, comm)

    paths = {on: run_threads(3, lambda comm, on=on: save_shard(comm, on))[0] for on in ("cpu", "gpu")}
    shards = sorted(path.name for path in paths["cpu"].glob("shard-*.h5"))
    assert len(shards) == 3
    for name in shards:
        assert (paths["cpu"] / name).read_bytes() == (paths["gpu"] / name).read_bytes()
    for saved_on in paths:
        for on in ("cpu", "gpu"):
            back = FlatStore(LAYOUT, whole.dtype, on=on)
            restore(paths[saved_on], pieces_of(back))
            got = back.array.get() if on == "gpu" else back.array
            assert got.tobytes() == whole.array.tobytes()


def test_each_gpu_piece_is_copied_once(gpu, tmp_path):
    store = FlatStore(LAYOUT, np.dtype(np.float32), on="gpu")
    store.array += 1
    pieces = pieces_of(store)
    gpu.LOG.clear()
    path = run_threads(1, lambda comm: save(tmp_path, 1, pieces, {}, comm))[0]
    copied = {
        (gpu.D2H, "shard._of_device"): len(pieces),
        (gpu.SYNCHRONISE, "shard._wait_for_copy"): len(pieces),
    }
    assert gpu.LOG.sites() == copied and gpu.LOG.nbytes(gpu.D2H) == sum(piece.array.nbytes for piece in pieces)
    gpu.LOG.clear()
    restore(path, pieces)
    assert gpu.LOG.sites() == {(gpu.H2D, "restore._fill_in_memory"): len(pieces)}
    assert gpu.LOG.nbytes(gpu.H2D) == sum(piece.array.nbytes for piece in pieces)
