"""Stages that are recomputed in the backward pass: the same bits with less memory."""

import numpy as np
import pytest

from hpcdist import models
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.store import FlatStore
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.models.split_backward import RecomputedStage, split_operations, with_recomputation
from hpcdist.models.stage import Draw


def gradients(model, x, targets, draw, microbatches=2):
    """Return the gradients of micro-batches that are alive at once, the loss, and the peak memory."""
    stores, ledger = [FlatStore(model.layout, model.dtype) for _ in range(2)], Ledger()
    model.initialise(stores[0], 3)
    arena, parameters, into = Arena(ledger), model.bind(stores[0]), model.bind_gradients(stores[1])
    for stage in into:
        stage.begin_step()
    loss = 0.0
    parts = list(zip(np.array_split(x, microbatches), np.array_split(targets, microbatches), strict=True))
    for number, (inputs, expected) in enumerate(parts):
        logits = model.forward(parameters, inputs, arena, number, draw)
        saved = arena.saved(model.stages[-1].layer, number)
        loss += float(model.loss.forward(logits, expected, model.operations, saved))
    for number in range(microbatches):
        model.backward(parameters, into, 1 / len(x), arena, number)
    assert not arena._live, "something was not released"
    assert sum(arena._uses) == 0, "a block was not given back"
    return stores[1].array.copy(), loss, ledger.peak["activations"]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["gpt", "mlp"])
def test_recomputed_gradients_have_the_same_bits(kind, dropout, rng):
    config = ModelConfig(
        kind=kind, layers=3, hidden=32, heads=4, vocabulary=50, dropout=dropout, activation="gelu", tied=kind == "gpt"
    )
    if kind == "gpt":
        model = models.build(config, "float32", context=70)
        x, targets = rng.integers(0, 50, (2, 5, 70))
    else:
        model = models.build(config, "float32", features=9, classes=4)
        x, targets = rng.standard_normal((5, 9)).astype(np.float32), rng.integers(0, 4, 5)
    draw = Draw(seed=1, step=2, first_sample=4)
    again = with_recomputation(model)
    assert [isinstance(stage, RecomputedStage) for stage in again.stages] == [False] + [True] * (
        len(model.stages) - 2
    ) + [False]
    assert not any(isinstance(stage, RecomputedStage) for stage in model.stages), "the model itself stays as it is"
    expected, result = gradients(model, x, targets, draw), gradients(again, x, targets, draw)
    assert np.array_equal(result[0], expected[0]) and result[1] == expected[1]
    if dropout:  # the loss with dropout differs from the loss of an evaluation
        assert not np.array_equal(expected[0], gradients(model, x, targets, None)[0])


@pytest.mark.full
def test_recomputation_needs_memory_for_one_block_and_the_outputs(rng):
    model = models.build(ModelConfig(layers=12, hidden=64, heads=4, vocabulary=16), "float32", context=64)
    x, targets = rng.integers(0, 16, (2, 4, 64))
    whole, less = (gradients(one, x, targets, None, 1)[2] for one in (model, with_recomputation(model)))
    outputs = 12 * x.size * 64 * 4
    assert less < 0.35 * whole and less > outputs


def test_two_pass_backward_with_recomputation_is_rejected(rng):
    model = with_recomputation(models.build(ModelConfig(layers=1, hidden=16, heads=2, vocabulary=16), context=8))
    model.operations = split_operations(model.operations)
    x, targets = rng.integers(0, 16, (2, 4, 8))
    with pytest.raises(AssertionError, match="cannot defer weight gradients"):
        gradients(model, x, targets, None, 1)
