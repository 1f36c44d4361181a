"""Repeated steps: the same bits without a fault, and with a fault the bits of an undisturbed run."""

import socket
from functools import partial

import numpy as np
import pytest

from harness import trainings
from harness.marks import cases
from harness.trainings import assemble_trainer, assert_rejected, recipe_keys
from hpcdist.checkpoint.shard import blocks_of
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import DivergenceError
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.schedule.step import RecomputeVerdict
from hpcdist.training.observe import sdc_check

Settings = dict[str, object]
Steps = tuple[list[float], list[RecomputeVerdict | None], list[bytes]]  # losses, what was found, the state at the end

RING = {"communication.algorithm": "ring"}
SERVER = {"parallel.strategy": "parameter_server"}
EACH = {"run.recompute_every_steps": 1}
# name -> (ranks, keys)
LAYOUTS = {
    "alone": (1, {}),
    "allreduce": (3, {**RING, "parallel.microbatches": 2}),
    "dropout": (2, {"model.dropout": 0.2}),
    "logical shards": (2, recipe_keys("algorithm=auto logical_shards=4 global_batch=8")),
    "zero2": (2, RING | recipe_keys("strategy=zero2 microbatches=2")),
    "zero3": (3, RING | recipe_keys("strategy=zero3 microbatches=2")),
    "zero3 ahead": (2, RING | recipe_keys("strategy=zero3 overlap=thread zero.prefetch=2")),
    "zero3 offloaded": (
        2,
        RING | recipe_keys("strategy=zero3 zero.offload_parameters=file zero.offload_optimizer=file"),
    ),
    "bfloat16": (2, recipe_keys("precision.mode=bfloat16 strategy=zero2")),
    "1f1b x zero1": (4, recipe_keys("pipeline=2 microbatches=3 global_batch=12 strategy=zero1")),
    "tensor": (2, recipe_keys("tensor=2 tied=false")),
    "bfloat16 in a pipeline": (2, recipe_keys("pipeline=2 microbatches=3 global_batch=12 precision.mode=bfloat16")),
    "a server": (3, {**SERVER, "parameter_server.servers": 1}),
    "colocated servers": (2, {**SERVER, "parameter_server.placement": "colocated"}),
    "two servers": (4, {**SERVER, "parameter_server.servers": 2}),
    "servers in shared memory": (3, {**SERVER, "parameter_server.transport": "shared"}),
}


@pytest.fixture
def text(text, tmp_path):
    kept = tmp_path / "offloaded"
    kept.mkdir()
    return {"data.path": text, "run.steps": 4, "zero.offload_directory": kept}


def make_steps(trainer):
    steps = trainings.run_steps(trainer, trainer.recipe.run.steps)
    losses, result = [step.loss for step in steps], [step.recomputed for step in steps]
    return losses, result, [b"".join(map(bytes, blocks_of(piece.array))) for piece in trainer.exchange.pieces()]


def train(ranks, settings, run, between=None):
    def body(comm):
        trainer = assemble_trainer(comm, settings, directory=run)
        if between is not None:
            between(trainer)
        return make_steps(trainer)

    return run_threads(ranks, body)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.full_except("bfloat16 in a pipeline")
def test_flipped_bit_is_detected_and_corrected(layout, text, tmp_path):
    ranks, keys = LAYOUTS[layout]
    settings = {**text, "optimizer.clip_norm": 0, **keys}
    if "offloaded" not in layout:
        settings.pop("zero.offload_directory")
    calm = train(ranks, settings, tmp_path)
    errs = 1 if ranks > 1 else 0
    result = train(ranks, {**settings, **EACH, "chaos.corrupt": f"['{errs}@2']"}, tmp_path)
    assert [losses for losses, _, _ in result] == [losses for losses, _, _ in calm]
    assert [state for _, _, state in result] == [state for _, _, state in calm]
    for _, again, _ in result:
        assert [step.fault for step in (again[0], *again[2:])] == [""] * 3
        assert again[1].ranks == (errs,) and f"step 2: a silent fault: rank {errs} on {socket.gethostname()}" in (
            again[1].fault
        )


def test_overflow_that_does_not_repeat_is_corrected(text, tmp_path):
    settings = {**text, **RING}
    settings.pop("zero.offload_directory")
    calm = train(2, settings, tmp_path)
    result = train(2, {**settings, "run.suspicious_factor": 9, "chaos.overflow": "[3]"}, tmp_path)
    assert [losses for losses, _, _ in result] == [losses for losses, _, _ in calm]
    again = result[1][1]
    assert again[0] is again[1] is again[3] is None
    assert again[2].suspicion == "gradient norm inf" and again[2].ranks == (0,)


def test_repeat_of_unusual_data_gives_the_same_bits(text, tmp_path, monkeypatch):
    monkeypatch.setattr(sdc_check, "LEAST_STEPS", 1)

    def between(trainer):
        step = trainer.executor.run

        def run(operations, batches, samples, number, *rest):  # the third step has a tenth of its samples
            return step(operations, batches, samples if number != 3 else samples / 10, number, *rest)

        trainer.executor.run = run

    settings = {**text, **RING, "run.suspicious_factor": 4}
    settings.pop("zero.offload_directory")
    for _, again, _ in train(2, settings, tmp_path, between):
        assert again[0] is again[1] is again[3] is None
        assert again[2].suspicion.startswith("gradient norm ") and "with a median of" in again[2].suspicion
        assert again[2].ranks == () and again[2].fault == ""


def failure(settings, tmp_path, between=None):
    def body(comm):
        trainer = assemble_trainer(comm, {**settings, **RING, **EACH}, directory=tmp_path)
        if between is not None:
            between(trainer)
        with pytest.raises(DivergenceError) as failed:
            make_steps(trainer)
        return str(failed.value)

    return run_threads(3, body)


def test_rank_with_two_consecutive_faults_stops_the_run(text, tmp_path):
    text.pop("zero.offload_directory")
    for output in failure({**text, "chaos.corrupt": "['2@2', '2@3']"}, tmp_path):
        assert output.startswith(f"step 3: rank 2 on {socket.gethostname()} computed other bits of the same step twice")
    apart = train(3, {**text, **RING, **EACH, "chaos.corrupt": "['0@2', '1@3']"}, tmp_path)
    assert [step.ranks for step in apart[2][1]] == [(), (0,), (1,), ()]


def test_rank_with_a_permanent_fault_stops_the_run(text, tmp_path):
    text.pop("zero.offload_directory")
    drifts = np.random.default_rng(1)

    def between(trainer):
        handlers = trainer.executor._handlers

        def backward(op):
            handlers[Kind.BACKWARD](op)
            if trainer.comm.rank == 1 and trainer.executor.number == 2:
                trainer.executor.gradients_in(trainer.exchange.context.part)[0] += drifts.random()

        trainer.executor._handlers = {**handlers, Kind.BACKWARD: backward}

    for output in failure(text, tmp_path, between):
        assert "step 2: rank 1 on " in output and "twice in a row" in output and "exclude that node" in output


def plant_damage(trainer, times):
    """Make sums received by rank 1 wrong, by a growing amount, in the first ``times`` computations of step 2."""
    reduce, left = trainer.exchange.handlers[Kind.REDUCE], [times if trainer.comm.rank == 1 else 0]

    def reduce_damaged(op):
        reduce(op)
        if left[0] and trainer.executor.number == 2:
            trainer.executor.gradients_in(op.range)[0] += left[0]
            left[0] -= 1

    trainer.exchange.handlers = {**trainer.exchange.handlers, Kind.REDUCE: reduce_damaged}


def test_fault_of_the_exchange_blames_no_rank(text, tmp_path):
    text.pop("zero.offload_directory")
    calm = train(3, {**text, **RING}, tmp_path)
    between = partial(plant_damage, times=1)
    result = train(3, {**text, **RING, **EACH}, tmp_path, between)
    assert [losses for losses, _, _ in result] == [losses for losses, _, _ in calm]
    assert result[0][1][1].ranks == () and "the exchange of gradients gave other bits" in result[0][1][1].fault
    for output in failure(text, tmp_path, partial(plant_damage, times=3)):
        assert "step 2: three exchanges of the same gradients gave three results" in output


@cases(
    "settings, message",
    ({"run.suspicious_factor": 1}, "finite and above 1"),
    ({"run.recompute_every_steps": -1}, "must be at least 0"),
    ({**EACH, "parallel.strategy": "gossip"}, "ranks without common gradient sums"),
    ({**EACH, **SERVER, "parameter_server.consistency": "asp"}, "consistency = 'bsp'"),
    (recipe_keys("suspicious_factor=5 run.device=gpu"), "run.suspicious_factor = 5.0 with run.device = 'gpu'"),
    (
        EACH | recipe_keys("delayed=true overlap=thread"),
        "run.recompute_every_steps = 1 with communication.delayed = true",
    ),
)
def test_recipes_that_cannot_repeat_steps_are_rejected(settings, message):
    assert_rejected(settings, message)
