"""Optimizers whose rate depends on norms of whole tensors: two phases, with a sum over the owners between them.

A tensor is what a model declares. Query, key and value of a block are one, (3, h, h), so they share one ratio, as the
one `in_proj_weight` of PyTorch and the fused matrix of Megatron-LM do; published references of LARS and LAMB that have
three matrices take three. They stay one here: the norms are summed over the ranks by tensor, the large-batch results
were measured so, and a run that goes on must keep the ratios that it began with. With ``model.kv_heads`` queries are a
tensor of their own. For weight decay it makes no difference: all three matrices decay, and none of their biases does.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.optim import kernels
from hpcdist.optim.segmentwise import SegmentWise

BLOCK: Final = 1 << 16  # elements of which a direction is still in the cache when their squares are summed


class LayerWise(SegmentWise):
    """Directions and the sums of their squares in one pass, the steps in another."""

    needs_norms: ClassVar[bool] = True

    def direction(self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0) -> None:
        """Turn ``scale * gradient`` on ``piece`` into the direction u, in place, and advance the slots."""
        assert master.dtype == self.dtype == gradient.dtype, "widen 16-bit gradients to the master dtype first"
        for index, spec, where in self._tensors(piece):
            decay = self._decay(spec)
            for block in _blocks(where, gradient.array):
                weights, step = master.range(block), gradient.range(block)
                self._direction(block, weights, step, scale, decay)
                if spec.adapted:
                    self._norms.add(index, block, weights, step)

    def apply(
        self,
        piece: Range,
        master: FlatStore,
        direction: FlatStore,
        working: FlatStore | None = None,
        norms: np.ndarray | None = None,
    ) -> None:
        """Move ``master`` along ``direction`` on ``piece``, and round it into ``working`` when given."""
        assert norms is not None, "the reduced partial norms are missing"
        common_rate = self.learning_rate
        for index, spec, where in self._tensors(piece):
            decay, rate = self._decay(spec), common_rate * self._rate_factor(spec)
            weight_norm, step_norm = (norms[index] ** 0.5).tolist()
            ratio = self._ratio(weight_norm, step_norm, decay) if spec.adapted else 1.0
            for block in _blocks(where, direction.array) if working is not None else (where,):
                weights = master.range(block)
                self._update(block, weights, direction.range(block), rate * ratio, decay)
                if working is not None:
                    kernels.round_into(weights, working.range(block))

    @abstractmethod
    def _direction(self, where: Range, weights: Array, gradient: Array, scale: float, decay: float) -> None:
        """Turn the gradient of one stretch of a tensor into the direction, in place."""

    @abstractmethod
    def _ratio(self, weight_norm: float, step_norm: float, decay: float) -> float:
        """Return the layer-wise factor of an adapted tensor with these norms and its weight decay."""

    def _update(self, where: Range, weights: Array, step: Array, rate: float, decay: float) -> None:
        """Move the weights of one stretch at the ``rate`` of its tensor."""
        kernels.descend(weights, step, rate)


def _blocks(where: Range, array: Array) -> Iterable[Range]:
    """Return what is done at a time: on a GPU all of it."""
    return (where,) if is_device(array) else cut(where, BLOCK)
