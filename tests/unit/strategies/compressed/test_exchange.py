"""Trainings with compressed gradients: steps, skipped steps, checkpoints and other numbers of ranks."""

import numpy as np
import pytest

from harness.combinations import EXCHANGES, HALF, SMALL
from harness.marks import cases, on_threads
from harness.trainings import local_bits, losses, outcomes, residuals_of, state, trainer_of
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import NonFiniteError
from hpcdist.strategies.compressed.config import COMPRESSORS
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.data.coded_allreduce import CodedSum
from hpcdist.training.build import pipeline
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 6
FEEDBACK_LOSES = {"float16": 2e-3, "bfloat16": 1e-2}  # relative to the loss of a dense run, of the ones that lose least


@pytest.fixture
def keys(words):
    return {**SMALL, **words, "model.dropout": 0, "compression.density": 0.1, "compression.rank": 2}


def compressed(keys, name, **more):
    read = {"topk": "density", "randomk": "density", "powersgd": "rank"}.get(name)
    dropped = {f"compression.{key}" for key in ("density", "rank") if key != read}
    kept = {key: value for key, value in keys.items() if key not in dropped}
    return kept | {"communication.compression": name} | {key.replace("__", "."): value for key, value in more.items()}


def exchange_of(trainer):
    assert isinstance(trainer.exchange.reducer, CodedSum)
    return trainer.exchange


def spoil(exchange, value):
    """Replace one value of every later gradient of this rank by ``value``."""

    def reduce_spoiled(op):
        assert op.range is not None
        exchange.gradients.range(op.range)[3] = value
        exchange.reducer.reduce(op)

    exchange.handlers = {**exchange.handlers, Kind.REDUCE: reduce_spoiled}


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.matrix_except("bfloat16", "int8", "qsgd", "sign", "topk", "randomk", "powersgd")
@pytest.mark.full_except("powersgd")
def test_compressed_replicas_stay_identical_and_learn(keys, name):
    def run(comm, given):
        trainer = trainer_of(comm, given)
        return losses(trainer, STEPS), trainer.exchange.parameters.array.copy()

    dense = run_threads(3, lambda comm: run(comm, compressed(keys, "none")))[0][0]
    results = run_threads(3, lambda comm: run(comm, compressed(keys, name)))
    for _, parameters in results:
        np.testing.assert_array_equal(parameters, results[0][1])
    assert results[0][0] != dense, "something was lost"
    assert results[0][0][-1] < results[0][0][0] and results[0][0] == pytest.approx(
        dense, rel=FEEDBACK_LOSES.get(name, 0.1)
    )


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 4 << 20])
@on_threads(2)
def test_powersgd_buckets_contain_whole_layers(comm, keys, bucket_bytes):
    trainer = trainer_of(comm, compressed(keys, "powersgd", communication__bucket_bytes=bucket_bytes))
    layers = sorted(trainer.model.layout.units.values(), reverse=True)
    results = [op.range for op in trainer.operations if op.kind is Kind.REDUCE]
    assert [layer for part in results for layer in layers if layer.intersect(part) == layer] == layers
    assert [part.start for part in results[:-1]] == [part.stop for part in results[1:]]
    for part in results[:-1]:
        first = min(layer for layer in layers if layer.intersect(part))
        assert 4 * (part.stop - first.start) >= bucket_bytes > 4 * (part.stop - first.stop)
    assert len(results) == {1: len(layers), 4 << 20: 1}.get(bucket_bytes, len(results))


def test_warm_up_updates_are_dense(keys):
    def run(comm, given):
        return losses(trainer_of(comm, given), STEPS)

    dense, late = (
        run_threads(2, lambda comm, given=given: run(comm, given))[0]
        for given in (compressed(keys, "none"), compressed(keys, "sign", compression__warmup_steps=3))
    )
    assert late[:4] == dense[:4] and late[4:] != dense[4:], "a loss is that of the update before"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["int8", "topk", "randomk", "powersgd"])
@pytest.mark.full_except("randomk-2")
def test_resumed_run_restores_the_residuals(keys, tmp_path, name, ranks):
    given = compressed(keys, name)

    def begin(comm):
        trainer = trainer_of(comm, given)
        outcomes(trainer, HALF, 0)
        path = CheckpointSaver(trainer, tmp_path).save(HALF)
        kept = local_bits(trainer)
        saved = state(trainer)
        return path, kept, outcomes(trainer, 2 * HALF, HALF), saved

    def resumed(comm, path):
        trainer = trainer_of(comm, given, path)
        residuals = residuals_of(trainer.exchange)
        assert residuals is not None
        owed = np.zeros(trainer.model.layout.size)
        for part in residuals.parts:
            owed[part.slice] = residuals.range(part)
        return local_bits(trainer), outcomes(trainer, 2 * HALF, HALF), owed

    results = run_threads(2, begin)
    again = run_threads(ranks, lambda comm: resumed(comm, results[0][0]))
    if ranks == 2:
        assert [(one[1], one[2]) for one in results] == [one[:2] for one in again], "bit for bit"
    trainer = run_threads(1, lambda comm: trainer_of(comm, compressed(keys, "none")))[0]
    for segment in trainer.model.layout.segments:
        saved = [results[0][3].get((f"residual.{rank}", segment.key)) for rank in range(2)]
        if saved[0] is None:
            continue  # a vector of powersgd travels as it is
        total = sum(np.asarray(values, np.float64) for values in saved)
        now = sum(one[2][segment.range.slice] for one in again)
        np.testing.assert_allclose(now, total, atol=1e-6, err_msg=segment.key)
    assert np.abs(sum(one[2] for one in again)).max() > 0


@pytest.mark.parametrize("name", ["int8", "topk", "powersgd"])
def test_overflow_on_one_rank_changes_no_state(keys, name):
    given = compressed(keys, name) | {"precision.mode": "float16", "precision.loss_scale": 256.0}

    def run(comm):
        trainer = trainer_of(comm, given)
        outcomes(trainer, HALF, 0)
        before = local_bits(trainer)
        if comm.rank == 1:
            spoil(exchange_of(trainer), np.inf)
        skipped = outcomes(trainer, HALF + 1, HALF)[0][2]
        return skipped, local_bits(trainer)[:-1] == before[:-1]  # but for the count of skipped steps

    assert run_threads(2, run) == [(True, True)] * 2


def test_non_finite_gradient_ends_a_float32_run(keys):
    given = compressed(keys, "sign")

    def run(comm):
        trainer = trainer_of(comm, given)
        outcomes(trainer, 1, 0)
        before = trainer.exchange.parameters.array.tobytes()
        if comm.rank == 0:
            spoil(exchange_of(trainer), np.nan)
        with pytest.raises(NonFiniteError):
            outcomes(trainer, 2, 1)
        return before, trainer.exchange.parameters.array.tobytes()

    for before, after in run_threads(2, run):
        assert before == after


def test_resume_cases_cover_every_kind_of_sum():
    named = {row["communication.compression"] for row in EXCHANGES.values() if "communication.compression" in row}
    assert named >= {"int8", "topk", "randomk", "qsgd", "powersgd"}


@cases(
    "name, more, nbytes",
    ("int8", {}, 8 + 4),
    ("int8", {"compression.error_feedback": "false"}, 8),
    ("topk", {"precision.mode": "bfloat16"}, 4 + 8 + 4 + 4),  # master, moments, and residuals of before the step
    ("dgc", {"optimizer.name": "sgd", "optimizer.momentum": 0.9}, 4 + 4),
    ("onebit", {"compression.warmup_steps": 1}, 8 + 4 + 2),
)
def test_memory_partition_counts_residuals(keys, name, more, nbytes):
    given = compressed(keys, name) | more | ({"compression.density": 0.1} if name == "dgc" else {})

    def run(comm):
        trainer = trainer_of(comm, given)
        held = trainer.ledger.peak["optimizer"] / trainer.model.layout.size
        return held, pipeline.model_state_bytes(trainer.recipe, comm.size).per_parameter

    kept = 4 if "precision.mode" in more else 8  # parameters and gradients
    for held, each in run_threads(2, run):
        assert each - kept == nbytes
        assert held == pytest.approx(nbytes, rel=0.08)  # small tensors take more than their part of a line
