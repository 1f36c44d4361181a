"""Low-rank adapters in checkpoints: merge them into the weights, and read and write the files of PEFT.

PEFT's directory has ``adapter_model.safetensors`` and ``adapter_config.json``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist import models
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint.convert.huggingface import HuggingFaceDirectory
from hpcdist.checkpoint.convert.importing import ForeignFile
from hpcdist.checkpoint.convert.tensor_names import MappedTensor, adapted_module, mapped_tensors
from hpcdist.checkpoint.listing import StoredTensor
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.models.config import ModelConfig
from hpcdist.models.layers import low_rank
from hpcdist.models.layers.lora import ADAPTED_LAYERS, LoraConfig
from hpcdist.models.transformer import with_adapters
from hpcdist.reporting import regular

CONFIG: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"
# Options of PEFT that change the result, and their values without an effect.
_WITHOUT: Final[dict[str, tuple[Any, ...]]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "layers_to_transform": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}


def is_adapter(name: str) -> bool:
    """Return True if the tensor ``name`` belongs to a low-rank adapter."""
    return name.endswith((f".{low_rank.A}", f".{low_rank.B}"))


def mapped_adapters(family: str, model: ModelConfig, context: int, lora: LoraConfig) -> dict[str, MappedTensor]:
    """Return the names and shapes in PEFT's files of the adapters ``lora`` of ``model``, by their names in hpcdist."""
    layout = with_adapters(models.build(model, context=context), lora).layout
    return mapped_tensors(family, layout, select=is_adapter)


def config_of(family: str, lora: LoraConfig, names: Sequence[str], base: str) -> dict[str, Any]:
    """Return the content of ``adapter_config.json`` for the adapters ``names``. ``base``: path of the base model."""
    modules = {adapted_module(family, name.partition(".")[2].rpartition(".")[0]) for name in names}
    suffixes = {module.rpartition(".")[2] for module in modules}
    ambiguous = len(suffixes) < len(modules)  # c_proj of GPT-2
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules if ambiguous else suffixes),
        "bias": "none",
        "fan_in_fan_out": family == "gpt2",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }


class PeftDirectory(HuggingFaceDirectory):
    """Open directory of PEFT: its tensors have the names and shapes of the adapters ``lora`` of ``model``.

    Raises StorageError for damaged files, and ConfigurationError for adapters that differ from ``lora``.
    """

    def __init__(self, path: Path, family: str, model: ModelConfig, context: int, lora: LoraConfig) -> None:
        self.directory, self.dtype = path, "float32"
        self.config = _read_config(path)
        _check_options(path, self.config, lora)
        ForeignFile.__init__(self, path / TENSORS)
        self.mapped = mapped_adapters(family, model, context, lora)
        self._stored, self._index = self.tensors, {one.name: number for number, one in enumerate(self.tensors)}
        try:
            shapes = {name: mapped.stack.shape for mapped in self.mapped.values() for name in mapped.stack.names}
            stored = {one.name: one.shape for one in self.tensors}
            if shapes != stored:
                name = next(name for name in {**shapes, **stored} if shapes.get(name) != stored.get(name))
                targets = sorted(self.config.get("target_modules") or ())
                raise ConfigurationError(
                    f"{path / TENSORS}: {name} has the shape {stored.get(name)}, but {shapes.get(name)} in the "
                    f"model of the recipe; set lora.targets to {targets}, or use adapters of this model"
                )
        except BaseException:
            self.reader.close()
            raise


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(regular.text(path / CONFIG))
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise StorageError(f"{path / CONFIG} cannot be read: {error}; name a directory that PEFT has saved") from error
    return config


def _check_options(path: Path, config: Mapping[str, Any], lora: LoraConfig) -> None:
    if config.get("peft_type") != "LORA":
        raise ConfigurationError(f"{path / CONFIG}: peft_type is {config.get('peft_type')!r}; only LORA is supported")
    for key, allowed in _WITHOUT.items():
        if key in config and config[key] not in allowed:
            raise ConfigurationError(
                f"{path / CONFIG}: {key} is {config[key]!r}, which hpcdist does not support; merge the adapters with "
                "PEFT (merge_and_unload), and train new ones"
            )
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    alpha = alpha * rank**0.5 if config.get("use_rslora") else alpha
    for key, ours, theirs in (("rank", lora.rank, rank), ("alpha", lora.alpha, alpha)):
        if ours != theirs:
            raise ConfigurationError(
                f"lora.{key} is {ours}, but {path / CONFIG} has {theirs}; set lora.{key} = {theirs}"
            )


@dataclass(frozen=True)
class Merge:
    """Adapters of a checkpoint, to be added to its weights. The adapters are in memory, in float32."""

    scale: float
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Path, stored: Sequence[StoredTensor], lora: LoraConfig) -> "Merge":
        """Read the adapters among the tensors ``stored`` of ``checkpoint``. Local."""
        arrays = {one.name: np.empty(one.shape, dtype_of(one.dtype)) for one in stored if is_adapter(one.name)}
        kinds = {one.name: one.source or one.kind for one in stored}
        restore(checkpoint, [Piece.whole(kinds[name], name, array) for name, array in arrays.items()])
        return cls(lora.alpha / max(lora.rank, 1), {name: array.astype(np.float32) for name, array in arrays.items()})

    def merged(self, weight: StoredTensor, elements: Range, values: np.ndarray) -> np.ndarray:
        """Return ``values``, the range ``elements`` of the flattened ``weight``, plus the product of its adapters.

        The sum is in float32.
        """
        layer, _, rest = weight.name.partition(".")
        prefix, _, kind = rest.rpartition(".")
        parts = weight.shape[0] if len(weight.shape) > 2 else 1
        targets = next((names for names in ADAPTED_LAYERS.get(prefix, ()) if len(names) == parts), ())
        names = [f"{layer}.{prefix}.{target}" for target in targets]
        if kind != "weight" or not any(f"{name}.{low_rank.A}" in self.tensors for name in names):
            return values
        outputs, inputs = weight.shape[-2:]
        result = values.astype(np.float32)
        for part, name in enumerate(names):
            common = elements.intersect(Range(part * outputs * inputs, (part + 1) * outputs * inputs))
            if not common or f"{name}.{low_rank.A}" not in self.tensors:
                continue
            begin = common.start - part * outputs * inputs
            rows = slice(begin // inputs, -(-(begin + common.size) // inputs))
            product = self.tensors[f"{name}.{low_rank.B}"][rows] @ self.tensors[f"{name}.{low_rank.A}"]
            start = begin - rows.start * inputs
            delta = product.reshape(-1)[start : start + common.size]
            result[common.start - elements.start :][: common.size] += np.float32(self.scale) * delta
        return result
