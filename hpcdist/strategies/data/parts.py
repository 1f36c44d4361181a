"""The two communicating parts of a `DataExchange`: a `Reducer` of gradients and a `Gatherer` of parameters."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.core.exchange import Handlers
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.data.residuals import Feedback
from hpcdist.strategies.schedule.operations import Operation
from hpcdist.strategies.tensor.axis import counted


def saved_shares(context: RankContext) -> list[Range]:
    """Return the ranges of replicated state that this rank saves: an equal share of bytes per data rank. Local."""
    data, dtype = context.data, context.dtype if context.working is None else context.master_dtype
    shares = [split(part.size, data.size, dtype.itemsize)[data.rank].shift(part.start) for part in context.parts]
    return counted(context.layout, shares, context.tensor)


class Reducer:
    """Base class of parts that sum gradients over the replicas and bring the sums to the ranks that update.

    ``update``: this rank's optimizer update. The keyword ``counts``: if False, this rank's summand of the norm is 0,
    because another rank adds it. Handlers are collective over the data axis, unless their docstrings say local.
    """

    handlers: Handlers = MappingProxyType({})
    loss_scale = 1.0  # factor of the gradients of this step

    def __init__(self, update: ShardedUpdate, *, counts: bool = True) -> None:
        self.update, self.counts = update, counts
        self.feedback = Feedback()

    def plan(self) -> list[Operation]:
        """Return the operations before the ranks agree on loss and norm. Local."""
        raise NotImplementedError

    def plan_after_agreement(self) -> list[Operation]:
        """Return the operations between the agreement and the update. Local."""
        return []

    def begin(self, operations: Sequence[Operation]) -> None:
        """Prepare for the list ``operations``; undo the encoding of a step that was given up. Local."""
        self.feedback.give_up()

    def gradients_at(self, layer: int) -> FlatStore:
        """Return the store for gradients of ``layer`` from the backward pass. Local."""
        return self.update.gradients

    def norm_squared(self) -> float:
        """Return this rank's summand of the squared norm of the mean gradient, as `Exchange.norm_squared` does."""
        squared = self.update.norm_squared()
        return squared if self.counts else 0.0

    def begin_update(self, scale: float, correction: float) -> float:
        """Keep the residuals of this step. Return the factor of the gradients in the update. Local.

        ``scale``: factor that clips the gradient, including ``correction``, the factor of weighted losses.
        """
        self.feedback.keep()
        return scale

    def pieces(self) -> list[Piece]:
        """Return further pieces of a checkpoint, such as residuals. Local."""
        return self.feedback.pieces()

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        """Record the scalars of the checkpoint to be read. Return the kinds of pieces that it may lack. Local."""
        return self.feedback.prepare_restore(state)

    def wanted(self) -> list[Piece]:
        """Return views of the memory into which the pieces of a checkpoint are read. Local."""
        return self.feedback.wanted()

    def state(self) -> dict[str, Any]:
        """Return further scalars of a checkpoint. Local."""
        return self.feedback.state()

    def restored(self, state: Mapping[str, Any]) -> None:
        """Finish a restore, after the pieces were read. Local."""
        self.feedback.restored()


class Gatherer:
    """Base class of parts that bring updated parameters to all ranks that compute with them.

    The base class gathers nothing: every rank updates all parameters that it computes with.
    """

    handlers: Handlers = MappingProxyType({})

    def __init__(self, update: ShardedUpdate) -> None:
        self.update = update

    @property
    def parameters(self) -> FlatStore:
        """The store of the parameters that stay on this rank between steps."""
        return self.update.parameters

    def parameters_at(self, layer: int) -> FlatStore:
        """Return the store with the present parameters of ``layer``. Local."""
        return self.parameters

    def plan(self) -> list[Operation]:
        """Return the operations after the update. Local."""
        return []

    def begin(self) -> None:
        """Prepare for a step or an evaluation. Collective over the data axis."""

    def begin_update(self) -> None:
        """Prepare for the update of a step. Local."""

    def spread(self) -> None:
        """Send this rank's parameters by the operations of `plan`. Collective over the data axis."""
        for op in self.plan():
            self.handlers[op.kind](op)

    def loaded(self) -> None:
        """Note that initial parameters were loaded. Local."""

    def restored(self) -> None:
        """Note that parameters were restored. Local."""

    def close(self) -> None:
        """Free communicators. Collective over the data axis."""
