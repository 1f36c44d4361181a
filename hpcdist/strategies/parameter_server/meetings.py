"""How ranks that are not in lock-step come together: for a checkpoint, to stop.

Anybody calls (`call`); the first server tells every worker with its next values; a worker that knows it, or that has
done all its steps, tells every server that it pushes no more (`meet`), and from then on nobody waits for its clock. A
server has a meeting when all workers have told it, so then nothing is under way and all servers have applied the same
pushes. A worker that only computes waits until the first server says that all are there: it enters no collective
before, so however long the others need, no deadline of its own passes and nobody waits for it.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from hpcdist.strategies.parameter_server.notes import Fields, Note, Notes
from hpcdist.strategies.parameter_server.roles import Roles

LOOK_S: Final = 0.5  # how often a rank that waits for a meeting asks whether it wants the others to come earlier


class Meetings:
    """The meetings of one rank. ``wants`` tells whether it wishes for one, ``called`` that it was told to come to one.

    ``due``, on the first server, is what it tells with the values that it gives. ``meanwhile`` is called every now and
    then on a worker that waits for the others to come, ``left`` on a server with each worker that pushes no more.
    """

    def __init__(self, rank: int, roles: Roles, notes: Notes) -> None:
        self._rank, self._roles, self._notes = rank, roles, notes
        self._first, self._serves, self._works = roles.servers[0], rank in roles.servers, rank in roles.workers
        notes.answers |= {Note.CALL: self._on_call, Note.MEET: self._on_meet, Note.GATHERED: self._on_gathered}
        self.wants: Callable[[], bool] = lambda: False
        self.meanwhile: Callable[[], None] = lambda: None
        self.left: Callable[[int], None] = lambda worker: None
        self.called = self.due = False
        self.calls = 0  # that this rank has sent, since the start
        self._held = 0  # meetings
        self._taken: Counter[int] = Counter()  # calls received, by the meetings that their sender had held
        self._here: set[int] = set()  # workers that push no more
        self._gathered = self._has_called = False
        self._looked = 0.0

    def consider(self) -> None:
        """Call a meeting when this rank wishes for one (local)."""
        if self.wants():
            self.call()

    def call(self) -> None:
        """Call a meeting (local)."""
        if self._rank == self._first:
            self.due = True
        elif not self._has_called:
            self._has_called = True
            self.calls += 1
            self._notes.tell(self._first, Note.CALL, Fields(clock=self._held))

    def meet(self) -> None:
        """Return when every worker has come here; serve until then. Collective over the world."""
        if self._works:
            for server in self._roles.servers:
                if server != self._rank:
                    self._notes.tell(server, Note.MEET)
            self._come(self._rank)
        self._looked = time.monotonic()
        while not self._all_here():
            self._notes.wait(alone=not self._works, look=self._look)
        if self._rank == self._first:
            for worker in self._roles.workers:
                if worker not in self._roles.servers:
                    self._notes.tell(worker, Note.GATHERED)
        self._here.clear()
        self.called = self.due = self._gathered = self._has_called = False
        self._held += 1

    def settle(self, calls: int) -> None:
        """Take what is left of the ``calls`` of all ranks before `meet`; none of them is under way afterwards (local).

        All ranks must have been in a collective since `meet`. Others may have parted already: what they say now belongs
        to their next steps, and is answered when this rank has parted too.
        """
        while self._rank == self._first and self._taken_before() < calls:
            self._notes.take(Note.CALL)
        self._notes.settle()

    def _taken_before(self) -> int:
        """Return how many calls came for meetings that have been."""
        return sum(count for held, count in self._taken.items() if held < self._held)

    def _all_here(self) -> bool:
        return len(self._here) == len(self._roles.workers) if self._serves else self._gathered

    def _look(self) -> None:
        if time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            self.consider()
            self.meanwhile()

    def _come(self, worker: int) -> None:
        self._here.add(worker)
        if self._serves:
            self.left(worker)

    def _on_call(self, rank: int, fields: Fields) -> None:
        self._taken[fields.clock] += 1
        self.due |= fields.clock == self._held  # else it was for a meeting that has been

    def _on_meet(self, worker: int, fields: Fields) -> None:
        self._come(worker)

    def _on_gathered(self, server: int, fields: Fields) -> None:
        self._gathered = True
