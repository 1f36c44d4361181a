"""What ranks that are threads share: letters, the receives that wait for them, and a place to meet."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcdist.comm.communicator import ANY


@dataclass(eq=False)
class Letter:
    """A message under way: a copy of what was sent."""

    source: int
    tag: int
    payload: np.ndarray


@dataclass(eq=False)
class Posted:
    """A receive that waits for its letter. Receives match in the order in which they were posted, as in MPI."""

    peer: int
    tag: int
    letter: Letter | None = None

    def matches(self, letter: Letter) -> bool:
        """Whether ``letter`` is one that this receive takes."""
        return self.peer in (ANY, letter.source) and self.tag in (ANY, letter.tag)


@dataclass
class Parting:
    """A meeting of the living: what each brought, and what the first to see all of them made of it."""

    number: int
    brought: dict[int, bool] = field(default_factory=dict)
    living: tuple[int, ...] | None = None  # ranks that lived when it was decided: the same for all


@dataclass
class Group:
    """What the threads of one communicator share. ``members`` are their numbers in the world, in rank order.

    ``failed`` and ``dead``, numbers in the world, are those of the whole world; ``mortal``: a rank may die alone.
    """

    members: tuple[int, ...]
    deadline_s: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    failed: list[BaseException] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    mortal: bool = False

    def __post_init__(self) -> None:
        self.size = len(self.members)
        self.inbox: list[list[Letter]] = [[] for _ in range(self.size)]  # letters that nobody waits for yet
        self.posted: list[list[Posted]] = [[] for _ in range(self.size)]  # receives whose letter is still to come
        self.met = threading.Condition()  # apart from `changed`, which every letter notifies
        self.meetings: dict[int, dict[int, Any]] = {}  # number of a collective -> rank -> what it brought
        self.rounds: dict[int, dict[int, np.ndarray]] = {}  # the same of each iallreduce
        self.partings: dict[int, Parting] = {}
        self.revoked = False
        self.children: dict[str, Group] = {}

    def child(self, key: str, ranks: Sequence[int]) -> "Group":
        """Return the group of some of the members under ``key``; the first to ask makes it."""
        with self.changed:
            group = self.children.get(key)
            if group is None:
                members = tuple(self.members[rank] for rank in ranks)
                group = Group(members, self.deadline_s, failed=self.failed, dead=self.dead, mortal=self.mortal)
                self.children[key] = group
                if group.gone():  # while it was made: nobody will come round again to say so
                    group.stop()
        return group

    def abort(self) -> None:
        """Release every thread that waits in this group or below."""
        self.stop()
        for child in self._all_children():
            child.abort()

    def stop(self) -> None:
        """Release every thread that waits in this group: it finds out why by itself."""
        for condition in (self.changed, self.met):
            with condition:
                condition.notify_all()

    def bury(self, member: int) -> None:
        """Let every thread in this group or below that waits for ``member``, a number in the world, see its death."""
        self.dead.add(member)
        if member in self.members:
            self.stop()
        for child in self._all_children():
            child.bury(member)

    def _all_children(self) -> list["Group"]:
        with self.changed:
            return list(self.children.values())

    def gone(self) -> list[int]:
        """Return the ranks that are dead."""
        return [rank for rank, member in enumerate(self.members) if member in self.dead]
