"""Measured times of each unit on the ranks of a run: forward, backward, and the two halves of a split backward.

Units with the same tensors, input and output take equally long, so each kind is measured once: after `WARM` turns, in
which kernels are compiled and memory is taken, the median of `TURNS`. A turn runs the unit forward and back, and
forward and back in two halves, on random activations and with gradients that are added to those before, as in all
micro-batches but the first. A GPU is waited for at both ends of each span. What an executor does around the passes is
not in it, and neither are messages. The memory it takes, that of the largest unit, is given back.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.models.classifiers import Convolution
from hpcdist.models.model import Model
from hpcdist.models.runtime.arena import Arena
from hpcdist.models.runtime.split_backward import release_first_pass, split_operations, weight_gradients
from hpcdist.models.stage import Draw

WARM: Final = 2
TURNS: Final = 7
VALUE: Final = 0.01  # of all parameters: no product of them over- or underflows


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one unit and micro-batch; ``input`` and ``weight`` are the halves of a split ``backward``."""

    forward: float
    backward: float
    input: float
    weight: float


def measure(model: Model, samples: int, on: str = "cpu") -> tuple[PassSeconds, ...]:
    """Return what each unit takes for a micro-batch of ``samples``. Collective over the tensor axis, or local."""
    known: dict[object, PassSeconds] = {}
    found = []
    for unit in range(len(model.stages)):
        kind = _kind(model, unit)
        if kind not in known:
            known[kind] = _Probe(model, unit, samples, on).run()
        found.append(known[kind])
    return tuple(found)


def agree(comm: Communicator, own: Sequence[PassSeconds], speed: float = 1.0) -> tuple[PassSeconds, ...]:
    """Return the medians over ``comm`` of what a rank of speed 1 takes, the same on all of them. Collective.

    ``own`` were measured on a rank of the relative speed ``speed``.
    """
    rows = np.array([[one.forward, one.backward, one.input, one.weight] for one in own]) * speed
    middle = np.median(np.array(comm.allgather_object(rows)), axis=0)
    return tuple(PassSeconds(*map(float, row)) for row in middle)


def _kind(model: Model, unit: int) -> object:
    """Return what is equal for units that take equally long."""
    stage = model.stages[unit]
    tensors = tuple((spec.name, spec.shape) for spec in stage.tensors())
    enters = model.stages[unit - 1].output_shape(1) if unit else None
    ends = unit == len(model.stages) - 1
    return type(stage), tensors, tuple(stage.tied), enters, stage.output_shape(1), ends


class _Probe:
    """One unit with memory of its own."""

    def __init__(self, model: Model, unit: int, samples: int, on: str) -> None:
        self._model, self._stage, self._on = model, model.stages[unit], on
        self._arena = Arena(on=on)
        layers = sorted({model.stages[need].layer for need in model.needs[unit]})
        parts = [model.layout.units[layer] for layer in layers]
        values, gradients = (FlatStore(model.layout, model.dtype, parts, on=on) for _ in range(2))
        values.array[...] = VALUE
        self._parameters = model.bind_stage(unit, lambda layer: values)
        self._gradients = model.bind_stage_gradients(unit, lambda layer: gradients, set())
        self._ends = unit == len(model.stages) - 1
        draw = np.random.default_rng(0)
        self._x = self._place(_input(model, unit, samples, draw))
        self._dy = self._place(draw.standard_normal(self._stage.output_shape(samples)).astype(model.dtype))
        self._targets = self._place(_targets(model, samples))
        self._split = split_operations(model.operations)

    def _place(self, array: np.ndarray) -> Array:
        return backend.place(array, self._on)

    def run(self) -> PassSeconds:
        turns = [self._turn() for _ in range(WARM + TURNS)][WARM:]
        first, second, joint, halves, weight = zip(*turns, strict=True)
        return PassSeconds(median(first + second), median(joint), median(halves), median(weight))

    def _turn(self) -> tuple[float, float, float, float, float]:
        first = self._forward()
        joint = self._backward(split=False)
        self._saved.release()
        second = self._forward()
        halves = self._backward(split=True)
        release_first_pass(self._saved)
        begun = self._clock()
        weight_gradients(self._parameters, self._gradients, self._model.operations, self._saved)
        weight = self._clock() - begun
        self._saved.release()
        return first, second, joint, halves, weight

    def _forward(self) -> float:
        self._saved = self._arena.saved(self._stage.layer)
        self._saved.draw = Draw(seed=0, step=1, first_sample=0)
        operations = self._model.operations
        begun = self._clock()
        y = self._stage.forward(self._parameters, self._x, operations, self._saved)
        if self._ends:
            self._model.loss.forward(y, self._targets, operations, self._saved)
        return self._clock() - begun

    def _backward(self, *, split: bool) -> float:
        dy = self._dy.copy()  # a stage may write over it
        operations = self._split if split else self._model.operations
        begun = self._clock()
        if self._ends:
            dy = self._model.loss.backward(1.0, self._model.operations, self._saved)
        self._stage.backward(self._parameters, self._gradients, dy, operations, self._saved)
        return self._clock() - begun

    def _clock(self) -> float:
        backend.synchronise(self._x)
        return time.perf_counter()


def _targets(model: Model, samples: int) -> np.ndarray:
    """Return targets that the loss takes."""
    if hasattr(model.loss, "example_targets"):  # that of a user's own model
        made: np.ndarray = model.loss.example_targets(samples)
        return made
    return np.zeros(model.stages[-1].output_shape(samples)[:-1], np.int64)


def _input(model: Model, unit: int, samples: int, draw: np.random.Generator) -> np.ndarray:
    """Return random data, or activations, that ``unit`` takes."""
    if unit:
        return draw.standard_normal(model.stages[unit - 1].output_shape(samples)).astype(model.dtype)
    first = model.stages[0]
    if hasattr(first, "example_input"):  # that of a user's own model
        made: np.ndarray = first.example_input(samples)
        return made
    if isinstance(first, Convolution):
        return draw.random(first.input_shape(samples)).astype(model.dtype)
    table = first.tensors()[0]
    rows, columns = table.whole or table.shape
    if table.name.startswith("tokens"):  # a token for each of the last stage's logits
        return draw.integers(0, rows, model.stages[-1].output_shape(samples)[:-1])
    return draw.random((samples, columns)).astype(model.dtype)
