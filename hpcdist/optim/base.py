"""Base classes of the optimizers: state on the owned ranges, elementwise steps, layer-wise steps.

Query, key and value of a block are one tensor (3, h, h) with one layer-wise ratio. Published references of LARS and
LAMB use three ratios.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array, Ledger, is_device, place, to_host
from hpcdist.arrays.dtypes import is_16bit_float
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.optim import kernels, rates
from hpcdist.optim.config import OptimizerConfig, ParameterGroup
from hpcdist.optim.norms import ExactNorms, GpuNorms, Norms

Copy: TypeAlias = FlatStore | None  # rounded working copy of the weights, if there is one
Sums: TypeAlias = np.ndarray | None  # partial norms, summed over the ranks; None if the optimizer needs no norms
Decay: TypeAlias = float | kernels.TensorOptions  # weight decay of one tensor, or options of all tensors on a GPU


BLOCK: Final = 1 << 16  # elements per block: gradient, weights and slots fit in the cache of a core
AVERAGE: Final = "ema"  # name of the state vector with the moving average of the weights


class SegmentWise(ABC):
    """Base class of optimizers for ``parts``, the ranges of the flat parameter vector that this rank owns.

    An update calls `begin_step`, then `direction` for every range, then `apply` for every range. If ``needs_norms`` is
    True, the caller must sum `partial_norms` over the ranks before `apply`.
    """

    # names of the optimizer state vectors, which have the dtype of the master weights
    slot_names: ClassVar[tuple[str, ...]] = ()
    needs_norms: ClassVar[bool] = False
    slots_in_apply: ClassVar[bool] = False  # True if only `apply` uses the slots

    def __init__(
        self,
        config: OptimizerConfig,
        layout: Layout,
        parts: Range | Sequence[Range],
        dtype: np.dtype,
        *,
        ledger: Ledger | None,
        total_steps: int,
        on: str,
        make_slot: Callable[[str], FlatStore] | None = None,
    ) -> None:
        if dtype not in (np.float32, np.float64):
            raise UsageError(f"master weights cannot be {dtype}: updates would be rounded away; use float32 or float64")
        self.config = config
        self.layout = layout
        self.parts = (parts,) if isinstance(parts, Range) else tuple(parts)
        self.dtype = np.dtype(dtype)
        self.count = 0
        self._factor = self._scale = 1.0
        self._groups = grouped(config, layout)
        make = make_slot or (
            lambda name: FlatStore(
                layout, self.dtype, self._ranges_of(name), on=on, category="optimizer", ledger=ledger
            )
        )
        averages = (AVERAGE,) if config.ema_decay else ()
        self.slots = {name: make(name) for name in (*self._slots_of(config), *averages)}
        self._total_steps = total_steps
        self._index = {segment.range.start: index for index, segment in enumerate(layout.segments)}
        self._options = self._options_on_gpu() if on == "gpu" else None
        self._norms: Norms | GpuNorms | ExactNorms = Norms(len(layout.segments))
        if self._options is not None and self.needs_norms:
            self._norms = GpuNorms(layout.size, self._options)

    def _slots_of(self, config: OptimizerConfig) -> tuple[str, ...]:
        return self.slot_names

    def _ranges_of(self, slot: str) -> Sequence[Range]:
        # Flat ranges for which the state vector ``slot`` has elements: whole tensors within `parts`.
        return self.parts

    @property
    def learning_rate(self) -> float:
        """Learning rate of the current update. Before the first update, the learning rate of the first update."""
        return self._factor * rates.learning_rate(self.config, max(1, self.count), self._total_steps)

    def begin_step(self, factor: float = 1.0) -> None:
        """Start the next update, with ``factor`` times the scheduled learning rate. Do not call for skipped updates."""
        self.count += 1
        self._factor = factor
        self._norms.clear()

    @abstractmethod
    def direction(self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0) -> None:
        """Start the update of the weights ``master`` in the flat range ``piece``, with ``scale * gradient``."""
        # All calls of an update have the same scale, and their ranges together contain each owned element once. If
        # `needs_norms` is true, this call overwrites ``gradient`` with the update direction. Otherwise, ``gradient``
        # must not change before `apply`.

    def sum_exactly(self) -> None:
        """Make `partial_norms` exact from the next update on, so that the sums do not depend on the sharding."""
        self._norms = ExactNorms(len(self.layout.segments))

    def partial_norms(self) -> np.ndarray:  # (segments, 2) or (segments, 2, exact.SLOTS)
        """Return a host array of this rank's sums of squares: for each tensor, of weights and of update directions."""
        # Float64 sums or, after a call of `sum_exactly`, accumulators of `hpcdist.optim.exact`.
        return to_host(self._norms.sums()).copy()

    def apply(
        self, piece: Range, master: FlatStore, direction: FlatStore, working: Copy = None, norms: Sums = None
    ) -> None:
        """Complete an update: change the weights ``master`` in the flat range ``piece``, and their moving average.

        ``direction``: store that the method `direction` got as ``gradient``; `apply` may overwrite the content.
        ``working``: store for the rounded weights, or None. ``norms``: sum over the ranks of `partial_norms`, or None.
        """
        self._apply(piece, master, direction, working, norms)
        if AVERAGE in self.slots:
            self._average(piece, master)

    def _average(self, piece: Range, master: FlatStore) -> None:
        # average <- decay average + (1 - decay) weights, from the weights of the first update on, as PyTorch's
        # AveragedModel with get_ema_multi_avg_fn(decay).
        for block in cut(piece, BLOCK) if not is_device(master.array) else (piece,):
            average, weights = self.slots[AVERAGE].range(block), master.range(block)
            if self.count == 1:
                average[...] = weights
            else:
                change = weights - average
                change *= self.dtype.type(1.0 - self.config.ema_decay)
                average += change

    @abstractmethod
    def _apply(self, piece: Range, master: FlatStore, direction: FlatStore, working: Copy, norms: Sums) -> None: ...

    def state(self) -> dict[str, float]:
        """Return {"count": number of updates}, to save in a checkpoint in addition to the state vectors."""
        return {"count": self.count}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the number of updates from ``state``, a result of `state`."""
        self.count = int(state["count"])

    @abstractmethod
    def _direction(self, where: Range, weights: Array, gradient: Array, scale: float, decay: float) -> None:
        # ``where`` is a flat range of one tensor. The mean gradient is ``scale`` times ``gradient``. The direction
        # excludes the learning rate.
        ...

    def _tensors(self, piece: Range) -> Iterator[tuple[int, TensorSpec, Range]]:
        for segment, where in self.layout.within(piece):
            yield self._index[segment.range.start], segment.spec, where

    def _decay(self, spec: TensorSpec) -> float:
        group = self._groups.get(spec.key) if self._groups else None
        if group is not None and group.weight_decay is not None:
            return group.weight_decay
        return self.config.weight_decay if spec.adapted else 0.0

    def _rate_factor(self, spec: TensorSpec) -> float:
        group = self._groups.get(spec.key) if self._groups else None
        return 1.0 if group is None else group.rate_factor

    def _options_on_gpu(self) -> kernels.TensorOptions:
        segments = self.layout.segments
        bounds = [(segment.range.start, segment.range.stop) for segment in segments]
        options = [(self._decay(segment.spec), self._rate_factor(segment.spec)) for segment in segments]
        return kernels.TensorOptions(
            place(np.array(bounds, np.int64).reshape(-1, 2), "gpu"),
            place(np.array(options, np.float64).reshape(-1, 2), "gpu"),
        )

    def _all_tensors(self, piece: Range) -> kernels.TensorOptions:
        assert self._options is not None, "the weights are on a GPU: build the optimizer with on='gpu'"
        return self._options._replace(start=piece.start)


def grouped(config: OptimizerConfig, layout: Layout) -> dict[str, ParameterGroup]:
    """Return {tensor name: parameter group}. Raises ConfigurationError for a group in ``config`` without tensors."""
    groups = config.parsed_groups
    group_of: dict[str, ParameterGroup] = {}
    for key in (segment.key for segment in layout.segments) if groups else ():
        # A tensor belongs to the first group that matches.
        group = next((group for group in groups if group.has(key)), None)
        if group is not None:
            group_of[key] = group
    for text, group in zip(config.groups, groups, strict=True):
        if not group.frozen and not any(group is taken for taken in group_of.values()):
            raise ConfigurationError(
                f"the group {text!r} in optimizer.groups matches no tensor, or only tensors of earlier groups; use "
                f"tensor names such as {', '.join(segment.key for segment in layout.segments[:4])} (`hpcdist "
                "checkpoint show --tensors` lists the names of a run)"
            )
    return group_of


class ElementWise(SegmentWise):
    """Base class of optimizers that update each element separately, such as AdamW and SGD."""

    # For 16-bit gradients on the host, the caller must set this buffer. It has at most `BLOCK` elements.
    wide: Array | None = None  # float32 scratch buffer of one block
    _before = False

    def direct_before(self) -> None:
        """From the next update on, compute update directions in `direction` instead of in `apply`."""
        self._before = True

    def direction(self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0) -> None:
        """Store ``scale``, the factor of ``gradient``, for `apply`.

        If `direct_before` was called, also overwrite ``gradient`` in the flat range ``piece`` with the update
        direction of the weights ``master``.
        """
        self._scale = scale
        if self._before:
            assert master.dtype == self.dtype == gradient.dtype, "direct_before needs gradients in the master dtype"
            for _, spec, where in self._tensors(piece):
                self._direction(where, master.range(where), gradient.range(where), scale, self._decay(spec))

    def _apply(self, piece: Range, master: FlatStore, direction: FlatStore, working: Copy, norms: Sums) -> None:
        assert master.dtype == self.dtype, f"the master weights are {master.dtype}, expected {self.dtype}"
        common_rate = self.learning_rate
        if is_device(direction.array) and not self._before:  # one kernel for all tensors
            copy = None if working is None else working.range(piece)
            self._step(piece, master.range(piece), direction.range(piece), common_rate, self._all_tensors(piece), copy)
            return
        for _, spec, where in self._tensors(piece):
            rate = common_rate * self._rate_factor(spec)
            if self._before:
                kernels.descend(master.range(where), direction.range(where), rate)
                if working is not None:
                    kernels.round_into(master.range(where), working.range(where))
                continue
            decay = self._decay(spec)
            for block in self._blocks(where, direction, working):
                copy = None if working is None else working.range(block)
                gradient = self._widened(direction.range(block))
                self._step(block, master.range(block), gradient, rate, decay, copy)

    def _blocks(self, where: Range, direction: FlatStore, working: FlatStore | None) -> Iterable[Range]:
        if direction.dtype != self.dtype:
            return cut(where, self._scratch(direction).size)
        return (where,) if working is None else cut(where, BLOCK)

    def _widened(self, gradient: Array) -> Array:
        if gradient.dtype == self.dtype:
            return gradient
        assert self.wide is not None
        wide = self.wide[: gradient.size]
        kernels.widen(gradient, wide)
        return wide

    def _scratch(self, direction: FlatStore) -> Array:
        if self.wide is None or self.dtype != np.float32 or not is_16bit_float(direction.dtype):
            raise UsageError(
                f"{direction.dtype} gradients cannot update {self.dtype} master weights: 16-bit gradients need float32 "
                "master weights and a float32 buffer; use hpcdist.optim.master_weights.MasterWeights"
            )
        return self.wide

    @abstractmethod
    def _step(
        self, where: Range, weights: Array, gradient: Array, rate: float, decay: Decay, working: Array | None
    ) -> None: ...


NORM_BLOCK: Final = 1 << 16  # elements per block: a direction is still in cache when its squares are summed


class LayerWise(SegmentWise):
    """Base class of optimizers that scale a tensor's update by norms of the tensor, such as LAMB and LARS."""

    needs_norms: ClassVar[bool] = True
    _rates: kernels.TensorOptions | None = None  # decays and rates of the current update, on a GPU

    def begin_step(self, factor: float = 1.0) -> None:
        super().begin_step(factor)
        self._rates = None

    def direction(
        self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0, into: FlatStore | None = None
    ) -> None:
        """Write the update direction of the weights ``master`` in the flat range ``piece`` to the store ``into``.

        ``scale``: factor of ``gradient``. If ``into`` is None, the update direction overwrites ``gradient``.
        """
        step = gradient if into is None else into
        assert master.dtype == self.dtype == step.dtype, "directions must have the master dtype"
        if is_device(gradient.array):
            assert isinstance(self._norms, GpuNorms), "exact norms are not supported on a GPU"
            arrays = master.range(piece), gradient.range(piece), step.range(piece), self._norms.partial
            self._direction_all(piece, *arrays, scale, self._all_tensors(piece))
            return
        assert not isinstance(self._norms, GpuNorms), "the weights are on the host: build the optimizer with on='cpu'"
        for index, spec, where in self._tensors(piece):
            decay = self._decay(spec)
            for block in cut(where, NORM_BLOCK):
                weights, values = master.range(block), step.range(block)
                if into is not None:
                    kernels.widen(gradient.range(block), values)
                self._direction(block, weights, values, scale, decay)
                if spec.adapted:
                    self._norms.add(index, block, weights, values)

    def partial_norms(self) -> np.ndarray:  # (segments, 2) or (segments, 2, exact.SLOTS)
        sums = super().partial_norms()
        sums[[not segment.spec.adapted for segment in self.layout.segments]] = 0  # GPU kernels sum all tensors
        return sums

    def _apply(self, piece: Range, master: FlatStore, direction: FlatStore, working: Copy, norms: Sums) -> None:
        assert norms is not None, "the reduced partial norms are missing"
        if is_device(direction.array):
            copy = None if working is None else working.range(piece)
            self._update_all(piece, master.range(piece), direction.range(piece), self._rates_on_gpu(piece, norms), copy)
            return
        common_rate = self.learning_rate
        for index, spec, where in self._tensors(piece):
            decay, rate = self._decay(spec), self._rate_of(index, spec, common_rate, norms)
            for block in cut(where, NORM_BLOCK) if working is not None else (where,):
                weights = master.range(block)
                self._update(block, weights, direction.range(block), rate, decay)
                if working is not None:
                    kernels.round_into(weights, working.range(block))

    def _rate_of(self, index: int, spec: TensorSpec, common_rate: float, norms: np.ndarray) -> float:
        weight_norm, step_norm = (norms[index] ** 0.5).tolist()
        ratio = self._ratio(weight_norm, step_norm, self._decay(spec)) if spec.adapted else 1.0
        return common_rate * self._rate_factor(spec) * ratio

    def _rates_on_gpu(self, piece: Range, norms: np.ndarray) -> kernels.TensorOptions:
        if self._rates is None:
            common_rate = self.learning_rate
            table = [
                (self._decay(segment.spec), self._rate_of(index, segment.spec, common_rate, norms))
                for index, segment in enumerate(self.layout.segments)
            ]
            self._rates = self._all_tensors(piece)._replace(
                options=place(np.array(table, np.float64).reshape(-1, 2), "gpu")
            )
        return self._rates._replace(start=piece.start)

    @abstractmethod
    def _ratio(self, weight_norm: float, step_norm: float, decay: float) -> float: ...

    @abstractmethod
    def _direction_all(
        self,
        where: Range,
        weights: Array,
        gradient: Array,
        step: Array,
        partial: Array,
        scale: float,
        tensors: kernels.TensorOptions,
    ) -> None:
        # The mean gradient is ``scale * gradient``. The squares of weights and directions are added to ``partial``.
        ...

    def _update(self, where: Range, weights: Array, step: Array, rate: float, decay: float) -> None:
        kernels.descend(weights, step, rate)

    def _update_all(
        self, where: Range, weights: Array, step: Array, tensors: kernels.TensorOptions, working: Array | None
    ) -> None:
        kernels.launch_update("descend", weights, step, (), working, tensors)


class WrappedOptimizer(ABC):
    """Base class of wrappers that give other weights, gradients or state to the wrapped optimizer ``inner``."""

    def __init__(self, inner: SegmentWise) -> None:
        self._inner, self.parts, self.slots = inner, inner.parts, inner.slots

    @property
    def inner(self) -> SegmentWise:
        """The wrapped optimizer."""
        return self._inner

    @property
    def count(self) -> int:
        return self._inner.count

    @property
    def needs_norms(self) -> bool:
        return self._inner.needs_norms

    @property
    def learning_rate(self) -> float:
        return self._inner.learning_rate

    def begin_step(self, factor: float = 1.0) -> None:
        self._inner.begin_step(factor)

    @abstractmethod
    def direction(self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0) -> None: ...

    @abstractmethod
    def apply(
        self, piece: Range, master: FlatStore, direction: FlatStore, working: Copy = None, norms: Sums = None
    ) -> None: ...

    def sum_exactly(self) -> None:
        self._inner.sum_exactly()

    def partial_norms(self) -> np.ndarray:  # (segments, 2)
        return self._inner.partial_norms()

    def state(self) -> dict[str, float]:
        return self._inner.state()

    def restore(self, state: Mapping[str, float]) -> None:
        self._inner.restore(state)
