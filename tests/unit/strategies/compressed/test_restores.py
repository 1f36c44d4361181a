"""Residuals of compressed runs are applied after any restore: another compressor, rank, number of nodes, one rank."""

import numpy as np
import pytest

from harness import trainings
from harness.combinations import HALF, SMALL
from harness.marks import cases
from harness.trainings import local_bits, losses, outcomes, trainer_of
from hpcdist.arrays.layout import TensorSpec
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.strategies.compressed.autoselect import CompressionDecision
from hpcdist.training.build import selection
from hpcdist.training.run.saving import CheckpointSaver

FACTORS = {"communication.compression": "powersgd", "compression.rank": 2}
ACROSS = {"compression.across_nodes": "true"}


@pytest.fixture
def keys(words):
    return {**SMALL, **words, "model.dropout": 0}


def residuals_of(trainer):
    """Return the residuals of this rank, or zeros if it has no residuals."""
    result, store = np.zeros(trainer.model.layout.size), trainings.residuals_of(trainer.exchange)
    assert store is not None
    for part in store.parts:
        result[part.slice] = store.range(part)
    return result


def begin(comm, given, path):
    trainer = trainer_of(comm, given)
    outcomes(trainer, HALF, 0)
    return (
        CheckpointSaver(trainer, path).save(HALF),
        local_bits(trainer),
        residuals_of(trainer),
        outcomes(trainer, 2 * HALF, HALF),
    )


@pytest.mark.parametrize("of", [FACTORS, {"communication.compression": "int8"}])
@pytest.mark.full_except("of0")
def test_resume_over_nodes_is_bit_identical(keys, tmp_path, of):
    """Factors differ between the ranks of a node: each rank has the factors of its share."""
    given = keys | of | ACROSS

    def resumed(comm, path):
        trainer = trainer_of(comm, given, path)
        return local_bits(trainer), outcomes(trainer, 2 * HALF, HALF)

    results = run_threads(4, lambda comm: begin(comm, given, tmp_path), ranks_per_node=2)
    again = run_threads(4, lambda comm: resumed(comm, results[0][0]), ranks_per_node=2)
    assert [(one[1], one[3]) for one in results] == again


@cases(
    "before, now",
    (FACTORS, {"communication.compression": "int8"}),
    ({"communication.compression": "sign"}, FACTORS),
    (FACTORS, FACTORS | {"compression.rank": 64}),
)
@pytest.mark.full_except("before1-now1")
def test_another_compressor_takes_over_the_residuals(keys, tmp_path, before, now):
    def resumed(comm, path):
        trainer = trainer_of(comm, keys | now, path)
        first = residuals_of(trainer)
        outcomes(trainer, HALF + 1, HALF)
        whole = [key for key, _ in local_bits(trainer) if "powersgd" in key]
        return first, residuals_of(trainer), whole

    results = run_threads(2, lambda comm: begin(comm, keys | before, tmp_path))
    again = run_threads(2, lambda comm: resumed(comm, results[0][0]))
    for one, (first, then, factors) in zip(results, again, strict=True):
        assert np.abs(first).max() > 0
        np.testing.assert_array_equal(first, one[2], "nothing is left out")
        if now is not FACTORS and "compression.rank" in now:
            assert not factors and not then.any(), "where nothing is encoded, all is paid with the next gradient"


def test_residuals_of_biases_with_factors_are_applied(keys, tmp_path, monkeypatch):
    """The checkpoint comes from a version that treated stacked biases as matrices."""

    def resumed(comm, path):
        trainer = trainer_of(comm, keys | FACTORS, path)
        assert not [key for key, _ in local_bits(trainer) if "powersgd" in key and "bias" in key]
        bias = trainer.model.layout.by_key["1.qkv.bias"].range
        first = residuals_of(trainer)[bias.slice].copy()
        outcomes(trainer, HALF + 1, HALF)
        return first, residuals_of(trainer)[bias.slice]

    with monkeypatch.context() as before:
        before.setattr(TensorSpec, "is_matrix", property(lambda spec: len(spec.shape) > 1))
        results = run_threads(2, lambda comm: begin(comm, keys | FACTORS, tmp_path))
    for first, then in run_threads(2, lambda comm: resumed(comm, results[0][0])):
        assert first.any() and not then.any()


def test_one_rank_applies_the_residuals_of_two_ranks(keys, tmp_path):
    given = keys | {"communication.compression": "sign", "optimizer.name": "sgd", "optimizer.clip_norm": 0}

    def resumed(comm, path, *, forgets):
        trainer = trainer_of(comm, given, path)
        first = residuals_of(trainer)
        if forgets:
            trainings.residuals_of(trainer.exchange).zero()
        outcomes(trainer, HALF + 1, HALF)
        return first, residuals_of(trainer), trainer.exchange.parameters.array.copy(), trainer.learning_rate(HALF + 1)

    results = run_threads(2, lambda comm: begin(comm, given, tmp_path))
    first, then, paid, rate = run_threads(1, lambda comm: resumed(comm, results[0][0], forgets=False))[0]
    _, _, unpaid, _ = run_threads(1, lambda comm: resumed(comm, results[0][0], forgets=True))[0]
    np.testing.assert_allclose(first, results[0][2] + results[1][2], atol=1e-6)
    assert np.abs(first).max() > 0 and not then.any()
    np.testing.assert_allclose(paid - unpaid, -rate * first, atol=1e-6)


def test_overflow_does_not_lose_pending_residuals(keys, tmp_path):
    given = keys | {"communication.compression": "sign", "precision.mode": "float16", "precision.loss_scale": 256.0}

    def resumed(comm, path):
        trainer = trainer_of(comm, given, path)
        exchange, first = trainer.exchange, residuals_of(trainer)
        reduce, kept = exchange.reducer.reduce, exchange.handlers

        def reduce_spoiled(op):
            exchange.gradients.range(op.range)[3] = np.inf
            reduce(op)

        exchange.handlers = {kind: reduce_spoiled if call == reduce else call for kind, call in kept.items()}
        skipped = [outcomes(trainer, HALF + 1, HALF)[0][2]]
        trainer.exchange.pieces()
        same = [bool((residuals_of(trainer) == first).all())]
        exchange.handlers = kept
        skipped += [outcomes(trainer, HALF + 2, HALF + 1)[0][2]]
        return skipped, [*same, not residuals_of(trainer).any()]

    results = run_threads(2, lambda comm: begin(comm, given, tmp_path))
    assert run_threads(1, lambda comm: resumed(comm, results[0][0])) == [([True, False], [True, True])]


def test_messages_inside_a_node_are_not_compressed(keys):
    def run(comm, more):
        return losses(trainer_of(comm, keys | {"communication.algorithm": "native"} | more), 3)

    dense, across = (
        run_threads(2, lambda comm, more=more: run(comm, more))
        for more in ({}, {"communication.compression": "int4"} | ACROSS)
    )
    assert dense == across


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.full
def test_loss_scale_changes_neither_steps_nor_residuals(keys, served):
    """Scales are powers of 2, so results agree up to 16-bit rounding.

    A misplaced scale would be a factor of 16, which AdamW hides.
    """
    servers = {"parallel.strategy": "parameter_server", "parameter_server.placement": "colocated"}
    sgd = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.05, "optimizer.clip_norm": 0, "optimizer.momentum": 0}
    given = (
        keys | sgd | {"communication.compression": "int4", "precision.mode": "float16"} | (servers if served else {})
    )

    def run(comm, scale):
        trainer = trainer_of(comm, given | {"precision.loss_scale": scale})
        first = trainer.exchange.parameters.array.astype(np.float32)
        assert not any(done[2] for done in outcomes(trainer, HALF, 0))
        return trainer.exchange.parameters.array.astype(np.float32) - first, residuals_of(trainer)

    small, large = (run_threads(2, lambda comm, scale=scale: run(comm, scale)) for scale in (64.0, 1024.0))
    for (moved, kept), (again, also) in zip(small, large, strict=True):
        assert np.abs(moved).max() > 1e-3 and np.abs(kept).max() > 1e-5
        np.testing.assert_allclose(again, moved, atol=0.2 * np.abs(moved).max())
        assert 0.5 < np.abs(also).sum() / np.abs(kept).sum() < 2


def test_measured_selection_is_kept_for_the_same_number_of_ranks(keys, tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "decide", lambda *args, **more: CompressionDecision("int8", "measured"))
    monkeypatch.setattr(selection, "tuning_is_off", lambda world: False)
    given = keys | {"communication.compression": "auto"}
    path = run_threads(2, lambda comm: begin(comm, given, tmp_path))[0][0]
    monkeypatch.setattr(selection, "decide", lambda *args, **more: CompressionDecision("none", "measured"))
    for ranks, expected in ((2, ("int8", "checkpoint")), (3, ("none", "measured"))):
        for result in run_threads(ranks, lambda comm: trainer_of(comm, given, path).compression):
            assert (result.name, result.source) == expected
