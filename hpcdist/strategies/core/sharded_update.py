"""The optimizer update of the ranges that a rank owns, for every strategy that is in lock-step.

`ShardedUpdate` steps parts of the parameters in the two phases of an optimizer (direction, then apply, with the norms
of layer-wise rates between). `ShardedUpdateExchange` is the base class of lock-step exchanges: one store of
parameters and gradients each, agreement on norm and loss, and the pieces of a checkpoint.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.backend import Array
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.optim import norms
from hpcdist.optim.master_weights import MasterWeights, rounded
from hpcdist.optim.optimizer import Optimizer
from hpcdist.optim.update import exact
from hpcdist.strategies.core.exchange import Exchange, pieces_of
from hpcdist.strategies.core.logical_shards import ALGORITHM, LogicalShards
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.tensor.axis import counted, ranges_of, sum_gradients, sum_norms


class ShardedUpdate:
    """Update of ``parameters`` on ``parts`` by the reduced ``gradients``, in the two phases of an optimizer.

    ``sharers`` joins the ranks that own the other parts of the same tensors, None where tensors are whole: layer-wise
    rates and the global norm are then exact however tensors are cut. With ``exactly`` they are so to the bit: their
    squares are summed without rounding. ``tensor`` joins the ranks of the tensor axis, where there are several: tensors
    that all of them have whole count once. ``experts`` joins those that have the other experts of the same tensors.
    """

    def __init__(
        self,
        parameters: FlatStore,
        gradients: FlatStore,
        optimizer: Optimizer,
        parts: Sequence[Range],
        sharers: Communicator | None,
        agree_algorithm: str,
        *,
        exactly: bool = False,
        tensor: Communicator | None = None,
        experts: Communicator | None = None,
    ) -> None:
        self.parameters, self.gradients, self.optimizer = parameters, gradients, optimizer
        self.parts = [part for part in parts if part]
        self._sharers, self._algorithm, self._exactly = sharers, agree_algorithm, exactly
        if exactly:
            optimizer.sum_exactly()
        self._tensor, self._experts = tensor or solo(), experts
        self.counted = counted(gradients.layout, self.parts, self._tensor)
        # Tensors that the tensor axis does not cut are counted by its first rank alone.
        self._elsewhere = ranges_of(gradients.layout, self.parts) if self._tensor.rank else []
        self._scale = 1.0
        self._norms: np.ndarray | None = None  # (segments, 2)
        self.handlers = {
            Kind.DIRECTION: self.direction,
            Kind.NORMS: self.norms,
            Kind.APPLY: self.apply,
            Kind.SUM_ROWS: self.sum_rows,
        }

    def plan(self) -> list[Operation]:
        """Return DIRECTION of every part, NORMS where layer-wise rates need them, APPLY of every part (local)."""
        norms = [Operation(Kind.NORMS)] if self.optimizer.needs_norms else []
        return [
            *(Operation(Kind.DIRECTION, range=part) for part in self.parts),
            *norms,
            *(Operation(Kind.APPLY, range=part) for part in self.parts),
        ]

    def norm_squared(self) -> float:
        """Return the sum of squares of the gradients of the owned parts (local).

        Exactly summed it is that of all sharers, returned by the first of them, 0 by the others: their sum, as it must
        be. Collective over the sharers then. Not finite also where gradients are not that another rank of the tensor
        axis counts: it has its own.
        """
        if not self._exactly:
            return norms.sum_of_squares(self.gradients, self.counted, self._elsewhere)
        # Sums of digits are exact in any order, and rounded to a float only at the end.
        digits = norms.exact_squares(self.gradients, self.parts)
        if self._sharers is not None:
            collectives.allreduce(self._sharers, digits, self._algorithm)
        speaks = self._sharers is None or self._sharers.rank == 0  # the caller adds up what all ranks return
        return float(exact.rounded(digits)) if speaks else 0.0

    def begin_update(self, scale: float) -> None:
        """Advance the optimizer's clock; gradients of this step are multiplied by ``scale`` (local)."""
        self._scale = scale
        self.optimizer.begin_step()

    def direction(self, op: Operation) -> None:
        """Turn gradients into directions (local)."""
        self.optimizer.direction(op.part, self.parameters, self.gradients, self._scale)

    def norms(self, op: Operation) -> None:
        """Sum the norms of tensors over those who share them. Collective over the sharers and the tensor axis."""
        norms = self.optimizer.partial_norms()  # of the pieces on this rank; a tensor may lie on several sharers
        if self._sharers is not None:
            collectives.allreduce(self._sharers, norms.reshape(-1), self._algorithm)
        if self._experts is not None:
            collectives.allreduce(self._experts, norms.reshape(-1), self._algorithm)
        sum_norms(norms, self.gradients.layout, self._tensor, self._algorithm)
        self._norms = exact.rounded(norms) if self._exactly else norms

    def sum_rows(self, op: Operation) -> None:
        """Sum the ranks' gradients of tensors that the tensor axis does not cut. Collective over it."""
        sum_gradients(self.gradients, self.parts, self._tensor, self._algorithm)

    def apply(self, op: Operation) -> None:
        """Update the parameters along the directions (local)."""
        self.optimizer.apply(op.part, self.parameters, self.gradients, None, self._norms)

    @property
    def master(self) -> MasterWeights | None:
        """Optimizer with float32 master weights, where the parameters are their 16-bit copies; else None."""
        return self.optimizer if isinstance(self.optimizer, MasterWeights) else None

    def slots(self) -> dict[str, FlatStore]:
        """Return the stores of the optimizer's state, by the kind that a checkpoint gives them (local)."""
        return {f"optimizer.{name}": store for name, store in self.optimizer.slots.items()}


class ShardedUpdateExchange(Exchange):
    """Base of exchanges in lock-step: one store each of parameters and gradients, and their `ShardedUpdate`.

    See `hpcdist.strategies.core.exchange.Exchange` for what each method promises. A subclass sets ``sharded_update``
    and adds how gradients come to their owners, and parameters back. With ``shards`` all sums are those of logical
    shards.
    """

    lock_step = True
    sharded_update: ShardedUpdate

    def __init__(self, context: RankContext, shards: LogicalShards | None = None) -> None:
        self.context, self.shards = context, shards
        self.algorithm = context.algorithm if shards is None else ALGORITHM

    def summed_gradients(self) -> Iterable[Array]:
        """Return the summed gradients of the owned parts (local)."""
        return (self.sharded_update.gradients.contents(part) for part in self.sharded_update.parts)

    def describe_sums(self) -> str:
        """Return the logical shards and their arithmetic, if there are any (local)."""
        return "" if self.shards is None else f"{self.shards.count} logical shards, arithmetic {self.shards.arithmetic}"

    @property
    def parameters(self) -> FlatStore:
        """The parameters that this rank keeps between steps."""
        return self.sharded_update.parameters

    @property
    def gradients(self) -> FlatStore:
        """The gradients that this rank keeps until the update."""
        return self.sharded_update.gradients

    @property
    def weights(self) -> FlatStore:
        """Parameters that a checkpoint keeps: never a rounded copy."""
        return self.parameters if self.sharded_update.master is None else self.sharded_update.master.weights

    def norm_squared(self) -> float:
        """Return the squared norm of the owned parts: those of all owners add up to that of the model."""
        return self.sharded_update.norm_squared()

    def agree(self, values: np.ndarray) -> np.ndarray:
        """Sum ``values`` over the world, in place. Collective."""
        collectives.allreduce(self.context.world, values, self.context.agree_algorithm)
        return values

    def agree_losses(self, losses: Sequence[float], values: np.ndarray) -> tuple[float, np.ndarray]:
        """Sum ``losses`` and ``values`` over the world. Collective."""
        if self.shards is None:
            return super().agree_losses(losses, values)
        return self.shards.agree_losses(losses, values, self.agree)

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step."""
        self.sharded_update.begin_update(scale)

    def load_initial(self, initial: FlatStore) -> None:
        """Load the initial values; working copies are their 16-bit rounding."""
        self.weights.copy_from(initial)
        if self.sharded_update.master is not None:
            self.parameters.copy_from(rounded(initial, self.parameters.dtype))

    def pieces(self) -> Sequence[Piece]:
        """Return parameters and optimizer state of the owned parts."""
        return pieces_of({"parameters": self.weights, **self.sharded_update.slots()}, self.sharded_update.counted)

    def wanted(self) -> Sequence[Piece]:
        """Return all parameters that this rank keeps, and the optimizer state of the owned parts.

        Of working copies it is the master, on the owned parts: `restore` makes the copies from it.
        """
        parameters = pieces_of({"parameters": self.weights}, self.weights.parts)
        return parameters + pieces_of(self.sharded_update.slots(), self.sharded_update.parts)

    def state(self) -> dict[str, Any]:
        """Return the optimizer's clock, and the arithmetic of logical shards."""
        return self.sharded_update.optimizer.state() | (self.shards.state() if self.shards is not None else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer's clock, and make working copies anew. Collective over the data axis then."""
        if self.shards is not None:
            self.shards.check(state)
        self.sharded_update.optimizer.restore(dict(state))
        if self.sharded_update.master is not None:
            self.sharded_update.master.round_into(self.parameters)
            self.spread()

    def poll(self, op: Operation) -> None:
        """Make progress on what goes on beside the computation (local)."""
        assert self.overlap is not None
        self.overlap.poll()

    def spread(self) -> None:
        """Send the owned parts to all ranks that keep them: here each rank has updated its own (local)."""
