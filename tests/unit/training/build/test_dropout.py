"""Training with dropout: the same run under every layout, with recomputed forwards, and after a resume."""

from dataclasses import replace

import numpy as np
import pytest

from harness import trainings
from harness.inputs import write_text
from harness.trainings import STEPS, assemble_trainer
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.models.arena import Arena
from hpcdist.training.data import SampleShares
from hpcdist.training.run.saving import CheckpointSaver

PIPELINE = {"parallel.pipeline": 2, "parallel.microbatches": 3, "run.global_batch": 12}
CHUNKS = {"parallel.schedule": "interleaved", "parallel.chunks": 2, "parallel.microbatches": 2}
SHARDS = {"run.logical_shards": 3, "communication.algorithm": "auto"}
# Name: ranks, the keys of the run alone that it equals, its own keys.
LAYOUTS = {
    "micro-batches": (1, {}, {"parallel.microbatches": 3}),
    "uneven replicas": (3, {}, {"parallel.microbatches": 2}),
    "recomputed layers": (1, {}, {"parallel.recompute": "true"}),
    "zero3": (2, {}, {"parallel.strategy": "zero3"}),
    "zero3, recomputed layers": (2, {}, {"parallel.strategy": "zero3", "parallel.recompute": "true"}),
    "a server": (3, {}, {"parallel.strategy": "parameter_server", "parameter_server.servers": 1}),
    "gpipe": (2, {"run.global_batch": 12}, {**PIPELINE, "parallel.schedule": "gpipe"}),
    "1f1b": (4, {"run.global_batch": 12}, PIPELINE),
    "1f1b, recomputing": (2, {"run.global_batch": 12}, {**PIPELINE, "parallel.recompute": "true"}),
    "zb-h1": (2, {"run.global_batch": 12}, {**PIPELINE, "parallel.schedule": "zb-h1"}),
    "interleaved": (2, {"run.global_batch": 12}, {**PIPELINE, **CHUNKS}),
    "tensor": (2, {}, {"parallel.tensor": 2}),
    "tensor, recomputed layers": (2, {}, {"parallel.tensor": 2, "parallel.recompute": "true"}),
    "tensor, by rows": (2, {}, {"parallel.tensor": 2, "parallel.sequence_parallel": "true"}),
    "logical shards": (2, {"run.global_batch": 12}, {"run.global_batch": 12, **SHARDS}),
}


def _train(comm, keys, save=None, resume=None):
    """Return the losses and the parameter pieces after all steps, or after the saved first half."""
    trainer = assemble_trainer(comm, keys, resume)
    losses = trainings.losses(trainer, STEPS // 2 if save else STEPS)
    if save:
        CheckpointSaver(trainer, save).save(STEPS // 2)
    pieces = [piece for piece in trainer.exchange.pieces() if piece.kind == "parameters"]
    state = {(p.tensor, p.global_shape, p.box, p.flat): p.array.copy() for p in pieces}
    trainer.close()
    return losses, state


def _keys(tmp_path, rng):
    text = write_text(tmp_path / "text.txt", rng)
    return {"data.path": text, "model.dropout": 0.2, "precision.mode": "float64", "run.global_batch": 7}


def _all_parameters(ranks):
    """Return all parameters except the bias of keys, whose true gradient is zero."""
    tensors = {}
    for _, state in ranks:
        for (tensor, shape, box, flat), values in state.items():
            whole = tensors.setdefault(tensor, np.full(shape, np.nan))
            part = np.ix_(*(range(*inside) for inside in box))
            held = whole[part].ravel()
            held[flat.slice] = values
            whole[part] = held.reshape(whole[part].shape)
    return np.concatenate([whole.ravel() for name, whole in sorted(tensors.items()) if not name.endswith("qkv.bias")])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_the_same_dropout(layout, tmp_path, rng):
    ranks, alone, local_data = LAYOUTS[layout]
    keys = _keys(tmp_path, rng)
    (reference,) = run_threads(1, lambda comm: _train(comm, {**keys, **alone}))
    results = run_threads(ranks, lambda comm: _train(comm, {**keys, **local_data}))
    for losses, _ in results:
        np.testing.assert_allclose(losses, reference[0], rtol=1e-12)
    want = _all_parameters([reference])
    assert np.linalg.norm(_all_parameters(results) - want) <= 1e-11 * np.linalg.norm(want)


def test_dropout_depends_on_the_seed_and_the_rate(tmp_path, rng):
    keys = _keys(tmp_path, rng)
    first = [
        run_threads(1, lambda comm, more=more: _train(comm, {**keys, **more}))[0][0][0]
        for more in ({}, {"model.dropout": 0.0}, {"model.dropout": 0.3})
    ]
    assert len({round(loss, 6) for loss in first}) == 3


def test_resumed_run_has_the_same_dropout(tmp_path, rng):
    keys = {**_keys(tmp_path, rng), "parallel.microbatches": 2}
    whole = run_threads(2, lambda comm: _train(comm, keys))
    run_threads(2, lambda comm: _train(comm, keys, save=tmp_path / "checkpoints"))
    (saved,) = (tmp_path / "checkpoints").glob("step-*")
    resumed = run_threads(2, lambda comm: _train(comm, keys, resume=saved))
    for (losses, state), (rest, same) in zip(whole, resumed, strict=True):
        assert rest == losses[STEPS // 2 :]
        assert all((state[name] == same[name]).all() for name in state)


def test_evaluation_during_a_run_has_no_dropout(tmp_path, rng):
    keys = _keys(tmp_path, rng)

    def body(comm):
        trainer = assemble_trainer(comm, keys)
        with trainer.batches(1) as batches:
            (batch,) = batches
        trainer.step(1, trainer.cut(batch), np.zeros(2))
        model, parameters = trainer.model, trainer.model.bind(trainer.exchange.parameters)
        return trainer.executor.evaluate(*batch), model.evaluate(parameters, *batch, Arena())

    ((during, alone),) = run_threads(1, body)
    assert during == alone


def test_uneven_shares_keep_the_sample_numbers(tmp_path, rng):
    keys = _keys(tmp_path, rng)

    def sample_places(comm):
        trainer = replace(assemble_trainer(comm, keys), shares=SampleShares(7, 3))
        trainer.shares.change(2, (1, 1, 5))
        return [(trainer.first_sample(step), len(batch[0])) for step, batch in enumerate(trainer.batches(4), start=1)]

    ranks = run_threads(3, sample_places)
    for step, want in ((0, [(0, 3), (3, 2), (5, 2)]), (3, [(0, 1), (1, 1), (2, 5)])):
        assert [rank[step] for rank in ranks] == want
