"""The seam between a training step and the architecture that turns gradients into parameters."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.overlap import Overlap
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.zero_config import Degrees

Handlers: TypeAlias = Mapping[Kind, Callable[[Operation], None]]


class Exchange(Protocol):
    """How replicas turn their gradients into the next parameters.

    ``plan`` contributes operations to the step, and ``carries_out`` has the function for each kind of them; the
    executor calls it when it meets one. Gradients arrive divided by the number of samples of the whole batch, so that
    their sum over the replicas is the mean.
    """

    algorithm: str  # of the reductions; kept in checkpoints
    lock_step: bool  # whether all ranks make each step together
    replicas_identical: bool  # whether the sentinel may compare ``parameters`` over the data axis
    accumulates: bool  # whether gradients of all micro-batches are added up first and exchanged once
    degrees: Degrees | None  # over how many replicas what is cut, where none keeps everything
    # For each unit, those whose parameters must be gathered before it is computed, and freed after it; {}: none ever.
    gathers: Mapping[int, Sequence[int]]
    keeps_parameters: bool  # whether they stay from their first use in a step to their last
    alternates: bool  # whether gradients of a step go elsewhere than those of the step before
    ahead: int  # how many gathers are started before their turn
    overlap: Overlap | None  # the reductions that go on beside the computation, where there are any
    carries_out: Handlers

    @property
    def parameters(self) -> FlatStore:
        """What this rank keeps between steps."""
        ...

    def plan(self) -> list[Operation]:
        """Return the operations of one step that are not the schedule's (local)."""
        ...

    def begin(self, operations: Sequence[Operation]) -> None:
        """Take note that this rank is about to run ``operations``: a step, or an evaluation.

        Collective over the data axis, or local.
        """
        ...

    def parameters_at(self, layer: int) -> FlatStore:
        """Return the store that holds the parameters of ``layer`` now (local)."""
        ...

    def gradients_at(self, layer: int) -> FlatStore:
        """Return the store into which the gradients of ``layer`` go (local)."""
        ...

    def norm_squared(self) -> float:
        """Return this rank's share of the squared norm of the mean gradient (local; waits for a GPU).

        The shares of all ranks of the world add up to it: every tensor is counted once.
        """
        ...

    def agree(self, values: np.ndarray) -> np.ndarray:
        """Return the sums of ``values`` (float64) over the world, in place, the same bits on all ranks. Collective."""
        ...

    def agree_losses(self, losses: Sequence[float], values: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the sum of all ranks' ``losses``, one of each micro-batch, and the sums of ``values`` as `agree` does.

        Collective.
        """
        ...

    def begin_update(self, scale: float) -> None:
        """Take note that this step updates, with gradients multiplied by ``scale`` (local)."""
        ...

    def count_samples(self, own: int, samples: int) -> None:
        """Take note that ``own`` of the ``samples`` of the step that begins are this replica's (local)."""
        ...

    def scaled_by(self, loss_scale: float) -> None:
        """Take note that gradients of the step that begins are multiplied by ``loss_scale`` (local)."""
        ...

    def flush(self) -> bool:
        """Make one state of what the replicas have, where it differs; return whether it did. Collective.

        Called before a run saves or evaluates.
        """
        ...

    def finish(self) -> bool:
        """Bring into the parameters what the last step has left to be done; return whether there was any. Collective.

        Called when the run is complete.
        """
        ...

    def take(self, initial: FlatStore) -> None:
        """Take over what concerns this rank of the initial values in ``initial``, which are on the host (local)."""
        ...

    def pieces(self) -> Sequence[Piece]:
        """Return views of the state that this rank saves, named by tensor.

        Local, or collective over the data axis where sums of gradients are under way.
        """
        ...

    def foresee(self, state: Mapping[str, Any]) -> Collection[str]:
        """Take note of the ``state`` that will be restored, before `wanted` is asked (local).

        Returns the kinds of pieces that it may lack: they begin as they are.
        """
        ...

    def wanted(self) -> Sequence[Piece]:
        """Return views of the state that this rank restores (local)."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint needs beside the pieces: JSON values (local)."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned, once the pieces are there (local)."""
        ...


def pieces_of(stores: Mapping[str, FlatStore], parts: Iterable[Range]) -> list[Piece]:
    """Return the pieces of ``parts`` of each store, by kind (local)."""
    return [
        Piece.of(kind, segment, touched, store.contents(touched))
        for kind, store in stores.items()
        for part in parts
        for segment, touched in store.layout.within(part)
    ]
