"""What compressed runs owe is paid, whatever a restore changes: the compressor, its rank, the nodes, one rank alone."""

import numpy as np
import pytest

from harness.combinations import HALF, SMALL
from harness.marks import cases
from harness.trainings import bits, losses, outcomes, trainer_of
from hpcdist.arrays.layout import TensorSpec
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.strategies.compressed.autoselect import CompressionDecision
from hpcdist.strategies.compressed.exchange import CompressedExchange
from hpcdist.strategies.parameter_server.compressed import CompressedServerExchange
from hpcdist.training.build import selection
from hpcdist.training.run.saving import CheckpointSaver

FACTORS = {"communication.compression": "powersgd", "compression.rank": 2}
ACROSS = {"compression.across_nodes": "true"}


@pytest.fixture
def keys(words):
    return {**SMALL, **words, "model.dropout": 0}


def owed(trainer):
    """Return the residuals of this rank, zeros where it has none."""
    exchange = trainer.exchange
    assert isinstance(exchange, CompressedExchange | CompressedServerExchange) and exchange.residuals is not None
    found, store = np.zeros(trainer.model.layout.size), exchange.residuals.feedback.residuals
    for part in store.parts:
        found[part.slice] = store.range(part)
    return found


def begun(comm, given, path):
    trainer = trainer_of(comm, given)
    outcomes(trainer, HALF, 0)
    return CheckpointSaver(trainer, path).save(HALF), bits(trainer), owed(trainer), outcomes(trainer, 2 * HALF, HALF)


@pytest.mark.parametrize("of", [FACTORS, {"communication.compression": "int8"}])
@pytest.mark.full_except("of0")
def test_a_run_over_nodes_goes_on_bit_for_bit(keys, tmp_path, of):
    """Factors differ from rank to rank of a node: each has those of its own share."""
    given = keys | of | ACROSS

    def resumed(comm, path):
        trainer = trainer_of(comm, given, path)
        return bits(trainer), outcomes(trainer, 2 * HALF, HALF)

    found = run_threads(4, lambda comm: begun(comm, given, tmp_path), ranks_per_node=2)
    again = run_threads(4, lambda comm: resumed(comm, found[0][0]), ranks_per_node=2)
    assert [(one[1], one[3]) for one in found] == again


@cases(
    "before, now",
    (FACTORS, {"communication.compression": "int8"}),
    ({"communication.compression": "sign"}, FACTORS),
    (FACTORS, FACTORS | {"compression.rank": 64}),
)
@pytest.mark.full_except("before1-now1")
def test_another_compressor_takes_over_what_is_owed(keys, tmp_path, before, now):
    def resumed(comm, path):
        trainer = trainer_of(comm, keys | now, path)
        first = owed(trainer)
        outcomes(trainer, HALF + 1, HALF)
        whole = [key for key, _ in bits(trainer) if "powersgd" in key]
        return first, owed(trainer), whole

    found = run_threads(2, lambda comm: begun(comm, keys | before, tmp_path))
    again = run_threads(2, lambda comm: resumed(comm, found[0][0]))
    for one, (first, then, factors) in zip(found, again, strict=True):
        assert np.abs(first).max() > 0
        np.testing.assert_array_equal(first, one[2], "nothing is left out")
        if now is not FACTORS and "compression.rank" in now:
            assert not factors and not then.any(), "where nothing is encoded, all is paid with the next gradient"


def test_biases_that_had_factors_are_paid_what_they_are_owed(keys, tmp_path, monkeypatch):
    """A checkpoint of a version that took stacked biases for matrices."""

    def resumed(comm, path):
        trainer = trainer_of(comm, keys | FACTORS, path)
        assert not [key for key, _ in bits(trainer) if "powersgd" in key and "bias" in key]
        bias = trainer.model.layout.by_key["1.qkv.bias"].range
        first = owed(trainer)[bias.slice].copy()
        outcomes(trainer, HALF + 1, HALF)
        return first, owed(trainer)[bias.slice]

    with monkeypatch.context() as before:
        before.setattr(TensorSpec, "is_matrix", property(lambda spec: len(spec.shape) > 1))
        found = run_threads(2, lambda comm: begun(comm, keys | FACTORS, tmp_path))
    for first, then in run_threads(2, lambda comm: resumed(comm, found[0][0])):
        assert first.any() and not then.any()


def test_one_rank_alone_pays_what_two_ranks_owed(keys, tmp_path):
    given = keys | {"communication.compression": "sign", "optimizer.name": "sgd", "optimizer.clip_norm": 0}

    def resumed(comm, path, *, forgets):
        trainer = trainer_of(comm, given, path)
        first = owed(trainer)
        if forgets:
            assert isinstance(trainer.exchange, CompressedExchange) and trainer.exchange.residuals is not None
            trainer.exchange.residuals.feedback.residuals.zero()
        outcomes(trainer, HALF + 1, HALF)
        return first, owed(trainer), trainer.exchange.parameters.array.copy(), trainer.learning_rate(HALF + 1)

    found = run_threads(2, lambda comm: begun(comm, given, tmp_path))
    first, then, paid, rate = run_threads(1, lambda comm: resumed(comm, found[0][0], forgets=False))[0]
    _, _, unpaid, _ = run_threads(1, lambda comm: resumed(comm, found[0][0], forgets=True))[0]
    np.testing.assert_allclose(first, found[0][2] + found[1][2], atol=1e-6)
    assert np.abs(first).max() > 0 and not then.any()
    np.testing.assert_allclose(paid - unpaid, -rate * first, atol=1e-6)


def test_an_overflow_does_not_lose_what_was_about_to_be_paid(keys, tmp_path):
    given = keys | {"communication.compression": "sign", "precision.mode": "float16", "precision.loss_scale": 256.0}

    def resumed(comm, path):
        trainer = trainer_of(comm, given, path)
        exchange, first = trainer.exchange, owed(trainer)
        assert isinstance(exchange, CompressedExchange)
        reduce, kept = exchange.reduce, exchange.handlers

        def spoiled(op):
            exchange.gradients.range(op.range)[3] = np.inf
            reduce(op)

        exchange.handlers = {kind: spoiled if call == reduce else call for kind, call in kept.items()}
        skipped = [outcomes(trainer, HALF + 1, HALF)[0][2]]
        trainer.exchange.pieces()
        same = [bool((owed(trainer) == first).all())]
        exchange.handlers = kept
        skipped += [outcomes(trainer, HALF + 2, HALF + 1)[0][2]]
        return skipped, [*same, not owed(trainer).any()]

    found = run_threads(2, lambda comm: begun(comm, given, tmp_path))
    assert run_threads(1, lambda comm: resumed(comm, found[0][0])) == [([True, False], [True, True])]


def test_what_does_not_leave_a_node_is_not_compressed(keys):
    def run(comm, more):
        return losses(trainer_of(comm, keys | {"communication.algorithm": "native"} | more), 3)

    dense, across = (
        run_threads(2, lambda comm, more=more: run(comm, more))
        for more in ({}, {"communication.compression": "int4"} | ACROSS)
    )
    assert dense == across


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.full
def test_another_loss_scale_changes_neither_steps_nor_what_is_owed(keys, served):
    """Powers of 2, but for what 16 bits round: a scale in the wrong place is a factor of 16, hidden by AdamW."""
    servers = {"parallel.strategy": "parameter_server", "parameter_server.placement": "colocated"}
    sgd = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.05, "optimizer.clip_norm": 0, "optimizer.momentum": 0}
    given = (
        keys | sgd | {"communication.compression": "int4", "precision.mode": "float16"} | (servers if served else {})
    )

    def run(comm, scale):
        trainer = trainer_of(comm, given | {"precision.loss_scale": scale})
        first = trainer.exchange.parameters.array.astype(np.float32)
        assert not any(done[2] for done in outcomes(trainer, HALF, 0))
        return trainer.exchange.parameters.array.astype(np.float32) - first, owed(trainer)

    small, large = (run_threads(2, lambda comm, scale=scale: run(comm, scale)) for scale in (64.0, 1024.0))
    for (moved, kept), (again, also) in zip(small, large, strict=True):
        assert np.abs(moved).max() > 1e-3 and np.abs(kept).max() > 1e-5
        np.testing.assert_allclose(again, moved, atol=0.2 * np.abs(moved).max())
        assert 0.5 < np.abs(also).sum() / np.abs(kept).sum() < 2


def test_as_many_ranks_keep_a_measured_choice_and_others_measure_again(keys, tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "decide", lambda *args, **more: CompressionDecision("int8", "measured"))
    monkeypatch.setattr(selection, "tuning_is_off", lambda world: False)
    given = keys | {"communication.compression": "auto"}
    path = run_threads(2, lambda comm: begun(comm, given, tmp_path))[0][0]
    monkeypatch.setattr(selection, "decide", lambda *args, **more: CompressionDecision("none", "measured"))
    for ranks, wanted in ((2, ("int8", "checkpoint")), (3, ("none", "measured"))):
        for found in run_threads(ranks, lambda comm: trainer_of(comm, given, path).compression):
            assert (found.name, found.source) == wanted
