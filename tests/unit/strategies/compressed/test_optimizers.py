"""Trainings with DGC and 1-bit Adam: resume, other numbers of ranks, pipelines, GPUs, and bad gradients."""

from dataclasses import replace

import numpy as np
import pytest

from harness.combinations import SMALL
from harness.compressed.optimizers import layout, pad_values, seat_of
from harness.compressed.optimizers import steps as given_steps
from harness.marks import cases
from harness.trainings import local_bits, outcomes, recipe_keys, trainer_of
from hpcdist.arrays.ranges import Range
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError, NonFiniteError, ScheduleError
from hpcdist.strategies.build import build_executor, operations
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.data import catalogue
from hpcdist.strategies.data.coded_allreduce import Dgc
from hpcdist.strategies.data.exchange import DataExchange
from hpcdist.strategies.data.onebit import OneBit
from hpcdist.strategies.schedule.replica_check import check_replicas
from hpcdist.strategies.schedule.verify.proof import verify
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.saving import CheckpointSaver

WARM = 3
DGC = recipe_keys(
    "compression=dgc compression.density=0.05 compression.warmup_steps=4 optimizer.name=sgd "
    "optimizer.momentum=0.9 optimizer.learning_rate=0.1"
)
ONEBIT = {"communication.compression": "onebit", "compression.warmup_steps": WARM}
BOTH = {"dgc": DGC, "onebit": ONEBIT}
PIPELINE = {"parallel.pipeline": 2, "parallel.microbatches": 2}


@pytest.fixture
def text(text):
    return {**SMALL, "data.path": text}


@pytest.mark.parametrize(
    ("name", "ranks", "kept", "keys"), [("onebit", 3, 2, {}), ("dgc", 4, 2, PIPELINE), ("onebit", 4, 4, PIPELINE)]
)
@pytest.mark.full
def test_resumed_run_has_the_bits_of_the_whole_run(text, tmp_path, name, ranks, kept, keys):
    settings, last = text | BOTH[name] | keys, 6

    def run_whole(comm):
        trainer = trainer_of(comm, settings)
        outcomes(trainer, kept, 0)
        path = CheckpointSaver(trainer, tmp_path / "saved").save(kept)
        return (outcomes(trainer, last, kept), local_bits(trainer)), path

    def resumed(comm):
        trainer = trainer_of(comm, settings, path)
        results = outcomes(trainer, last, kept)
        check_replicas(trainer.data_axis, trainer.exchange.parameters, last)
        return results, local_bits(trainer)

    results = run_threads(ranks, run_whole)
    path = results[0][1]
    assert run_threads(ranks, resumed) == [kept for kept, _ in results]


def local_residuals(trainer):
    """Return the local contribution to the residuals of all ranks, by name: flat, in float64."""
    exchange, size, ranks = trainer.exchange, trainer.model.layout.size, trainer.data_axis.size
    reducer = exchange.reducer
    if isinstance(reducer, Dgc):
        kept = {"unsent": reducer.unsent, "velocity": reducer.velocity}
        return {name: one.feedback.residuals.array.astype(np.float64) for name, one in kept.items()}
    assert isinstance(reducer, OneBit)
    results = {name: np.zeros(size) for name in ("worker", "server", "m", "v")}
    for group, adam in reducer.all_groups():
        where = np.concatenate([np.r_[part.slice] for _, part in group.tensors])
        results["worker"][where] = adam.worker_error / ranks
        results["server"][where[adam.own.slice]] = adam.server_error
        for key in ("m", "v"):
            results[key][where] = adam.arrays()[key].astype(np.float64) / ranks
    return results


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("name", BOTH)
def test_residuals_are_kept_on_another_number_of_ranks(text, tmp_path, name, after):
    settings = text | BOTH[name]

    def save_run(comm):
        trainer = trainer_of(comm, settings)
        outcomes(trainer, 5, 0)
        return CheckpointSaver(trainer, tmp_path / "saved").save(5), local_residuals(trainer)

    def resume_run(comm):
        trainer = trainer_of(comm, settings, path)
        result = local_residuals(trainer)
        losses = [loss for loss, *_ in outcomes(trainer, 8, 5)]
        check_replicas(trainer.data_axis, trainer.exchange.parameters, 8)
        return result, bool(np.isfinite(losses).all())

    saved = run_threads(2, save_run)
    path = saved[0][0]
    again = run_threads(after, resume_run)
    for key in saved[0][1]:
        was, has = (
            sum(one[key] for one in side) for side in ([kept for _, kept in saved], [kept for kept, _ in again])
        )
        assert np.abs(was).max() > 0
        np.testing.assert_allclose(has, was, atol=1e-6 * np.abs(was).max(), err_msg=key)
    assert all(finite for _, finite in again)


def test_frozen_variance_can_resume_as_adam_only_via_one_rank(text, tmp_path):
    adamw = {**text, "optimizer.beta2": 0.9}

    def save_frozen(comm):
        trainer = trainer_of(comm, adamw | ONEBIT)
        outcomes(trainer, 4, 0)
        path = CheckpointSaver(trainer, tmp_path / "saved").save(4)
        with pytest.raises(ConfigurationError, match="has the frozen variance of 1-bit Adam"):
            trainer_of(comm, adamw, path)
        return path

    path = run_threads(2, save_frozen)[0]
    alone = trainer_of(solo(), adamw | ONEBIT, path)
    outcomes(alone, 5, 4)
    plain = trainer_of(solo(), adamw, CheckpointSaver(alone, tmp_path / "thawed").save(5))
    ours, theirs = ([loss for loss, *_ in outcomes(one, 8, 5)] for one in (alone, plain))
    assert theirs == pytest.approx(ours, rel=1e-6)


def test_one_rank_applies_sign_residuals_and_continues_with_adam(rng):
    given = np.array([pad_values(rng.standard_normal) for _ in range(6)])

    def body(comm):
        exchange = catalogue.onebit(
            seat_of(comm, {"name": "adamw", "clip_norm": 0.0}), CompressionConfig(warmup_steps=4)
        )
        given_steps(exchange, given[:5])
        ((_, adam), *_) = exchange.reducer.all_groups()
        before = adam.v.copy()
        adam.freeze()
        adam.worker_error[...] = 0.25
        adam.server_error[...] = 0.5
        m = adam.m.copy()
        adam.thaw()
        return [adam.v, before, adam.m - m, adam.worker_error, adam.server_error]

    v, before, paid, *errors = run_threads(1, body)[0]
    assert not np.concatenate(errors).any()
    np.testing.assert_allclose(v[before > 1e-2 * before.mean()], before[before > 1e-2 * before.mean()], rtol=1e-5)
    np.testing.assert_allclose(paid[before > 0], 0.75, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "steps_before", "keys"), [("onebit", 2, {}), ("dgc", 2, PIPELINE), ("onebit", 5, PIPELINE)]
)
def test_bad_gradient_on_one_rank_changes_no_state_on_any_rank(text, name, steps_before, keys):
    settings = text | BOTH[name] | keys

    def body(comm):
        trainer = trainer_of(comm, settings)
        outcomes(trainer, steps_before, 0)
        before, healthy = local_bits(trainer), trainer.model.loss.backward
        if comm.rank == comm.size - 1:  # the last stage, where there are several
            trainer.model.loss.backward = lambda scale, *rest: healthy(np.nan * scale, *rest)
        with pytest.raises(NonFiniteError) as refused:
            outcomes(trainer, steps_before + 1, steps_before)
        trainer.model.loss.backward = healthy
        assert local_bits(trainer) == before
        return str(refused.value)

    for messages in run_threads(4 if keys else 3, body):
        assert f"step {steps_before + 1}: loss" in messages and "gradient norm nan" in messages


@pytest.mark.parametrize("clip", [0, 0.05])
def test_pipeline_steps_match_one_rank(text, clip):
    """The clipped gradient is the gradient of the replica, not of a stage."""
    settings = text | DGC | {"optimizer.clip_norm": clip, "model.dropout": 0, "compression.warmup_steps": 0}
    settings |= {"compression.density": 1, "parallel.microbatches": 2}

    def body(comm, keys):
        trainer = trainer_of(comm, settings | keys)
        result = [norm for _, norm, *_ in outcomes(trainer, 4, 0)]
        part = trainer.context.part
        return part, trainer.exchange.parameters.range(part).copy(), result

    _, whole, norms = run_threads(2, lambda comm: body(comm, {}))[0]
    for part, result, lines in run_threads(4, lambda comm: body(comm, {"parallel.pipeline": 2})):
        np.testing.assert_allclose(result, whole[part.slice], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(lines, norms, rtol=1e-4)


@pytest.mark.parametrize("name", BOTH)
def test_uncut_tensors_stay_identical_on_the_tensor_axis(text, name):
    settings = text | BOTH[name] | {"parallel.tensor": 2, "model.dropout": 0}

    def body(comm):
        trainer = trainer_of(comm, settings)
        losses = [loss for loss, *_ in outcomes(trainer, 6, 0)]
        assert np.isfinite(losses).all()
        check_replicas(trainer.data_axis, trainer.exchange.parameters, 6)
        segments = [segment for segment in trainer.model.layout.segments if not segment.spec.whole]
        return {segment.key: trainer.exchange.parameters.view(segment.key).tobytes() for segment in segments}

    results = run_threads(4, body)
    assert all(one == results[0] for one in results) and len(results[0]) > 5


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.full_except("onebit")
def test_compressed_optimizers_on_the_gpu_match_the_cpu(gpu, name):
    rng = np.random.default_rng(5)  # drawn once: none of these signs hangs on rounding
    given = np.array([[pad_values(lambda n: rng.integers(-9, 10, n)) for _ in range(2)] for _ in range(6)])

    def body(comm, on):
        exchange: DataExchange
        if name == "dgc":
            keys = {"name": "sgd", "momentum": 0.5, "learning_rate": 0.25, "weight_decay": 0.0, "clip_norm": 0.0}
            config = CompressionConfig(density=0.1, warmup_steps=4)
            exchange = catalogue.dgc(seat_of(comm, keys, on=on), config)
        else:
            context = seat_of(comm, {"name": "adamw", "learning_rate": 0.01}, on=on)
            exchange = catalogue.onebit(context, CompressionConfig(warmup_steps=WARM))
        return given_steps(exchange, given[:, comm.rank])

    host = run_threads(2, lambda comm: body(comm, "cpu"))
    there = run_threads(2, lambda comm: body(comm, "gpu"))
    assert there[0].tobytes() == there[1].tobytes()
    if name == "dgc":
        assert np.array_equal(host, there)
    np.testing.assert_allclose(there, host, atol=1e-4)


def list_operations(comm):
    context = replace(seat_of(comm, {"name": "adamw"}), pipeline=solo())
    exchange = catalogue.onebit(context, CompressionConfig(warmup_steps=WARM))
    return operations(context, exchange, build_executor(context, exchange).copies, ParallelConfig())


def test_lists_that_send_too_early_or_too_little_are_rejected():
    units = dict(enumerate(layout().units.values()))
    good = run_threads(2, list_operations)
    kinds = [op.kind for op in good[0]]
    assert kinds.index(Kind.REDUCE) < kinds.index(Kind.AGREE) < kinds.index(Kind.COMPRESS) < kinds.index(Kind.DIRECTION)

    def check(change, ranks=(0, 1)):
        lists = [change(steps) if rank in ranks else steps for rank, steps in enumerate(good)]
        verify(lists, grid=ProcessGrid(data=2), units=units, microbatches=1)

    def without(kind):
        return lambda steps: [op for op in steps if op.kind is not kind]

    def moved(kind, before):
        def change(steps):
            rest, local_data = without(kind)(steps), [op for op in steps if op.kind is kind]
            at = [op.kind for op in rest].index(before)
            return [*rest[:at], *local_data, *rest[at:]]

        return change

    def halved(steps):
        half = Range(0, next(op.range.stop for op in steps if op.kind is Kind.COMPRESS and op.range) // 2)
        return [replace(op, range=half) if op.kind is Kind.COMPRESS else op for op in steps]

    def doubled(steps):
        return [same for op in steps for same in ([op, op] if op.kind is Kind.COMPRESS else [op])]

    check(lambda steps: steps)
    for change, ranks, why in (
        (moved(Kind.COMPRESS, Kind.AGREE), (0, 1), r"COMPRESS\(.*\) comes before AGREE"),
        (moved(Kind.COMPRESS, Kind.APPLY), (0, 1), r"DIRECTION\(.*\) comes before COMPRESS"),
        (without(Kind.AGREE), (0, 1), r"sends gradients, but the list has no AGREE\(\), in which the ranks agree"),
        (halved, (0, 1), "is not covered by COMPRESS operations"),
        (doubled, (0, 1), "overlaps the parameter range of an earlier COMPRESS"),
        (without(Kind.COMPRESS), (1,), "rank 1 has ended|at the same point|waits"),
    ):
        with pytest.raises(ScheduleError, match=why):
            check(change, ranks)


@cases(
    "keys, why",
    (DGC | {"optimizer.name": "adamw"}, "set optimizer.name = 'sgd'"),
    (DGC | {"parallel.strategy": "zero1"}, "set parallel.strategy = 'allreduce'"),
    (DGC | {"optimizer.normalize_gradient": "true"}, "which no rank has; set optimizer.normalize_gradient = false"),
    (DGC | {"compression.across_nodes": "true"}, "set compression.across_nodes = false"),
    (DGC | {"compression.error_feedback": "false"}, "compression.error_feedback = false has no effect"),
    (DGC | {"precision.mode": "float16"}, "set precision.mode = 'float32'"),
    (DGC | {"precision.mode": "float64"}, "set precision.mode = 'float32'"),
    (ONEBIT | {"optimizer.name": "lamb"}, "set optimizer.name = 'adamw'"),
    (ONEBIT | {"compression.warmup_steps": 0}, "the frozen variance is measured in the warm-up steps"),
    (ONEBIT | {"optimizer.bias_correction": "false"}, "set optimizer.bias_correction = true"),
    (ONEBIT | {"compression.density": 0.1}, "compression.density = 0.1 has no effect"),
    (ONEBIT | {"precision.mode": "bfloat16"}, "error feedback"),
    (ONEBIT | {"communication.overlap": "thread"}, "communication.overlap"),
)
def test_incompatible_optimizer_options_are_rejected(text, keys, why):
    with pytest.raises(ConfigurationError) as refused:
        recipes.load(None, [f"{key}={value}" for key, value in (text | keys).items()], {})
    assert why in str(refused.value) and refused.value.exit_code == 78
