"""Activation recomputation (Chen et al., arXiv:1604.06174): stages compute again in backward what they did not store.

A stage keeps its input and its output. For one more forward of the stages between the first and the last, activations
of L alike stages take the memory of one and of L outputs. The second forward is the same as the first, dropout
included, so gradients are too, bit by bit.
"""

import copy

from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import TensorSpec
from hpcdist.models.model import Model
from hpcdist.models.stage import Gradients, Operations, Parameters, Saved, Stage, StreamOf


def with_recomputation(model: Model) -> Model:
    """Return ``model`` with stages that are computed again in backward (local).

    Not the first, whose output is all that it keeps where it embeds; not the last, whose backward follows at once; and
    not those that take, or are taken by, skip connections: they stay as they are.
    """
    found = copy.copy(model)
    last, joined = len(model.stages) - 1, {unit for pair in model.skips for unit in pair}
    found.stages = tuple(
        stage if unit in {0, last} | joined else RecomputedStage(stage) for unit, stage in enumerate(model.stages)
    )
    return found


class RecomputedStage:
    """The stage ``inner``, of which nothing lies between its forward and its backward but input and output."""

    def __init__(self, inner: Stage) -> None:
        self.inner, self.layer, self.tied = inner, inner.layer, inner.tied
        self.name = getattr(inner, "name", "")  # what the user calls it

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the specs of the inner one."""
        return self.inner.tensors()

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """Return that of the inner one."""
        return self.inner.output_shape(samples)

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Draw the values of the inner one."""
        self.inner.initialise(parameters, rng_of)

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        """Return a copy of the output; x must stay unchanged until backward."""
        within = saved.within()
        y = self.inner.forward(parameters, x, operations, within)
        kept = saved.empty("recomputed.y", y.shape, y.dtype)
        kept[...] = y
        saved.keep("recomputed.x", x)
        within.release()
        return kept

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array | None:
        """Compute the stage once more, and take it back."""
        within = saved.within()
        self.inner.forward(parameters, saved["recomputed.x"], operations, within)
        dx = self.inner.backward(parameters, gradients, dy, operations, within)
        assert not within.deferred, "a backward in two passes keeps what is to be computed again"
        assert dx is None or not within.owns(dx), "what a stage returns lies in scratch, or in the memory of dy"
        within.release()
        return dx
