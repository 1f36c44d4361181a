"""GPT and MLP against PyTorch's autograd: the loss, and every gradient to 1e-5 of the whole in float32."""

import numpy as np
import pytest

from hpcdist import models
from hpcdist.arrays.store import FlatStore
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig

torch = pytest.importorskip("torch")


def _gpt(w, tokens, layers, heads, tied):
    functional = torch.nn.functional
    batch, context = tokens.shape
    x = w["0.tokens.weight"][tokens] + w["0.positions.weight"][:context]
    hidden = x.shape[-1]
    for layer in range(1, layers + 1):
        p = {key.split(".", 1)[1]: value for key, value in w.items() if key.startswith(f"{layer}.")}
        h = functional.layer_norm(x, (hidden,), p["norm1.scale"], p["norm1.bias"])
        qkv = functional.linear(h, p["qkv.weight"].flatten(0, 1), p["qkv.bias"].flatten())
        q, k, v = qkv.view(batch, context, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + functional.linear(h, p["projection.weight"], p["projection.bias"])
        h = functional.layer_norm(x, (hidden,), p["norm2.scale"], p["norm2.bias"])
        h = functional.gelu(functional.linear(h, p["up.weight"], p["up.bias"]), approximate="tanh")
        x = x + functional.linear(h, p["down.weight"], p["down.bias"])
    last = layers + 1
    x = functional.layer_norm(x, (hidden,), w[f"{last}.norm.scale"], w[f"{last}.norm.bias"])
    return functional.linear(x, w["0.tokens.weight" if tied else f"{last}.head.weight"])


def _mlp(w, x, layers, activation):
    functional = torch.nn.functional
    for layer in range(layers):
        x = functional.linear(x, w[f"{layer}.linear.weight"], w[f"{layer}.linear.bias"])
        x = functional.relu(x) if activation == "relu" else functional.gelu(x, approximate="tanh")
    return functional.linear(x, w[f"{layers}.linear.weight"], w[f"{layers}.linear.bias"])


def _compare(model, x, targets, reference, rng):
    store, gradient = FlatStore(model.layout, model.dtype), FlatStore(model.layout, model.dtype)
    model.initialise(store, int(rng.integers(1 << 31)))
    for segment in model.layout.segments:  # biases and scales off their special initial values
        store.view(segment.key)[...] += rng.standard_normal(segment.spec.shape) * 0.05
    weights = {
        segment.key: torch.tensor(store.view(segment.key), requires_grad=True) for segment in model.layout.segments
    }
    parameters, into, arena = model.bind(store), model.bind_gradients(gradient), Arena()
    for stage in into:
        stage.begin_step()
    logits = model.forward(parameters, x, arena)
    expected = reference(weights)
    scale = np.abs(expected.detach().numpy()).max()
    np.testing.assert_allclose(logits, expected.detach().numpy(), atol=1e-5 * scale)
    loss = model.loss.forward(logits, targets, model.operations, arena.saved(model.stages[-1].layer))
    model.backward(parameters, into, 1 / targets.size, arena)
    wide = torch.tensor(targets.astype(np.int64).reshape(-1))
    mean = torch.nn.functional.cross_entropy(expected.reshape(-1, expected.shape[-1]), wide)
    mean.backward()
    assert loss / targets.size == pytest.approx(float(mean.detach()), rel=1e-6)
    whole = np.sqrt(sum(float((value.grad.double() ** 2).sum()) for value in weights.values()))
    for key, value in weights.items():
        difference = np.linalg.norm(gradient.view(key).astype(np.float64) - value.grad.double().numpy())
        assert difference <= 1e-5 * whole, f"{key}: {difference / whole:.1e} of the whole gradient"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("hidden", "heads", "context", "batch"), [(64, 4, 80, 3), (33, 3, 1, 2), (128, 4, 128, 2)])
def test_gpt(tied, hidden, heads, context, batch, rng):
    config = ModelConfig(layers=2, hidden=hidden, heads=heads, vocabulary=50, tied=tied)
    tokens = rng.integers(0, 50, (batch, context + 1)).astype(np.uint16)
    x, targets = tokens[:, :-1], tokens[:, 1:]
    wide = torch.tensor(x.astype(np.int64))
    model = models.build(config, "float32", context=context)
    _compare(model, x, targets, lambda w: _gpt(w, wide, 2, heads, tied), rng)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_mlp(activation, rng):
    config = ModelConfig(kind="mlp", layers=3, hidden=50, activation=activation)
    x = rng.standard_normal((17, 21)).astype(np.float32)
    targets = rng.integers(0, 6, 17).astype(np.uint8)
    wide = torch.tensor(x)
    model = models.build(config, "float32", features=21, classes=6)
    _compare(model, x, targets, lambda w: _mlp(w, wide, 3, activation), rng)
