"""Protection of the state of a run against rank failures: in replicas, or in copies at partner ranks.

Replicas suffice if every rank has the whole state, and the update sends no messages. Otherwise each rank and its
partner keep copies, and a failure repeats at most ``every_steps`` steps.
"""

import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint.partner import HeldCopies, PartnerStore, recover
from hpcdist.checkpoint.restoring.reshard import reshard
from hpcdist.comm.communicator import Communicator
from hpcdist.reporting.units import counted
from hpcdist.strategies.core.operations import Kind
from hpcdist.training.build import state
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.recipe.config import SurvivalConfig

LOCAL_UPDATE_KINDS = (Kind.DIRECTION, Kind.NORMS, Kind.APPLY)  # operations of an update without messages


@dataclass(frozen=True)
class SurvivorState:
    """Training state after ``step`` steps, distributed over the memory of the surviving ranks."""

    step: int
    scalars: Mapping[str, Any]
    held: Sequence[Piece]  # parts of tensors in this rank's memory
    holders: Communicator | None = None  # ranks that together hold all tensors; None: as passed to `fill`

    def fill(self, comm: Communicator, pieces: Sequence[Piece], optional: Collection[str]) -> None:
        reshard(self.holders or comm, self.held, pieces, optional)

    def __str__(self) -> str:
        return "the memory of the surviving ranks"


@dataclass(frozen=True)
class RankMemory:
    """Training state in the memory of this process, for a recovery from a rank failure."""

    life: int  # number of recoveries of the job before this state
    place: int  # this process's training rank
    copies: HeldCopies | None = None  # copies of this rank's and a partner's state
    live: SurvivorState | None = None  # arrays that this rank trains with


class StateProtection:
    """Protection of a trainer's state against rank failures. Construction is collective."""

    # ``life``: number of recoveries of the job. ``earlier``: states in this rank's memory from before the last
    # recovery, which are freed after the first completed step.
    def __init__(self, trainer: Trainer, life: int, config: SurvivalConfig, earlier: list[RankMemory]) -> None:
        self._trainer, self._life, self._config, self._earlier = trainer, life, config, earlier
        self._done = trainer.first_step
        self._buddies: PartnerStore | None = None
        if trainer.comm.size > 1 and not all(trainer.comm.allgather_object(holds_whole_state(trainer))):
            self._buddies = PartnerStore(trainer.comm, trainer.ledger)
        self.described = (
            "in the replicas of every rank"
            if self._buddies is None
            else f"in copies at partners, renewed every {counted(config.every_steps, 'step')}"
        )

    def keep(self, step: int, now: bool) -> None:
        """Record that ``step`` is complete. Every ``survival.every_steps`` steps, copy the state to a partner rank.

        ``now``: True to copy the state after this step in any case. Collective.
        """
        self._done = step
        if step > self._trainer.first_step:
            # All ranks agreed on a step of this incarnation, so all have its state.
            self._earlier.clear()
        if self._buddies is None:  # every rank has the whole state
            return
        every = self._config.check_every_steps
        damage = self._buddies.checked() if every and step % every == 0 else ""
        if damage:  # bytes changed without a write: the memory is faulty
            host = socket.gethostname()
            print(f"hpcdist: memory of rank {self._trainer.comm.rank} on {host}: {damage}", file=sys.stderr, flush=True)
        if not (now or step % self._config.every_steps == 0):
            return
        trainer = self._trainer
        trainer.flush()
        self._buddies.keep(step, trainer.pieces(), state.scalars(trainer, step))

    def memory(self) -> RankMemory:
        """Return a `RankMemory`: the state in this rank's memory, to recover from a rank failure. Local."""
        trainer, place = self._trainer, self._trainer.comm.rank
        if self._buddies is not None:
            return RankMemory(self._life, place, copies=self._buddies.copies)
        # After AGREE the update needs no other rank, so the executor's last step is complete here, even if the
        # failure came before `keep` recorded it.
        done = trainer.executor.updated or self._done
        live = SurvivorState(done, state.scalars(trainer, done), trainer.wanted())
        return RankMemory(self._life, place, live=live)


def holds_whole_state(trainer: Trainer) -> bool:
    """Return True if this rank has all parameters and optimizer state, and can update them without messages. Local."""
    exchange, operations = trainer.exchange, trainer.operations
    if not exchange.traits.whole_state:
        return False
    if trainer.data_axis.size < trainer.comm.size or not any(op.kind is Kind.AGREE for op in operations):
        return False
    agreed = next(index for index, op in enumerate(operations) if op.kind is Kind.AGREE)
    return all(op.kind in LOCAL_UPDATE_KINDS for op in operations[agreed + 1 :])


def recover_newest(comm: Communicator, memories: Sequence[RankMemory]) -> SurvivorState | None:
    """Return the newest state that the ``memories`` of all ranks together hold, or None. Collective over ``comm``."""
    lives: set[int] = set().union(*comm.allgather_object({memory.life for memory in memories}))
    for life in sorted(lives, reverse=True):
        mine = next((memory for memory in memories if memory.life == life), None)
        live = mine is not None and mine.live is not None
        newest = _from_replicas(comm, mine) if any(comm.allgather_object(live)) else _from_copies(comm, mine)
        if newest is not None:
            return newest
    return None


def _from_replicas(comm: Communicator, mine: RankMemory | None) -> SurvivorState | None:
    live = None if mine is None else mine.live
    steps: list[int] = comm.allgather_object(-1 if live is None else live.step)
    newest = max(steps)
    scalars: dict[str, Any] = comm.broadcast_object(None if live is None else live.scalars, root=steps.index(newest))
    held: Sequence[Piece] = live.held if live is not None and live.step == newest else ()
    return SurvivorState(newest, scalars, held, comm)


def _from_copies(comm: Communicator, mine: RankMemory | None) -> SurvivorState | None:
    place, copies = (None, None) if mine is None else (mine.place, mine.copies)
    recovered = recover(comm, place, copies)
    return None if recovered is None else SurvivorState(recovered.step, recovered.scalars, recovered.held, comm)
