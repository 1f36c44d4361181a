"""Architecture fields of transformers, compared with the models of the library transformers in float64."""

import numpy as np
import pytest

from harness.pytorch.exact import in_float64
from hpcdist import models
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig

CONTEXT, VOCABULARY, LAYERS = 11, 37, 4
SMALL = {"layers": LAYERS, "vocabulary": VOCABULARY, "norm": "rms", "positions": "rotary", "activation": "swiglu"}
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2.0}
# Name -> (kind in transformers, its fields, fields of ModelConfig)
CASES = {
    "llama": (
        "Llama",
        {"head_dim": 6, "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 123.0}},
        {"head_size": 6, "kv_heads": 2, "rotary_base": 123.0, "bias": False, "norm_epsilon": 1e-6},
    ),
    "linear": (
        "Llama",
        {"rope_parameters": LINEAR, "attention_bias": True, "rms_norm_eps": 1e-2},
        {
            "rotary_base": 5e3, "rotary_scaling": "linear", "rotary_factor": 4.0, "biased": "attention",
            "norm_epsilon": 1e-2,
        },
    ),
    "llama3": (
        "Llama",
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}, "mlp_bias": True},
        {
            "rotary_base": 50.0, "rotary_scaling": "llama3", "rotary_factor": 8.0, "rotary_context": 16,
            "biased": "feed_forward", "norm_epsilon": 1e-6,
        },
    ),
    "yarn": (
        "Llama",
        {"rope_parameters": YARN | {"original_max_position_embeddings": 16}, "tie_word_embeddings": True},
        {
            "rotary_base": 100.0, "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_context": 16,
            "rotary_fast": 2.0, "tied": True, "bias": False, "norm_epsilon": 1e-6,
        },
    ),
    "qwen2": (
        "Qwen2",
        {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
        {"kv_heads": 1, "biased": "qkv", "window": 3, "window_layers": "3-4", "norm_epsilon": 1e-6},
    ),
    "qwen3": (
        "Qwen3",
        {"head_dim": 10, "num_key_value_heads": 2},
        {"head_size": 10, "kv_heads": 2, "query_key_norm": "head", "bias": False, "norm_epsilon": 1e-6},
    ),
    "qwen3 with equal heads": (
        "Qwen3",
        {"head_dim": 4, "num_key_value_heads": 4},
        {"head_size": 4, "query_key_norm": "head", "bias": False, "norm_epsilon": 1e-6},
    ),
    "smollm3": (
        "SmolLM3",
        {"num_key_value_heads": 2, "no_rope_layers": [1, 0, 1, 1], "rope_parameters": {"rope_theta": 1e4}},
        {"kv_heads": 2, "rotary_layers": "1,3-4", "tied": True, "bias": False, "norm_epsilon": 1e-6},
    ),
}  # fmt: skip


def twin(torch, kind, **fields):
    """Return a random model ``kind`` of transformers in float64."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 24, "pad_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**SIZES | sizes | fields, attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.float64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def tensors_of(module, config):
    """Return {tensor name of hpcdist: parameters of ``module`` that it stacks}."""
    tensors = {"0.tokens.weight": [module.model.embed_tokens.weight]}
    for layer, block in enumerate(module.model.layers, start=1):
        attention, feed_forward = block.self_attn, block.mlp
        query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
        tensors[f"{layer}.norm1.scale"] = [block.input_layernorm.weight]
        tensors[f"{layer}.norm2.scale"] = [block.post_attention_layernorm.weight]
        if config.query_key_norm != "none":
            tensors[f"{layer}.query_norm.scale"] = [attention.q_norm.weight]
            tensors[f"{layer}.key_norm.scale"] = [attention.k_norm.weight]
        linears = {"projection": [attention.o_proj], "down": [feed_forward.down_proj]}
        linears["up"] = [feed_forward.gate_proj, feed_forward.up_proj]
        linears |= {"query": [query], "kv": [key, value]} if config.separates_query else {"qkv": [query, key, value]}
        for name, stacked in linears.items():
            tensors[f"{layer}.{name}.weight"] = [linear.weight for linear in stacked]
            if stacked[0].bias is not None:
                tensors[f"{layer}.{name}.bias"] = [linear.bias for linear in stacked]
    tensors[f"{LAYERS + 1}.norm.scale"] = [module.model.norm.weight]
    if not config.tied:
        tensors[f"{LAYERS + 1}.head.weight"] = [module.lm_head.weight]
    return tensors


def loss_and_gradients(config, dtype, values, tokens):
    """Return logits, loss and gradients of hpcdist's model with the tensors ``values``."""
    model = models.build(config, dtype, context=CONTEXT)
    store, gradient = FlatStore(model.layout, model.dtype), FlatStore(model.layout, model.dtype)
    assert {segment.key for segment in model.layout.segments} == set(values)
    for segment in model.layout.segments:
        store.view(segment.key)[...] = values[segment.key].reshape(segment.spec.shape)
    parameters, into, arena = model.bind(store), model.bind_gradients(gradient), Arena()
    logits = model.logits(parameters, tokens[:, :-1], arena).copy()
    for stage in into:
        stage.begin_step()
    outputs = model.forward(parameters, tokens[:, :-1], arena, 0)
    last = arena.saved(model.stages[-1].layer, 0)
    loss = model.loss.forward(outputs, tokens[:, 1:], model.operations, last)
    model.backward(parameters, into, 1.0, arena, 0)
    for stage in into:
        stage.finish()
    return logits, loss, {key: gradient.view(key) for key in values}


@pytest.fixture
def torch_in_float64():
    with in_float64():
        yield pytest.importorskip("torch")


@pytest.mark.reference
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_match_transformers(name, torch_in_float64, rng):
    torch = torch_in_float64
    kind, theirs, ours = CASES[name]
    config = ModelConfig(hidden=32, heads=4, feed_forward=24, **SMALL | ours)
    torch.manual_seed(int(rng.integers(1 << 30)))
    module = twin(torch, kind, **theirs)
    tokens = rng.integers(0, VOCABULARY, (3, CONTEXT + 1))
    logits = module(torch.from_numpy(tokens[:, :-1])).logits
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCABULARY), torch.from_numpy(tokens[:, 1:]).reshape(-1), reduction="sum"
    )
    loss.backward()
    tensors = tensors_of(module, config)
    values = {key: np.stack([part.detach().numpy() for part in parts]) for key, parts in tensors.items()}
    expected = {key: np.stack([part.grad.numpy() for part in parts]) for key, parts in tensors.items()}
    for dtype, tolerance in (("float64", 1e-10), ("float32", 1e-4)):
        got, total, gradients = loss_and_gradients(config, dtype, values, tokens.astype(np.uint16))
        np.testing.assert_allclose(got, logits.detach().numpy(), rtol=tolerance, atol=tolerance)
        assert total == pytest.approx(float(loss), rel=tolerance)
        for key, gradient in gradients.items():
            want = expected[key].reshape(gradient.shape)
            assert np.linalg.norm(gradient - want) <= tolerance * (1 + np.linalg.norm(want)), key


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rotary_base": 5e5}, "has no effect with model.positions = 'learned'"),
        ({"positions": "rotary", "rotary_factor": 2.0}, "has no effect with model.rotary_scaling = 'none'"),
        ({"positions": "rotary", "rotary_scaling": "llama3"}, "set it to the context with which"),
        ({"window_layers": "1-2"}, "has no effect with model.window = 0"),
        ({"window": 4, "window_layers": "2-9"}, "it must name existing blocks; write ranges of the numbers 1 to 4"),
        ({"window": 4, "window_layers": "0-2"}, "it must name existing blocks"),
        ({"positions": "rotary", "rotary_layers": "1-"}, "it must name existing blocks"),
        ({"positions": "rotary", "head_size": 5}, "the width is 5; change model.head_size"),
        ({"bias": False, "biased": "qkv"}, "has no effect with model.bias = false"),
    ],
)
def test_invalid_architecture_is_rejected(fields, message):
    with pytest.raises(ConfigurationError) as caught:
        ModelConfig(**fields)
    assert message in str(caught.value)
