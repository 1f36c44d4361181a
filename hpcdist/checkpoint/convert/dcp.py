"""Checkpoints of torch.distributed.checkpoint with the tensor names of torchtitan's Llama, or of Hugging Face.

The directory has ``.metadata`` and ``*.distcp``. The user adds the ``config.json`` of the model.
"""

import pickle
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint.convert.families import read_config
from hpcdist.checkpoint.convert.gguf_file import paired_rows
from hpcdist.checkpoint.convert.torch_state import import_torch
from hpcdist.checkpoint.listing import PARAMETERS, StoredTensor

METADATA: Final = ".metadata"
DATA: Final = "*.distcp"
_MODULES: Final = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER: Final = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_HEADS: Final = {"attention.wq": "num_attention_heads", "attention.wk": "num_key_value_heads"}
_NAMES: Final = ("model.", "lm_head.")  # of Hugging Face
# Classes and functions in the pickled metadata, which contains no tensors.
_MODULE: Final = "torch.distributed.checkpoint"
_ALLOWED: Final = frozenset(
    (
        *((f"{_MODULE}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *((f"{_MODULE}.metadata", f"{name}StorageMetadata") for name in ("Chunk", "Tensor", "Bytes")),
        *((f"{_MODULE}.metadata", "_MEM_FORMAT_ENCODING"), (f"{_MODULE}.filesystem", "_StorageInfo")),
        *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
        *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
        *(("torch", name) for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "bool", "uint8")),
    )
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ValueError(f"{METADATA} names {module}.{name}, which is not in the metadata of a checkpoint")
        return super().find_class(module, name)


class DcpReader:
    """Reader of a checkpoint of torch.distributed.checkpoint, with Hugging Face names. It keeps the last tensor."""

    def __init__(self, path: Path) -> None:
        self._module = import_torch()
        from torch.distributed.checkpoint import FileSystemReader

        with open(path, "rb") as file:
            stored = _Unpickler(file).load()

        class Reader(FileSystemReader):
            def read_metadata(self, *_: Any, **__: Any) -> Any:
                return stored

        self._storage = Reader(path.parent)
        config = read_config(path.parent)
        heads = config.get("num_attention_heads", 1)
        self._heads = {"num_attention_heads": heads, "num_key_value_heads": config.get("num_key_value_heads") or heads}
        self.metadata = ""
        self.left_out: list[str] = []
        self.tensors: list[StoredTensor] = []
        self._keys: list[tuple[str, str]] = []  # name in the file, key of the number of heads or ""
        for key, entry in stored.state_dict_metadata.items():
            name, permuted = _name_of(key)
            if not name or not hasattr(entry, "size"):
                self.left_out.append(key)
                continue
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            self.tensors.append(StoredTensor(PARAMETERS, name, dtype, tuple(entry.size)))
            self._keys.append((key, permuted))
        self._last: tuple[int, np.ndarray] = (-1, np.empty(0, np.uint8))

    def read(self, index: int, elements: Range, out: np.ndarray) -> None:
        if self._last[0] != index:
            self._last = index, self._whole(index)
        out.view(np.uint8)[...] = self._last[1][elements.start * out.itemsize : elements.stop * out.itemsize]

    def _whole(self, index: int) -> np.ndarray:
        from torch.distributed import checkpoint

        tensor, (key, permuted) = self.tensors[index], self._keys[index]
        values = self._module.empty(tensor.shape, dtype=getattr(self._module, tensor.dtype))
        checkpoint.load({key: values}, storage_reader=self._storage, no_dist=True)
        rows = values.reshape(tensor.shape[0], -1).view(self._module.uint8).numpy()
        return np.ravel(paired_rows(rows, self._heads[permuted]) if permuted else rows)

    def close(self) -> None:
        self._last = -1, np.empty(0, np.uint8)


def _name_of(key: str) -> tuple[str, str]:
    # Returns (name of Hugging Face or "", key of the number of heads or "").
    plain = key.removeprefix("model.")
    module, _, part = plain.rpartition(".")
    if module in _OUTER and not key.startswith("model.norm"):
        return f"{_OUTER[module]}.{part}", ""
    pieces = module.split(".", 2)
    if len(pieces) == 3 and pieces[0] == "layers" and pieces[2] in _MODULES:
        return f"model.layers.{pieces[1]}.{_MODULES[pieces[2]]}.{part}", _HEADS.get(pieces[2], "")
    return (key, "") if key.startswith(_NAMES) else ("", "")
