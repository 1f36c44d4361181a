"""Frozen tensors: a stage keeps them in memory of its own, without gradients and optimizer state.

The layout of a model has only trained tensors, so strategies neither reduce nor shard frozen ones. All data ranks have
all frozen tensors of their layers.
"""

import copy
from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np

from hpcdist.arrays.backend import Array, Ledger
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError
from hpcdist.models.model import Model
from hpcdist.models.stage import Parameters, Stage, StreamOf, WrappedStage


def freeze(model: Model, is_frozen: Callable[[str], bool]) -> Model:
    """Return a copy of ``model`` whose tensors ``LAYER.NAME`` are frozen where ``is_frozen`` says so. Local.

    Returns ``model`` itself if it has no such tensor. Raises ConfigurationError if all tensors are frozen.
    """
    keys = {segment.key for segment in model.layout.segments if is_frozen(segment.key)}
    if not keys:
        return model
    if len(keys) == len(model.layout.segments):
        raise ConfigurationError(
            "optimizer.groups freezes all tensors, so that nothing is left to train; remove frozen=1 from a group"
        )
    frozen, stages = copy.copy(model), dict[int, FrozenStage]()
    for stage in model.stages:
        stages[stage.layer] = FrozenStage(stage, keys, stages)
    for name in ("layout", "whole_layout", "needs", "skips", "_numbers"):  # cached for the stages of `model`
        frozen.__dict__.pop(name, None)
    frozen.stages = tuple(stages.values())
    return frozen


class FrozenStage(WrappedStage):
    """Stage with tensors of which some are frozen. ``keys``: frozen tensors of the model. ``stages``: by layer."""

    def __init__(self, inner: Stage, keys: set[str], stages: "Mapping[int, FrozenStage]") -> None:
        super().__init__(inner, [spec for spec in inner.tensors() if spec.key not in keys])
        self.tied = {name: key for name, key in inner.tied.items() if key not in keys}
        self._borrowed = {name: key for name, key in inner.tied.items() if key in keys}
        self._stages = stages
        self.held = Layout.of(spec for spec in inner.tensors() if spec.key in keys)
        self.store: FlatStore | None = None  # None on ranks without this stage

    def inner_tensors(self) -> tuple[TensorSpec, ...]:
        """Return the specs of all tensors of the stage, with the frozen ones."""
        return self.inner.tensors()

    def hold(self, dtype: np.dtype, on: str, ledger: Ledger | None) -> None:
        """Allocate the frozen tensors of this stage, and of stages that share a tensor with this one."""
        for stage in (self, *(self._owner(key) for key in self._borrowed.values())):
            if stage.store is None:
                stage.store = FlatStore(stage.held, dtype, on=on, ledger=ledger)

    def stores(self) -> list[FlatStore]:
        """Return the memory that `hold` has allocated for this stage, and for stages that share a tensor with it."""
        stages = (self, *(self._owner(key) for key in self._borrowed.values()))
        return [stage.store for stage in stages if stage.store is not None]

    def _owner(self, key: str) -> "FrozenStage":
        return self._stages[int(key.partition(".")[0])]

    @cached_property
    def frozen(self) -> Parameters:
        """The frozen tensors as {name in the stage: array}, after `hold`."""
        assert self.store is not None
        views: dict[str, Array] = {spec.name: self.store.view(spec.key) for spec in self._specs_of(self.held)}
        for name, key in self._borrowed.items():
            store = self._owner(key).store
            assert store is not None
            views[name] = store.view(key)
        return views

    @staticmethod
    def _specs_of(layout: Layout) -> list[TensorSpec]:
        return [segment.spec for segment in layout.segments]

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Write the initial values of the trained tensors to ``parameters``, and of the frozen tensors to `store`."""
        host = FlatStore(self.held, np.dtype(np.float32) if self.store is None else self.store.dtype)
        held = {spec.name: host.view(spec.key) for spec in self._specs_of(self.held)}
        self.inner.initialise({**parameters, **held}, rng_of)
        if self.store is not None:
            self.store.copy_from(host)
