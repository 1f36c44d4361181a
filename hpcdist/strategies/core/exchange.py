"""The exchange between a training step and the strategy that turns gradients into parameters.

The executor drives every strategy through `Exchange`: begin a step, handle the communication operations, agree on
loss and norm, update, save and restore. `BackgroundCollectives` runs collectives of an exchange while other layers
are computed: sums of gradients behind a backward, and parameters that are gathered ahead. It measures the seconds for
which a rank had to wait for them.
"""

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.nonblocking import engines
from hpcdist.collectives.nonblocking.progress import Handle
from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.zero.config import ShardingDegrees


@dataclass(frozen=True)
class PrefetchCounts:
    """Gathers that were started ahead, by whether they were complete when they were waited for.

    ``exposed_s`` is the time that starting and waiting took.
    """

    hits: int = 0
    misses: int = 0
    exposed_s: float = 0.0


class BackgroundCollectives:
    """Collectives under way over the axis ``data``, by any key, and the time that the rank waits for them.

    Construction is collective. ``kind`` is one of `nonblocking.KINDS`: with "thread" nothing has to be polled.
    """

    def __init__(self, data: Communicator, kind: str) -> None:
        self._progress = engines.begin(data, kind)
        self.over = self._progress.own  # the communicator of the collectives: not ``data``, which others may use
        self.polls = kind == "poll"
        self._under_way: dict[Hashable, Handle] = {}
        self._exposed_s = self._busy_before_s = 0.0
        self._fetched = PrefetchCounts()

    def start(self, key: Hashable, gradients: Array, algorithm: str) -> None:
        """Begin to sum ``gradients`` in place. Collective over the axis, in the same order."""
        with self._exposed():
            self._under_way[key] = self._progress.iallreduce(gradients, algorithm)

    def start_sum(self, key: Hashable, gradients: Array, shares: Sequence[Range], algorithm: str) -> None:
        """Begin to sum ``gradients`` in place, each rank its share. Collective over the axis, in the same order."""
        with self._exposed():
            self._under_way[key] = self._progress.ireduce_scatter(gradients, shares, algorithm)

    def wait(self, key: Hashable) -> None:
        """Wait for the sum that was started under ``key``."""
        with self._exposed():
            self._under_way.pop(key).wait()

    def start_gather(self, key: Hashable, parameters: Array, shares: Sequence[Range], algorithm: str) -> None:
        """Begin to all-gather the shares of all ranks. Collective over the axis, in the same order."""
        with self._fetching():
            self._under_way[key] = self._progress.iall_gather(parameters, shares, algorithm)

    def wait_gather(self, key: Hashable) -> None:
        """Wait for the gather of ``key``; count whether it was complete already."""
        with self._fetching():
            handle = self._under_way.pop(key)
            if handle.test():
                self._fetched = replace(self._fetched, hits=self._fetched.hits + 1)
            else:
                self._fetched = replace(self._fetched, misses=self._fetched.misses + 1)
                handle.wait()

    def poll(self) -> None:
        """Make progress on what is under way, without waiting (local)."""
        with self._exposed():
            self._progress.progress()

    def drain(self) -> None:
        """Wait until nothing is under way (local): then ``over`` may be used by others.

        What was started is still to be waited for, each by its key.
        """
        with self._exposed():
            for handle in self._under_way.values():
                handle.wait()

    @contextmanager
    def _exposed(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._exposed_s += time.perf_counter() - begun

    @contextmanager
    def _fetching(self) -> Iterator[None]:
        before = self._exposed_s
        with self._exposed():
            yield
        self._fetched = replace(self._fetched, exposed_s=self._fetched.exposed_s + self._exposed_s - before)

    def taken(self) -> tuple[float, float]:
        """Return, since the last call, the exposed and the busy seconds of background collectives (local).

        Exposed is the time spent starting, polling and waiting. Busy is the time in which the thread was at work,
        waiting for other ranks included; NaN without a thread, where it is not known.
        """
        exposed_s, self._exposed_s = self._exposed_s, 0.0
        busy_s, before_s = self._progress.busy_s, self._busy_before_s
        self._busy_before_s = busy_s
        return exposed_s, math.nan if self.polls else busy_s - before_s

    def fetched(self) -> PrefetchCounts:
        """Return the gathers that were waited for since the last call (local)."""
        counts, self._fetched = self._fetched, PrefetchCounts()
        return counts

    def close(self) -> None:
        """Free the communicator, and end the thread. Collective."""
        self._progress.close()


Handlers: TypeAlias = Mapping[Kind, Callable[[Operation], None]]


class Exchange(Protocol):
    """Base of a strategy: it turns the gradients of replicas into the next parameters.

    ``plan`` contributes operations to the step, and ``handlers`` has the function for each kind of them; the
    executor calls it when it meets one. Gradients arrive divided by the number of samples of the whole batch, so that
    their sum over the replicas is the mean. Defaults are those of replicas that make each step together.
    """

    algorithm: str  # of the reductions; kept in checkpoints
    lock_step: bool  # whether all ranks make each step together
    replicas_identical: bool  # whether `replica_check` may compare ``parameters`` over the data axis
    # Further stores of which the ranks of a communicator must hold the same bits.
    other_replicas: Sequence[tuple[Communicator, FlatStore]] = ()
    accumulates: bool = True  # whether gradients of all micro-batches are added up first and exchanged once
    degrees: ShardingDegrees | None = None  # the sharding degrees; None where every replica keeps everything
    # For each unit, those whose parameters must be gathered before it is computed, and freed after it; {}: none ever.
    gathers: Mapping[int, Sequence[int]] = {}
    keeps_parameters: bool = False  # whether gathered parameters stay from their first use in a step to their last
    alternates: bool = False  # whether gradients of a step go elsewhere than those of the step before
    ahead: int = 0  # how many gathers are started before their turn
    overlap: BackgroundCollectives | None = None  # the reductions that go on beside the computation
    whole_state: bool = False  # whether every data rank holds the whole state and updates all of it
    serves_beside: bool = False  # whether this rank answers workers (COLLECT) beside its own computation
    drops_late: bool = False  # whether gradients that come too late are dropped
    fullest: float | None = None  # the parameters of the server that has most, over an even share
    correction: float = 1.0  # set before `begin_update`, whose ``scale`` includes it: factor of the step's gradient
    corrects: bool = True  # whether `begin_update` obeys a ``correction`` other than 1
    restores: Collection[str] = ()  # special entries of `state` of a checkpoint that it understands: "pending", ...
    handlers: Handlers

    @property
    def loaded_bytes(self) -> int:
        """The bytes that this rank has read from memory that others of its node wrote; never part of those sent."""
        return 0

    @property
    def parameters(self) -> FlatStore:
        """The parameters that this rank keeps between steps."""

    @property
    def parameter_stores(self) -> Sequence[FlatStore]:
        """All stores of the parameters that this rank keeps: ``parameters``, and what lies beside them."""
        return (self.parameters,)

    @property
    def gradients(self) -> FlatStore:
        """The gradients that this rank keeps until the update."""

    def plan(self) -> list[Operation]:
        """Return the operations of one step that are not the schedule's (local)."""

    def begin(self, operations: Sequence[Operation]) -> None:
        """Prepare for the list ``operations``, a step or an evaluation.

        Collective over the data axis, or local.
        """
        return

    def parameters_at(self, layer: int) -> FlatStore:
        """Return the store that holds the parameters of ``layer`` now (local)."""
        return self.parameters

    def gradients_at(self, layer: int) -> FlatStore:
        """Return the store into which the gradients of ``layer`` go (local)."""
        return self.gradients

    def norm_squared(self) -> float:
        """Return this rank's share of the squared norm of the mean gradient (local; waits for a GPU).

        The shares of all ranks of the world add up to it: every tensor is counted once.
        """

    def agree(self, values: np.ndarray) -> np.ndarray:
        """Return the sums of ``values`` (float64) over the world, in place, the same bits on all ranks. Collective."""

    def agree_losses(self, losses: Sequence[float], values: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the sum of all ranks' ``losses``, one of each micro-batch, and the sums of ``values`` as `agree` does.

        Collective.
        """
        sums = self.agree(np.concatenate([[sum(losses)], values]))
        return float(sums[0]), sums[1:]

    def begin_update(self, scale: float) -> None:
        """Record that this step updates, with gradients multiplied by ``scale`` (local)."""

    def count_samples(self, local_samples: int, samples: int) -> None:
        """Record that ``local_samples`` of the ``samples`` of the step that begins are this replica's (local)."""
        return

    def scaled_by(self, loss_scale: float) -> None:
        """Record that gradients of the step that begins are multiplied by ``loss_scale`` (local)."""
        return

    def flush(self) -> bool:
        """Bring replicas that differ to one state; return whether they differed. Collective.

        Called before a run saves or evaluates.
        """
        return False

    def describe(self) -> str:
        """Return the mixing or averaging of the replicas in words; "" where they make each step together (local)."""
        return ""

    def describe_sums(self) -> str:
        """Return the order of sums that does not follow the ranks, in words; "" where it does (local)."""
        return ""

    def new_consensus_distances(self) -> dict[int, float]:
        """Return the consensus distances, by step, since the last call, and forget them (local)."""
        return {}

    def consensus(self) -> Mapping[str, float]:
        """Return "spectral_gap" and "consensus_distance" of replicas that differ, NaN unknown; {} of others (local)."""
        return {}

    def summed_gradients(self) -> Iterable[Array]:
        """Return the summed gradients that this rank updates by, part by part (local)."""
        return ()

    def close(self) -> None:
        """Free communicators, windows and threads; no step can be made afterwards. Collective over the world."""
        return

    def finish(self) -> bool:
        """Apply what the last step has left to be done; return whether there was any. Collective.

        Called when the run is complete.
        """
        return False

    def load_initial(self, initial: FlatStore) -> None:
        """Load this rank's part of the initial values in ``initial``, which are on the host (local)."""

    def pieces(self) -> Sequence[Piece]:
        """Return views of the state that this rank saves, named by tensor.

        Local, or collective over the data axis where sums of gradients are under way.
        """

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        """Record the ``state`` that will be restored, before `wanted` is called (local).

        Returns the kinds of pieces that it may lack: they begin as they are.
        """
        return ()

    def wanted(self) -> Sequence[Piece]:
        """Return views of the state that this rank restores (local)."""

    def state(self) -> dict[str, Any]:
        """Return the scalars (JSON values) to store in a checkpoint in addition to the arrays. Local."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, once the pieces are there (local)."""


def pieces_of(stores: Mapping[str, FlatStore], parts: Iterable[Range]) -> list[Piece]:
    """Return the pieces of ``parts`` of each store, by kind (local)."""
    return [
        Piece.of(kind, segment, touched, store.contents(touched))
        for kind, store in stores.items()
        for part in parts
        for segment, touched in store.layout.within(part)
    ]
