"""Base class of the strategies: an `Exchange` turns the gradients of all replicas into the next parameters.

In each step, the executor calls `Exchange.begin` with a list of operations, calls the handler of each operation, and
sums losses and norms over the ranks. The trainer saves and restores the exchange.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.backend import Array
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.optim.master_weights import rounded
from hpcdist.strategies.core.background import BackgroundCollectives
from hpcdist.strategies.core.grid import ShardingDegrees
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate

Handlers: TypeAlias = Mapping[Kind, Callable[[Operation], None]]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of a strategy (`Exchange`) that do not change after construction."""

    algorithm: str  # reduction algorithm, as stored in checkpoints
    lock_step: bool = True  # all ranks make each step together
    identical: bool = False  # parameters that ranks of the data axis keep have the same bits
    accumulates: bool = True  # gradients of all micro-batches are added up first, and exchanged once per step
    degrees: ShardingDegrees | None = None  # sharding degrees; None: every replica keeps everything
    # Per model stage: the stages whose parameters are gathered before it is computed, and freed afterwards.
    gathers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    keeps_parameters: bool = False  # gathered parameters stay from their first use in a step to their last
    # gradients of consecutive steps go to two alternating stores, and are applied one step late
    alternates: bool = False
    ahead: int = 0  # number of gathers that are started before they are needed
    whole_state: bool = False  # every data rank holds and updates the whole state
    serves: bool = False  # this rank is a parameter server, which answers workers between its computations
    drops_late: bool = False  # gradients that arrive too late are dropped
    fullest: float | None = None  # parameters of the largest server / mean per server; None without servers
    corrects: bool = True  # the exchange can multiply gradients by an `Exchange.correction` other than 1
    restores: Collection[str] = ()  # scalars of a checkpoint that only some exchanges can restore, such as "pending"
    sums: str = ""  # summation order that does not depend on the ranks, as text
    mixing: str = ""  # method that mixes or averages differing replicas, as text


class Exchange:
    """Base class of the strategies that exchange gradients and parameters between replicas, on one rank."""

    # `plan` returns the operations that the strategy adds to a step. Gradients are already divided by the number of
    # targets of the global batch, so their sum over the replicas is the gradient of the mean loss. The default methods
    # suit ranks that make each step together, with one store of parameters and one of gradients.

    context: RankContext
    traits: Traits
    update: ShardedUpdate
    handlers: Handlers  # a function per kind of operation
    # Further stores that must have equal bits on all ranks of a communicator.
    other_replicas: Sequence[tuple[Communicator, FlatStore]] = ()
    background: BackgroundCollectives | None = None
    correction: float = 1.0  # factor of this step's gradient; set before `begin_update`, whose ``scale`` includes it
    rate_factor: float = 1.0  # factor of the scheduled learning rate; set before `begin_update`

    @property
    def loaded_bytes(self) -> int:
        """Number of bytes that this rank has read from the shared memory of its node."""
        return 0

    @property
    def parameters(self) -> FlatStore:
        """The parameters that this rank keeps between steps."""
        return self.update.parameters

    @property
    def parameter_stores(self) -> Sequence[FlatStore]:
        """All stores of parameters that this rank keeps."""
        return (self.parameters,)

    @property
    def gradients(self) -> FlatStore:
        """The gradients that this rank keeps until the update."""
        return self.update.gradients

    @property
    def weights(self) -> FlatStore:
        """The parameters to save in a checkpoint. For 16-bit parameters, these are the float32 master weights."""
        return self.update.parameters if self.update.master is None else self.update.master.weights

    def plan(self) -> list[Operation]:
        """Return a list of the operations that exchange gradients and update parameters in one step. Local."""
        raise NotImplementedError

    def begin(self, operations: Sequence[Operation]) -> None:
        """Prepare to execute the list ``operations`` of a step or an evaluation. Collective over the data axis."""

    def parameters_at(self, layer: int) -> FlatStore:
        """Return the store that now holds the parameters of ``layer``. Local."""
        return self.parameters

    def gradients_at(self, layer: int) -> FlatStore:
        """Return the store into which the backward pass writes the gradients of ``layer``. Local."""
        return self.gradients

    def norm_squared(self) -> float:
        """Return a number whose sum over all ranks is the squared norm of the mean gradient. Collective."""
        return self.update.norm_squared()

    def agree(self, values: np.ndarray) -> np.ndarray:
        """Sum float64 ``values`` in place over the world, with equal bits on all ranks. Return the sums. Collective."""
        collectives.allreduce(self.context.world, values, self.context.agree_algorithm)
        return values

    def agree_losses(self, losses: Sequence[float], values: np.ndarray) -> tuple[float, np.ndarray]:
        """Return (sum of the losses of all ranks, elementwise sum of ``values`` over all ranks). Collective."""
        sums = self.agree(np.concatenate([[sum(losses)], values]))
        return float(sums[0]), sums[1:]

    def begin_update(self, scale: float) -> None:
        """Start the optimizer update of a step, which multiplies gradients by ``scale``. Local."""
        self.update.begin_update(scale, self.rate_factor)

    def count_samples(self, local_samples: int, samples: int) -> None:
        """Record the numbers of samples in the step, in this replica and in all replicas together. Local."""

    def scaled_by(self, loss_scale: float) -> None:
        """Record that the next step's gradients contain the factor ``loss_scale``. Local."""

    def flush(self) -> bool:
        """Average the parameters of all replicas before a checkpoint or evaluation. Collective.

        Return True if the parameters differed between replicas.
        """
        return False

    def new_consensus_distances(self) -> dict[int, float]:
        """Return a dict {step: consensus distance between the replicas} for the steps since the last call. Local."""
        return {}

    def consensus(self) -> Mapping[str, float]:
        """Return {"spectral_gap": float, "consensus_distance": float}, or {} if replicas never differ. Local."""
        return {}

    def applied_gradients(self) -> Iterable[Array]:
        """Return an iterable of arrays: the reduced gradients that this rank's optimizer update applies. Local."""
        return (self.gradients.contents(part) for part in self.update.parts)

    def finish(self) -> bool:
        """Apply the gradient that is pending after the last step. Return True if a gradient was pending. Collective."""
        return False

    def load_initial(self, initial: FlatStore) -> None:
        """Copy this rank's shard of the initial values from the host store ``initial``. Local."""
        self.weights.copy_from(initial)
        if self.update.master is not None:
            self.parameters.copy_from(rounded(initial, self.parameters.dtype))

    def pieces(self) -> Sequence[Piece]:
        """Return a list of the pieces of arrays that this rank saves in a checkpoint. Collective over the data axis."""
        return pieces_of({"parameters": self.weights, **self.update.slots()}, self.update.counted)

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        """Prepare to read a checkpoint with the scalars ``state``. Local.

        Return the kinds of arrays, such as "optimizer.m", that the checkpoint may lack.
        """
        return ()

    def wanted(self) -> Sequence[Piece]:
        """Return a list of the checkpoint pieces that this rank reads, as views of the memory to fill. Local."""
        # All parameters that this rank keeps, and the optimizer state of the parameters that it updates.
        parameters = pieces_of({"parameters": self.weights}, self.weights.parts)
        return parameters + pieces_of(self.update.slots(), self.update.parts)

    def state(self) -> dict[str, Any]:
        """Return a dict {name: scalar} to store in a checkpoint, in addition to the arrays. Local."""
        return self.update.optimizer.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer's counters from the checkpoint scalars ``state``, after the arrays were read.

        Collective over the data axis, because 16-bit parameters are rounded and sent again.
        """
        self.update.optimizer.restore(dict(state))
        if self.update.master is not None:
            self.update.master.round_into(self.parameters)
            self.spread()

    def spread(self) -> None:
        """Send the parameters that this rank updates to all ranks that keep a copy. Collective over the data axis."""

    def close(self) -> None:
        """Free communicators, windows and threads. No step can follow. Collective over the world."""


def have_equal_digests(comm: Communicator, digest: int, algorithm: str) -> bool:
    """Return True if all ranks pass the same 64-bit ``digest``. Collective over ``comm``.

    ``algorithm``: allreduce algorithm for the comparison.
    """
    number = digest >> 1  # 63 bits fit an int64
    # The maximum of ~x is the complement of the minimum of x, so one reduction finds the maximum and the minimum.
    bounds = np.array([number, ~number], np.int64)
    collectives.allreduce(comm, bounds, algorithm, op="max")
    return bool(bounds[0] == ~bounds[1])


def pieces_of(stores: Mapping[str, FlatStore], parts: Iterable[Range]) -> list[Piece]:
    """Return a list of checkpoint pieces: views of all tensors in the flat ranges ``parts`` of each store.

    ``stores``: a dict {kind of array, such as "parameters": store with these arrays}. A store may lack whole tensors.
    """
    return [
        Piece.of(kind, segment, touched, store.contents(touched))
        for kind, store in stores.items()
        for part in parts
        for segment, touched in store.layout.within(part)
        if store.holds(touched)
    ]
