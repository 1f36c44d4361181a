"""Protocols of a stage, of its gradients and of what its forward saves, and the tensors that stages declare.

Rules that every stage and operation keeps, so that no buffer is copied:
- forward returns an array that `Saved` owns; it stays valid until that `Saved` is released;
- an operation's backward leaves ``dy`` alone, and may overwrite what its forward saved;
- a stage's backward may overwrite ``dy`` and may return it as ``dx``.

The specs at the end (norm, column and row linear) say along which dim tensor parallelism cuts a tensor, and
`draw_normal` writes initial values.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import TensorSpec

if TYPE_CHECKING:
    from hpcdist.models.layers.dropout import Draw
    from hpcdist.models.operations import Operations

Parameters: TypeAlias = Mapping[str, Array]  # local tensor name -> view, tied names included
StreamOf: TypeAlias = Callable[[TensorSpec], np.random.Generator]


class Gradients(Protocol):
    """Where the gradients of one stage go."""

    def into(self, name: str) -> tuple[Array, bool]:
        """Return the view of tensor ``name`` and whether to add to it (False: this is the first write, overwrite)."""

    def begin_step(self) -> None:
        """Declare every tensor of the stage unwritten; call it on all stages before the first backward of a step."""

    def finish(self) -> None:
        """Zero the tensors that no backward of this step wrote."""


class Saved(Protocol):
    """What the forward of one stage on one micro-batch keeps for its backward."""

    layer: int  # the global one of the stage
    draw: "Draw | None"  # of what is dropped; None: nothing is, as in an evaluation
    deferred: dict[str, str]  # prefix of a tensor -> its operation, that still owes a gradient: see models/split.py

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return uninitialised memory that is kept under ``name`` until `release`."""

    def keep(self, name: str, value: Any) -> None:
        """Keep ``value``, an array that somebody else owns or a plain object."""

    def __getitem__(self, name: str) -> Any:
        """Return what was kept under ``name``."""

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return uninitialised memory that any stage overwrites when it asks for the same ``name``."""

    def within(self) -> "Saved":
        """Return another one of the same stage and draw, with memory of its own, that the caller releases."""

    def owns(self, array: Array) -> bool:
        """Whether ``array`` lies in memory that `empty` of this one gave."""

    def hold(self, name: str) -> None:
        """Keep what is under ``name`` through `narrow`, and its memory until `release`, whoever took it."""

    def narrow(self) -> None:
        """Give back all but what is held."""

    def release(self) -> None:
        """Give the memory back: after the backward, or once the output of the forward is no longer needed."""


class Stage(Protocol):
    """A unit of a model that can be cut off, gathered and freed."""

    layer: int
    tied: dict[str, str]  # local name -> key of a tensor that another layer owns

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the tensors that this stage owns, in the order of the layout."""

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """Return the shape of what `forward` gives for so many samples, each of the full length."""

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Write the initial values of the own tensors: float64 draws, rounded once."""

    def forward(self, parameters: Parameters, x: Array, operations: "Operations", saved: Saved) -> Array:
        """Return the output of the stage."""

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: "Operations", saved: Saved
    ) -> Array | None:
        """Write or add the gradients; return that of the input, None where the input is data."""


def draw_normal(parameters: Parameters, spec: TensorSpec, rng_of: StreamOf, deviation: float) -> None:
    """Write normal draws of so large a deviation, in float64 and rounded once."""
    parameters[spec.name][...] = rng_of(spec).standard_normal(spec.shape) * deviation


def norm_specs(layer: int, name: str, width: int, kind: str) -> tuple[TensorSpec, ...]:
    """Return the scale of a norm over ``width`` numbers and, of a "layer" norm, its bias."""
    scale = TensorSpec(layer, f"{name}.scale", (width,), False)
    return (scale,) if kind == "rms" else (scale, TensorSpec(layer, f"{name}.bias", (width,), False))


def column_specs(layer: int, name: str, inputs: int, *outputs: int, bias: bool = True) -> tuple[TensorSpec, ...]:
    """Return weight and bias that tensor parallelism cuts by outputs, along the last dim of those.

    ``outputs`` are those of one linear, or before them how many are stacked.
    """
    last = len(outputs) - 1
    stacked = outputs[0] if last else 1
    weight = TensorSpec(layer, f"{name}.weight", (*outputs, inputs), cut=last, stacked=stacked)
    return (weight, TensorSpec(layer, f"{name}.bias", outputs, False, cut=last, stacked=stacked)) if bias else (weight,)


def row_specs(layer: int, name: str, inputs: int, outputs: int, *, bias: bool = True) -> tuple[TensorSpec, ...]:
    """Return a weight that tensor parallelism cuts by inputs, and a bias that all ranks have."""
    weight = TensorSpec(layer, f"{name}.weight", (outputs, inputs), cut=1)
    return (weight, TensorSpec(layer, f"{name}.bias", (outputs,), False)) if bias else (weight,)
