"""Every kind of model compared with PyTorch's autograd: the loss, and each gradient to 1e-5 of its norm in float32."""

import numpy as np
import pytest

from harness.marks import cases
from harness.models.documents import random_places, visibility_mask
from hpcdist import models
from hpcdist.arrays.store import FlatStore
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.models.documents import PackedTokens
from hpcdist.models.stage import IGNORED
from hpcdist.models.transformer import masked_predictions

torch = pytest.importorskip("torch")


def _norm(x, p, name):
    if f"{name}.bias" in p:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], p[f"{name}.scale"], p[f"{name}.bias"])
    return torch.nn.functional.rms_norm(x, x.shape[-1:], p[f"{name}.scale"], eps=1e-5)


def _linear(x, p, name):
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
    weight = weight.flatten(0, -2)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.flatten())


def _rotated(x, places):
    """Rotate heads (batch, heads, context, size) by complex numbers, whose parts are the two halves of a head."""
    size = x.shape[-1]
    angles = places[:, None, :, None] * 10000.0 ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
    turns = torch.polar(torch.ones_like(angles), angles)
    numbers = torch.complex(x[..., : size // 2].double(), x[..., size // 2 :].double()) * turns
    return torch.cat([numbers.real, numbers.imag], -1).to(x.dtype)


def _heads(x, parts, size):
    return x.view(*x.shape[:2], parts, -1, size).permute(2, 0, 3, 1, 4)


def _transformer(w, tokens, config, places=None):
    """``places`` are the token positions in their documents. None means that each sample is one document."""
    functional = torch.nn.functional
    seen = None if places is None else torch.tensor(visibility_mask(places, config.kind == "gpt"))[:, None]
    if config.window:
        band = torch.ones(tokens.shape[1:] * 2, dtype=torch.bool).tril().triu(1 - config.window)
        seen = band if seen is None else seen & band
    places = torch.arange(tokens.shape[1]).expand(tokens.shape) if places is None else torch.tensor(places)
    x = w["0.tokens.weight"][tokens]
    if config.positions == "learned":
        x = x + w["0.positions.weight"][places]
    size = config.hidden // config.heads
    for layer in range(1, config.layers + 1):
        p = {key.split(".", 1)[1]: value for key, value in w.items() if key.startswith(f"{layer}.")}
        h = _norm(x, p, "norm1")
        if "qkv.weight" in p:
            q, k, v = _heads(_linear(h, p, "qkv"), 3, size)
        else:
            (q,), (k, v) = _heads(_linear(h, p, "query"), 1, size), _heads(_linear(h, p, "kv"), 2, size)
        if config.positions == "rotary":
            q, k = _rotated(q, places), _rotated(k, places)
        causal = config.kind == "gpt" and seen is None
        h = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal, enable_gqa=True)
        x = x + _linear(h.transpose(1, 2).reshape(x.shape), p, "projection")
        h = _linear(_norm(x, p, "norm2"), p, "up")
        if config.activation == "swiglu":
            gate, value = h.chunk(2, -1)
            h = functional.silu(gate) * value
        else:
            h = functional.relu(h) if config.activation == "relu" else functional.gelu(h, approximate="tanh")
        x = x + _linear(h, p, "down")
    last = config.layers + 1
    x = _norm(x, {key.split(".", 1)[1]: value for key, value in w.items() if key.startswith(f"{last}.")}, "norm")
    return functional.linear(x, w["0.tokens.weight" if config.tied else f"{last}.head.weight"])


def _convnet(w, x, config):
    functional = torch.nn.functional
    x = x.permute(0, 3, 1, 2)
    for layer in range(config.layers):
        p = {key.split(".", 1)[1]: value for key, value in w.items() if key.startswith(f"{layer}.")}
        stride = 2 if layer and layer % 2 == 0 else 1
        weight = p["convolution.weight"].permute(0, 3, 1, 2)
        x = functional.conv2d(x, weight, p["convolution.bias"], stride=stride, padding=1)
        x = _norm(x.permute(0, 2, 3, 1), p, "norm").permute(0, 3, 1, 2)
        x = functional.relu(x) if config.activation == "relu" else functional.gelu(x, approximate="tanh")
    return functional.linear(x.mean((2, 3)), w[f"{config.layers}.head.weight"], w[f"{config.layers}.head.bias"])


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
    count = int((targets.astype(np.int64) >= 0).sum())
    assert count == len(targets) * model.tokens_per_sample or isinstance(x, PackedTokens)
    model.backward(parameters, into, 1 / count, arena)
    wide = torch.tensor(targets.astype(np.int64).reshape(-1))
    mean = torch.nn.functional.cross_entropy(expected.reshape(-1, expected.shape[-1]), wide, ignore_index=-1)
    mean.backward()
    assert loss / count == pytest.approx(float(mean.detach()), rel=1e-6)
    whole = np.sqrt(sum(float((value.grad.double() ** 2).sum()) for value in weights.values()))
    for key, value in weights.items():
        difference = np.linalg.norm(gradient.view(key).astype(np.float64) - value.grad.double().numpy())
        assert difference <= 1e-5 * whole, f"{key}: {difference / whole:.1e} of the whole gradient"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("hidden", "heads", "context", "batch"), [(64, 4, 80, 3), (33, 3, 1, 2), (128, 4, 128, 2)])
def test_gpt_matches_autograd(tied, hidden, heads, context, batch, rng):
    config = ModelConfig(layers=2, hidden=hidden, heads=heads, vocabulary=50, tied=tied)
    tokens = rng.integers(0, 50, (batch, context + 1)).astype(np.uint16)
    x, targets = tokens[:, :-1], tokens[:, 1:]
    wide = torch.tensor(x.astype(np.int64))
    model = models.build(config, "float32", context=context)
    _compare(model, x, targets, lambda w: _transformer(w, wide, config), rng)


OPTIONS = {
    "rotary": {"positions": "rotary"},
    "rms": {"norm": "rms"},
    "swiglu": {"activation": "swiglu"},
    "relu": {"activation": "relu", "feed_forward": 77},
    "grouped": {"kv_heads": 2},
    "one for all": {"kv_heads": 1, "positions": "rotary", "tied": True},
    "no bias": {"bias": False},
    "llama": {
        "positions": "rotary", "norm": "rms", "activation": "swiglu", "kv_heads": 2, "bias": False, "feed_forward": 45,
    },
}  # fmt: skip
WINDOWED = {"mistral": OPTIONS["llama"] | {"window": 19}}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["gpt", "encoder"])
@pytest.mark.parametrize(("context", "batch"), [(80, 2), (1, 3)])
def test_transformer_options_match_autograd(kind, options, context, batch, rng):
    config = ModelConfig(kind=kind, layers=2, hidden=48, heads=4, vocabulary=50, **OPTIONS[options])
    tokens = rng.integers(0, 50, (batch, context + 1)).astype(np.uint16)
    x, targets = tokens[:, :-1], tokens[:, 1:]
    if kind == "encoder":
        targets = np.full(x.shape, IGNORED)
        for row in targets:
            row[rng.choice(context, masked_predictions(context), replace=False)] = 3
    wide = torch.tensor(x.astype(np.int64))
    model = models.build(config, "float32", context=context)
    _compare(model, x, targets, lambda w: _transformer(w, wide, config), rng)


@cases("options, context", ({"window": 1}, 7), (WINDOWED["mistral"], 80), ({"window": 70}, 150))
def test_attention_windows_match_autograd(options, context, rng):
    config = ModelConfig(layers=2, hidden=48, heads=4, vocabulary=50, **options)
    tokens = rng.integers(0, 50, (2, context + 1)).astype(np.uint16)
    wide, model = torch.tensor(tokens[:, :-1].astype(np.int64)), models.build(config, "float32", context=context)
    _compare(model, tokens[:, :-1], tokens[:, 1:], lambda w: _transformer(w, wide, config), rng)


@cases(
    "kind, options, context, most",
    ("gpt", "no bias", 80, 30),
    ("gpt", "llama", 150, 0),
    ("gpt", "mistral", 150, 0),
    ("encoder", "one for all", 70, 9),
)
def test_packed_documents_match_autograd(kind, options, context, most, rng):
    config = ModelConfig(kind=kind, layers=2, hidden=48, heads=4, vocabulary=50, **(OPTIONS | WINDOWED)[options])
    tokens, places = rng.integers(0, 50, (2, context)).astype(np.uint16), random_places(rng, 2, context, most)
    targets = np.where(rng.random(tokens.shape) < 0.2, IGNORED, rng.integers(0, 50, tokens.shape))
    wide = torch.tensor(tokens.astype(np.int64))
    model, packed = models.build(config, "float32", context=context), PackedTokens.of(tokens, places)
    _compare(model, packed, targets, lambda w: _transformer(w, wide, config, places), rng)


@cases(
    "layers, activation, norm, shape",
    (4, "relu", "layer", (6, 16, 16, 3)),
    (5, "gelu", "rms", (3, 9, 14, 1)),
    (1, "gelu", "layer", (2, 1, 5, 4)),
    (3, "relu", "layer", (1, 2, 1, 2)),
)
def test_convnet_matches_autograd(layers, activation, norm, shape, rng):
    config = ModelConfig(kind="convnet", layers=layers, hidden=12, activation=activation, norm=norm)
    x = rng.standard_normal(shape).astype(np.float32)
    targets = rng.integers(0, 6, shape[0]).astype(np.uint8)
    height, width, channels = shape[1:]
    model = models.build(config, "float32", height=height, width=width, channels=channels, classes=6)
    wide = torch.tensor(x)
    _compare(model, x, targets, lambda w: _convnet(w, wide, config), rng)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_mlp_matches_autograd(activation, rng):
    config = ModelConfig(kind="mlp", layers=3, hidden=50, activation=activation)
    x = rng.standard_normal((17, 21)).astype(np.float32)
    targets = rng.integers(0, 6, 17).astype(np.uint8)
    wide = torch.tensor(x)
    model = models.build(config, "float32", features=21, classes=6)
    _compare(model, x, targets, lambda w: _mlp(w, wide, 3, activation), rng)
