"""What ranks that are threads share: letters, the receives that wait for them, and a place to meet."""

import threading
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
class Group:
    """What the threads of one communicator share."""

    size: int
    deadline_s: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    failed: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inbox: list[list[Letter]] = [[] for _ in range(self.size)]  # letters that nobody waits for yet
        self.posted: list[list[Posted]] = [[] for _ in range(self.size)]  # receives whose letter is still to come
        self.slots: list[Any] = [None] * self.size
        self.meeting = threading.Barrier(self.size)
        self.rounds: dict[int, dict[int, np.ndarray]] = {}  # number of an iallreduce -> rank -> what it brought
        self.children: dict[str, Group] = {}

    def abort(self) -> None:
        """Release every thread that waits in this group or below."""
        with self.changed:
            self.changed.notify_all()
            children = list(self.children.values())
        self.meeting.abort()
        for child in children:
            child.abort()
