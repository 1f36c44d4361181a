"""A parameter server without lock-step: no worker waits for another ("asp"), or only for the far slower ("ssp").

- What is pushed is the mean gradient over the worker's *own* samples, clipped by its own norm, never divided by the
  number of workers. Moments and weight decay live on the servers alone. Each push is one update.
- A pull waits for the update of the worker's own push, so it has all of its own pushes (read-my-writes) and those of
  others that the server applied before. Under ssp the server holds the answer back while the worker is more than
  ``bound`` ahead of the slowest (`clocks`); it never holds back a push.
- Servers do not wait for each other: what is read in one pull may hold different sets of pushes at different servers,
  but each tensor is of one version.
- With W workers a run of N steps is N pushes of each, on 1/W of the global batch, so N W updates at each server. The
  learning rate of update u is that of step u / W of N.
- A push carries (worker, clock): one that comes twice is answered but not applied again.
- The staleness tau of a gradient is the number of updates, of all workers, that a server applied between giving the
  values of which it is the gradient and applying it: 0 for a worker alone, W - 1 for W workers that take turns. With
  ``staleness_aware`` the rate of that update is divided by tau where tau > 1 (Zhang et al. 2015, arXiv:1511.05950,
  whose n-softsync is with n = W what asp does). It is the rate, not the gradient, so it holds under any optimizer, and
  it is a server's own: two of them may count differently. A start begins with tau = 0 for all.

A restored state is bit-equal; what follows is not reproducible. All ranks come together only in a meeting (`meet`). A
worker that is in one is not waited for; after it, and after a restore, a worker that is too far ahead asks anew.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hpcdist.optim import rates
from hpcdist.strategies.parameter_server.clocks import Clocks
from hpcdist.strategies.parameter_server.notes import Fields, Note
from hpcdist.strategies.parameter_server.roles import Roles
from hpcdist.strategies.parameter_server.served import GRADIENT, ServedExchange
from hpcdist.strategies.parameter_server.shard import per_push
from hpcdist.strategies.schedule.operations import Operation
from hpcdist.strategies.seat import Seat


class AsynchronousExchange(ServedExchange):
    """One rank under asp (``bound`` infinite) or ssp."""

    def __init__(self, seat: Seat, roles: Roles, bound: float, *, staleness_aware: bool) -> None:
        super().__init__(seat, roles, per_push(seat, len(roles.workers)))
        self._notes.answers |= {Note.READ: self._on_read}
        self._bound, self._aware = bound, staleness_aware
        self._vector = Clocks(roles.workers, bound)  # of this rank's shard
        self._read = dict.fromkeys(roles.workers, 0)  # updates that the values have that each worker was given
        self._staleness = dict.fromkeys(roles.workers, 0)
        self._scale = 1.0

    @property
    def seen(self) -> Mapping[int, int]:
        """The clock of each worker, as this server knows it."""
        return self._vector.vector

    def begin_update(self, scale: float) -> None:
        """Remember by what the servers shall multiply this rank's gradient."""
        self._scale = scale

    def pull(self, op: Operation) -> None:
        """Have every server apply this rank's gradient, and take the new values; serve others meanwhile (local)."""
        self.meetings.consider()
        self.clock += 1
        self._request(Note.PUSH, Fields(clock=self.clock, scale=self._scale), self.roles.servers)

    def _on_push(self, worker: int, what: Fields) -> None:
        shard = self.shard
        assert shard is not None
        gradients = self.gradients
        if worker != self.rank:
            gradients = shard.inbox
            for part in self._served():
                self._values.recv(gradients.range(part), worker, GRADIENT)
        if self._vector.push(worker, what.clock):
            self._staleness[worker] = staleness = shard.updates - self._read[worker]
            shard.step(gradients, what.scale, self._factor(staleness))
            if self.rank == self._first:
                self.updates = shard.updates
                self.meetings.due |= 0 < self.meet_at <= min(self.seen.values())
            self.meetings.consider()
        self._on_read(worker, what)

    def _on_read(self, worker: int, what: Fields) -> None:
        self._vector.ask(worker)
        self._answer_all()

    def _on_left(self, worker: int) -> None:
        self._vector.leave(worker)
        self._answer_all()

    def _answer_all(self) -> None:
        """Give the values to all who wait for them and may have them."""
        assert self.shard is not None
        for worker in self._vector.answerable():
            self._read[worker] = updates = self.shard.updates
            staleness, called = self._staleness[worker], self.meetings.due
            self._answer(worker, Fields(self.seen[worker], updates=updates, called=called, staleness=staleness))

    def _told(self, what: Fields) -> None:
        self.staleness = what.staleness

    def _factor(self, staleness: int) -> float:
        return 1.0 / max(1, staleness) if self._aware else 1.0

    def adjourn(self, clocks: Sequence[int], updates: int, calls: int) -> None:
        """Take note of what the meeting found out: clocks of the workers, updates, calls that were sent (local)."""
        super().adjourn(clocks, updates, calls)
        found = dict(zip(self.roles.workers, self.clocks, strict=True))
        assert self.shard is None or self.seen == found, f"pushes {self.seen} came to server {self.rank} of {found}"
        self._vector.convene(found)

    def part(self) -> None:
        """End the meeting: every rank goes on by itself, once it may (local)."""
        super().part()
        left = self.clock < self.seat.total_steps
        if self.works and left and self.clock - min(self.clocks) > self._bound:
            self._request(Note.READ, Fields(clock=self.clock), self.roles.servers)

    @property
    def share(self) -> float:
        """The part of a global batch that one update takes."""
        return 1 / len(self.roles.workers)

    @property
    def learning_rate(self) -> float:
        """Rate of the last update that this rank knows of (local)."""
        seat = per_push(self.seat, len(self.roles.workers))
        rate = rates.learning_rate(seat.optimizer, max(1, self.updates), seat.total_steps)
        return rate * self._factor(self.staleness)

    def state(self) -> dict[str, Any]:
        """Return the clocks and the number of updates, as of the last meeting; ``count`` for other architectures.

        In a meeting the version vectors of all shards are the same: these clocks.
        """
        return {"count": min(self.clocks), "clocks": self.clocks, "updates": self.updates}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back the clocks; with another number of workers all go on from the slowest of them.

        Whoever is then too far ahead for the bound waits in `part`.
        """
        count, workers = int(state["count"]), len(self.roles.workers)
        if len(state.get("clocks", ())) == workers:
            self.clocks, self.updates = [int(clock) for clock in state["clocks"]], int(state["updates"])
        else:
            self.clocks, self.updates = [count] * workers, count * workers
        if self.works:
            self.clock = self.clocks[self.roles.workers.index(self.rank)]
        self._vector.convene(dict(zip(self.roles.workers, self.clocks, strict=True)))
        self._read = dict.fromkeys(self.roles.workers, self.updates)
        if self.shard is not None:
            self.shard.optimizer.restore({"count": self.updates})
