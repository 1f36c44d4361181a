"""Whole models: gradients against finite differences, micro-batches, ties, initial values."""

import numpy as np
import pytest

from harness.inputs import model_case
from hpcdist import models
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import UsageError
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.models.stage import IGNORED
from hpcdist.models.transformer import masked_predictions

GPT = {"layers": 2, "hidden": 6, "heads": 2, "vocabulary": 7}
SMALL = GPT | {"layers": 1, "vocabulary": 6}
LLAMA = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False}
ONE_PIXEL = {"height": 1, "width": 1, "channels": 1}
CASES = {
    "gpt": model_case(**GPT, context=5),
    "gpt tied": model_case(**GPT, tied=True, context=5),
    "gpt context 1, one head": model_case(layers=1, hidden=3, heads=1, vocabulary=4, context=1),
    "gpt with all options": model_case(
        **LLAMA, layers=1, hidden=12, heads=3, kv_heads=1, vocabulary=7, feed_forward=5, tied=True, context=5
    ),
    "gpt grouped, rotary": model_case(
        layers=2, hidden=8, heads=4, kv_heads=2, vocabulary=6, positions="rotary", context=4
    ),
    "gpt rotary": model_case(layers=1, hidden=8, heads=2, vocabulary=6, positions="rotary", context=4),
    "gpt swiglu, rms": model_case(**SMALL, norm="rms", activation="swiglu", feed_forward=7, context=4),
    "gpt relu": model_case(**SMALL, activation="relu", feed_forward=9, context=4),
    "gpt of experts": model_case(**SMALL, experts=3, expert_hidden=5, shared_experts=1, balance_loss=0, context=4),
    "encoder of gated experts": model_case(
        **SMALL, kind="encoder", experts=3, experts_per_token=1, activation="swiglu", balance_loss=0, context=7
    ),
    "encoder": model_case(kind="encoder", **GPT, context=6),
    "encoder with all options": model_case(
        kind="encoder", **LLAMA, layers=1, hidden=8, heads=4, kv_heads=2, vocabulary=6, context=9
    ),
    "convnet": model_case(kind="convnet", layers=3, hidden=3, height=5, width=4, channels=2, classes=3),
    "convnet of one pixel, rms": model_case(
        **ONE_PIXEL, kind="convnet", layers=3, hidden=2, norm="rms", activation="relu", classes=2
    ),
    "mlp gelu": model_case(kind="mlp", layers=2, hidden=7, features=5, classes=4),
    "mlp relu": model_case(kind="mlp", layers=1, hidden=9, activation="relu", features=3, classes=2),
}


class Run:
    """A model with its stores, and the gradient of the summed loss by the model's own backward."""

    def __init__(self, model, rng):
        self.model = model
        self.store, self.gradient = (FlatStore(model.layout, model.dtype) for _ in range(2))
        for segment in model.layout.segments:  # larger than initial values, so that every path matters
            self.store.view(segment.key)[...] = rng.standard_normal(segment.spec.shape) * 0.5
        self.parameters, self.into = model.bind(self.store), model.bind_gradients(self.gradient)
        self.arena = Arena()

    def backward(self, batches, scale=1.0):
        """Return the loss of several micro-batches. The gradient is left in its store."""
        for stage in self.into:
            stage.begin_step()
        total = 0.0
        for number, (x, targets) in enumerate(batches):
            logits = self.model.forward(self.parameters, x, self.arena, number)
            saved = self.arena.saved(self.model.stages[-1].layer, number)
            total += self.model.loss.forward(logits, targets, self.model.operations, saved)
            self.model.backward(self.parameters, self.into, scale, self.arena, number)
        for stage in self.into:
            stage.finish()
        return total


def _batch(config, inputs, batch, rng):
    if config.kind == "gpt":
        tokens = rng.integers(0, config.vocabulary, (batch, inputs["context"] + 1)).astype(np.uint8)
        return tokens[:, :-1], tokens[:, 1:]
    if config.kind == "encoder":
        context, output = inputs["context"], masked_predictions(inputs["context"])
        tokens = rng.integers(0, config.vocabulary, (batch, context))
        targets = np.full((batch, context), IGNORED)
        for row in targets:
            row[rng.choice(context, output, replace=False)] = rng.integers(0, config.vocabulary, output)
        return tokens, targets
    if config.kind == "convnet":
        shape = batch, inputs["height"], inputs["width"], inputs["channels"]
        return rng.standard_normal(shape), rng.integers(0, inputs["classes"], batch)
    return rng.standard_normal((batch, inputs["features"])), rng.integers(0, inputs["classes"], batch)


@pytest.fixture(params=CASES)
def case(request, rng):
    config, inputs = CASES[request.param]
    return Run(models.build(config, "float64", **inputs), rng), _batch(config, inputs, 3, rng)


@pytest.mark.full_except("gpt with all options")
def test_every_gradient_matches_finite_differences(case):
    run, batch = case
    run.gradient.array[...] = np.nan  # the first write of a step overwrites
    for segment in run.model.layout.segments:
        run.gradient.view(segment.key)[...] = np.nan
    run.backward([batch], scale=0.25)
    step = 1e-6
    for segment in run.model.layout.segments:
        flat, got = run.store.range(segment.range), run.gradient.range(segment.range)
        want = np.empty_like(flat)
        for i, value in enumerate(flat.copy()):
            losses = []
            for sign in (1, -1):
                flat[i] = value + sign * step
                losses.append(run.model.evaluate(run.parameters, *batch, run.arena))
            flat[i] = value
            want[i] = 0.25 * (losses[0] - losses[1]) / (2 * step)
        assert np.linalg.norm(got - want) <= 1e-7 * (1 + np.linalg.norm(want)), segment.key


def test_micro_batches_add_up_to_the_batch(case):
    run, (x, targets) = case
    whole = run.backward([(x, targets)])
    want = run.gradient.array.copy()
    assert run.backward([(x[:1], targets[:1]), (x[1:], targets[1:])]) == pytest.approx(whole, rel=1e-13)
    assert np.linalg.norm(run.gradient.array - want) <= 1e-13 * np.linalg.norm(want)


def test_second_step_has_the_bits_of_the_first(case):
    run, batch = case
    loss = run.backward([batch])
    want = run.gradient.array.copy()
    assert run.backward([batch]) == loss and (run.gradient.array == want).all()


def test_all_forwards_before_any_backward_give_the_same_gradient(rng):
    config, inputs = CASES["gpt tied"]
    run = Run(models.build(config, "float64", **inputs), rng)
    batches = [_batch(config, inputs, size, rng) for size in (2, 1)]
    run.backward(batches)
    want = run.gradient.array.copy()
    for stage in run.into:
        stage.begin_step()
    for number, (x, targets) in enumerate(batches):
        logits = run.model.forward(run.parameters, x, run.arena, number)
        saved = run.arena.saved(run.model.stages[-1].layer, number)
        run.model.loss.forward(logits, targets, run.model.operations, saved)
    for number in range(len(batches)):
        run.model.backward(run.parameters, run.into, 1.0, run.arena, number)
    assert (run.gradient.array == want).all()


def test_gradients_without_a_backward_are_zeroed(rng):
    config, inputs = CASES["gpt"]
    run = Run(models.build(config, "float64", **inputs), rng)
    run.gradient.array[...] = 5
    for stage in run.into:
        stage.begin_step()
    for stage in run.into:
        stage.finish()
    assert all((run.gradient.view(segment.key) == 0).all() for segment in run.model.layout.segments)


def test_integer_features_are_scaled_to_fractions(rng):
    run = Run(models.build(ModelConfig(kind="mlp", layers=1), "float64", features=6, classes=3), rng)
    x = rng.integers(0, 256, (4, 6)).astype(np.uint8)
    fractions = run.model.logits(run.parameters, x / 255, run.arena)
    np.testing.assert_allclose(run.model.logits(run.parameters, x, run.arena), fractions, rtol=1e-12)


def test_tied_head_owns_no_tensor():
    tied, untied = (models.build(ModelConfig(**GPT, tied=tied), context=5) for tied in (True, False))
    assert set(untied.layout.by_key) - set(tied.layout.by_key) == {"3.head.weight"}
    bound = tied.bind(FlatStore(tied.layout, tied.dtype))
    assert bound[-1]["head.weight"].ctypes.data == bound[0]["tokens.weight"].ctypes.data


def test_logits_accept_shorter_contexts_and_are_causal(rng):
    config, inputs = CASES["gpt"]
    run = Run(models.build(config, "float64", **inputs), rng)
    tokens = rng.integers(0, config.vocabulary, (2, 5)).astype(np.uint16)
    whole = run.model.logits(run.parameters, tokens, run.arena)
    assert whole.shape == (2, 5, config.vocabulary)
    for context in range(1, 5):
        part = run.model.logits(run.parameters, tokens[:, :context], run.arena)
        np.testing.assert_allclose(part, whole[:, :context], rtol=1e-10)
    with pytest.raises(UsageError, match="samples have 6 tokens, but the model has positions for only 5"):
        run.model.logits(run.parameters, np.zeros((1, 6), np.uint8), run.arena)


def test_initial_values_are_reproducible_by_seed():
    model = models.build(ModelConfig(layers=8, hidden=64, heads=2), "float32", context=32)
    store, other = FlatStore(model.layout, model.dtype), FlatStore(model.layout, model.dtype)
    model.initialise(store, 3)
    model.initialise(other, 3)
    assert (store.array == other.array).all()
    model.initialise(other, 4)
    deviations = {"tokens.weight": 0.02, "qkv.weight": 0.02, "up.weight": 0.02, "head.weight": 0.02}
    deviations |= {"projection.weight": 0.005, "down.weight": 0.005}
    for segment in model.layout.segments:
        values = store.view(segment.key)
        if segment.spec.name.endswith(".scale"):
            assert (values == 1).all()
        elif segment.spec.name.endswith(".bias"):
            assert (values == 0).all()
        else:
            assert segment.spec.adapted and not (values == other.view(segment.key)).any()
            assert values.std() == pytest.approx(deviations.get(segment.spec.name, 0.02), rel=0.1)
    assert not (store.view("1.qkv.weight") == store.view("2.qkv.weight")).any()


def test_initial_loss_is_the_loss_of_guessing(rng):
    model = models.build(ModelConfig(), "float32", context=16)
    store = FlatStore(model.layout, model.dtype)
    model.initialise(store, 0)
    tokens = rng.integers(0, 256, (8, 17)).astype(np.uint8)
    loss = model.evaluate(model.bind(store), tokens[:, :-1], tokens[:, 1:], Arena()) / (8 * 16)
    assert loss == pytest.approx(np.log(256), abs=0.1)
