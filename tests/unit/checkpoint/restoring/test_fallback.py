"""The restore detects a damaged checkpoint and uses the one before it. Each byte is read once."""

import weakref

import numpy as np
import pytest

from harness.inputs import flip_bit
from harness.marks import on_threads
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, split
from hpcdist.checkpoint import manifest, shard
from hpcdist.checkpoint.restoring.restore import from_newest_intact, newest_complete, restore_together
from hpcdist.checkpoint.shard import DamagedError
from hpcdist.checkpoint.two_phase import save
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import StorageError

ELEMENTS = 5000


def piece_of(comm):
    part = split(ELEMENTS, comm.size, 8)[comm.rank]
    return Piece("parameters", "w", (ELEMENTS,), ((0, ELEMENTS),), Range(part.start, part.stop), np.zeros(part.size))


@pytest.fixture
def run(tmp_path):
    def body(comm):
        piece = piece_of(comm)
        for step in (1, 2, 3):
            piece.array[...] = step
            save(tmp_path / "checkpoints", step, [piece], {"step": step}, comm, keep=3)

    run_threads(2, body)
    return tmp_path


def damage(run, step, rank=0):
    path = run / f"checkpoints/step-{step}"
    entry = manifest.load(path).pieces[rank]
    flip_bit(path / entry.file, entry.offset + entry.nbytes // 2)


def resume_run(run, ranks):
    """Resume on ``ranks`` threads. Return the restored step and the set of array values of each rank."""

    def body(comm):
        def take(path):
            piece = piece_of(comm)
            scalars = {} if path is None else restore_together(comm, path, [piece])
            return scalars.get("step"), set(piece.array.tolist())

        return from_newest_intact(run, comm, newest_complete(run, comm), take)

    return run_threads(ranks, body)


@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.full
def test_damage_on_one_rank_makes_all_ranks_use_the_one_before(run, capfd, ranks):
    damage(run, 3, rank=1)
    assert resume_run(run, ranks) == [(2, {2.0})] * ranks
    stderr = capfd.readouterr().err
    assert stderr.count("skipped") == 1 and "step-3" in stderr and "digest does not match" in stderr


def test_resume_with_only_damaged_checkpoints_starts_anew(run, capfd):
    for step in (1, 2, 3):
        damage(run, step)
    assert resume_run(run, 2) == [(None, {0.0})] * 2
    assert capfd.readouterr().err.count("skipped") == 3


def test_failed_state_is_freed_before_the_next_attempt(run):
    damage(run, 3)
    begun = []

    class State:
        def __init__(self):
            self.itself = self  # a reference cycle, like between a trainer and its executor

    def take(path):
        assert all(held() is None for held in begun)
        begun.append(weakref.ref(State()))
        piece = piece_of(solo())
        restore_together(solo(), path, [piece])
        return len(begun)

    assert from_newest_intact(run, solo(), newest_complete(run), take) == 2


def test_resume_reads_every_byte_once(run, monkeypatch):
    read = []
    pass_through = shard.BlockReader.read
    monkeypatch.setattr(shard.BlockReader, "read", lambda *arguments: read.append(pass_through(*arguments)) or read[-1])
    assert resume_run(run, 2) == [(3, {3.0})] * 2
    assert sum(read) == ELEMENTS * 8


@on_threads(2)
def test_another_shape_is_not_reported_as_damage(comm, run):
    expected = Piece.whole("parameters", "w", np.zeros(ELEMENTS if comm.rank else 7))
    with pytest.raises(StorageError, match=r"float64\[5000\], expected float64\[7\]") as caught:
        restore_together(comm, run / "checkpoints/step-3", [expected])
    assert not isinstance(caught.value, DamagedError)
