"""The [model] section rejects models that cannot be built."""

from dataclasses import FrozenInstanceError

import pytest

from harness.marks import cases
from hpcdist import models
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig, applies, loss_unit, speed_unit


@cases(
    "changes, message",
    ({"kind": "cnn"}, "model.kind = 'cnn'; choose one of gpt, encoder, mlp, convnet"),
    ({"layers": 0}, "model.layers = 0"),
    ({"layers": 10**9}, "model.layers = 1000000000; it must be between 1 and 10000"),
    ({"hidden": 10**18}, "model.hidden = 1000000000000000000; it must be between 1 and"),
    ({"heads": 10**18}, "it must be between 1 and"),
    ({"vocabulary": 10**18}, "it must be between 1 and"),
    ({"feed_forward": 10**18}, "it must be between 0 and"),
    ({"window": 10**18}, "it must be between 0 and"),
    ({"experts": 100_000}, "model.experts = 100000; it must be between 0 and 2\\^16"),
    ({"hidden": -4}, "model.hidden = -4"),
    ({"heads": 0}, "model.heads = 0"),
    ({"vocabulary": 0}, "model.vocabulary = 0"),
    ({"hidden": 130}, "model.hidden = 130 with model.heads = 4: all heads must have the same width"),
    ({"dropout": 1.0}, "at least 0 and below 1"),
    ({"dropout": -0.1}, "at least 0"),
    ({"activation": "swish"}, "choose one of gelu, relu, swiglu"),
    ({"activation": "swiglu", "kind": "mlp"}, "model.activation = 'swiglu' with model.kind = 'mlp'"),
    ({"activation": "swiglu", "kind": "convnet"}, "model.kind = 'convnet'; use 'gelu' or 'relu'"),
    ({"positions": "sine"}, "model.positions = 'sine'; choose one of learned, rotary"),
    ({"norm": "batch"}, "model.norm = 'batch'; choose one of layer, rms"),
    ({"kv_heads": -1}, "model.kv_heads = -1; it must be at least 0"),
    ({"window": -1}, r"model.window = -1; it must be between 0 and 2\^27"),
    ({"kind": "encoder", "window": 8}, "model.window = 8 has no effect with model.kind = 'encoder'"),
    ({"kv_heads": 3}, r"model.kv_heads = 3 with model.heads = 4: .*; choose one of \[1, 2, 4\]"),
    ({"kv_heads": 8}, "model.kv_heads = 8 with model.heads = 4"),
    ({"feed_forward": -1}, "model.feed_forward = -1"),
    ({"hidden": 12, "positions": "rotary"}, "model.hidden / model.heads = 3; change model.head_size"),
    ({"kind": "encoder", "vocabulary": 1}, "an encoder needs a mask token and at least one other"),
    ({"kind": "encoder", "mask_token": 256}, "model.mask_token = 256 with model.vocabulary = 256"),
    ({"kind": "encoder", "mask_token": -2}, "model.mask_token = -2"),
    ({"kind": "encoder", "hidden": 130}, "model.hidden = 130 with model.heads = 4: all heads must have the same width"),
    (
        {"mask_token": 5},
        "model.mask_token = 5 has no effect with model.kind = 'gpt'; remove it, or set model.kind = 'encoder'",
    ),
    ({"kind": "mlp", "tied": True}, "model.tied = true has no effect with model.kind = 'mlp'; .* gpt, encoder"),
    ({"kind": "mlp", "norm": "rms"}, "model.norm = 'rms' has no effect with model.kind = 'mlp'"),
    ({"kind": "convnet", "bias": False}, "model.bias = false has no effect with model.kind = 'convnet'"),
    ({"kind": "convnet", "kv_heads": 2}, "model.kv_heads = 2 has no effect"),
    ({"kind": "convnet", "positions": "rotary"}, "model.positions = 'rotary' has no effect"),
    ({"kind": "mlp", "feed_forward": 9}, "model.feed_forward = 9 has no effect"),
    ({"kind": "mlp", "experts": 4}, "model.experts = 4 has no effect with model.kind = 'mlp'"),
    ({"experts": 1}, "model.experts = 1: a router must choose between experts; set it to 2 or more, or to 0"),
    ({"experts": -2}, "model.experts = -2"),
    (
        {"experts": 4, "experts_per_token": 5},
        "model.experts_per_token = 5 with model.experts = 4: .*; choose at most 4",
    ),
    ({"experts": 4, "experts_per_token": 0}, "model.experts_per_token = 0"),
    ({"experts_per_token": 1}, "model.experts_per_token = 1 has no effect with model.experts = 0; .* 2 or more"),
    ({"shared_experts": 1}, "model.shared_experts = 1 has no effect"),
    ({"balance_rate": 0.1}, "model.balance_rate = 0.1 has no effect"),
    ({"experts": 4, "router": "hash"}, "model.router = 'hash'; choose one of softmax, sigmoid"),
    (
        {"experts": 4, "capacity_factor": 2.5},
        "model.capacity_factor = 2.5 .*: an expert would take more than all tokens; choose at most 2,",
    ),
    ({"experts": 4, "capacity_factor": float("nan")}, "model.capacity_factor = nan; it must be finite"),
    ({"experts": 4, "z_loss": -1.0}, "model.z_loss = -1.0; it must be finite and at least 0"),
)
def test_invalid_model_options_are_rejected(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        ModelConfig(**changes)


def test_attention_dropout_above_the_counter_limit_is_rejected():
    config = ModelConfig(heads=16, hidden=128, dropout=0.1)
    with pytest.raises(ConfigurationError, match="model.heads = 16 and data.context = 32768"):
        models.build(config, context=32768)
    assert models.build(config, context=32764).tokens_per_sample == 32764


def test_hidden_of_an_mlp_needs_no_multiple_of_heads():
    assert ModelConfig(kind="mlp", hidden=7).hidden == 7


@cases(
    "changes, inner, kv_width",
    ({}, 512, 128),
    ({"activation": "swiglu"}, 352, 128),  # 341.3 rounded up
    ({"activation": "swiglu", "hidden": 12}, 32, 12),
    ({"activation": "swiglu", "hidden": 4096, "heads": 32, "kv_heads": 8}, 10944, 1024),
    ({"activation": "relu", "feed_forward": 7, "kv_heads": 1}, 7, 32),
)
def test_block_widths_follow_the_options(changes, inner, kv_width):
    config = ModelConfig(**changes)
    assert (config.inner, config.kv_width) == (inner, kv_width)
    shapes = {spec.name: spec.shape for spec in models.build(config, context=2).stages[1].tensors()}
    assert shapes["down.weight"] == (config.hidden, inner)
    grouped = kv_width != config.hidden
    assert shapes["kv.weight" if grouped else "qkv.weight"] == (2 if grouped else 3, kv_width, config.hidden)


def test_mask_token_defaults_to_the_last_token():
    assert ModelConfig(kind="encoder", vocabulary=300).mask == 299
    assert ModelConfig(kind="encoder", vocabulary=300, mask_token=0).mask == 0


def test_default_tensor_names_are_unchanged():
    # A checkpoint of a gpt finds its tensors by these names and shapes, and its random numbers by their order.
    names = [spec.name for spec in models.build(ModelConfig(), context=2).stages[1].tensors()]
    assert names == [
        *("norm1.scale", "norm1.bias", "qkv.weight", "qkv.bias", "projection.weight", "projection.bias"),
        *("norm2.scale", "norm2.bias", "up.weight", "up.bias", "down.weight", "down.bias"),
    ]


def test_model_config_is_frozen_and_keyword_only():
    with pytest.raises(FrozenInstanceError):
        ModelConfig().layers = 2
    with pytest.raises(TypeError):
        ModelConfig("gpt")


def test_build_rejects_missing_inputs_and_unsupported_dtypes():
    with pytest.raises(ConfigurationError, match="data.context is 0"):
        models.build(ModelConfig())
    with pytest.raises(ConfigurationError, match="0 features and 3 classes"):
        models.build(ModelConfig(kind="mlp"), classes=3)
    with pytest.raises(ConfigurationError, match="3 x 0 pixels, 1 channels and 2 classes"):
        models.build(ModelConfig(kind="convnet"), height=3, channels=1, classes=2)
    with pytest.raises(ConfigurationError, match="data.context is 0; encoder models"):
        models.build(ModelConfig(kind="encoder"))
    with pytest.raises(ConfigurationError, match="got 'int8'"):
        models.build(ModelConfig(), "int8", context=4)


@cases(
    "kind, tokens, speed, loss",
    ("gpt", 1, "tokens", "nats"),
    ("convnet", 1, "samples", "nats"),
    ("import", 128, "tokens", "nats"),
    ("import", 1, "samples", ""),
    ("given", 1, "samples", ""),
)
def test_units_of_a_model_follow_its_kind_and_tokens(kind, tokens, speed, loss):
    assert (speed_unit(kind, tokens), loss_unit(kind, tokens)) == (speed, loss)


def test_keys_of_a_model_apply_only_to_its_kind():
    assert applies("hidden", "mlp") and not applies("hidden", "import") and applies("factory", "import")
    assert applies("router", "gpt") and not applies("router", "mlp") and applies("kind", "given")
