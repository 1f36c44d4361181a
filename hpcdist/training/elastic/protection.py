"""Protect the state of a run against rank failures: in replicas, or in copies at partners.

Where every rank has the whole state, and the update that follows the agreement of a step sends nothing, nothing is
copied: a survivor either made the update, whole, or did not begin it, and those that made it give it to the others.
Everywhere else each rank keeps a copy of its own part of the state as it was after a step, and its partner another
one (`hpcdist.checkpoint.partner.redundancy`): a death in the middle of an update tears nothing, since all go back to
the newest complete copies. That repeats ``every_steps`` steps at the most, and bit for bit on the same layout.
"""

import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint.partner import redundancy
from hpcdist.checkpoint.partner.redundancy import HeldCopies, PartnerStore
from hpcdist.checkpoint.restoring.reshard import reshard
from hpcdist.comm.communicator import Communicator
from hpcdist.reporting.units import counted
from hpcdist.strategies.schedule.operations import Kind
from hpcdist.training.build import state
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.recipe.config import SurvivalConfig

LOCAL_UPDATE_KINDS = (Kind.DIRECTION, Kind.NORMS, Kind.APPLY)  # what an update consists of where nothing is sent in it


@dataclass(frozen=True)
class SurvivorState:
    """The state after ``step`` steps, of which this rank has the pieces ``held`` in its memory.

    ``holders`` joins all that may have some, more than those who train: a layout need not have a place for everyone.
    """

    step: int
    scalars: Mapping[str, Any]
    held: Sequence[Piece]
    holders: Communicator | None = None

    def fill(self, comm: Communicator, wanted: Sequence[Piece], optional: Collection[str]) -> None:
        """Take what this rank wants from whoever holds it, itself first. Collective over the holders."""
        reshard(self.holders or comm, self.held, wanted, optional)

    def __str__(self) -> str:
        return "the memory of the ranks that are left"


@dataclass
class RankMemory:
    """Copies that this process has of ``life``, in which it had ``place``: its own state or copies, if any."""

    life: int
    place: int
    copies: HeldCopies | None = None
    live: SurvivorState | None = None


class StateProtection:
    """Keeps the state of ``trainer`` safe. ``life`` is counted from 0 over all that a job had.

    ``earlier`` are memories of lives before, which are dropped when no rank can need them any more.
    """

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

    def keep(self, step: int, *, now: bool = False) -> None:
        """Take note that ``step`` is done, and renew the copies where that is due, or wanted ``now``. Collective."""
        self._done = step
        if step > self._trainer.first_step:
            self._earlier.clear()  # all ranks have agreed on a step of this life, so all have its state
        if self._buddies is None:
            return
        every = self._config.check_every_steps
        damage = self._buddies.checked() if every and step % every == 0 else ""
        if damage:  # of bytes that nobody has written since: no disk, no network, and no program of ours
            host = socket.gethostname()
            print(f"hpcdist: memory of rank {self._trainer.comm.rank} on {host}: {damage}", file=sys.stderr, flush=True)
        if not (now or step % self._config.every_steps == 0):
            return
        trainer = self._trainer
        trainer.flush()
        self._buddies.keep(step, trainer.exchange.pieces(), state.scalars(trainer, step))

    def memory(self) -> RankMemory:
        """Return what this rank remembers, after a death (local)."""
        trainer = self._trainer
        found = RankMemory(self._life, trainer.comm.rank)
        if self._buddies is not None:
            found.copies = self._buddies.copies
        else:
            # A step that was agreed on is whole here, whatever became of the others since.
            done = trainer.executor.updated or self._done
            found.live = SurvivorState(done, state.scalars(trainer, done), trainer.exchange.wanted())
        return found


def holds_whole_state(trainer: Trainer) -> bool:
    """Whether this rank has the whole state, and sends nothing once a step is agreed on (local)."""
    exchange, operations = trainer.exchange, trainer.operations
    if not exchange.whole_state:
        return False
    if trainer.data_axis.size < trainer.comm.size or not any(op.kind is Kind.AGREE for op in operations):
        return False
    agreed = next(index for index, op in enumerate(operations) if op.kind is Kind.AGREE)
    return all(op.kind in LOCAL_UPDATE_KINDS for op in operations[agreed + 1 :])


def recover_newest(comm: Communicator, memories: Sequence[RankMemory]) -> SurvivorState | None:
    """Return the newest state that the ranks of ``comm`` have together; None for none.

    ``memories`` are this rank's, of any lives; a rank that came new has none. Collective over ``comm``, as is to fill
    with that state.
    """
    known: set[int] = set().union(*comm.allgather_object({memory.life for memory in memories}))
    for life in sorted(known, reverse=True):
        mine = next((memory for memory in memories if memory.life == life), None)
        live = mine is not None and mine.live is not None
        found = _from_replicas(comm, mine) if any(comm.allgather_object(live)) else _from_copies(comm, mine)
        if found is not None:
            return found
    return None


def _from_replicas(comm: Communicator, mine: RankMemory | None) -> SurvivorState | None:
    """Return the state of those who made the last update."""
    own = None if mine is None else mine.live
    steps: list[int] = comm.allgather_object(-1 if own is None else own.step)
    newest = max(steps)
    scalars: dict[str, Any] = comm.broadcast_object(None if own is None else own.scalars, root=steps.index(newest))
    held: Sequence[Piece] = own.held if own is not None and own.step == newest else ()
    return SurvivorState(newest, scalars, held, comm)


def _from_copies(comm: Communicator, mine: RankMemory | None) -> SurvivorState | None:
    """Return the state of the newest copies that are complete."""
    place, copies = (None, None) if mine is None else (mine.place, mine.copies)
    found = redundancy.recover(comm, place, copies)
    return None if found is None else SurvivorState(found.step, found.scalars, found.held, comm)
