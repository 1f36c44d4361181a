"""Model: stages, tensor layout, and views of the tensors in a store.

Strategies run single stages, and replace operations of the table `LOCAL` with `dataclasses.replace`.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np

from hpcdist.arrays import rng
from hpcdist.arrays.backend import Array, Scalar, namespace
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.store import FlatStore
from hpcdist.constants import PRECISIONS
from hpcdist.errors import ConfigurationError
from hpcdist.models.arena import Arena
from hpcdist.models.attention.flash import LocalAttention
from hpcdist.models.documents import unpacked
from hpcdist.models.layers.dropout import LocalDropout
from hpcdist.models.layers.embedding import LocalCrossEntropy, LocalEmbedding, LocalPositions
from hpcdist.models.layers.linear import LocalActivation, LocalLinear
from hpcdist.models.layers.norm import LocalNorm
from hpcdist.models.layers.rotary import LocalRotary
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
    """Skip connections of a micro-batch: stored stage outputs that later stages also read, and their gradients."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        # A pair has the numbers of a stage and of a later stage. In the `Saved` of the later stage, "skip.N" is the
        # output of stage number N, and "skip.N.gradient" its gradient.
        self._into: dict[int, list[int]] = defaultdict(list)
        for source, target in sorted(pairs):
            self._into[target].append(source)
        self._sources = {source for source, _ in pairs}
        self._values: dict[int, Array] = {}
        self._gradients: dict[int, list[Array]] = defaultdict(list)

    def bring(self, unit: int, saved: Saved) -> None:
        """Put the outputs that stage number ``unit`` also reads from earlier stages into ``saved``, before forward."""
        for source in self._into.get(unit, ()):
            saved.keep(f"skip.{source}", self._values[source])

    def leave(self, unit: int, y: Array, *, copy: bool = False) -> None:
        """Store ``y``, the output of stage number ``unit``, for later stages that read y. ``copy``: True to copy y."""
        if unit in self._sources:
            self._values[unit] = y.copy() if copy else y

    def send_back(self, unit: int, saved: Saved) -> None:
        """Store the gradients for earlier stages, which the backward of stage number ``unit`` wrote to ``saved``."""
        for source in self._into.get(unit, ()):
            self._gradients[source].append(saved[f"skip.{source}.gradient"].copy())

    def add(self, unit: int, dy: Array) -> Array:
        """Add the gradients that `send_back` stored for stage number ``unit`` to dy, its output gradient. Return dy."""
        for gradient in reversed(self._gradients.pop(unit, [])):
            dy += gradient
        return dy


StoreOf: TypeAlias = Callable[[int], FlatStore]  # layer -> the store with its tensors


class Model:
    """Trainable model: stages in layer order, and a loss. The caller allocates memory for parameters and gradients."""

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
        # `seeded`: initial values depend only on the seed; if False, all ranks use rank 0's values. `on` is the device;
        # None: the device of the parameters.
        if dtype not in PRECISIONS:
            raise ConfigurationError(f"model dtype must be one of {', '.join(PRECISIONS)}, got {dtype!r}")
        self.stages = tuple(stages)
        self.dtype: np.dtype[Any] = dtype_of(dtype)
        self.tokens_per_sample = tokens_per_sample  # predictions per sample: the divisor of the mean loss
        self.operations = operations
        self.loss = Loss() if loss is None else loss
        self.seeded, self.on = seeded, on
        self.clocks: tuple[Callable[[], float], ...] = ()  # communication times of stages; see `communicated_s`
        self.watch: Any = None  # checker for bad values in the communication of stages
        self._unread: dict[tuple[int, ...], Array] = {}  # gradients of frozen tensors, by shape

    def predicting(self, targets: float) -> "Model":
        """Return a copy of this model whose loss is divided by ``targets``, the number of targets per sample."""
        other = copy.copy(self)
        other.tokens_per_sample = targets
        return other

    @cached_property
    def layout(self) -> Layout:
        """Layout of the trained tensors in one flat parameter vector. The tensors of each stage are contiguous."""
        specs = (spec for stage in self.stages for spec in stage.tensors())
        return Layout.of(specs, tuple(stage.layer for stage in self.stages))

    @cached_property
    def whole_layout(self) -> Layout:
        """Layout of all tensors, with the frozen ones."""
        return Layout.of(spec for stage in self.stages for spec in getattr(stage, "inner_tensors", stage.tensors)())

    @cached_property
    def needs(self) -> dict[int, list[int]]:
        """Owners of parameters: {stage number: sorted numbers of this stage and of all owners of its tied tensors}."""
        unit_of = {stage.layer: unit for unit, stage in enumerate(self.stages)}
        owners = [[unit_of[self.layout.by_key[key].spec.layer] for key in stage.tied.values()] for stage in self.stages]
        return {unit: sorted({unit, *owners[unit]}) for unit in unit_of.values()}

    @cached_property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """Skip connections: pairs (number of a stage, number of a later stage that reads the output of this stage)."""
        return tuple((source, unit) for unit, stage in enumerate(self.stages) for source in getattr(stage, "takes", ()))

    def bind_stage(self, unit: int, store_of: StoreOf) -> Parameters:
        """Return the parameters of stage number ``unit`` as {name: view of the parameter store ``store_of(layer)``}."""
        stage = self.stages[unit]
        frozen: Parameters = getattr(stage, "frozen", {})
        return {**_views(stage, self._stores(store_of)), **frozen}

    def bind_stage_gradients(self, unit: int, store_of: StoreOf, written: set[str]) -> "BoundGradients":
        """Return the gradients of stage number ``unit`` as views of the gradient stores ``store_of(layer)``."""
        # All stages of a rank share `written`, the set of the keys of tensors with a gradient in this step.
        views = _views(self.stages[unit], self._stores(store_of))
        return BoundGradients(self.stages[unit], views, written, self._unread)

    def bind(self, store: FlatStore) -> list[Parameters]:
        """Return a list with the parameters of each stage, as views of ``store``, which must contain all tensors."""
        return [self.bind_stage(unit, lambda layer: store) for unit in range(len(self.stages))]

    def bind_gradients(self, store: FlatStore) -> list["BoundGradients"]:
        """Return a list with the gradients of each stage, as views of ``store``, which must contain all tensors."""
        written: set[str] = set()
        return [self.bind_stage_gradients(unit, lambda layer: store, written) for unit in range(len(self.stages))]

    def _stores(self, store_of: StoreOf) -> Callable[[str], FlatStore]:
        return lambda key: store_of(self.layout.by_key[key].spec.layer)

    def initialise(self, store: FlatStore, seed: int) -> None:
        """Write the initial parameters of all stages into ``store``."""
        for unit in range(len(self.stages)):
            self.initialise_stage(unit, store, seed)

    def initialise_stage(self, unit: int, store: FlatStore, seed: int) -> None:
        """Write the initial parameters of stage number ``unit`` into ``store``, on the host."""
        stage = self.stages[unit]

        def rng_of(spec: TensorSpec) -> np.random.Generator:
            return rng.stream(seed, spec.layer, self._numbers[spec.key])

        stage.initialise({spec.name: store.view(spec.key) for spec in stage.tensors()}, rng_of)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        # {key: number of the tensor in its layer}
        layers: dict[int, int] = defaultdict(int)
        numbers = {}
        for segment in self.whole_layout.segments:
            numbers[segment.key] = layers[segment.spec.layer]
            layers[segment.spec.layer] += 1
        return numbers

    def forward(
        self, parameters: Sequence[Parameters], x: Array, arena: Arena, microbatch: int = 0, draw: Draw | None = None
    ) -> Array:
        """Run the forward pass of all stages. Return the logits, of shape (..., classes).

        ``arena``: memory pool that keeps the activations of ``microbatch`` for `backward`. ``draw``: key of the dropout
        masks, or None to disable dropout.
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
        """Run the backward pass of all stages for ``scale`` times the loss, and release the activations.

        ``arena``, ``microbatch``: as for `forward`.
        """
        # `Gradients.begin_step` of every stage must precede the first backward pass of a step, and `Gradients.finish`
        # must follow the last one.
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
        """Return a copy of the logits for the input x. Keep no activations for a backward pass."""
        return self.outputs(parameters, x, arena, self.operations)

    def outputs(
        self,
        parameters: Sequence[Parameters],
        x: Array,
        arena: Arena,
        operations: Operations,
        *,
        only_last: bool = False,
    ) -> Array:
        """Return a copy of the last stage's output for x, computed with ``operations``. Keep no activations.

        ``only_last``: True to compute the last stage only for the last token of x, which has one sample or one token.
        """
        before: Saved | None = None
        skips = SkipConnections(self.skips)
        x, documents = unpacked(x)
        for unit, (stage, views) in enumerate(zip(self.stages, parameters, strict=True)):
            saved = arena.saved(stage.layer, microbatch=-1)
            saved.documents = documents
            skips.bring(unit, saved)
            if only_last and stage is self.stages[-1]:
                x = x[:, -1:]
            x = stage.forward(views, x, operations, saved)
            skips.leave(unit, x, copy=True)
            if before is not None:
                # so that only two stages keep activations
                before.release()
            before = saved
        result = x.copy()
        assert before is not None
        before.release()
        return result

    def communicated_s(self) -> float:
        """Return this rank's seconds of communication in stages since the last call of this method. Local."""
        return sum((clock() for clock in self.clocks), 0.0)

    def evaluate(self, parameters: Sequence[Parameters], x: Array, targets: Array, arena: Arena) -> float:
        """Return the loss in nats, summed over the batch (x, ``targets``). ``arena``: memory for the activations."""
        return self.weighted_loss(parameters, x, targets, arena)[0]

    def weighted_loss(
        self, parameters: Sequence[Parameters], x: Array, targets: Array, arena: Arena
    ) -> tuple[float, float]:
        """Return (summed loss, sum of the loss weights) of the batch (x, ``targets``).

        The sum of the weights is NaN if the loss has no weights. ``arena``: memory for the activations.
        """
        logits = self.outputs(parameters, x, arena, self.operations)
        saved = arena.saved(self.stages[-1].layer, microbatch=-1)
        total = float(self.loss.forward(logits, targets, self.operations, saved))
        weight = float(saved[LOSS_WEIGHT]) if self.loss.weighs else float("nan")
        saved.release()
        return total, weight


LOSS_WEIGHT: Final = "loss.weight"  # the name in `Saved` of the weight of a micro-batch


class Loss:
    """Loss of a model: cross entropy of the logits, summed over samples and tokens. Base class of other losses."""

    # If True, the mean loss is the sum divided by a sum of weights, not by the number of targets: `forward` must store
    # the micro-batch's float32 weight in `saved` as `LOSS_WEIGHT`.
    weighs: bool = False

    def forward(self, logits: Array, targets: Array, operations: Operations, saved: Saved) -> Scalar:
        """Return the summed loss in nats, as float64. Overwrites ``logits``, of shape (..., classes)."""
        saved.keep("loss.shape", logits.shape)
        return operations.cross_entropy.forward(logits.reshape(-1, logits.shape[-1]), targets, saved)

    def backward(self, scale: float, operations: Operations, saved: Saved) -> Array:
        """Return the gradient of ``scale`` times the loss with respect to the logits. Overwrites the saved logits."""
        return operations.cross_entropy.backward(scale, saved).reshape(saved["loss.shape"])


class BoundGradients:
    """Gradient arrays of one stage, as views of stores. Implements `hpcdist.models.stage.Gradients`."""

    def __init__(self, stage: Stage, views: Parameters, written: set[str], unread: dict[Any, Array]) -> None:
        # `unread`: scratch arrays for gradients of frozen tensors, by shape.
        self._views, self._frozen, self._unread = views, getattr(stage, "frozen", {}), unread
        self._own = {spec.name: spec.key for spec in stage.tensors()}
        self._keys = self._own | stage.tied
        self._written = written

    @property
    def views(self) -> Parameters:
        return self._views

    @property
    def written(self) -> frozenset[str]:
        """Keys of the tensors whose gradients this step has written. Further gradients of these tensors are added."""
        return frozenset(self._written.intersection(self._keys.values()))

    def wrote(self, keys: frozenset[str]) -> None:
        """Mark the gradients of the tensors ``keys`` as written. Further gradients of this step are added to them."""
        self._written.update(keys)

    def wants(self, name: str) -> bool:
        return name in self._keys

    def into(self, name: str) -> tuple[Array, bool]:
        if name in self._frozen:
            like = self._frozen[name]
            if like.shape not in self._unread:
                self._unread[like.shape] = namespace(like).empty(like.shape, like.dtype)
            return self._unread[like.shape], False
        key = self._keys[name]
        add = key in self._written
        self._written.add(key)
        return self._views[name], add

    def begin_step(self) -> None:
        self._written.difference_update(self._own.values())

    def finish(self) -> None:
        for name, key in self._own.items():
            if key not in self._written:
                self._views[name][...] = 0
                self._written.add(key)


def _views(stage: Stage, store_of: Callable[[str], FlatStore]) -> dict[str, Array]:
    keys = {spec.name: spec.key for spec in stage.tensors()} | stage.tied
    return {name: store_of(key).view(key) for name, key in keys.items()}
