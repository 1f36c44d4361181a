"""Closed forms of the costs of units, compared with counted products and memory in the arena."""

import numpy as np
import pytest

from hpcdist import models
from hpcdist.arrays.store import FlatStore
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.models.layers import linear
from hpcdist.models.split_backward import split_operations
from hpcdist.strategies.pipeline.costs import TensorSplit, attention_scores, unit_costs

SAMPLES = 3
ALIGNED = 64  # bytes to which the arena rounds each of its blocks
BLOCKS = 16  # that a unit takes at most


def gpt(context, *, tied=False, dropout=0.0, window=0):
    config = ModelConfig(layers=2, hidden=32, heads=4, vocabulary=48, tied=tied, dropout=dropout, window=window)
    return models.build(config, "float32", context=context), np.zeros((SAMPLES, context), np.int64)


def mlp():
    config = ModelConfig(kind="mlp", layers=2, hidden=24, activation="relu")
    return models.build(config, "float64", features=20, classes=7), np.zeros((SAMPLES, 20), np.uint8)


def options():
    config = ModelConfig(
        layers=2, hidden=32, heads=4, vocabulary=48, kv_heads=2, positions="rotary", norm="rms", activation="swiglu",
        bias=False,
    )  # fmt: skip
    return models.build(config, "float32", context=70), np.zeros((SAMPLES, 70), np.int64)


def encoder():
    config = ModelConfig(kind="encoder", layers=2, hidden=32, heads=4, vocabulary=48, feed_forward=40)
    return models.build(config, "float64", context=130), np.zeros((SAMPLES, 130), np.int64)


def convnet():
    config = ModelConfig(kind="convnet", layers=3, hidden=8, activation="relu", norm="rms")
    model = models.build(config, "float32", height=9, width=10, channels=3, classes=5)
    return model, np.zeros((SAMPLES, 9, 10, 3), np.float32)


class Walked:
    """A micro-batch through all units: bytes in the arena and operations in products, by unit."""

    def __init__(self, model, x, counted_operations, *, split):
        stores = [FlatStore(model.layout, model.dtype) for _ in range(2)]
        parameters, gradients = model.bind(stores[0]), model.bind_gradients(stores[1])
        operations = split_operations(model.operations) if split else model.operations
        self.arena, self.kept, self.forward, self.backward = Arena(), [], [], []
        last, before = len(model.stages) - 1, 0
        for unit, stage in enumerate(model.stages):
            saved, begun = self.arena.saved(stage.layer), sum(counted_operations)
            x = stage.forward(parameters[unit], x, model.operations, saved)
            if unit == last:
                model.loss.forward(x, np.zeros(x.shape[:-1], np.int64), model.operations, saved)
            self.kept.append(self.taken() - before)
            self.forward.append(sum(counted_operations) - begun)
            before = self.taken()
        d = model.loss.backward(1.0, model.operations, self.arena.saved(model.stages[last].layer))
        for unit, stage in reversed(list(enumerate(model.stages))):
            saved, begun = self.arena.saved(stage.layer), sum(counted_operations)
            d = stage.backward(parameters[unit], gradients[unit], d, operations, saved)
            self.backward.insert(0, sum(counted_operations) - begun)
            if split:
                saved.narrow()

    def taken(self):
        """Return the bytes of all blocks in use."""
        return sum(block.nbytes for block, uses in zip(self.arena._blocks, self.arena._uses, strict=True) if uses)


@pytest.fixture
def counted_operations(monkeypatch):
    """The operations of every matrix product from here on."""
    results = []
    multiply = np.matmul

    def matmul(a, b, **given):
        product = multiply(a, b, **given)
        results.append(2 * product.size * a.shape[-1])
        return product

    monkeypatch.setattr(np, "matmul", matmul)
    monkeypatch.setattr(linear, "column_sums", lambda *of: None)  # bias gradients are products too, with ones
    return results


EVERY = [lambda: gpt(40), lambda: gpt(150), lambda: gpt(64, tied=True), lambda: gpt(256, window=70)]
EVERY += [options, encoder, mlp, convnet]


@pytest.mark.parametrize("build", EVERY)
def test_operation_costs_match_the_products(build, counted_operations):
    model, x = build()
    walked = Walked(model, x, counted_operations, split=False)
    for unit, cost in enumerate(unit_costs(model, SAMPLES)):
        if model.stages[unit].tensors()[0].name == "tokens.weight":
            additions = x.size * 32
            assert (cost.forward_flop, cost.input_flop, cost.weight_flop) == (additions, 0, 2 * additions)
        else:
            assert cost.forward_flop == walked.forward[unit]
            assert cost.input_flop + cost.weight_flop == walked.backward[unit]


@pytest.mark.parametrize("build", EVERY[:-1])  # a convolution has one pass
def test_split_backward_computes_input_gradients_first(build, counted_operations):
    model, x = build()
    walked = Walked(model, x, counted_operations, split=True)
    costs = unit_costs(model, SAMPLES)
    assert walked.backward == [cost.input_flop for cost in costs]
    # What two units share is counted with the first: the input of a linear that is the output of the unit before.
    held = sum(cost.held_bytes for cost in costs)
    assert held <= walked.taken() <= held + ALIGNED * BLOCKS * len(costs)


@pytest.mark.parametrize("build", [*EVERY, lambda: gpt(64, dropout=0.1)])
def test_memory_costs_match_the_arena(build):
    model, x = build()
    walked = Walked(model, x, [], split=False)
    costs = unit_costs(model, SAMPLES)
    for cost, kept in zip(costs, walked.kept, strict=True):
        assert cost.kept_bytes <= kept <= cost.kept_bytes + ALIGNED * BLOCKS
    expected = {}
    for cost in costs:
        for name, size in cost.scratch.items():
            expected[name] = max(expected.get(name, 0), size)
    for name, block in walked.arena._scratch.items():
        if name in expected:
            assert expected[name] <= block.nbytes < expected[name] + ALIGNED, name
    assert {"linear.dx"} <= expected.keys() & walked.arena._scratch.keys()


def test_parameter_costs_count_the_local_parameters():
    model, _ = gpt(40)
    assert sum(cost.parameters for cost in unit_costs(model, 1)) == model.layout.size
    halves = unit_costs(model, 1, TensorSplit(ranks=2))
    for half, cost in zip(halves, unit_costs(model, 1), strict=True):
        assert half.parameters < cost.parameters
        assert all(getattr(half, name) == getattr(cost, name) for name in ("forward_flop", "input_flop", "weight_flop"))


def test_border_bytes_match_the_outputs():
    model, _ = gpt(40)
    costs = unit_costs(model, 5)
    assert [cost.input_bytes for cost in costs] == [0] + [5 * 40 * 32 * 4] * 3
    assert [cost.output_bytes for cost in costs] == [5 * 40 * 32 * 4] * 3 + [0]


@pytest.mark.parametrize("window", [0, 1, 2, 64, 65, 66, 100, 500])
@pytest.mark.parametrize("context", [1, 63, 64, 65, 128, 300])
def test_attention_scores_match_the_computed_blocks(context, window):
    blocks = [list(range(first, min(first + 64, context))) for first in range(0, context, 64)]
    seen = [max(0, block[0] + 1 - (window or context)) // 64 * 64 for block in blocks]
    scores = sum(len(block) * (block[-1] + 1 - first) for block, first in zip(blocks, seen, strict=True))
    assert attention_scores(context, window) == scores
