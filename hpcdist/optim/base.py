"""Base classes of the optimizers: state on the owned ranges, elementwise steps, layer-wise steps.

`SegmentWise` has the state on the owned part, the count of updates, and the loop over tensors. `ElementWise` steps
each element by itself (AdamW, SGD): no norm is needed, so an update is one pass over memory. `LayerWise` has a rate
that depends on norms of whole tensors (LAMB, LARS): two phases, with a sum over the owners between them.

The tensors of a layer-wise optimizer are those that a model declares. Query, key and value of a block are one, (3, h,
h), so they share one ratio, as the one `in_proj_weight` of PyTorch and the fused matrix of Megatron-LM do; published
references of LARS and LAMB that have three matrices take three. They stay one here: the norms are summed over the
ranks by tensor, the large-batch results were measured so, and a run that goes on must keep the ratios that it began
with. With ``model.kv_heads`` queries are a tensor of their own. For weight decay it makes no difference: all three
matrices decay, and none of their biases does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array, is_device, place, to_host
from hpcdist.arrays.dtypes import is_16bit_float
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.optim import rates
from hpcdist.optim.config import OptimizerConfig, ParameterGroup
from hpcdist.optim.norms import ExactNorms, GpuNorms, Norms
from hpcdist.optim.update import kernels

Copy: TypeAlias = FlatStore | None  # the rounded working copy of the weights, where there is one
Sums: TypeAlias = np.ndarray | None  # partial norms, summed over the ranks; None where an optimizer needs none
Decay: TypeAlias = float | kernels.TensorOptions  # of one tensor, or of all on a GPU


class SegmentWise(ABC):
    """Optimizer on the ``parts`` that a rank owns; `ElementWise` and `LayerWise` define its two phases. No messages.

    ``slots`` are the stores of its state by name, in the master dtype; a checkpoint saves them as pieces. ``count`` is
    the number of updates, the begun one included. ``needs_norms``: `apply` needs the reduced `partial_norms`. See
    `hpcdist.optim.optimizer` for the order of calls.
    """

    slot_names: ClassVar[tuple[str, ...]] = ()
    needs_norms: ClassVar[bool] = False
    slots_in_apply: ClassVar[bool] = False  # whether `apply` advances the slots, instead of `direction`

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
            raise UsageError(f"master weights in {dtype}: updates would be rounded away; use float32 or float64")
        self.config = config
        self.layout = layout
        self.parts = (parts,) if isinstance(parts, Range) else tuple(parts)
        self.dtype = np.dtype(dtype)
        self.count = 0
        self._factor = self._scale = 1.0
        make = make_slot or (
            lambda name: FlatStore(layout, self.dtype, parts, on=on, category="optimizer", ledger=ledger)
        )
        self.slots = {name: make(name) for name in self._slots_of(config)}
        self._total_steps = total_steps
        self._index = {segment.range.start: index for index, segment in enumerate(layout.segments)}
        self._groups = grouped(config, layout)
        self._options = self._options_on_gpu() if on == "gpu" else None
        self._norms: Norms | GpuNorms | ExactNorms = Norms(len(layout.segments))
        if self._options is not None and self.needs_norms:
            self._norms = GpuNorms(layout.size, self._options)

    def _slots_of(self, config: OptimizerConfig) -> tuple[str, ...]:
        return self.slot_names

    @property
    def learning_rate(self) -> float:
        """Rate of the update that `begin_step` began; of the coming one before the first."""
        return self._factor * rates.learning_rate(self.config, max(1, self.count), self._total_steps)

    def begin_step(self, factor: float = 1.0) -> None:
        """Begin an update, at ``factor`` times its rate. Call it once it is certain that this one is not skipped."""
        self.count += 1
        self._factor = factor
        self._norms.clear()

    @abstractmethod
    def direction(self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0) -> None:
        """Take the mean gradient on ``piece``, times ``scale`` (see `hpcdist.optim.norms`): one in each update.

        Where norms are needed the buffer of ``gradient``, in the master dtype, holds the direction u afterwards; else
        it must stay as it is until `apply`. Each element of the owned part is given once in an update; pieces may cut
        tensors anywhere. Padding is not touched.
        """

    def sum_exactly(self) -> None:
        """Make `partial_norms` exact from the next update on: the same bits of the norms for every partition."""
        self._norms = ExactNorms(len(self.layout.segments))

    def partial_norms(self) -> np.ndarray:  # (segments, 2) or (segments, 2, exact.SLOTS)
        """Return, for each tensor of the layout, sum(w^2) and sum(u^2) over the given pieces, in float64, on the host.

        The caller sums them over the ranks that share the tensors; rows of tensors that need none are 0. After
        `sum_exactly` they are accumulators of `hpcdist.optim.update.exact`, int64, which the caller sums and rounds.
        """
        return to_host(self._norms.sums()).copy()

    @abstractmethod
    def apply(
        self, piece: Range, master: FlatStore, direction: FlatStore, working: Copy = None, norms: Sums = None
    ) -> None:
        """Write the new ``master`` weights on ``piece`` and, when given, their rounded ``working`` copy.

        ``direction`` is what `direction` was given, undefined afterwards. ``norms`` are the summed `partial_norms`;
        they may be None when `needs_norms` is false.
        """

    def state(self) -> dict[str, float]:
        """Return what a checkpoint needs beside the slots: the number of applied updates."""
        return {"count": self.count}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue after the update that `state` describes; the slots are filled by the caller."""
        self.count = int(state["count"])

    @abstractmethod
    def _direction(self, where: Range, weights: Array, gradient: Array, scale: float, decay: float) -> None:
        """Turn the gradient of one stretch of a tensor into the direction, in place, and advance the slots."""

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
        """Return the options of all tensors, for a kernel over ``piece``."""
        assert self._options is not None, "an optimizer of weights on a GPU is built with its state there"
        return self._options._replace(start=piece.start)


def grouped(config: OptimizerConfig, layout: Layout) -> dict[str, ParameterGroup]:
    """Return the group of each tensor of ``layout`` that has one, by its name (local).

    Raises ConfigurationError for a group without a tensor.
    """
    groups = config.parsed_groups
    group_of: dict[str, ParameterGroup] = {}
    for key in (segment.key for segment in layout.segments) if groups else ():
        group = next((group for group in groups if group.has(key)), None)
        if group is not None:
            group_of[key] = group
    for text, group in zip(config.groups, groups, strict=True):
        if not any(group is taken for taken in group_of.values()):
            raise ConfigurationError(
                f"optimizer.groups has {text!r}, which no tensor matches that an earlier group has not taken; names "
                f"are such as {', '.join(segment.key for segment in layout.segments[:4])}: `hpcdist checkpoint show "
                "--tensors` lists those of a run"
            )
    return group_of


BLOCK: Final = 1 << 16  # elements whose gradient, weights and slots stay in the cache of a core: a megabyte of float32


class ElementWise(SegmentWise):
    """Elementwise optimizer: `direction` stores the scale; `apply` unscales, clips, decays, advances slots and steps.

    Where weights change between the two, as those of gossip do, `direct_before` makes them apart. Gradients may be
    16-bit floats beside float32 weights: on the host they are widened in ``wide``, block by block.
    """

    wide: Array | None = None  # float32 memory of one block
    _before = False

    def direct_before(self) -> None:
        """From the next update on compute the step in `direction`, from the weights at that time, for `apply`."""
        self._before = True

    def direction(self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0) -> None:
        """Store ``scale``, which is that of the whole update. ``gradient`` must stay until `apply`."""
        self._scale = scale
        if self._before:
            assert master.dtype == self.dtype == gradient.dtype, "gradients of 16 bits are widened by `apply`"
            for _, spec, where in self._tensors(piece):
                self._direction(where, master.range(where), gradient.range(where), scale, self._decay(spec))

    def apply(
        self, piece: Range, master: FlatStore, direction: FlatStore, working: Copy = None, norms: Sums = None
    ) -> None:
        """Step ``master`` on ``piece`` along the scaled gradient, and round it into ``working`` when given."""
        assert master.dtype == self.dtype, f"the master weights are {master.dtype}, the optimizer's {self.dtype}"
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
        """Return the ranges of one loop each: all at once, or blocks that stay in a cache for a second loop."""
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
                f"a gradient in {direction.dtype} for master weights in {self.dtype}: 16-bit gradients go with float32 "
                "weights and memory to widen them in, see hpcdist.optim.master_weights.MasterWeights"
            )
        return self.wide

    @abstractmethod
    def _step(
        self, where: Range, weights: Array, gradient: Array, rate: float, decay: Decay, working: Array | None
    ) -> None:
        """Make the whole update of one stretch of a tensor, and of its ``working`` copy.

        The gradient counts ``_scale`` times, and is undefined afterwards. On a GPU it may be 16-bit floats beside
        float32 weights, and the stretch any number of tensors.
        """


NORM_BLOCK: Final = 1 << 16  # elements of which a direction is still in the cache when their squares are summed


class LayerWise(SegmentWise):
    """Layer-wise optimizer: directions and their sums of squares in one pass, the steps in another.

    On a GPU each pass over a piece is one kernel for all tensors.
    """

    needs_norms: ClassVar[bool] = True
    _rates: kernels.TensorOptions | None = None  # decays and rates of the update under way, on a GPU

    def begin_step(self, factor: float = 1.0) -> None:
        """Count one update more, whose rates depend on norms that are still to come."""
        super().begin_step(factor)
        self._rates = None

    def direction(
        self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0, into: FlatStore | None = None
    ) -> None:
        """Turn ``scale * gradient`` on ``piece`` into the direction u, in place, and advance the slots.

        With ``into``, of the master dtype, it goes there, and a gradient of 16 bits is kept.
        """
        step = gradient if into is None else into
        assert master.dtype == self.dtype == step.dtype, "directions are not rounded to 16 bits"
        if is_device(gradient.array):
            assert isinstance(self._norms, GpuNorms), "norms on a GPU are not exact"
            arrays = master.range(piece), gradient.range(piece), step.range(piece), self._norms.partial
            self._direction_all(piece, *arrays, scale, self._all_tensors(piece))
            return
        assert not isinstance(self._norms, GpuNorms), (
            "an optimizer of weights on the host is built with its state there"
        )
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
        """Return sums of squares of w and of the direction over the pieces seen; 0 for tensors that need none."""
        sums = super().partial_norms()
        sums[[not segment.spec.adapted for segment in self.layout.segments]] = 0  # a kernel sums up all
        return sums

    def apply(
        self, piece: Range, master: FlatStore, direction: FlatStore, working: Copy = None, norms: Sums = None
    ) -> None:
        """Move ``master`` along ``direction`` on ``piece``, and round it into ``working`` when given."""
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
        """Return the rate of a tensor: with the factor of its group and, where it is adapted, the layer-wise one."""
        weight_norm, step_norm = (norms[index] ** 0.5).tolist()
        ratio = self._ratio(weight_norm, step_norm, self._decay(spec)) if spec.adapted else 1.0
        return common_rate * self._rate_factor(spec) * ratio

    def _rates_on_gpu(self, piece: Range, norms: np.ndarray) -> kernels.TensorOptions:
        """Return decays and rates of all tensors, for a kernel over ``piece``: one copy to the GPU for an update."""
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
    def _ratio(self, weight_norm: float, step_norm: float, decay: float) -> float:
        """Return the layer-wise factor of an adapted tensor with these norms and its weight decay."""

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
        """Do as `_direction` for all tensors of a stretch on a GPU, into ``step``, and add to the ``partial`` norms."""

    def _update(self, where: Range, weights: Array, step: Array, rate: float, decay: float) -> None:
        """Move the weights of one stretch at the ``rate`` of its tensor."""
        kernels.descend(weights, step, rate)

    def _update_all(
        self, where: Range, weights: Array, step: Array, tensors: kernels.TensorOptions, working: Array | None
    ) -> None:
        """Do as `_update` for all tensors of a stretch on a GPU, and round the weights into ``working``."""
        kernels.launch_update("descend", weights, step, (), working, tensors)


class WrappedOptimizer(ABC):
    """Base of optimizers that hand ``inner`` other weights, gradients or state to step: its clock, rates and norms.

    The members are those of `SegmentWise`.
    """

    def __init__(self, inner: SegmentWise) -> None:
        self._inner, self.parts, self.slots = inner, inner.parts, inner.slots

    @property
    def count(self) -> int:
        """Number of applied updates, the begun one included."""
        return self._inner.count

    @property
    def needs_norms(self) -> bool:
        """Whether `apply` needs the reduced `partial_norms`."""
        return self._inner.needs_norms

    @property
    def learning_rate(self) -> float:
        """Rate of the update that is under way."""
        return self._inner.learning_rate

    def begin_step(self, factor: float = 1.0) -> None:
        """Begin an update, at ``factor`` times the rate."""
        self._inner.begin_step(factor)

    @abstractmethod
    def direction(self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0) -> None:
        """Take the mean gradient on ``piece``."""

    @abstractmethod
    def apply(
        self, piece: Range, master: FlatStore, direction: FlatStore, working: Copy = None, norms: Sums = None
    ) -> None:
        """Write the new ``master`` weights on ``piece``."""

    def sum_exactly(self) -> None:
        """Make `partial_norms` exact."""
        self._inner.sum_exactly()

    def partial_norms(self) -> np.ndarray:  # (segments, 2)
        """Return sums of squares of the master weights and of the direction over the pieces seen."""
        return self._inner.partial_norms()

    def state(self) -> dict[str, float]:
        """Return the scalars that a checkpoint needs beside the slots."""
        return self._inner.state()

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned."""
        self._inner.restore(state)
