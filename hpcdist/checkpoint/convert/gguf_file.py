"""GGUF files of the llama architecture: settings, tokenizer and dequantized tensors, as in a Hugging Face directory.

Source: llama.cpp, ``convert_hf_to_gguf.py`` and ``gguf-py``. The package ``gguf`` reads the format.
"""

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint.listing import PARAMETERS, StoredTensor
from hpcdist.errors import ConfigurationError, MissingCapabilityError, StorageError

MODULES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Keys of llama.* that have the same meaning as keys of config.json.
_KEYS: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_SCALING: Final = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_DIGITS: Final = {"type": "Digits", "individual_digits": True}
# Steps before the byte-level split, by the value of tokenizer.ggml.pre.
_SPLITS: Final[dict[str, list[dict[str, Any]]]] = {"smollm": [_DIGITS], "gpt-2": [], "default": []}
_CONTROL: Final = (3, 4)  # token types of special tokens and of tokens that a user added


def paired_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return query or key rows of rotary pairs (2i, 2i + 1) in the order of hpcdist, with pairs (i, i + size / 2)."""
    size = rows.shape[0] // heads
    return rows.reshape(heads, size // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """Return {name of a JSON file: content}: ``config.json``, ``tokenizer.json``, ``tokenizer_config.json``.

    Raises ConfigurationError, MissingCapabilityError, StorageError.
    """
    values, tensors, _ = _content(path)
    names = {name for name, *_ in tensors}
    config = _config(values, tied="output.weight" not in names)
    tokens = [] if (path.parent / "tokenizer.json").is_file() else values.get("tokenizer.ggml.tokens", [])
    return {"config.json": config, **(_tokenizer(values, tokens) if tokens else {})}


def _config(values: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    architecture = values.get("general.architecture")
    if architecture != "llama":
        raise ConfigurationError(
            f"general.architecture = {str(architecture)[:40]!r} is not supported; supported: 'llama'; convert the "
            "model to a Hugging Face directory"
        )
    config: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": tied, "torch_dtype": "float32"}
    scaling: dict[str, Any] = {}
    settings = {key.removeprefix("llama."): value for key, value in values.items() if key.startswith("llama.")}
    for ignored in ("rope.dimension_count", "attention.value_length"):
        size = settings.pop(ignored, None)
        expected = (
            settings.get("attention.key_length") or settings["embedding_length"] // settings["attention.head_count"]
        )
        if size not in (None, expected):
            raise ConfigurationError(f"llama.{ignored} = {size} is not supported; supported: {expected}")
    for key, value in settings.items():
        number = float(str(np.float32(value))) if isinstance(value, float) else value
        if key in _KEYS:
            config[_KEYS[key]] = number
        elif key in _SCALING:
            scaling[_SCALING[key]] = number
        else:
            raise ConfigurationError(f"llama.{key} = {str(value)[:40]!r} is not supported; use another model")
    if scaling.get("rope_type", "none") != "none":
        config["rope_scaling"] = scaling
    config.setdefault("vocab_size", len(values.get("tokenizer.ggml.tokens", ())))
    ends = {f"{name}_token_id": values.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return config | {name: value for name, value in ends.items() if value is not None}


def _tokenizer(values: Mapping[str, Any], tokens: list[str]) -> dict[str, dict[str, Any]]:
    kind, split = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in _SPLITS:
        raise ConfigurationError(
            f"tokenizer.ggml.model = {kind!r} with tokenizer.ggml.pre = {split!r} is not supported; supported: 'gpt2' "
            f"with {', '.join(_SPLITS)}; put the tokenizer.json of the model next to the file"
        )
    types = values.get("tokenizer.ggml.token_type", [])
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [(number, tokens[number], kind == 3) for number, kind in enumerate(types) if kind in _CONTROL]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": one, "content": text, **special, "special": flag} for one, text, flag in added],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_SPLITS[split], byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {text: number for number, text in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in values["tokenizer.ggml.merges"]],
        },
    }
    ends = {name: values.get(f"tokenizer.ggml.{key}_token_id") for name, key in _ENDS.items()}
    settings: dict[str, Any] = {name: tokens[one] for name, one in ends.items() if one is not None}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}
    if template := values.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}


_ENDS: Final = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


class GgufReader:
    """Reader of the tensors of a GGUF file, with Hugging Face names. It keeps the last tensor as float32."""

    def __init__(self, path: Path) -> None:
        values, self._stored, self._module = _content(path)
        self.left_out: list[str] = []
        self.metadata = ""
        heads = values.get("llama.attention.head_count", 1)
        self._heads = {"attn_q": heads, "attn_k": values.get("llama.attention.head_count_kv", heads)}
        self.tensors = [StoredTensor(PARAMETERS, _name_of(name), "float32", shape) for name, shape, *_ in self._stored]
        self._last: tuple[int, np.ndarray] = (-1, np.empty(0, np.float32))

    def read(self, index: int, elements: Range, out: np.ndarray) -> None:
        if self._last[0] != index:
            name, shape, data, code = self._stored[index]
            values = self._module.dequantize(data, code).reshape(shape)
            heads = self._heads.get(name.split(".")[-2])
            self._last = index, np.ravel(paired_rows(values, heads) if heads else values)
        out[...] = self._last[1][elements.slice]

    def close(self) -> None:
        self._last = -1, np.empty(0, np.float32)


def _name_of(name: str) -> str:
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in MODULES:
        return f"model.layers.{parts[1]}.{MODULES[parts[2]]}.{parts[3]}"
    return ".".join([_OUTER.get(parts[0], parts[0]), *parts[1:]])


def _content(path: Path) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], np.ndarray, Any]], Any]:
    # Returns metadata, (name, shape, bytes, type) of the tensors, and the module gguf.
    try:
        stat = os.stat(path)
        return _parsed(path, stat.st_mtime_ns, stat.st_size)
    except (MissingCapabilityError, StorageError):
        raise
    except Exception as error:  # a hostile file may make the library raise anything
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise StorageError(f"{path} cannot be read as GGUF: {reason}; copy the file again") from error


@lru_cache(maxsize=1)  # parsing a vocabulary takes seconds
def _parsed(
    path: Path, _: int, __: int
) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], np.ndarray, Any]], Any]:
    try:
        import gguf
    except ImportError as error:
        raise MissingCapabilityError(
            f"{path}: gguf cannot be imported ({error}); run pip install 'hpcdist[gguf]'"
        ) from error
    reader = gguf.GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    tensors = [
        (one.name, tuple(int(size) for size in reversed(one.shape)), one.data, one.tensor_type)
        for one in reader.tensors
    ]
    return values, tensors, gguf
