"""The two communicating parts of a `DataExchange`: a `Reducer` of gradients and a `Gatherer` of parameters."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.core.exchange import Handlers
from hpcdist.strategies.core.operations import Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.core.tensor_shards import counted
from hpcdist.strategies.data.residuals import Feedback


def saved_shares(context: RankContext) -> list[Range]:
    """Return the ranges of replicated state that this rank saves: an equal share of bytes per data rank. Local."""
    data, dtype = context.data, context.dtype if context.working is None else context.master_dtype
    shares = [split(part.size, data.size, dtype.itemsize)[data.rank].shift(part.start) for part in context.parts]
    return counted(context.layout, shares, context.tensor)


class Reducer:
    """Base class of the gradient reduction in a data-parallel strategy. Handlers are collective over the data axis."""

    # Each rank gets the sums that it updates with. Some methods are marked local.

    handlers: Handlers = MappingProxyType({})
    loss_scale = 1.0  # factor of the gradients of this step

    # ``counts``: False if another rank counts this rank's gradients in the gradient norm
    def __init__(self, update: ShardedUpdate, *, counts: bool = True) -> None:
        self.update, self.counts = update, counts
        self.feedback = Feedback()

    def plan(self) -> list[Operation]:
        """Return the reducer's operations before AGREE, in which the ranks sum loss and gradient norm. Local."""
        raise NotImplementedError

    def plan_after_agreement(self) -> list[Operation]:
        """Return the reducer's operations between AGREE and the optimizer update. Local."""
        return []

    def begin(self, operations: Sequence[Operation]) -> None:
        """Prepare for a step with ``operations``. If the previous step was abandoned, restore its residuals. Local."""
        self.feedback.give_up()

    def gradients_at(self, layer: int) -> FlatStore:
        """Return the store for the gradients that the backward pass computes for ``layer``. Local."""
        return self.update.gradients

    def norm_squared(self) -> float:
        """Return this rank's contribution to the squared norm of the mean gradient, a sum over all ranks. Local."""
        squared = self.update.norm_squared()
        return squared if self.counts else 0.0

    def begin_update(self, scale: float, correction: float) -> float:
        """Return the factor by which the update multiplies gradients; keep this step's residuals. Local.

        ``scale``: clipping factor times ``correction``. ``correction``: factor that normalizes a weighted loss.
        """
        self.feedback.keep()
        return scale

    def pieces(self) -> list[Piece]:
        """Return the reducer's checkpoint pieces, such as compression residuals. Local."""
        return self.feedback.pieces()

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        """Read the scalars ``state`` of a checkpoint; return the kinds of pieces that may be missing in it. Local."""
        return self.feedback.prepare_restore(state)

    def wanted(self) -> list[Piece]:
        """Return the reducer's checkpoint pieces to read, as views of the memory to fill. Local."""
        return self.feedback.wanted()

    def state(self) -> dict[str, Any]:
        """Return a dict of the reducer's scalars to store in a checkpoint. Local."""
        return self.feedback.state()

    def restored(self, state: Mapping[str, Any]) -> None:
        """Finish a restore, after the checkpoint pieces were read. Local."""
        self.feedback.restored()


class Gatherer:
    """Base class of gatherers: they send updated parameters to all ranks that compute with the parameters.

    The base class gathers nothing: every rank updates all parameters that it computes with.
    """

    handlers: Handlers = MappingProxyType({})

    def __init__(self, update: ShardedUpdate) -> None:
        self.update = update

    @property
    def parameters(self) -> FlatStore:
        """Store of the parameters that this rank keeps between steps."""
        return self.update.parameters

    def parameters_at(self, layer: int) -> FlatStore:
        """Return the store with the current parameters of ``layer``. Local."""
        return self.parameters

    def plan(self) -> list[Operation]:
        """Return the gatherer's operations after the optimizer update. Local."""
        return []

    def begin(self) -> None:
        """Prepare for a step or an evaluation. Collective over the data axis."""

    def begin_update(self) -> None:
        """Prepare for the update of a step. Local."""

    def spread(self) -> None:
        """Send this rank's updated parameters to the ranks that compute with them. Collective over the data axis."""
        for op in self.plan():
            self.handlers[op.kind](op)

    def loaded(self) -> None:
        """Record that initial parameters were loaded. Local."""

    def restored(self) -> None:
        """Record that parameters were restored from a checkpoint. Local."""

    def close(self) -> None:
        """Free communicators. Collective over the data axis."""
