"""Injected faults: each happens at the requested place, once per run, and is handled by the responsible check."""

import os
import time
from dataclasses import replace

import numpy as np
import pytest

from harness import trainings
from harness.inputs import newest_intact_checkpoint
from harness.marks import cases, on_threads
from harness.trainings import assemble_trainer
from hpcdist.arrays import backend
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, DivergenceError, StorageError
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.schedule.replica_check import check_replicas
from hpcdist.training.build import fault_injection
from hpcdist.training.build.fault_injection import flip_bit, largest_index, make_infinite
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.chaos_config import ChaosConfig
from hpcdist.training.run.saving import build_saver

Settings = dict[str, object]


class Killed(Exception):  # noqa: N818 - a process would not live to raise it
    """The exception that replaces the death of a thread."""


@pytest.fixture
def text(text):
    return {"data.path": text, "run.steps": 4}


@pytest.fixture
def mortal(monkeypatch):
    def die():
        raise Killed

    monkeypatch.setattr(fault_injection, "kill_process", die)


def build_with_faults(comm, settings, run):
    trainer = assemble_trainer(comm, settings, directory=run)
    writers = trainer.recipe.checkpoint.writers
    fault_injection.refuse_impossible_faults(trainer.recipe.chaos, comm, writers, trainer.exchange)
    return trainer, build_saver(trainer, run / "checkpoints")


def make_steps(trainer, first=1, last=None):
    return trainings.losses(trainer, last or trainer.recipe.run.steps, first - 1)


def train(ranks, settings, run):
    """Return the losses of each rank, and the state that it would save."""

    def body(comm):
        trainer, _ = build_with_faults(comm, settings, run)
        return make_steps(trainer), [np.asarray(piece.array).tobytes() for piece in trainer.exchange.pieces()]

    return run_threads(ranks, body)


@cases(
    "phase, last",
    *(("begin", None), ("forward", Kind.FORWARD), ("backward", Kind.BACKWARD), ("exchange", Kind.REDUCE)),
    ("update", Kind.DIRECTION),
)
@pytest.mark.usefixtures("mortal")
@on_threads(1)
def test_kill_happens_once_at_the_requested_place(comm, phase, last, text, tmp_path):
    trainer, _ = build_with_faults(comm, {**text, "chaos.kill": f"['0@2:{phase}']"}, tmp_path)
    assert len(make_steps(trainer, last=1)) == 1 and not (tmp_path / "chaos").exists()
    seen = []

    def note_operation(handler, op):
        seen.append(op.kind)
        handler(op)

    for kind, handler in list(trainer.executor._handlers.items()):
        trainer.executor._handlers[kind] = lambda op, handler=handler: note_operation(handler, op)
    with pytest.raises(Killed):
        make_steps(trainer, first=2)
    assert (seen[-1] if seen else None) is last and seen.count(last) <= 1
    assert os.listdir(tmp_path / "chaos") == [f"kill-0@2-{phase}"]
    again, _ = build_with_faults(comm, {**text, "chaos.kill": f"['0@2:{phase}']"}, tmp_path)
    assert len(make_steps(again)) == 4


RING = {"communication.algorithm": "ring"}
PIPELINE = {"parallel.pipeline": 2, "parallel.microbatches": 2, "run.global_batch": 8}
SERVER = {"parallel.strategy": "parameter_server", "parameter_server.placement": "colocated"}
TENSOR = {"parallel.tensor": 2, "model.tied": "false"}
CORRUPTED = {
    "allreduce": RING,
    "overlapped": {**RING, "communication.overlap": "thread"},
    "delayed": {**RING, "communication.delayed": "true", "communication.overlap": "poll"},
    "logical shards": {"communication.algorithm": "auto", "run.logical_shards": 4, "run.global_batch": 8},
    "zero1": {**RING, "parallel.strategy": "zero1"},
    "zero3": {**RING, "parallel.strategy": "zero3"},
    "bfloat16": {"precision.mode": "bfloat16", "parallel.strategy": "zero2"},
    "pipeline": PIPELINE,
    "tensor": TENSOR,
    "bsp": SERVER,
    "gossip": {"parallel.strategy": "gossip"},
}


@pytest.mark.parametrize("layout", CORRUPTED)
@pytest.mark.full_except("zero1")
def test_flipped_bit_of_a_gradient_changes_later_steps_silently(layout, text, tmp_path):
    settings = {**text, "optimizer.clip_norm": 0, **CORRUPTED[layout]}
    calm = train(2, settings, tmp_path)
    result = train(2, {**settings, "chaos.corrupt": "['1@2']"}, tmp_path)
    assert os.listdir(tmp_path / "chaos") == ["corrupt-1@2-gradients"]
    assert result[0][0][:2] == calm[0][0][:2] and [local_data for _, local_data in result] != [
        local_data for _, local_data in calm
    ]
    assert result[0][0] == result[1][0] and np.isfinite(result[0][0]).all(), "nobody notices"


def test_flipped_bit_changes_the_value_by_a_third_to_a_half():
    import ml_dtypes

    for dtype in ("float16", ml_dtypes.bfloat16, "float32", "float64"):
        values = np.array([0.5, -3.0, 2.9, 0], dtype)
        flip_bit(values)
        assert values.astype("f8")[[0, 2, 3]].tolist() == np.array([0.5, 2.9, 0], dtype).astype("f8").tolist()
        assert float(values[1]) == -2.0 and largest_index(values) == 2
        flip_bit(values[:0])


def test_corruption_on_a_gpu_matches_the_cpu(gpu):
    values = backend.place(np.array([0.5, -3.0, 2.9, 0], "f4"), "gpu")
    flip_bit(values)
    make_infinite(values[2:])
    assert backend.to_host(values).tolist() == [0.5, -2.0, np.inf, 0]


def test_flipped_bit_of_a_parameter_is_found_by_the_replica_check(text, tmp_path):
    def body(comm):
        trainer, _ = build_with_faults(comm, {**text, **RING, "chaos.corrupt": "['1@2:parameters']"}, tmp_path)
        make_steps(trainer, last=1)
        check_replicas(trainer.data_axis, trainer.exchange.parameters, 1)
        make_steps(trainer, first=2, last=2)
        try:
            check_replicas(trainer.data_axis, trainer.exchange.parameters, 2)
        except DivergenceError as error:
            return str(error)
        return "not found"

    assert all("step 2" in messages and "rank(s) [1] hold other bits" in messages for messages in run_threads(3, body))


@pytest.mark.parametrize("layout", ["allreduce", "zero2", "pipeline"])
def test_overflow_stops_the_run_and_names_the_step(layout, text, tmp_path):
    keys = {"parallel.strategy": "zero2"} if layout == "zero2" else CORRUPTED[layout]

    def body(comm):
        trainer, _ = build_with_faults(comm, {**text, **keys, "chaos.overflow": "[3]"}, tmp_path)
        make_steps(trainer, last=2)
        before = trainer.exchange.parameters.array.copy()
        messages = trainings.failure_reason(replace(trainer, first_step=2), step=3)
        assert (before == trainer.exchange.parameters.array).all()
        return messages

    for messages in run_threads(2, body):
        assert "step 3: " in messages and "gradient norm inf" in messages and "Nothing was updated" in messages


def test_float16_overflow_is_skipped_and_halves_the_scale(text, tmp_path):
    keys = {"precision.mode": "float16", "precision.hysteresis": 1, "chaos.overflow": "[2]"}

    def body(comm):
        trainer, _ = build_with_faults(comm, {**text, **keys}, tmp_path)
        make_steps(trainer, last=1)
        scales = [trainer.executor.loss_scale.scale]
        make_steps(trainer, first=2)
        return [*scales, trainer.executor.loss_scale.scale], trainer.executor.loss_scale.skipped

    (before, after), skipped = run_threads(2, body)[1]
    assert after == before / 2 and skipped == 1


def test_stall_delays_its_step(text, tmp_path):
    def body(comm):
        trainer, _ = build_with_faults(comm, {**text, "chaos.stall": "['1@2:0.2']"}, tmp_path)
        clock = [time.perf_counter()]
        for step in (1, 2, 3):
            make_steps(trainer, step, step)
            clock.append(time.perf_counter())
        return [end - start for start, end in zip(clock, clock[1:], strict=False)]

    assert min(taken[1] for taken in run_threads(2, body)) >= 0.2, "the other rank waits"


WORDS = {"fail": "Input/output error", "full": "No space left on device", "fsync": "Input/output error"}


@pytest.mark.parametrize("how", WORDS)
@pytest.mark.parametrize("beside", ["false", "true"])
def test_failing_disk_keeps_the_previous_checkpoint(how, beside, text, tmp_path, monkeypatch):
    synced, true = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or true(fd))
    keys = {"chaos.disk": f"['1@2:{how}']", "checkpoint.asynchronous": beside}

    def body(comm):
        _, saver = build_with_faults(comm, {**text, **keys}, tmp_path)
        messages = ""
        for step in (1, 2, 3):
            try:
                saver.save(step)
                saver.finish()
            except StorageError as error:
                messages += f"{step}: {error}"
            if step == 2:
                result = newest_intact_checkpoint(tmp_path, comm)
                assert result is not None and result.name == "step-1"
                comm.barrier()
        return messages

    for messages in run_threads(2, body):
        assert messages.startswith("2: the checkpoint was not saved: rank 1: ") and WORDS[how] in messages
    third = newest_intact_checkpoint(tmp_path)
    assert third is not None and third.name == "step-3" and restore(third, [])["steps"] == 3
    assert os.listdir(tmp_path / "chaos") == [f"disk-1@2-{how}"]
    assert any("step-3.tmp/shard-00001.h5" in path for path in synced), "of a disk that does not fail"


@pytest.mark.usefixtures("mortal")
def test_kill_during_a_save_leaves_half_a_shard(text, tmp_path):
    def body(comm):
        trainer, saver = build_with_faults(comm, {**text, "chaos.kill": "['0@2:save']"}, tmp_path)
        make_steps(trainer, last=1)
        saver.save(1)
        with pytest.raises(Killed):
            saver.save(3)  # the first one after step 2

    run_threads(1, body)
    first, half = (
        (tmp_path / "checkpoints" / name / "shard-00000.h5").read_bytes() for name in ("step-1", "step-3.tmp")
    )
    assert len(half) == len(first) and len(first) // 5 < half.count(0) - first.count(0) < len(first) * 2 // 3
    assert newest_intact_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-1"


def test_disk_failure_of_a_rank_that_writes_nothing_is_rejected(text, tmp_path):
    settings = {**text, "checkpoint.writers": 1, "chaos.disk": "['1@2:full']"}
    with pytest.raises(ConfigurationError, match=r"rank 1 writes nothing with .* '1'; the writing ranks are \[0\]"):
        run_threads(2, lambda comm: build_with_faults(comm, settings, tmp_path))


def test_faults_of_impossible_ranks_are_rejected(text):
    with pytest.raises(ConfigurationError, match=r"chaos.kill = \['2@1'\] on 2 ranks: there is no rank 2"):
        run_threads(2, lambda comm: assemble_trainer(comm, {**text, "chaos.kill": "['2@1']"}))
    served = {**text, "parallel.strategy": "parameter_server"}
    for keys, message in (
        ({"chaos.corrupt": "['1@1']"}, "rank 1 is only a server, which computes nothing; use ranks 0 to 0"),
        ({"chaos.kill": "['1@1:forward']"}, "is only a server, which computes nothing"),
        ({"chaos.stall": "['1@1:2']", "parameter_server.consistency": "asp"}, "makes no steps of its own"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            run_threads(2, lambda comm, keys=keys: assemble_trainer(comm, {**served, **keys}))
    run_threads(2, lambda comm: assemble_trainer(comm, {**served, "chaos.kill": "['1@1:exchange']"}))


def test_faults_of_removed_ranks_are_dropped():
    config = ChaosConfig(slow_ranks=(0, 3), kill=("1@5", "3@9"), disk=("3@2:full",), overflow=(4,))
    left = config.within(3)
    assert (left.slow_ranks, left.kill, left.disk, left.overflow) == ((0,), ("1@5",), (), (4,))
    assert config.within(4) == config
    gone = ChaosConfig(slow_ranks=(3,), slow_factor=5, seed=2, kill=("3@9",)).within(3)
    assert gone == ChaosConfig() and not gone.on


def test_faults_are_described_and_stored_in_the_recipe(tmp_path):
    config = ChaosConfig(
        kill=("0@9:save", "2@3"), stall=("1@4:2.5",), corrupt=("1@1",), overflow=(6,), disk=("0@7:full",)
    )
    assert config.on and config.described() == (
        "once in this run directory: one bit of the gradients of rank 1 flips in step 1; "
        "rank 2 is killed at the begin of step 3; "
        "rank 1 sleeps 2.5 s in step 4; the gradient overflows in step 6; "
        "rank 0 finds its disk full in the save after step 7; rank 0 is killed in the save after step 9"
    )
    recipe = recipes.load(None, ["chaos.kill=['0@9:save', \"2@3\"]", "chaos.overflow=[6]"], {}).recipe
    assert recipe.chaos.kill == ("0@9:save", "2@3")
    (tmp_path / "a.toml").write_text(recipes.dump(recipe))
    assert recipes.load_stored(tmp_path / "a.toml") == recipe
