"""Optimizers that step each element by itself: no norm is waited for, so an update is one pass over memory."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.dtypes import is_16bit_float
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import UsageError
from hpcdist.optim import kernels
from hpcdist.optim.segmentwise import SegmentWise

BLOCK: Final = 1 << 16  # elements whose gradient, weights and slots stay in the cache of a core: a megabyte of float32


class ElementWise(SegmentWise):
    """`direction` takes note of the scale alone; `apply` unscales, clips, decays, advances the slots and steps.

    Where weights change between the two, as those of gossip do, `direct_before` makes them apart. Gradients may be
    16-bit floats beside float32 weights: on the host they are widened in ``wide``, block by block.
    """

    wide: Array | None = None  # float32 memory of one block
    _before = False

    def direct_before(self) -> None:
        """From the next update on, `direction` makes the step of the weights as they are then, and `apply` takes it."""
        self._before = True

    def direction(self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0) -> None:
        """Take note of ``scale``, which is that of the whole update. ``gradient`` must stay until `apply`."""
        self._scale = scale
        if self._before:
            assert master.dtype == self.dtype == gradient.dtype, "gradients of 16 bits are widened by `apply`"
            for _, spec, where in self._tensors(piece):
                self._direction(where, master.range(where), gradient.range(where), scale, self._decay(spec))

    def apply(
        self,
        piece: Range,
        master: FlatStore,
        direction: FlatStore,
        working: FlatStore | None = None,
        norms: np.ndarray | None = None,
    ) -> None:
        """Step ``master`` on ``piece`` along the scaled gradient, and round it into ``working`` when given."""
        assert master.dtype == self.dtype, f"the master weights are {master.dtype}, the optimizer's {self.dtype}"
        common_rate = self.learning_rate
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
                self._step(block, master.range(block), gradient, self._scale, rate, decay, copy)

    def _blocks(self, where: Range, direction: FlatStore, working: FlatStore | None) -> Iterable[Range]:
        """Return what one loop takes at a time: all, or what stays in a cache where another one follows."""
        if is_device(direction.array):  # one kernel does all
            return (where,)
        if direction.dtype != self.dtype:
            return cut(where, self._scratch(direction).size)
        return (where,) if working is None else cut(where, BLOCK)

    def _widened(self, gradient: Array) -> Array:
        if gradient.dtype == self.dtype or is_device(gradient):
            return gradient
        assert self.wide is not None
        wide = self.wide[: gradient.size]
        kernels.widen(gradient, wide)
        return wide

    def _scratch(self, direction: FlatStore) -> Array:
        if self.wide is None or self.dtype != np.float32 or not is_16bit_float(direction.dtype):
            raise UsageError(
                f"a gradient in {direction.dtype} for master weights in {self.dtype}: 16-bit gradients go with float32 "
                "weights and memory to widen them in, see hpcdist.optim.master.WithMaster"
            )
        return self.wide

    @abstractmethod
    def _direction(self, where: Range, weights: Array, gradient: Array, scale: float, decay: float) -> None:
        """Turn the gradient of one stretch of a tensor into the step, in place, and advance the slots."""

    @abstractmethod
    def _step(
        self,
        where: Range,
        weights: Array,
        gradient: Array,
        scale: float,
        rate: float,
        decay: float,
        working: Array | None,
    ) -> None:
        """Make the whole update of one stretch of a tensor, and of its ``working`` copy.

        ``gradient`` is undefined afterwards. On a GPU it may be 16-bit floats beside float32 weights.
        """
