"""Model: its stages, its address space, and the places of its tensors in a store.

`LOCAL` is the table of operations that computes everything on this rank; strategies replace entries of it
(`dataclasses.replace`).

`Model` runs forward and backward of all stages on one rank and binds their tensors to stores; strategies bind single
stages. Skip connections: a stage that declares ``takes``, the indices of earlier stages, finds their outputs in its
`hpcdist.models.stage.Saved` as "skip.INDEX", which it leaves unchanged, and leaves their gradients there as
"skip.INDEX.gradient".
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np

from hpcdist.arrays import rng
from hpcdist.arrays.backend import Array, Scalar
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError
from hpcdist.models.attention.flash import LocalAttention
from hpcdist.models.documents import unpacked
from hpcdist.models.layers.activation import LocalActivation
from hpcdist.models.layers.cross_entropy import LocalCrossEntropy
from hpcdist.models.layers.dropout import LocalDropout
from hpcdist.models.layers.embedding import LocalEmbedding, LocalPositions, LocalRotary
from hpcdist.models.layers.linear import LocalLinear
from hpcdist.models.layers.norm import LocalNorm
from hpcdist.models.runtime.arena import Arena
from hpcdist.models.stage import Draw, Operations, Parameters, Saved, Stage

LOCAL: Final = Operations(
    linear_column=LocalLinear(),
    linear_row=LocalLinear(),
    embed=LocalEmbedding(),
    positions=LocalPositions(),
    rotary=LocalRotary(),
    norm=LocalNorm(),
    attention=LocalAttention(),
    activation=LocalActivation(),
    dropout=LocalDropout(),
    cross_entropy=LocalCrossEntropy(),
)


class SkipConnections:
    """Outputs and gradients of one micro-batch along skip connections, pairs (stage, later stage). Local."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._into: dict[int, list[int]] = defaultdict(list)
        for source, target in sorted(pairs):
            self._into[target].append(source)
        self._sources = {source for source, _ in pairs}
        self._values: dict[int, Array] = {}
        self._gradients: dict[int, list[Array]] = defaultdict(list)

    def bring(self, unit: int, saved: Saved) -> None:
        """Give stage ``unit`` what it takes, before its forward."""
        for source in self._into.get(unit, ()):
            saved.keep(f"skip.{source}", self._values[source])

    def leave(self, unit: int, y: Array, *, copy: bool = False) -> None:
        """Take the output of a stage; a ``copy`` where its memory is given back before others take it."""
        if unit in self._sources:
            self._values[unit] = y.copy() if copy else y

    def send_back(self, unit: int, saved: Saved) -> None:
        """Take the gradients that the backward of stage ``unit`` has left."""
        for source in self._into.get(unit, ()):
            self._gradients[source].append(saved[f"skip.{source}.gradient"].copy())

    def add(self, unit: int, dy: Array) -> Array:
        """Add to ``dy``, in place, what came back to stage ``unit``, in the order of those that took its output."""
        for gradient in reversed(self._gradients.pop(unit, [])):
            dy += gradient
        return dy


DTYPES: Final = ("float32", "float64", "bfloat16", "float16")  # those of 16 bits on a GPU alone
StoreOf: TypeAlias = Callable[[int], FlatStore]  # layer -> the store that holds its tensors now


class Model:
    """Stages in order of their layers. It holds no parameters: those lie in stores that the caller binds.

    ``seeded``: initial values follow from the seed, on every rank the same; else those of rank 0 count. ``on`` is where
    its stages compute, "cpu" or "gpu"; None: wherever their parameters lie.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        dtype: str,
        *,
        tokens_per_sample: float,
        operations: Operations = LOCAL,
        loss: "Loss | None" = None,
        seeded: bool = True,
        on: str | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigurationError(f"models compute in one of {', '.join(DTYPES)}, not in {dtype!r}")
        self.stages = tuple(stages)
        self.dtype: np.dtype[Any] = dtype_of(dtype)
        self.tokens_per_sample = tokens_per_sample  # predictions a sample: what the mean of the loss divides by
        self.operations = operations
        self.loss = Loss() if loss is None else loss
        self.seeded, self.on = seeded, on
        self.clocks: tuple[Callable[[], float], ...] = ()  # of communication inside of stages; see `communicated_s`
        self.watch: Any = None  # the search for bad values that communication inside of stages looks with

    def predicting(self, targets: float) -> "Model":
        """Return the same model for samples that have so many predictions in the mean (local)."""
        other = copy.copy(self)
        other.tokens_per_sample = targets
        return other

    @cached_property
    def layout(self) -> Layout:
        """All tensors, one contiguous unit a stage."""
        return Layout.of(spec for stage in self.stages for spec in stage.tensors())

    @cached_property
    def needs(self) -> dict[int, list[int]]:
        """The stages, by index, whose parameters each stage uses: itself, and those that own a tensor tied to it."""
        unit_of = {stage.layer: unit for unit, stage in enumerate(self.stages)}
        owners = [[unit_of[self.layout.by_key[key].spec.layer] for key in stage.tied.values()] for stage in self.stages]
        return {unit: sorted({unit, *owners[unit]}) for unit in unit_of.values()}

    @cached_property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """Pairs (stage, later stage that takes its output too): those of stages that declare ``takes``."""
        return tuple((source, unit) for unit, stage in enumerate(self.stages) for source in getattr(stage, "takes", ()))

    def bind_stage(self, unit: int, store_of: StoreOf) -> Parameters:
        """Return the views of stage ``unit`` into the stores that hold its tensors, tied names included."""
        return _views(self.stages[unit], self._stores(store_of))

    def bind_stage_gradients(self, unit: int, store_of: StoreOf, written: set[str]) -> "BoundGradients":
        """Return where stage ``unit`` writes its gradients; ``written`` is shared by all stages of the rank."""
        return BoundGradients(self.stages[unit], _views(self.stages[unit], self._stores(store_of)), written)

    def bind(self, store: FlatStore) -> list[Parameters]:
        """Return the views of each stage into ``store``, which holds all of them."""
        return [self.bind_stage(unit, lambda layer: store) for unit in range(len(self.stages))]

    def bind_gradients(self, store: FlatStore) -> list["BoundGradients"]:
        """Return where each stage writes its gradients in ``store``. They share what is written in a step."""
        written: set[str] = set()
        return [self.bind_stage_gradients(unit, lambda layer: store, written) for unit in range(len(self.stages))]

    def _stores(self, store_of: StoreOf) -> Callable[[str], FlatStore]:
        return lambda key: store_of(self.layout.by_key[key].spec.layer)

    def initialise(self, store: FlatStore, seed: int) -> None:
        """Write the initial values of all stages."""
        for unit in range(len(self.stages)):
            self.initialise_stage(unit, store, seed)

    def initialise_stage(self, unit: int, store: FlatStore, seed: int) -> None:
        """Write the initial values of one stage. A tensor draws from the stream (seed, layer, its index in the layer).

        ``store`` holds the stage's own tensors, on the host.
        """
        stage = self.stages[unit]
        index = {spec.key: number for number, spec in enumerate(stage.tensors())}

        def rng_of(spec: TensorSpec) -> np.random.Generator:
            return rng.stream(seed, spec.layer, index[spec.key])

        stage.initialise({spec.name: store.view(spec.key) for spec in stage.tensors()}, rng_of)

    def forward(
        self, parameters: Sequence[Parameters], x: Array, arena: Arena, microbatch: int = 0, draw: Draw | None = None
    ) -> Array:
        """Run all stages and keep what backward needs; return the logits (batch..., classes).

        Without a ``draw`` nothing is dropped.
        """
        skips = SkipConnections(self.skips)
        x, documents = unpacked(x)
        for unit, (stage, views) in enumerate(zip(self.stages, parameters, strict=True)):
            saved = arena.saved(stage.layer, microbatch)
            saved.draw, saved.documents = draw, documents
            skips.bring(unit, saved)
            x = stage.forward(views, x, self.operations, saved)
            skips.leave(unit, x)
        return x

    def backward(
        self,
        parameters: Sequence[Parameters],
        gradients: Sequence["BoundGradients"],
        scale: float,
        arena: Arena,
        microbatch: int = 0,
    ) -> None:
        """Run all stages backwards after `forward` and ``loss.forward``; release what they kept.

        Gradients are those of ``scale`` times the summed loss. `BoundGradients.begin_step` comes before the first
        micro-batch of a step, `finish` after the last.
        """
        last = arena.saved(self.stages[-1].layer, microbatch)
        d: Array | None = self.loss.backward(scale, self.operations, last)
        skips = SkipConnections(self.skips)
        for unit in reversed(range(len(self.stages))):
            assert d is not None
            stage = self.stages[unit]
            saved = arena.saved(stage.layer, microbatch)
            saved.scale = scale
            d = stage.backward(parameters[unit], gradients[unit], skips.add(unit, d), self.operations, saved)
            skips.send_back(unit, saved)
            saved.release()

    def logits(self, parameters: Sequence[Parameters], x: Array, arena: Arena) -> Array:
        """Run all stages without a backward to come: for sampling. Returns logits that the caller owns."""
        return self.outputs(parameters, x, arena, self.operations)

    def outputs(self, parameters: Sequence[Parameters], x: Array, arena: Arena, operations: Operations) -> Array:
        """Run all stages with ``operations`` and no backward to come; return a copy of what the last one gives.

        The memory of a stage is given back as soon as the next one is done.
        """
        before: Saved | None = None
        skips = SkipConnections(self.skips)
        x, documents = unpacked(x)
        for unit, (stage, views) in enumerate(zip(self.stages, parameters, strict=True)):
            saved = arena.saved(stage.layer, microbatch=-1)
            saved.documents = documents
            skips.bring(unit, saved)
            x = stage.forward(views, x, operations, saved)
            skips.leave(unit, x, copy=True)
            if before is not None:
                before.release()
            before = saved
        result = x.copy()
        assert before is not None
        before.release()
        return result

    def communicated_s(self) -> float:
        """Return the seconds that stages spent in communication since the last call (local)."""
        return sum((clock() for clock in self.clocks), 0.0)

    def evaluate(self, parameters: Sequence[Parameters], x: Array, targets: Array, arena: Arena) -> float:
        """Return the summed loss in nats of a batch, without a backward to come."""
        return self.weighted_loss(parameters, x, targets, arena)[0]

    def weighted_loss(
        self, parameters: Sequence[Parameters], x: Array, targets: Array, arena: Arena
    ) -> tuple[float, float]:
        """Return the summed loss of a batch as `evaluate` does, and its weight; NaN if the loss has no weight."""
        logits = self.outputs(parameters, x, arena, self.operations)
        saved = arena.saved(self.stages[-1].layer, microbatch=-1)
        total = float(self.loss.forward(logits, targets, self.operations, saved))
        weight = float(saved[LOSS_WEIGHT]) if self.loss.weighs else float("nan")
        saved.release()
        return total, weight


LOSS_WEIGHT: Final = "loss.weight"  # the name in `Saved` of the weight of a micro-batch


class Loss:
    """Cross entropy of the logits of the last stage, summed over samples and tokens.

    If ``weighs`` is True, `forward` saves the weight of the micro-batch, a float or a scalar array, as `LOSS_WEIGHT`.
    The mean loss then is the sum of all losses over the sum of all weights. Weights are rounded to float32, so that
    their sum in float64 is the same in any order. If ``weighs`` is False, the number of targets is known beforehand.
    """

    weighs: bool = False

    def forward(self, logits: Array, targets: Array, operations: Operations, saved: Saved) -> Scalar:
        """Return the sum in nats (float64). ``logits`` (batch..., classes) are overwritten; targets are (batch...)."""
        saved.keep("loss.shape", logits.shape)
        return operations.cross_entropy.forward(logits.reshape(-1, logits.shape[-1]), targets, saved)

    def backward(self, scale: float, operations: Operations, saved: Saved) -> Array:
        """Return the gradient of ``scale`` times the sum, in the shape and the memory of the logits."""
        return operations.cross_entropy.backward(scale, saved).reshape(saved["loss.shape"])


class BoundGradients:
    """`hpcdist.models.stage.Gradients` over the views of a store; tied names lead to the tensor of its owner."""

    def __init__(self, stage: Stage, views: Parameters, written: set[str]) -> None:
        self._views = views
        self._own = {spec.name: spec.key for spec in stage.tensors()}
        self._keys = self._own | stage.tied
        self._written = written

    @property
    def views(self) -> Parameters:
        """Destinations of the gradients, by the names that the parameters have."""
        return self._views

    @property
    def written(self) -> frozenset[str]:
        """Keys of the tensors that a backward of this step has written: `into` adds to those."""
        return frozenset(self._written.intersection(self._keys.values()))

    def wrote(self, keys: frozenset[str]) -> None:
        """Declare tensors written, as `into` does."""
        self._written.update(keys)

    def into(self, name: str) -> tuple[Array, bool]:
        """Return the view of tensor ``name`` and whether to add to it (False: this is the first write, overwrite)."""
        key = self._keys[name]
        add = key in self._written
        self._written.add(key)
        return self._views[name], add

    def begin_step(self) -> None:
        """Declare every tensor of the stage unwritten; call it on all stages before the first backward of a step."""
        self._written.difference_update(self._own.values())

    def finish(self) -> None:
        """Zero the tensors that no backward of this step wrote."""
        for name, key in self._own.items():
            if key not in self._written:
                self._views[name][...] = 0
                self._written.add(key)


def _views(stage: Stage, store_of: Callable[[str], FlatStore]) -> dict[str, Array]:
    keys = {spec.name: spec.key for spec in stage.tensors()} | stage.tied
    return {name: store_of(key).view(key) for name, key in keys.items()}
