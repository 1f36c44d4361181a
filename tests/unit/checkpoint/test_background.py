"""Asynchronous checkpoints: the saved state is the state at the step boundary, and failures and waits are visible."""

import errno
import os
import threading

import pytest

from harness.inputs import FLOAT, LAYOUT, newest_intact_checkpoint, pieces_of
from harness.jobs import LIMIT_S
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint import background, two_phase
from hpcdist.checkpoint.background import BackgroundCheckpoints
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.checkpoint.two_phase import SavePlan
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.training.recipe.recipe import load


class Run:
    """One rank that saves its part of a state. Every element is the number of the step."""

    def __init__(self, comm, root, writers="rank", ledger=None, on="cpu"):
        self.comm, self.root, self.writers = comm, root, writers
        self.store = FlatStore(LAYOUT, FLOAT, on=on)
        self.part = split(LAYOUT.size, comm.size, 4)[comm.rank]
        self.background = BackgroundCheckpoints(comm, ledger)

    def begin(self, step):
        self.store.array[...] = step
        plan = SavePlan(self.root, step, self.comm.size, {"step": step}, {}, 2)
        self.background.begin(plan, pieces_of(self.store, self.part), self.writers)
        self.store.array[...] = -1  # training continues immediately

    def step(self):
        """Do what a training step does for the checkpoint. Return the checkpoint that became visible in this step."""
        sums = self.background.numbers()
        self.comm.allreduce(sums)
        return self.background.settle(sums)

    def steps(self):
        while (path := self.step()) is None:
            pass
        return path


def assert_restores(path, step):
    into = FlatStore(LAYOUT, FLOAT)
    assert restore(path, pieces_of(into, Range(0, LAYOUT.size))) == {"step": step}
    assert all((into.view(segment.key) == step).all() for segment in LAYOUT.segments)


class ForeignThreadMessages:
    """Records messages that any thread but its creator sends."""

    def __init__(self):
        self.thread, self.strange = threading.current_thread(), []

    def begin(self, comm, op, *_):
        if threading.current_thread() is not self.thread:
            self.strange.append(op)
        return 0

    def end(self, token):
        return None


@pytest.mark.parametrize(("ranks", "writers"), [(1, "rank"), (3, "rank"), (4, "2")])
def test_background_save_keeps_the_state_of_the_step_boundary(tmp_path, monkeypatch, ranks, writers):
    may_write = threading.Event()
    true = two_phase.write

    def write_when_allowed(*args):
        assert may_write.wait(LIMIT_S)
        return true(*args)

    monkeypatch.setattr(two_phase, "write", write_when_allowed)

    def body(comm):
        run = Run(comm, tmp_path / "checkpoints", writers)
        comm.events = seen = ForeignThreadMessages()
        run.begin(10)
        assert [run.step() for _ in range(3)] == [None] * 3 and run.background.is_busy
        assert newest_intact_checkpoint(tmp_path, comm) is None, "visible before all ranks have written"
        comm.barrier()
        may_write.set()
        path = run.steps()
        assert not run.background.is_busy and path == tmp_path / "checkpoints/step-10"
        run.begin(20)
        run.begin(30)  # waits for the checkpoint before
        assert run.background.finish() == tmp_path / "checkpoints/step-30"
        assert not seen.strange, "a checkpoint thread has sent messages"

    run_threads(ranks, body)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-20", "step-30"]
    assert_restores(tmp_path / "checkpoints/step-20", 20)
    assert_restores(newest_intact_checkpoint(tmp_path), 30)


@pytest.mark.parametrize("where", ["write", "snapshot", "commit", "unforeseen"])
@pytest.mark.parametrize("writers", ["rank", "2"])
def test_background_failure_is_raised_on_all_ranks_at_a_step(tmp_path, monkeypatch, where, writers):
    def raise_no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def raise_programming_error(*_):
        raise ZeroDivisionError("a mistake of the programme")

    def body(comm):
        run = Run(comm, tmp_path / "checkpoints", writers)
        run.begin(1)
        run.background.finish()
        comm.barrier()
        if comm.rank == 0:
            place = {"write": "shard.write", "commit": "names.commit", "unforeseen": "shard.write"}.get(where)
            if place:
                monkeypatch.setattr(
                    f"hpcdist.checkpoint.two_phase.{place}",
                    raise_programming_error if where == "unforeseen" else raise_no_space,
                )
            else:
                monkeypatch.setattr(background.SnapshotMemory, "fill", raise_no_space)
        comm.barrier()
        run.begin(2)
        with pytest.raises(StorageError, match="No space left|a mistake of the programme"):
            run.steps()
        assert not run.background.is_busy
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.undo()
        comm.barrier()
        assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-1"]
        comm.barrier()
        run.begin(3)
        run.background.finish()

    run_threads(4, body)
    assert_restores(newest_intact_checkpoint(tmp_path), 3)


def test_background_copy_memory_is_kept_and_counted(tmp_path):
    ledgers = [Ledger(), Ledger()]

    def body(comm):
        run = Run(comm, tmp_path / "checkpoints", "1", ledgers[comm.rank])
        for step in (1, 2):
            run.begin(step)
            run.background.finish()
        held = ledgers[comm.rank].current["checkpoint"]
        assert held == ledgers[comm.rank].peak["checkpoint"]
        return held

    writer, other = run_threads(2, body)
    psi = 4 * LAYOUT.parameters
    assert psi <= writer <= psi + 64 * 2 * len(LAYOUT.segments) and other == 0


@pytest.mark.parametrize("writers", ["rank", "2"])
def test_background_save_of_gpu_state(gpu, tmp_path, writers):
    def body(comm):
        run = Run(comm, tmp_path / "checkpoints", writers, on="gpu")
        run.begin(4)
        return run.background.finish()

    assert_restores(run_threads(3, body)[0], 4)


def test_asynchronous_save_of_file_state_is_rejected():
    keys = ["parallel.strategy=zero1", "zero.offload_optimizer=file", "zero.offload_directory=/tmp"]
    assert load(None, keys).recipe.zero.offload_optimizer == "file"
    with pytest.raises(ConfigurationError, match="checkpoint.asynchronous = true with zero.offload_optimizer = 'file'"):
        load(None, [*keys, "checkpoint.asynchronous=true"])
