"""Names of tensors in Hugging Face's families, and the positions of their elements in tensors of hpcdist.

A tensor of hpcdist stacks tensors of Hugging Face: ``qkv`` is query, key and value, and ``up`` of swiglu is gate and
value. GPT-2 stores matrices transposed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.arrays.layout import Layout
from hpcdist.arrays.piece import Box, runs
from hpcdist.arrays.ranges import Range
from hpcdist.errors import ConfigurationError
from hpcdist.models.layers import low_rank
from hpcdist.models.layers.lora import ADAPTED_LAYERS

_LLAMA_MODULES: Final = {
    "tokens": ("model.embed_tokens",),
    "norm1": ("input_layernorm",),
    "query_norm": ("self_attn.q_norm",),
    "key_norm": ("self_attn.k_norm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "query": ("self_attn.q_proj",),
    "kv": ("self_attn.k_proj", "self_attn.v_proj"),
    "projection": ("self_attn.o_proj",),
    "norm2": ("post_attention_layernorm",),
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
}
_GPT2_MODULES: Final = {
    "tokens": ("transformer.wte",),
    "positions": ("transformer.wpe",),
    "norm1": ("ln_1",),
    "qkv": ("attn.c_attn",),
    "projection": ("attn.c_proj",),
    "norm2": ("ln_2",),
    "up": ("mlp.c_fc",),
    "down": ("mlp.c_proj",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
}
_ADAPTERS: Final = {low_rank.A: "lora_A.weight", low_rank.B: "lora_B.weight"}
_TRANSPOSED: Final = ("qkv", "projection", "up", "down")  # matrices of GPT-2, stored as (inputs, outputs)


def adapted_module(family: str, name: str) -> str:
    """Return the module in a block of ``family`` that the adapter ``name``, such as "kv.value", changes.

    Raises ConfigurationError for a module whose parts have adapters of their own, which PEFT does not support.
    """
    prefix, _, target = name.partition(".")
    modules = (_GPT2_MODULES if family == "gpt2" else _LLAMA_MODULES)[prefix]
    for targets in ADAPTED_LAYERS[prefix]:
        if len(targets) == len(modules) and target in targets:
            return modules[targets.index(target)]
    raise ConfigurationError(
        f"lora.targets has {target}: in models of type {family!r}, {modules[0]} has several matrices, for which PEFT "
        "has only one adapter; export the merged model without --adapters"
    )


def prefix_of(family: str) -> str:
    """Return the prefix of most tensor names of ``family``, which files of a model without a head may lack."""
    return "transformer." if family == "gpt2" else "model."


@dataclass(frozen=True)
class Stack:
    """Tensors of Hugging Face that make up one tensor of hpcdist, in the order of the flattened elements."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # of each tensor in the file
    transposed: bool


def stack_of(family: str, layer: int, num_layers: int, name: str, shape: tuple[int, ...]) -> Stack:
    """Return the tensors of Hugging Face in the tensor ``name`` of ``layer``, which has this ``shape`` in hpcdist."""
    module, _, part = name.rpartition(".")
    gpt2 = family == "gpt2"
    prefix = f"{'transformer.h' if gpt2 else 'model.layers'}.{layer - 1}." if 0 < layer <= num_layers else ""
    if part in _ADAPTERS:
        return Stack((f"base_model.model.{prefix}{adapted_module(family, module)}.{_ADAPTERS[part]}",), shape, False)
    suffix = "bias" if part == "bias" else "weight"
    names = tuple(f"{prefix}{target}.{suffix}" for target in (_GPT2_MODULES if gpt2 else _LLAMA_MODULES)[module])
    if len(names) > 1:
        return Stack(names, shape[1:], False)
    joined = (math.prod(shape[:-1]), shape[-1]) if part == "weight" else (math.prod(shape),)
    transposed = gpt2 and module in _TRANSPOSED and part == "weight"
    return Stack(names, joined[::-1] if transposed else joined, transposed)


@dataclass(frozen=True)
class Region:
    """Consecutive elements of a tensor in a file, and their positions in an array of hpcdist."""

    name: str
    file: Range
    local: slice


@dataclass(frozen=True)
class MappedTensor:
    """Tensor of hpcdist, and the tensors of Hugging Face that have its elements."""

    name: str
    shape: tuple[int, ...]
    stack: Stack

    def regions(self, box: Box, flat: Range) -> Iterator[Region]:
        """Yield the regions of the elements ``flat`` of the tensor region ``box``, in blocks. See `Piece`."""
        where = runs(self.shape, box, flat)
        columns = self.shape[-1] if self.stack.transposed else 1
        for start, local, size in _joined(where.start, where.local, where.size, columns):
            yield from (
                self._transposed(start, local, size)
                if self.stack.transposed
                else self._plain(start, local, size[0] * size[1])
            )

    def _plain(self, start: int, local: int, size: int) -> Iterator[Region]:
        part_size = math.prod(self.stack.shape)
        while size:
            number, offset = divmod(start, part_size)
            count = min(size, part_size - offset)
            yield Region(self.stack.names[number], Range(offset, offset + count), slice(local, local + count))
            start, local, size = start + count, local + count, size - count

    def _transposed(self, start: int, local: int, size: tuple[int, int]) -> Iterator[Region]:
        # A rectangle of ``size`` (rows, columns) is one run of the file per column.
        rows, columns = self.stack.shape[1], self.stack.shape[0]
        row, column = divmod(start, columns)
        for number in range(size[1]):
            begin = (column + number) * rows + row
            where = slice(local + number, local + number + (size[0] - 1) * size[1] + 1, size[1])
            yield Region(self.stack.names[0], Range(begin, begin + size[0]), where)


def _joined(
    starts: np.ndarray, locals_: np.ndarray, sizes: np.ndarray, columns: int
) -> Iterator[tuple[int, int, tuple[int, int]]]:
    # Yields (start, local offset, (rows, columns)) of rectangles in a matrix with ``columns``. Runs with the same
    # columns in consecutive rows are one rectangle. Without a matrix (``columns`` 1), each run is one rectangle.
    last: tuple[int, int, tuple[int, int]] | None = None
    for run in zip(starts.tolist(), locals_.tolist(), sizes.tolist(), strict=True):
        for start, local, (rows, width) in _rectangles(*run, columns):
            if last is not None and columns > 1 and last[2][1] == width:
                before, at, (height, _) = last
                if start == before + height * columns and local == at + height * width:
                    last = before, at, (height + rows, width)
                    continue
            if last is not None:
                yield last
            last = start, local, (rows, width)
    if last is not None:
        yield last


def _rectangles(start: int, local: int, size: int, columns: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    # The rest of the first row, whole rows, and the beginning of the last row.
    head = min(size, -start % columns)
    whole = (size - head) // columns
    tail = size - head - whole * columns
    for width, rows in ((head, 1), (columns, whole), (tail, 1)):
        if width and rows:
            yield start, local, (rows, width)
            start, local = start + rows * width, local + rows * width


def mapped_tensors(
    family: str, layout: Layout, prefixed: bool = True, select: Callable[[str], bool] = lambda name: True
) -> dict[str, MappedTensor]:
    """Return {name in hpcdist: `MappedTensor`} of the whole model with this ``layout``.

    ``family``: model_type of ``config.json``. ``prefixed``: False if the names in the file lack the `prefix_of` family.
    ``select``: function that returns True for the names to include.
    """
    last = max(segment.spec.layer for segment in layout.segments)
    tensors = {}
    for segment in (one for one in layout.segments if select(one.key)):
        spec = segment.spec
        shape = tuple(spec.whole or spec.shape)
        stack = stack_of(family, spec.layer, last - 1, spec.name, shape)
        names = stack.names if prefixed else tuple(name.removeprefix(prefix_of(family)) for name in stack.names)
        tensors[segment.key] = MappedTensor(segment.key, shape, Stack(names, stack.shape, stack.transposed))
    return tensors
