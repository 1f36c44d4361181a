"""Model families of Hugging Face: ``config.json`` as keys of [model], and back.

Sources: the configuration classes of transformers 4.57 and 5.24.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from hpcdist.errors import ConfigurationError
from hpcdist.models.config import MOST_CONTEXT, ModelConfig, in_blocks
from hpcdist.reporting import regular

CONFIG: Final = "config.json"
GGUF_SUFFIX: Final = ".gguf"
ROTARY_CONTEXT: Final = 1024  # tokens per sample of a new run, if the model has no table of positions
# Keys of config.json that do not change the logits.
HARMLESS: Final = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "hpcdist"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id"),
        *("initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "pretraining_tp"),
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        *("_name_or_path", "name_or_path", "id2label", "label2id", "problem_type", "task_specific_params", "n_ctx"),
        *("return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "tokenizer_class"),
        *("is_llama_config", "transformers.js_config", "max_length", "_attn_implementation", "is_decoder"),
        *("unsloth_fixed", "gradient_checkpointing", "auto_map", "max_position_embeddings", "n_positions"),
    )
)
ROTARY_KEYS: Final = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
# Keys of a rotary scaling, and the [model] keys with the same meaning.
SCALED: Final[dict[str, dict[str, str]]] = {
    "default": {},
    "linear": {"factor": "rotary_factor"},
    "llama3": {
        "factor": "rotary_factor",
        "original_max_position_embeddings": "rotary_context",
        "low_freq_factor": "rotary_slow",
        "high_freq_factor": "rotary_fast",
    },
    "yarn": {
        "factor": "rotary_factor",
        "original_max_position_embeddings": "rotary_context",
        "beta_slow": "rotary_slow",
        "beta_fast": "rotary_fast",
        "attention_factor": "rotary_magnitude",
    },
}


@dataclass(frozen=True)
class Family:
    """Family of models: its class in transformers, and its keys in ``config.json``."""

    architecture: str
    read: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]  # (config, defaults) -> [model] keys
    written: Callable[[ModelConfig, int], dict[str, Any]]  # (model, context) -> config
    defaults: Mapping[str, Any]  # values of missing keys; the keys are all that ``read`` uses


def is_directory(path: Path) -> bool:
    """Return True if ``path`` is a directory of Hugging Face, with a ``config.json``."""
    return (path / CONFIG).is_file()


def is_source(path: Path) -> bool:
    """Return True if ``path`` is a model with its settings: a directory of Hugging Face, or a GGUF file."""
    return is_directory(path) or (path.suffix == GGUF_SUFFIX and path.is_file())


def read_config(source: Path) -> dict[str, Any]:
    """Return the ``config.json`` of the model ``source``, see `is_source`. Raises StorageError, ConfigurationError."""
    path = source if source.suffix == GGUF_SUFFIX else source / CONFIG
    try:
        if path == source:
            from hpcdist.checkpoint.convert import gguf_file

            config: Any = gguf_file.read_settings(source)[CONFIG]
        else:
            with regular.damage(path):
                config = regular.json_value(path)
        model_keys(config)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return dict(config)


def recipe_values(source: Path) -> dict[str, Any]:
    """Return {recipe key: value} of the model ``source``, and a data.context that the model supports."""
    config = read_config(source)
    keys = {f"model.{name}": value for name, value in model_keys(config).items()}
    length = context_of(config)
    return {**keys, "data.context": length if config["model_type"] == "gpt2" else min(length, ROTARY_CONTEXT)}


def model_keys(config: Any) -> dict[str, Any]:
    """Return {key of [model]: value} of a ``config.json``, without keys at their default. Raises ConfigurationError.

    ``config``: content of the file. A value that changes the logits in a way that hpcdist lacks is refused.
    """
    if not isinstance(config, dict):
        raise ConfigurationError("config.json is not a JSON object; copy the file again")
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        inner = " with a text_config" if "text_config" in config else ""
        raise ConfigurationError(
            f"model_type {str(name)[:40]!r}{inner} is not supported; supported: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    for key, value in config.items():
        if key not in family.defaults and key not in HARMLESS and value is not None and value is not False:
            raise ConfigurationError(
                f"{key} = {str(value)[:80]!r} of model_type {name!r} is not supported; remove the key from config.json "
                "if it does not change the logits"
            )
    try:
        keys = {"kind": "gpt", **family.read({**family.defaults, **config}, config)}
        model = canonical(ModelConfig(**keys))
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"config.json has a value of the wrong type: {error}") from error
    default = ModelConfig()
    values = {item.name: getattr(model, item.name) for item in fields(model)}
    return {key: value for key, value in values.items() if value != getattr(default, key)}


def context_of(config: Mapping[str, Any]) -> int:
    """Return the maximum number of tokens per sample of a ``config.json``. Raises ConfigurationError."""
    name = "n_positions" if config["model_type"] == "gpt2" else "max_position_embeddings"
    length = config.get(name, FAMILIES[config["model_type"]].defaults[name])
    if type(length) is not int or length < 1:
        raise ConfigurationError(f"{name} is {str(length)[:40]!r}, expected a number of at least 1")
    return length


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int:
        raise ConfigurationError(f"{key} is {str(value)[:40]!r}, expected a whole number; correct config.json")
    return value


def _require(config: Mapping[str, Any], key: str, *values: Any) -> Any:
    if config.get(key) not in values:
        supported = " or ".join(repr(value) for value in values)
        raise ConfigurationError(f"{key} = {str(config.get(key))[:40]!r} is not supported; supported: {supported}")
    return config[key]


def _llama_keys(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden, layers = (
        _number(config, key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    _require(config, "hidden_act", "silu", "swish")
    attention, feed_forward = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    biased = {(True, True): "all", (True, False): "attention", (False, True): "feed_forward"}
    family = config["model_type"]
    if family == "llama" and hidden % heads:
        raise ConfigurationError(f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}")
    qkv = family == "qwen2"  # its biases have no key
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _number(config, "num_key_value_heads") if config.get("num_key_value_heads") is not None else 0,
        "head_size": _number(config, "head_dim") if config.get("head_dim") is not None else 0,
        "vocabulary": _number(config, "vocab_size"),
        "feed_forward": _number(config, "intermediate_size"),
        "tied": bool(config["tie_word_embeddings"]),
        "activation": "swiglu",
        "positions": "rotary",
        "norm": "rms",
        "norm_epsilon": float(config["rms_norm_eps"]),
        "bias": attention or feed_forward or qkv,
        "biased": "qkv" if qkv else biased.get((attention, feed_forward), "all"),
        "query_key_norm": "head" if family == "qwen3" else "none",
        **_window(config, layers),
        **_rotary(config, given),
    }


def _window(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True) or window >= context_of(config):
        return {}
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 0)
        slides = [number >= first for number in range(layers)]
    else:
        for kind in kinds:
            _require({"layer_types": kind}, "layer_types", "full_attention", "sliding_attention")
        slides = [kind == "sliding_attention" for kind in kinds]
    if len(slides) != layers:
        raise ConfigurationError(f"layer_types has {len(slides)} entries for {layers} layers; correct config.json")
    return {"window": int(window), "window_layers": _blocks(slides)} if any(slides) else {}


def _blocks(flags: list[bool]) -> str:
    # Ranges of the true flags, such as "1-5,7-7", or "" if all flags are true.
    if all(flags):
        return ""
    starts = [number for number, flag in enumerate(flags, 1) if flag and (number == 1 or not flags[number - 2])]
    ends = [number for number, flag in enumerate(flags, 1) if flag and (number == len(flags) or not flags[number])]
    return ",".join(f"{start}-{end}" if start < end else f"{start}" for start, end in zip(starts, ends, strict=True))


def _rotary(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    scaling, parameters = dict(given.get("rope_scaling") or {}), dict(given.get("rope_parameters") or {})
    for name, value in parameters.items():
        if isinstance(value, dict):
            raise ConfigurationError(f"rope_parameters with the entry {name!r} per layer type is not supported")
        if name in scaling and scaling[name] != value:
            raise ConfigurationError(
                f"rope_parameters has {name} = {value!r}, but rope_scaling has {scaling[name]!r}; correct config.json"
            )
    rope = {name: value for name, value in {**scaling, **parameters}.items() if value is not None}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    base = rope.pop("rope_theta", config["rope_theta"])
    partial = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    _require({"partial_rotary_factor": partial}, "partial_rotary_factor", 1)
    if kind not in SCALED:
        raise ConfigurationError(f"rope_type {str(kind)[:40]!r} is not supported; supported: {', '.join(SCALED)}")
    if kind == "yarn":
        _require({"truncate": rope.pop("truncate", True)}, "truncate", True)
    unsupported = [name for name in rope if name not in SCALED[kind] and kind != "default"]
    if unsupported:
        raise ConfigurationError(
            f"{unsupported[0]} = {str(rope[unsupported[0]])[:40]!r} of rope_type {kind!r} is not supported; supported: "
            f"{', '.join(SCALED[kind])}"
        )
    if "original_max_position_embeddings" in SCALED[kind]:
        rope.setdefault("original_max_position_embeddings", context_of(config))
    default = ModelConfig()
    keys = {ours: type(getattr(default, ours))(rope[name]) for name, ours in SCALED[kind].items() if name in rope}
    if kind != "default" and "rotary_factor" not in keys:
        raise ConfigurationError(f"rope_type {kind!r} has no factor; add the factor to config.json")
    return {"rotary_base": float(base), "rotary_scaling": "none" if kind == "default" else kind, **keys}


def _gpt2_keys(config: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}.items():
        _require(config, key, value)
    for key in ("reorder_and_upcast_attn", "add_cross_attention"):
        _require(config, key, False)
    activation = _require(config, "activation_function", "gelu_new", "gelu_pytorch_tanh", "relu")
    return {
        "layers": _number(config, "n_layer"),
        "hidden": _number(config, "n_embd"),
        "heads": _number(config, "n_head"),
        "vocabulary": _number(config, "vocab_size"),
        "feed_forward": _number(config, "n_inner") if config.get("n_inner") is not None else 0,
        "tied": bool(config["tie_word_embeddings"]),
        "activation": "relu" if activation == "relu" else "gelu",
        "norm_epsilon": float(config["layer_norm_epsilon"]),
    }


def canonical(model: ModelConfig, context: int = MOST_CONTEXT) -> ModelConfig:
    """Return ``model`` with default sizes as 0, an explicit feed-forward width, and no dropout.

    ``context``: maximum number of tokens per sample. A window of at least this size has no effect, and becomes 0.
    """
    layers = range(1, model.layers + 1)
    windowed = [0 < model.window < context and in_blocks(model.window_layers, block) for block in layers]
    rotary = [in_blocks(model.rotary_layers, block) for block in layers]
    fast, magnitude = 4.0 if model.rotary_scaling == "llama3" else 32.0, 0.1 * math.log(model.rotary_factor) + 1
    return replace(
        model,
        kv_heads=model.kv_heads % model.heads,
        head_size=0 if model.head_size * model.heads == model.hidden else model.head_size,
        feed_forward=model.inner,
        dropout=0.0,
        biased=model.biased if model.bias else "all",
        window=model.window if any(windowed) else 0,
        window_layers=_blocks(windowed) if any(windowed) else "",
        rotary_layers=_blocks(rotary),
        rotary_fast=0.0 if model.rotary_fast == fast else model.rotary_fast,
        rotary_magnitude=0.0 if math.isclose(model.rotary_magnitude, magnitude) else model.rotary_magnitude,
    )


def _llama_config(model: ModelConfig, context: int) -> dict[str, Any]:
    scaling: dict[str, Any] = {}
    if model.rotary_scaling != "none":
        named = {theirs: getattr(model, ours) for theirs, ours in SCALED[model.rotary_scaling].items()}
        if model.rotary_scaling == "llama3":
            named["high_freq_factor"] = model.rotary_fast or 4.0
        scaling = {name: value for name, value in named.items() if value}  # 0 means the default of the scaling
        scaling = {"rope_type": model.rotary_scaling, **scaling}
    attention = model.bias and model.biased in ("all", "attention")
    slides = [model.window > 0 and in_blocks(model.window_layers, block) for block in range(1, model.layers + 1)]
    return {
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.head_size or model.hidden // model.heads,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tied,
        "attention_bias": attention,
        "mlp_bias": model.bias and model.biased in ("all", "feed_forward"),
        "sliding_window": model.window or None,
        "use_sliding_window": model.window > 0,
        "max_window_layers": slides.index(True) if any(slides) else model.layers,
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in slides],
        # transformers 4 reads rope_theta and rope_scaling, and transformers 5 reads rope_parameters.
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": model.rotary_base},
    }


def _gpt2_config(model: ModelConfig, context: int) -> dict[str, Any]:
    return {
        "vocab_size": model.vocabulary,
        "n_positions": context,
        "n_embd": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.inner,
        "activation_function": "relu" if model.activation == "relu" else "gelu_new",
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tied,
    }


def config_of(model: ModelConfig, context: int, preferred: str = "") -> dict[str, Any]:
    """Return a ``config.json`` for ``model``, of the first family that has all features of the model.

    ``context``: maximum number of tokens per sample. ``preferred``: family to try first. Raises ConfigurationError if
    no family fits.
    """
    target = canonical(model, context)
    reasons: dict[str, list[str]] = {}
    for name in sorted(FAMILIES, key=lambda name: name != preferred):
        family = FAMILIES[name]
        config = {"model_type": name, "architectures": [family.architecture], **family.written(target, context)}
        config = {key: value for key, value in config.items() if key in family.defaults or key in HARMLESS}
        try:
            result = canonical(ModelConfig(**model_keys(config)))
        except ConfigurationError as error:
            reasons[name] = [f"{error}"]
            continue
        reasons[name] = [
            f"model.{item.name} = {getattr(target, item.name)!r}"
            for item in fields(target)
            if getattr(result, item.name) != getattr(target, item.name)
        ]
        if not reasons[name]:
            return config
    nearest = min(reasons, key=lambda name: len(reasons[name]))
    raise ConfigurationError(
        f"no model family of Hugging Face has all features of the model; {nearest} lacks {', '.join(reasons[nearest])}"
    )


_LLAMA_DEFAULTS: Final = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")),
    **dict.fromkeys((*ROTARY_KEYS, "num_key_value_heads", "head_dim")),
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "model_type": None,
    "partial_rotary_factor": 1.0,
}
_QWEN_DEFAULTS: Final = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "max_position_embeddings": 32768,
}


def _of_llama(architecture: str, **defaults: Any) -> Family:
    return Family(architecture, _llama_keys, _llama_config, _LLAMA_DEFAULTS | defaults)


# The order of preference at export.
FAMILIES: Final[dict[str, Family]] = {
    "llama": _of_llama("LlamaForCausalLM", attention_bias=False, mlp_bias=False),
    "mistral": _of_llama(
        "MistralForCausalLM", num_key_value_heads=8, sliding_window=4096, max_position_embeddings=131072
    ),
    "qwen2": _of_llama("Qwen2ForCausalLM", **_QWEN_DEFAULTS),
    "qwen3": _of_llama("Qwen3ForCausalLM", head_dim=128, attention_bias=False, **_QWEN_DEFAULTS),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _gpt2_keys,
        _gpt2_config,
        {
            **dict.fromkeys(("vocab_size", "n_embd", "n_layer", "n_head", "n_inner")),
            "n_positions": 1024,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
    ),
}
