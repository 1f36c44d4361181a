"""Checkpoints over real ranks: each rank writes its shard, and any other layout reads them."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from harness.inputs import LARGE as LAYOUT
from harness.inputs import newest_intact_checkpoint, pieces_of
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.background import BackgroundCheckpoints
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.checkpoint.two_phase import SavePlan, save
from hpcdist.errors import StorageError


@pytest.fixture
def shared_dir(comm):
    """A directory that all ranks see. Rank 0 makes it and removes it when all ranks are done."""
    made = tempfile.TemporaryDirectory() if comm.rank == 0 else None
    yield comm.broadcast_object(made.name if made else None)
    comm.barrier()
    if made:
        made.cleanup()


def state(comm, rng):
    """Return a state with the same values on all ranks."""
    store = FlatStore(LAYOUT, np.dtype("float32"))
    values = comm.broadcast_object(rng.standard_normal(LAYOUT.size).astype(np.float32) if comm.rank == 0 else None)
    for segment in LAYOUT.segments:
        store.range(segment.range)[...] = values[segment.range.slice]
    return store


def test_saved_shards_are_restored(comm, rng, shared_dir):
    store = state(comm, rng)
    parts = split(LAYOUT.size, comm.size, 4)
    for step in (1, 2, 3):
        path = save(f"{shared_dir}/checkpoints", step, pieces_of(store, parts[comm.rank]), {"step": step}, comm)
    assert newest_intact_checkpoint(shared_dir, comm) == path and path.name == "step-3"
    assert sorted(os.listdir(path)) == [
        "index.h5",
        "manifest.json",
        *(f"shard-{rank:05d}.h5" for rank in range(comm.size)),
    ]
    for part in (Range(0, LAYOUT.size), parts[(comm.rank + 1) % comm.size], split(LAYOUT.size, 7, 4)[comm.rank]):
        into = FlatStore(LAYOUT, np.dtype("float32"), part)
        assert restore(path, pieces_of(into, part)) == {"step": 3}
        assert into.array.tobytes() == store.array[part.slice].tobytes()
    comm.barrier()


@pytest.mark.parametrize("writers", ["node", "2"])
def test_pieces_are_sent_to_their_writers(comm, rng, shared_dir, writers):
    store = state(comm, rng)
    part = split(LAYOUT.size, comm.size, 4)[comm.rank]
    path = save(f"{shared_dir}/checkpoints", 1, pieces_of(store, part), {}, comm, writers=writers)
    files = comm.nodes().count if writers == "node" else min(2, comm.size)
    assert len(list(path.glob("shard-*.h5"))) == files and newest_intact_checkpoint(shared_dir, comm) == path
    into = FlatStore(LAYOUT, np.dtype("float32"))
    restore(path, pieces_of(into, Range(0, LAYOUT.size)))
    assert into.array.tobytes() == store.array.tobytes()
    comm.barrier()


def test_asynchronous_save_stores_the_state_of_its_step(comm, rng, shared_dir):
    store = state(comm, rng)
    kept, part = store.array.copy(), split(LAYOUT.size, comm.size, 4)[comm.rank]
    beside = BackgroundCheckpoints(comm)
    for step in (1, 2):
        plan = SavePlan(Path(shared_dir) / "checkpoints", step, comm.size, {}, {}, 2)
        beside.begin(plan, pieces_of(store, part), "rank" if step == 1 else "2")
        store.array[...] = step
    path = None
    while path is None:
        sums = beside.numbers()
        comm.allreduce(sums)
        path = beside.settle(sums)
    assert path.name == "step-2" and newest_intact_checkpoint(shared_dir, comm) == path
    for step, expected in (1, kept), (2, np.where(kept == 0, 0, np.float32(1))):  # zeros are the padding
        into = FlatStore(LAYOUT, np.dtype("float32"))
        restore(path.with_name(f"step-{step}"), pieces_of(into, Range(0, LAYOUT.size)))
        assert into.array.tobytes() == expected.astype("f4").tobytes()
    comm.barrier()


def test_damaged_shard_is_detected_by_all_ranks(comm, rng, shared_dir):
    mine = pieces_of(state(comm, rng), split(LAYOUT.size, comm.size, 4)[comm.rank])
    good = save(f"{shared_dir}/checkpoints", 1, mine, {}, comm)
    bad = save(f"{shared_dir}/checkpoints", 2, mine, {}, comm)
    if comm.rank == comm.size - 1:
        entry = next(e for e in manifest.load(bad).pieces if e.file == f"shard-{comm.rank:05d}.h5")
        data = bytearray((bad / entry.file).read_bytes())
        data[entry.offset + entry.nbytes - 1] ^= 1
        (bad / entry.file).write_bytes(data)
    comm.barrier()
    assert newest_intact_checkpoint(shared_dir, comm) == good


def test_save_fails_on_all_ranks_if_one_cannot_write(comm, rng, shared_dir, monkeypatch):
    mine = pieces_of(state(comm, rng), split(LAYOUT.size, comm.size, 4)[comm.rank])
    good = save(f"{shared_dir}/checkpoints", 1, mine, {}, comm)
    if comm.rank == comm.size - 1:

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=f"rank {comm.size - 1}: .*No space left"):
        save(f"{shared_dir}/checkpoints", 2, mine, {}, comm)
    monkeypatch.undo()
    assert newest_intact_checkpoint(shared_dir, comm) == good
    comm.barrier()
    assert sorted(os.listdir(f"{shared_dir}/checkpoints")) == ["latest", "step-1"]
