"""Closed forms of parameters, operations and memory, compared with layouts, counted products and the ledger."""

import numpy as np
import pytest

from harness.marks import cases
from hpcdist import models
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.store import FlatStore
from hpcdist.models.arena import Arena
from hpcdist.models.attention.flash import LocalAttention
from hpcdist.models.config import ModelConfig
from hpcdist.models.counts import attention_pairs, counts
from hpcdist.models.layers import linear
from hpcdist.models.split_backward import with_recomputation

BOUND = 0.1  # relative, of memory
GPTS = {
    "as it comes": ({}, {"context": 70}),
    "tied": ({"tied": True}, {"context": 64}),
    "rotary, rms, swiglu": ({"positions": "rotary", "norm": "rms", "activation": "swiglu"}, {"context": 33}),
    "grouped, no bias": ({"kv_heads": 2, "bias": False, "feed_forward": 96}, {"context": 40}),
    "encoder": ({"kind": "encoder"}, {"context": 50}),
    "window": ({"window": 9}, {"context": 80}),
    "experts": ({"experts": 5, "expert_hidden": 24, "experts_per_token": 3}, {"context": 30}),
    "gated experts, shared": (
        {"experts": 4, "shared_experts": 2, "activation": "swiglu", "bias": False},
        {"context": 20},
    ),
}
OTHERS = {
    "mlp": ({"kind": "mlp", "hidden": 48}, {"features": 20, "classes": 7}),
    "convnet": (
        {"kind": "convnet", "hidden": 8, "layers": 4, "activation": "relu"},
        {"height": 9, "width": 12, "channels": 3, "classes": 5},
    ),
}


def config_of(keys):
    return ModelConfig(**({"layers": 3, "hidden": 64, "heads": 4, "vocabulary": 48} | keys))


def data(config, inputs, samples, rng):
    if "context" in inputs:
        x, targets = rng.integers(0, config.vocabulary, (2, samples, inputs["context"]))
        return x, targets
    shape = (inputs["features"],) if "features" in inputs else tuple(inputs[k] for k in ("height", "width", "channels"))
    return rng.random((samples, *shape)).astype(np.float32), rng.integers(0, inputs["classes"], samples)


class Trained:
    """A model whose gradients were computed twice. A later step needs no more memory than the first."""

    def __init__(self, model, x, targets):
        stores = [FlatStore(model.layout, model.dtype) for _ in range(2)]
        model.initialise(stores[0], 1)
        self.ledger = Ledger()
        arena, parameters, gradients = Arena(self.ledger), model.bind(stores[0]), model.bind_gradients(stores[1])
        for _ in range(2):
            for stage in gradients:
                stage.begin_step()
            logits = model.forward(parameters, x, arena)
            model.loss.forward(logits, targets, model.operations, arena.saved(model.stages[-1].layer))
            model.backward(parameters, gradients, 1.0, arena)

    @property
    def activation_bytes(self):
        return self.ledger.peak["activations"]


@pytest.mark.parametrize("name", [*GPTS, *OTHERS])
def test_parameter_counts_match_the_layout(name):
    keys, inputs = (GPTS | OTHERS)[name]
    config = config_of(keys)
    model, result = models.build(config, **inputs), counts(config, **inputs)
    assert result.parameters == model.layout.parameters
    local_values = [sum(spec.size for spec in stage.tensors()) for stage in model.stages]
    assert [unit.parameters for unit in result.units] == local_values


@pytest.mark.parametrize("name", [*GPTS, *OTHERS])
@pytest.mark.full_except("rotary, rms, swiglu")
def test_operation_counts_match_the_computed_products(name, rng, monkeypatch):
    """All products of linear layers are counted.

    Attention is counted separately, because its products skip masked pairs only by blocks.
    """
    keys, inputs = (GPTS | OTHERS)[name]
    config = config_of(keys)
    model, samples = models.build(config, **inputs), 2
    made = []
    multiply, inside = np.matmul, [False]

    def matmul(a, b, **given):
        product = multiply(a, b, **given)
        if not inside[0]:
            made.append(2 * product.size * a.shape[-1])
        return product

    def without_counting(call):
        def called(*given, **named):
            inside[0] = True
            try:
                return call(*given, **named)
            finally:
                inside[0] = False

        return called

    monkeypatch.setattr(np, "matmul", matmul)
    monkeypatch.setattr(linear, "column_sums", lambda *of: None)  # bias gradients are products too, with ones
    for way in ("forward", "backward"):
        monkeypatch.setattr(LocalAttention, way, without_counting(getattr(LocalAttention, way)))
    Trained(model, *data(config, inputs, samples, rng))
    result = counts(config, **inputs)
    linears = sum((2 if unit.first else 3) * unit.linear for unit in result.units)
    assert sum(made) == 2 * samples * linears
    assert result.flops == linears + 3 * sum(unit.attention for unit in result.units)


@cases(
    "context, causal, window",
    (1, True, 0),
    (37, True, 0),
    (37, False, 0),
    (1, True, 1),
    (37, True, 1),
    (37, True, 9),
    (37, True, 37),
    (37, True, 99),
)
def test_attention_operations_count_visible_pairs(context, causal, window):
    every = [(query, key) for query in range(context) for key in range(context)]
    seen = sum(1 for query, key in every if not causal or query - (window or context) < key <= query)
    assert attention_pairs(context, causal=causal, window=window) == seen
    config = config_of({"kind": "gpt" if causal else "encoder", "window": window})
    block = counts(config, context=context).units[1]
    head_size = config.hidden // config.heads
    assert block.attention == config.heads * seen * 2 * (2 * head_size)  # a score and its share of the sum
    assert block.backward == 2 * block.linear + 2 * block.attention


def test_step_takes_about_6_operations_per_parameter_and_token():
    result = counts(ModelConfig(layers=12, hidden=768, heads=12, vocabulary=50_000), context=64)
    matrices = result.parameters - 50_000 * 768 - 64 * 768  # without the tables
    assert result.flops / 64 == pytest.approx(6 * matrices, rel=0.01)


LARGE = {
    "gpt": ({"layers": 4, "hidden": 256, "vocabulary": 256}, {"context": 256}, 4),
    "many layers": ({"layers": 12, "hidden": 64}, {"context": 128}, 8),
    "long": ({"layers": 3, "hidden": 128}, {"context": 1024}, 2),
    "large vocabulary": ({"layers": 4, "hidden": 128, "vocabulary": 4000}, {"context": 100}, 8),
    "all options": (
        {"layers": 4, "hidden": 128, "heads": 8, "kv_heads": 2, "positions": "rotary", "norm": "rms"}
        | {"activation": "swiglu", "bias": False},
        {"context": 128},
        8,
    ),
    "encoder": ({"kind": "encoder", "layers": 4, "hidden": 128}, {"context": 128}, 8),
    "experts": (
        {"layers": 4, "hidden": 128, "experts": 8, "expert_hidden": 200, "shared_experts": 1},
        {"context": 128},
        8,
    ),
    "mlp": ({"kind": "mlp", "layers": 5, "hidden": 512}, {"features": 300, "classes": 40}, 256),
    "convnet": (
        {"kind": "convnet", "layers": 5, "hidden": 16, "activation": "relu"},
        {"height": 32, "width": 32, "channels": 3, "classes": 10},
        32,
    ),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.full_except("encoder-True")
@pytest.mark.matrix_except(
    "gpt-True",
    "many layers-True",
    "large vocabulary-False",
    "all options-False",
    "encoder-False",
    "experts-True",
    "mlp-True",
    "convnet-True",
)
def test_activation_memory_matches_the_ledger(name, recompute, rng):
    keys, inputs, samples = LARGE[name]
    config = config_of(keys)
    model = models.build(config, **inputs)
    trained = Trained(with_recomputation(model) if recompute else model, *data(config, inputs, samples, rng))
    expected = counts(config, **inputs).activation_bytes(samples, recompute=recompute)
    assert trained.activation_bytes == pytest.approx(expected, rel=BOUND)


def test_recomputation_memory_is_one_block_and_the_outputs():
    whole = counts(config_of({"layers": 24}), context=128)
    assert whole.activation_bytes(8, recompute=True) < 0.2 * whole.activation_bytes(8)
    assert whole.activation_bytes(8, itemsize=2) * 2 == whole.activation_bytes(8)
