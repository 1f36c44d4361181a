"""Membership of an elastic job: the ranks that train, the spares, and how both change.

``everyone`` joins all processes of the job. Each has a place in the training, or none: then it is a spare that sleeps
until it is needed. After a death the living agree on new places: those of the dead go to spares, or to processes that
are started for them, or close up.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.failure.rank_failures import is_rank_failure
from hpcdist.comm.launch.exit_file import SPARES, SURVIVE, SURVIVE_MODES
from hpcdist.comm.mpi import spawn
from hpcdist.errors import ConfigurationError, RankDiedError

SPARE_POLL_S: Final = 0.05  # so often a spare looks whether it is needed
JOINER: Final = ("-m", "hpcdist.training.run.entry_point")


@dataclass(frozen=True)
class MembershipChange:
    """Change of the ranks that train: the places that were ``lost``, and the number of processes ``added``.

    ``grown``: more ranks were requested, and as many as possible were added.
    """

    lost: tuple[int, ...] = ()
    added: int = 0
    grown: bool = False


def mode_of(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the mode in which a job survives rank failures ("": it does not), and its number of spares (local)."""
    mode, spares = environment.get(SURVIVE, ""), environment.get(SPARES, "0")
    if mode and mode not in SURVIVE_MODES:
        raise ConfigurationError(f"{SURVIVE}={mode!r}; set it to one of {', '.join(SURVIVE_MODES)}, or leave it out")
    if not (spares.isascii() and spares.isdecimal()) or (int(spares) and mode != "replace"):
        raise ConfigurationError(
            f"{SPARES}={spares!r}; give a number of ranks, and {SURVIVE}=replace beside it, or leave it out"
        )
    return mode, int(spares)


class Membership:
    """Membership of the processes of a job, as one of them sees it.

    Collective over ``everyone``, unless a method says not. ``place`` is that of this process in the training of
    ``size`` ranks; None for a spare. ``wanted`` ranks, the same number on every rank, train from the next `fill` on.
    """

    def __init__(self, everyone: Communicator, mode: str, place: int | None, wanted: int) -> None:
        self.everyone, self.mode, self.place, self.wanted = everyone, mode, place, wanted
        self.size = wanted
        self.spares: tuple[int, ...] = ()  # ranks of everyone, as `world` found them
        self.leader = 0  # the rank of everyone that has the first place

    @classmethod
    def begin(cls, everyone: Communicator, mode: str, spares: int) -> "Membership":
        """Return the membership of a job that starts: its last ``spares`` ranks are spares (local)."""
        size = everyone.size - spares
        if size < 1:
            raise ConfigurationError(f"{SPARES}={spares} of {everyone.size} ranks leaves none to train; use fewer")
        return cls(everyone, mode, everyone.rank if everyone.rank < size else None, size)

    def world(self) -> Communicator | None:
        """Return the communicator of the ranks that train, in the order of their places; None on a spare."""
        places = self._places()
        self.spares = tuple(rank for rank, place in enumerate(places) if place is None)
        self.leader = places.index(0)
        return self.everyone.split(None if self.place is None else 0, self.place or 0, "training")

    def wait(self) -> int:
        """Sleep as a spare until the job ends; return its exit code (local). Raises the error of a rank failure."""
        code = np.zeros(1)
        spawn.sleep_until_message(self.everyone, SPARE_POLL_S).recv(code)
        return int(code[0])

    def dismiss(self, code: int) -> None:
        """Send the spares the exit code ``code`` of the job, which ends (local; one rank that trains does)."""
        for rank in self.spares:
            with suppress(Exception):  # a spare that died needs no message
                self.everyone.send(np.array([float(code)]), rank)

    def keep(self, used: int) -> None:
        """Let the first ``used`` places train; the others become spares (local, the same on every rank)."""
        self.size = used
        if self.place is not None and self.place >= used:
            self.place = None

    def meet(self) -> MembershipChange:
        """Agree on the places of the living anew, after deaths.

        Spares take the places of the dead where ``mode`` is "replace"; else ranks move up, and all the living
        train. Raises what `hpcdist.comm.failure.rank_failures.is_rank_failure` knows when another one dies
        meanwhile: then everyone that is left calls again.
        """
        before, self.everyone = self.everyone, self.everyone.shrink("everyone")
        before.abandon()
        lost = tuple(sorted(set(range(self.size)) - {place for place in self._places() if place is not None}))
        if self.mode == "replace":
            self._move_in()
        else:
            self.close_up()
            self.wanted = self.size
        return MembershipChange(lost)

    def _places(self) -> list[int | None]:
        return self.everyone.allgather_object(self.place)

    def _vacant(self, places: Sequence[int | None]) -> list[int]:
        return sorted(set(range(self.wanted)) - {place for place in places if place is not None})

    def _move_in(self) -> None:
        """Let spares take vacant places."""
        places = self._places()
        spares = [rank for rank, place in enumerate(places) if place is None]
        for rank, place in zip(spares, self._vacant(places), strict=False):
            if rank == self.everyone.rank:
                self.place = place

    def fill(self, change: MembershipChange, description: Any) -> MembershipChange:
        """Start a process for each vacant place; return ``change`` with them. They get it, and ``description``."""
        vacant = self._vacant(self._places())
        if vacant:
            self.everyone = self._with_new(len(vacant))
            change = replace(change, added=change.added + len(vacant))
            self.everyone.broadcast_object((vacant, self.wanted, self.mode, change, description))
        self.size = self.wanted
        return change

    def _with_new(self, count: int) -> Communicator:
        """Return a communicator with ``count`` new processes, on all ranks, or raise on all.

        A rank may die when some ranks have the larger communicator already: these would meet there next, and the
        others here.
        """
        larger: Communicator | None = None
        error: Exception | None = None
        try:
            larger = spawn.spawn(self.everyone, count, JOINER, "everyone")
        except Exception as failure:
            if not is_rank_failure(failure, self.everyone):
                raise
            self.everyone.revoke()
            error = failure
        if self.everyone.agree(larger is not None) and larger is not None:
            return larger
        if larger is not None:
            larger.revoke()
            larger.abandon()
        raise error or RankDiedError("a rank died while new processes were taken in")

    def close_up(self) -> None:
        """Fill vacant places by moving later ranks up; spares come last, as many as are wanted."""
        places = self._places()
        if self.mode == "replace" and not self._vacant(places):
            self.size = self.wanted
            return
        order = sorted((place is None, place or 0, rank) for rank, place in enumerate(places))
        self.size = min(len(order), self.wanted) if self.mode == "replace" else len(order)
        place = [rank for _, _, rank in order].index(self.everyone.rank)
        self.place = place if place < self.size else None


def join(everyone: Communicator) -> tuple[Membership, MembershipChange, Any]:
    """Return the membership of a process that `Membership.fill` has started, and the description. Collective."""
    vacant, wanted, mode, change, description = everyone.broadcast_object(None)
    mine: int = vacant[everyone.rank - (everyone.size - len(vacant))]
    return Membership(everyone, mode, mine, wanted), change, description
