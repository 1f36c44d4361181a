"""Protect the state of a run against rank failures: in replicas, or in copies at partners.

Where every rank has the whole state, and the update that follows the agreement of a step sends nothing, nothing is
copied: a survivor either made the whole update, or did not begin it, and those that made it send it to the others.
Everywhere else each rank keeps a copy of its own part of the state as it was after a step, and its partner another
one (`hpcdist.checkpoint.partner.redundancy`): a failure in the middle of an update is harmless, since all go back to
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

LOCAL_UPDATE_KINDS = (Kind.DIRECTION, Kind.NORMS, Kind.APPLY)  # the operations of an update that sends nothing


@dataclass(frozen=True)
class SurvivorState:
    """State after ``step`` steps, of which this rank has the pieces ``held`` in its memory.

    ``holders`` joins all ranks that may have some. These are more than those that train: a layout may leave spares.
    """

    step: int
    scalars: Mapping[str, Any]
    held: Sequence[Piece]
    holders: Communicator | None = None

    def fill(self, comm: Communicator, wanted: Sequence[Piece], optional: Collection[str]) -> None:
        """Fill the pieces of this rank from the ranks that hold them, itself first. Collective over the holders."""
        reshard(self.holders or comm, self.held, wanted, optional)

    def __str__(self) -> str:
        return "the memory of the ranks that are left"


@dataclass(frozen=True)
class RankMemory:
    """Memory of this process from incarnation ``life``, in which it had ``place``: its state, or copies, if any."""

    life: int
    place: int
    copies: HeldCopies | None = None
    live: SurvivorState | None = None


class StateProtection:
    """Protection of the state of ``trainer`` in incarnation ``life``, counted from 0.

    ``earlier`` are memories of earlier incarnations, which are dropped when no rank can need them any more.
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

    def keep(self, step: int, now: bool) -> None:
        """Record that ``step`` is done, and renew the copies where that is due, or ``now``. Collective."""
        self._done = step
        if step > self._trainer.first_step:
            # All ranks have agreed on a step of this incarnation, so all have its state: a recovery needs no older one.
            self._earlier.clear()
        if self._buddies is None:
            return
        every = self._config.check_every_steps
        damage = self._buddies.checked() if every and step % every == 0 else ""
        if damage:  # bytes that nothing has written since have changed: the memory is bad
            host = socket.gethostname()
            print(f"hpcdist: memory of rank {self._trainer.comm.rank} on {host}: {damage}", file=sys.stderr, flush=True)
        if not (now or step % self._config.every_steps == 0):
            return
        trainer = self._trainer
        trainer.flush()
        self._buddies.keep(step, trainer.exchange.pieces(), state.scalars(trainer, step))

    def memory(self) -> RankMemory:
        """Return the memory of this rank, after a failure (local)."""
        trainer, place = self._trainer, self._trainer.comm.rank
        if self._buddies is not None:
            return RankMemory(self._life, place, copies=self._buddies.copies)
        # After AGREE the update needs no other rank, so the executor's last step is whole here, even where the failure
        # came before `keep` recorded it.
        done = trainer.executor.updated or self._done
        live = SurvivorState(done, state.scalars(trainer, done), trainer.exchange.wanted())
        return RankMemory(self._life, place, live=live)


def holds_whole_state(trainer: Trainer) -> bool:
    """Whether this rank has the whole state, and sends nothing after the AGREE of a step (local)."""
    exchange, operations = trainer.exchange, trainer.operations
    if not exchange.whole_state:
        return False
    if trainer.data_axis.size < trainer.comm.size or not any(op.kind is Kind.AGREE for op in operations):
        return False
    agreed = next(index for index, op in enumerate(operations) if op.kind is Kind.AGREE)
    return all(op.kind in LOCAL_UPDATE_KINDS for op in operations[agreed + 1 :])


def recover_newest(comm: Communicator, memories: Sequence[RankMemory]) -> SurvivorState | None:
    """Return the newest state that the ranks of ``comm`` have together; None for none.

    ``memories`` are this rank's, of any incarnations; a process that joined has none. Collective over ``comm``, as is
    `SurvivorState.fill`. The newest incarnation comes first: where its copies are incomplete, an older one counts.
    """
    known: set[int] = set().union(*comm.allgather_object({memory.life for memory in memories}))
    for life in sorted(known, reverse=True):
        mine = next((memory for memory in memories if memory.life == life), None)
        live = mine is not None and mine.live is not None
        newest = _from_replicas(comm, mine) if any(comm.allgather_object(live)) else _from_copies(comm, mine)
        if newest is not None:
            return newest
    return None


def _from_replicas(comm: Communicator, mine: RankMemory | None) -> SurvivorState | None:
    """Return the state of the ranks that made the last update; the others contribute nothing. Collective."""
    own = None if mine is None else mine.live
    steps: list[int] = comm.allgather_object(-1 if own is None else own.step)
    newest = max(steps)
    scalars: dict[str, Any] = comm.broadcast_object(None if own is None else own.scalars, root=steps.index(newest))
    held: Sequence[Piece] = own.held if own is not None and own.step == newest else ()
    return SurvivorState(newest, scalars, held, comm)


def _from_copies(comm: Communicator, mine: RankMemory | None) -> SurvivorState | None:
    """Return the state of the newest copies that are complete; None for none. Collective."""
    place, copies = (None, None) if mine is None else (mine.place, mine.copies)
    recovered = redundancy.recover(comm, place, copies)
    return None if recovered is None else SurvivorState(recovered.step, recovered.scalars, recovered.held, comm)
