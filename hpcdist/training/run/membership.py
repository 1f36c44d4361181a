"""Membership of an elastic job: training ranks, spares, and their changes."""

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

SPARE_POLL_S: Final = 0.05  # polling interval of a spare
JOINER: Final = ("-m", "hpcdist.training.run.entry_point")


@dataclass(frozen=True)
class MembershipChange:
    """Change of the training ranks of an elastic job."""

    lost: tuple[int, ...] = ()  # ranks that died
    added: int = 0  # number of new processes
    grown: bool = False  # True if a user requested more ranks with `hpcdist grow`


def mode_of(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return (reaction to rank failures, number of spare ranks) from the variables in ``environment``.

    The reaction is one of `SURVIVE_MODES`, or "" if a rank failure ends the job.
    """
    mode, spares = environment.get(SURVIVE, ""), environment.get(SPARES, "0")
    if mode and mode not in SURVIVE_MODES:
        raise ConfigurationError(
            f"{SURVIVE}={mode!r} is invalid; unset {SURVIVE}, or choose one of {', '.join(SURVIVE_MODES)}"
        )
    if not (spares.isascii() and spares.isdecimal()) or (int(spares) and mode != "replace"):
        raise ConfigurationError(
            f"{SPARES}={spares!r} is invalid; unset {SPARES}, or set {SPARES} to a number of ranks and {SURVIVE} to "
            "'replace'"
        )
    return mode, int(spares)


class Membership:
    """Roles of all processes of a job. Each process is a training rank or a spare."""

    # ``everyone``: communicator of all living processes. ``place``: this process's training rank, or None for a spare.
    # ``size`` and ``wanted``: numbers of training ranks now, and after the next `fill`.
    def __init__(self, everyone: Communicator, mode: str, place: int | None, target_size: int) -> None:
        self.everyone, self.mode, self.place, self.wanted = everyone, mode, place, target_size
        self.size = target_size
        self.spares: tuple[int, ...] = ()  # ranks of everyone, set by `world`
        self.leader = 0  # the rank of everyone with place 0

    @classmethod
    def begin(cls, everyone: Communicator, mode: str, spares: int) -> "Membership":
        """Return the initial roles of the ranks of ``everyone``. The last ``spares`` ranks are spares. Local.

        ``mode``: reaction to rank failures, one of `SURVIVE_MODES`.
        """
        size = everyone.size - spares
        if size < 1:
            raise ConfigurationError(
                f"{SPARES}={spares} makes all {everyone.size} ranks spares, so that no rank trains; use fewer spare "
                "ranks"
            )
        return cls(everyone, mode, everyone.rank if everyone.rank < size else None, size)

    def world(self) -> Communicator | None:
        """Return a new communicator of the training ranks, or None on a spare rank. Collective over all processes."""
        places = self._places()
        self.spares = tuple(rank for rank, place in enumerate(places) if place is None)
        self.leader = places.index(0)
        return self.everyone.split(None if self.place is None else 0, self.place or 0, "training")

    def wait(self) -> int:
        """Sleep on a spare rank until the job ends, and return the job's exit code. Local.

        Raises an error if a rank of the job has failed.
        """
        code = np.zeros(1)
        spawn.sleep_until_message(self.everyone, SPARE_POLL_S).recv(code)
        return int(code[0])

    def dismiss(self, code: int) -> None:
        """Send the exit code ``code`` to the spares, so that the spares exit. Call this on one training rank only."""
        for rank in self.spares:
            with suppress(Exception):  # the spare may have died
                self.everyone.send(np.array([float(code)]), rank)

    def keep(self, used: int) -> None:
        """Turn the training ranks ``used`` and above into spares. Local, but all ranks must call this."""
        self.size = used
        if self.place is not None and self.place >= used:
            self.place = None

    def meet(self) -> MembershipChange:
        """Replace or remove dead ranks, and return a `MembershipChange`. Collective over the living ranks.

        If a rank dies during the call (`is_rank_failure`), all living ranks must call `meet` again.
        """
        # In mode "replace", spares take the ranks of dead processes. Otherwise later ranks are renumbered to close the
        # gaps.
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
        places = self._places()
        spares = [rank for rank, place in enumerate(places) if place is None]
        for rank, place in zip(spares, self._vacant(places), strict=False):
            if rank == self.everyone.rank:
                self.place = place

    def fill(self, change: MembershipChange, description: Any) -> MembershipChange:
        """Start a new process for each missing training rank. Collective over the living ranks.

        Return a copy of ``change`` that counts the new processes. ``description``: picklable object for new processes.
        """
        vacant = self._vacant(self._places())
        if vacant:
            self.everyone = self._with_new(len(vacant))
            change = replace(change, added=change.added + len(vacant))
            self.everyone.broadcast_object((vacant, self.wanted, self.mode, change, description))
        self.size = self.wanted
        return change

    def _with_new(self, count: int) -> Communicator:
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
        raise error or RankDiedError("a rank died while new processes were added")

    def close_up(self) -> None:
        """Renumber the training ranks from 0 without gaps after a rank failure. Collective over ``everyone``."""
        places = self._places()
        if self.mode == "replace" and not self._vacant(places):
            self.size = self.wanted
            return
        order = sorted((place is None, place or 0, rank) for rank, place in enumerate(places))
        self.size = min(len(order), self.wanted) if self.mode == "replace" else len(order)
        place = [rank for _, _, rank in order].index(self.everyone.rank)
        self.place = place if place < self.size else None


def join(everyone: Communicator) -> tuple[Membership, MembershipChange, Any]:
    """Join a job in a process that `Membership.fill` started. Collective over ``everyone``, all processes of the job.

    Return (`Membership`, `MembershipChange` that added this process, ``description`` that was passed to `fill`).
    """
    vacant, target_size, mode, change, description = everyone.broadcast_object(None)
    mine: int = vacant[everyone.rank - (everyone.size - len(vacant))]
    return Membership(everyone, mode, mine, target_size), change, description
