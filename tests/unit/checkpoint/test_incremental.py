"""Checkpoints that share unchanged parts with the one before, and snapshots on a disk of the node."""

import errno
import os

import h5py
import numpy as np
import pytest

from harness.inputs import newest_intact_checkpoint
from harness.marks import on_threads
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import split
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.background import BackgroundCheckpoints
from hpcdist.checkpoint.listing import verify
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.checkpoint.two_phase import IncrementalWriter, SavePlan, save_planned
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.training.recipe.recipe import load

SIZE = 3000


class State:
    """A constant tensor and one with the number of the step. Each rank has a part of both."""

    def __init__(self, comm):
        self.part = split(SIZE, comm.size, 8)[comm.rank]
        self.frozen = np.arange(SIZE, dtype=float)[self.part.slice]
        self.trained = np.zeros(self.part.size)

    def pieces(self):
        named = {"frozen": self.frozen, "trained": self.trained}
        return [Piece("parameters", n, (SIZE,), ((0, SIZE),), self.part, array) for n, array in named.items()]


def plan_of(tmp_path, comm, step, keep=2):
    return SavePlan(tmp_path / "checkpoints", step, comm.size, {"step": step}, {}, keep)


def assert_restores(path):
    frozen, trained = np.zeros(SIZE), np.zeros(SIZE)
    step = restore(path, [Piece.whole("parameters", "frozen", frozen), Piece.whole("parameters", "trained", trained)])
    assert (frozen == np.arange(SIZE)).all() and (trained == step["step"]).all()
    with h5py.File(path / "index.h5") as file:
        assert (file["parameters/frozen"][...] == frozen).all() and (file["parameters/trained"][...] == trained).all()
    verdict = verify(path)
    assert not verdict.damage and not verdict.not_covered
    assert verdict.read_bytes == sum(file.stat().st_size for file in path.glob("*.h5")), "each byte must be read once"
    return step["step"]


@pytest.mark.parametrize("way", ["waiting", "beside", "beside one writer"])
def test_unchanged_parts_are_linked(tmp_path, way):
    def body(comm):
        state, kept = State(comm), IncrementalWriter()
        beside = BackgroundCheckpoints(comm, incremental=kept)
        for step in (1, 2, 3, 4):
            state.trained[...] = step
            plan = plan_of(tmp_path, comm, step)
            if way == "waiting":
                save_planned(plan, state.pieces(), comm, "rank", kept)
            else:
                beside.begin(plan, state.pieces(), "1" if "one" in way else "rank")
                beside.finish()

    run_threads(3, body)
    root = tmp_path / "checkpoints"
    assert sorted(os.listdir(root)) == ["latest", "step-3", "step-4"], "step 1 may go, though its shards are used"
    shards = 1 if "one" in way else 3
    names = [f"shard-{index:05d}{end}.h5" for index in range(shards) for end in ("", "-of-1")]
    for path in (root / "step-3", root / "step-4"):
        assert sorted(manifest.load(path).files) == sorted(names)
        assert f"step-{assert_restores(path)}" == path.name
    assert newest_intact_checkpoint(tmp_path) == root / "step-4"
    inode = [(root / step / "shard-00000-of-1.h5").stat().st_ino for step in ("step-3", "step-4")]
    assert inode[0] == inode[1]
    written = (root / "step-4" / "shard-00000.h5").stat().st_size
    assert written < 0.7 * (root / "step-4" / "shard-00000-of-1.h5").stat().st_size


def test_verify_covers_unused_parts_of_linked_shards(tmp_path):
    def body(comm):
        state, kept = State(comm), IncrementalWriter()
        for step in (1, 2, 3):
            state.trained[...] = step
            save_planned(plan_of(tmp_path, comm, step), state.pieces(), comm, "rank", kept)

    run_threads(2, body)
    path = tmp_path / "checkpoints" / "step-3"
    unused = manifest.load(path).unused
    assert [(entry.file, entry.tensor) for entry in unused] == [
        (f"shard-{rank:05d}-of-1.h5", "trained") for rank in (0, 1)
    ]
    data = bytearray((path / unused[1].file).read_bytes())
    data[unused[1].offset + 5] ^= 4
    (path / unused[1].file).write_bytes(data)
    assert [unused[1].file in line and "parameters/trained" in line for line in verify(path).damage] == [True]


def test_failed_save_is_not_linked_to(tmp_path, monkeypatch):
    def body(comm):
        state, kept = State(comm), IncrementalWriter()
        save_planned(plan_of(tmp_path, comm, 1), state.pieces(), comm, "rank", kept)
        state.frozen += 7.0

        def raise_no_space(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        comm.barrier()
        if comm.rank == 0:
            monkeypatch.setattr("hpcdist.checkpoint.two_phase.names.commit", raise_no_space)
        comm.barrier()
        with pytest.raises(StorageError, match="No space left"):
            save_planned(plan_of(tmp_path, comm, 2), state.pieces(), comm, "rank", kept)
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.undo()
        comm.barrier()
        state.frozen -= 7.0
        state.trained[...] = 3
        save_planned(plan_of(tmp_path, comm, 3), state.pieces(), comm, "rank", kept)

    run_threads(2, body)
    assert assert_restores(newest_intact_checkpoint(tmp_path)) == 3


def test_file_system_without_links_gets_full_copies(tmp_path, monkeypatch, capfd):
    def raise_not_permitted(*_, **__):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", raise_not_permitted)

    def body(comm):
        state, kept = State(comm), IncrementalWriter()
        for step in (1, 2):
            state.trained[...] = step
            save_planned(plan_of(tmp_path, comm, step), state.pieces(), comm, "rank", kept)

    run_threads(2, body)
    assert (
        assert_restores(newest_intact_checkpoint(tmp_path)) == 2
        and "is written again: Operation not permitted" in capfd.readouterr().err
    )


@pytest.mark.parametrize("writers", ["rank", "1"])
def test_snapshot_on_a_node_local_disk(tmp_path, writers):
    local = tmp_path / "local"
    local.mkdir()

    def body(comm):
        state, beside = State(comm), BackgroundCheckpoints(comm, local_directory=local)
        for step in (1, 2, 3):
            state.trained[...] = step
            beside.begin(plan_of(tmp_path, comm, step), state.pieces(), writers)
            state.trained[...] = -1
            assert not list(local.iterdir()), "a killed process would leave files"
        beside.finish()

    run_threads(3, body)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-2", "step-3"]
    assert [assert_restores(tmp_path / f"checkpoints/step-{step}") for step in (2, 3)] == [2, 3]


@pytest.mark.parametrize("trouble", ["full", "missing"])
def test_full_or_missing_node_local_disk_is_reported(tmp_path, monkeypatch, trouble):
    local = tmp_path / "local"
    if trouble == "full":
        local.mkdir()

        def raise_no_space(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", raise_no_space)

    def body(comm):
        state, beside = State(comm), BackgroundCheckpoints(comm, local_directory=local)
        beside.begin(plan_of(tmp_path, comm, 1), state.pieces(), "rank")
        with pytest.raises(StorageError, match=r"rank 0: .*checkpoint.local_directory = .*(No space|No such file)"):
            beside.finish()

    run_threads(2, body)
    assert os.listdir(tmp_path / "checkpoints") == []


def test_conflicting_keys_are_rejected():
    beside = "checkpoint.asynchronous=true"
    for keys, output in (
        (["checkpoint.local_directory=/tmp"], "checkpoint.asynchronous = false"),
        (["checkpoint.incremental=true", "checkpoint.writers=node"], "checkpoint.writers = 'node'"),
    ):
        with pytest.raises(ConfigurationError, match=output):
            load(None, keys)
        assert load(None, [*keys, beside]).recipe.checkpoint.asynchronous
    in_file = ["parallel.strategy=zero1", "zero.offload_optimizer=file", "zero.offload_directory=/tmp"]
    assert load(None, [*in_file, beside, "checkpoint.local_directory=/tmp"]).recipe.checkpoint.local_directory == "/tmp"


@on_threads(1)
def test_few_unchanged_bytes_are_not_linked(comm, tmp_path):
    kept, bias, weight = IncrementalWriter(), np.ones(4), np.zeros(SIZE)
    for step in (1, 2):
        weight[...] = step
        pieces = [Piece.whole("parameters", name, array) for name, array in (("bias", bias), ("weight", weight))]
        path = save_planned(plan_of(tmp_path, comm, step), pieces, comm, "rank", kept)
    assert list(manifest.load(path).files) == ["shard-00000.h5"]
    restore(path, [Piece.whole("parameters", "bias", bias)])
    assert (bias == 1).all()
