"""Values that a stage passes on: one tensor as it is; several values, such as a tuple, as one array (samples, columns).

In the memory of the array, each tensor is contiguous. So the next stage gets views of the array instead of copies.
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hpcdist.adapters.torch.arrays import library
from hpcdist.errors import UsageError

if TYPE_CHECKING:
    import torch

_ALIKE: Final = "a stage must return the same structure in all calls"


@dataclass(frozen=True)
class Member:
    """Description of one tensor, or of one whole number, among the values that a stage passes on."""

    shape: tuple[int, ...]  # in the first call
    dtype: "torch.dtype | None"  # None: floating point, which is passed in the parameters' dtype
    is_number: bool  # a Python int, passed as a tensor of shape ()
    per_sample: bool  # dim 0 of the tensor is the samples; if False, all samples share the tensor

    @property
    def columns(self) -> int:
        """Number of elements per sample in the array. A shared tensor needs space for one sample only."""
        return math.prod(self.shape[1:] if self.per_sample else self.shape)

    def full(self, samples: int) -> tuple[int, ...]:
        """Return the shape of the tensor for ``samples`` samples."""
        return (samples, *self.shape[1:]) if self.per_sample else self.shape


class StageValues:
    """Structure of the values that a stage returns, ``stage`` in messages. The first call determines the structure."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._tree: Any = None
        self._leaves: tuple[Any, ...] = ()  # a `Member` for each tensor and int, and the value of each other leaf
        self.learns = False  # True while examples run: then a tensor whose dim 0 is not the samples becomes shared

    @property
    def several(self) -> bool:
        """True if the stage has returned anything but one tensor."""
        return self._tree is not None

    def pack(self, values: Any, samples: int, dtype: "torch.dtype") -> "torch.Tensor":
        """Return one tensor of ``dtype``: ``values`` itself if it is a tensor, or an array of all its tensors.

        Raises UsageError if the structure differs from the first call, or if ``dtype`` cannot hold a value.
        """
        torch = library()
        if isinstance(values, torch.Tensor) and not self.several:
            if not values.is_floating_point():
                raise UsageError(
                    f"{self._stage} returns a {values.dtype} tensor; a stage must return at least one floating-point "
                    "tensor, on which its parameters have an effect"
                )
            return self._converted(values, dtype)
        leaves, tree = _pytree().tree_flatten(values)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise UsageError(
                f"{self._stage} returns a {type(values).__name__} without tensors; return a tensor, or a tuple or dict "
                "of tensors, with the samples in dim 0"
            )
        numbers = [type(leaf) is int for leaf in leaves]
        leaves = [
            torch.tensor(leaf, device=tensors[0].device) if is_number else leaf
            for leaf, is_number in zip(leaves, numbers, strict=True)
        ]
        described = [self._described(leaf, samples, number) for leaf, number in zip(leaves, numbers, strict=True)]
        self._compare(tree, described, samples)
        return self._joined(leaves, samples, dtype)

    def _joined(self, leaves: Sequence[Any], samples: int, dtype: "torch.dtype") -> "torch.Tensor":
        parts: list[torch.Tensor] = []
        for leaf, member in zip(leaves, self._leaves, strict=True):
            if isinstance(member, Member):
                parts.append(self._converted(leaf, dtype).reshape(-1))
                if not member.per_sample and samples > 1:
                    parts.append(parts[-1].new_zeros((samples - 1) * member.columns))
        return library().cat(parts).view(samples, -1)

    def unpack(self, packed: "torch.Tensor") -> Any:
        """Return the values in the array ``packed``, with their structure. Tensors are views, except integers."""
        if not self.several:
            return packed
        values = zip(self._split(packed), self._leaves, strict=True)
        leaves = [int(leaf) if isinstance(member, Member) and member.is_number else leaf for leaf, member in values]
        return _pytree().tree_unflatten(leaves, self._tree)

    def rows(self, packed: "torch.Tensor", samples: Sequence[int] | slice) -> "torch.Tensor":
        """Return the array of the selected ``samples`` of the array ``packed``."""
        if not self.several:
            return packed[samples]
        leaves = [
            leaf[samples] if isinstance(member, Member) and member.per_sample else leaf
            for leaf, member in zip(self._split(packed), self._leaves, strict=True)
        ]
        return self._joined(leaves, len(np.arange(len(packed))[samples]), packed.dtype)

    def _split(self, packed: "torch.Tensor") -> list[Any]:
        # Returns a tensor for each `Member`, and the other leaves.
        samples = len(packed)
        members = [leaf for leaf in self._leaves if isinstance(leaf, Member)]
        parts = iter(packed.reshape(-1).split([member.columns * samples for member in members]))
        return [_restored(next(parts), leaf, samples) if isinstance(leaf, Member) else leaf for leaf in self._leaves]

    def _described(self, leaf: Any, samples: int, is_number: bool) -> Any:
        torch = library()
        if isinstance(leaf, torch.Tensor):
            dtype = None if leaf.is_floating_point() else leaf.dtype
            return Member(tuple(leaf.shape), dtype, is_number, leaf.dim() > 0 and len(leaf) == samples)
        if leaf is None or isinstance(leaf, bool | float | str | torch.dtype | torch.device):
            return leaf
        raise UsageError(
            f"{self._stage} returns a {type(leaf).__name__}; a stage can pass on tuples, lists and dicts of tensors, "
            "numbers, strings and None"
        )

    def _compare(self, tree: Any, described: list[Any], samples: int) -> None:
        if self._tree is None:
            self._tree, self._leaves = tree, tuple(described)
        if tree != self._tree:
            raise UsageError(f"{self._stage} returns {tree}, but it first returned {self._tree}; {_ALIKE}")
        if self.learns:
            pairs = zip(self._leaves, described, strict=True)
            self._leaves = tuple(
                _shared(member, new) if isinstance(member, Member) else member for member, new in pairs
            )
        for member, new in zip(self._leaves, described, strict=True):
            if not isinstance(member, Member) or not isinstance(new, Member):
                if type(member) is not type(new) or member != new:
                    raise UsageError(f"{self._stage} returns {new}, but it first returned {member}; {_ALIKE}")
            elif (new.shape, new.dtype, new.is_number) != (member.full(samples), member.dtype, member.is_number):
                raise UsageError(
                    f"{self._stage} returns a tensor {new.shape} of {new.dtype or 'floats'} for {samples} samples, "
                    f"expected {member.full(samples)} of {member.dtype or 'floats'}; dim 0 must be the samples, or "
                    "all samples must share the tensor, and the other dims must be the same in all calls"
                )

    def _converted(self, tensor: "torch.Tensor", dtype: "torch.dtype") -> "torch.Tensor":
        torch = library()
        if tensor.dtype == dtype:
            return tensor
        converted = tensor.to(dtype)
        if tensor.is_floating_point():
            fits = torch.promote_types(tensor.dtype, dtype) == dtype
        else:
            fits = not tensor.is_complex() and torch.equal(converted.to(tensor.dtype), tensor)
        if not fits:
            raise UsageError(
                f"{self._stage} returns {tensor.dtype} values, and its parameters' {dtype} cannot hold them exactly; "
                "convert the output to the parameters' dtype"
            )
        return converted


def _shared(member: Member, new: Any) -> Member:
    is_shared = member.per_sample and isinstance(new, Member) and new.shape == member.shape and not new.per_sample
    return replace(member, per_sample=False) if is_shared else member


def _restored(part: "torch.Tensor", member: Member, samples: int) -> "torch.Tensor":
    tensor = (part if member.per_sample else part[: member.columns]).view(member.full(samples))
    return tensor if member.dtype is None else tensor.detach().to(member.dtype)


def _pytree() -> Any:
    return importlib.import_module("torch.utils._pytree")
