"""Asynchronous and stale synchronous servers (asp, ssp): workers wait for nobody, or for the far slower only.

- What is pushed is the mean gradient over the worker's *own* samples, clipped by its own norm, never divided by the
  number of workers. Moments and weight decay live on the servers alone. Each push is one update.
- A pull waits for the update of the worker's own push, so it has all of its own pushes (read-my-writes) and those of
  others that the server applied before. Under ssp the server holds the answer back while the worker is more than
  ``bound`` ahead of the slowest (`VersionVector`); it never holds back a push.
- Servers do not wait for each other: what is read in one pull may hold different sets of pushes at different servers,
  but each tensor is of one version.
- With W workers a run of N steps is N pushes of each, on 1/W of the global batch, so N W updates at each server. The
  learning rate of update u is that of step u / W of N.
- A push carries (worker, clock): one that comes twice is answered but not applied again.
- The staleness tau of a gradient is the number of updates, of all workers, that a server applied between giving the
  values of which it is the gradient and applying it: 0 for a worker alone, W - 1 for W workers that take turns. With
  ``staleness_aware`` the rate of that update is divided by tau where tau > 1 (Zhang et al. 2015, arXiv:1511.05950,
  whose n-softsync is with n = W what asp does). It is the rate, not the gradient, so it holds under any optimizer,
  and it is a server's own: two of them may count differently. A start begins with tau = 0 for all.

A worker's clock is the number of its pushes that the shard has applied. With a bound s (Ho et al. 2013, "More
effective distributed ML via a stale synchronous parallel parameter server", NIPS; Petuum, arXiv:1312.7651) a worker
may start iteration c, counted from 0, only if

    c - min over q of clock(q) <= s.

A worker asks by the pull that follows its push c - 1, and it is the *answer* that waits: a push never does. So a read
at clock c has every update of iterations up to c - s - 1 of all workers, all of the reader's own, and perhaps newer
ones. s = 0 is lock-step, s = infinity no bound at all. Each shard decides by its own vector: a worker starts when all
shards have answered. That is enough: what holds of each shard holds of all that was read, and the slowest worker is
never held anywhere, so somebody can always go on. A worker that `leave`s, because it is done or dead or pushes no
more before a rendezvous, is not waited for. One that comes back is not waited for either for what the others did
meanwhile: it starts at the minimum of those who are there.

A restored state is bit-equal; what follows is not reproducible. All ranks come together only in a rendezvous
(`meet`). A worker that is in one is not waited for; after it, and after a restore, a worker that is too far ahead
asks anew.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcdist.optim import rates
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.parameter_server.asynchronous.base import AsynchronousServerExchange, per_push_context
from hpcdist.strategies.parameter_server.asynchronous.control_messages import ControlFields, ControlKind
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.strategies.parameter_server.transport import GRADIENT
from hpcdist.strategies.schedule.operations import Operation


class VersionVector:
    """Clocks of ``workers`` as one shard knows them; ``bound`` is s."""

    def __init__(self, workers: Iterable[int], bound: float) -> None:
        self.vector = dict.fromkeys(workers, 0)  # the clock of each worker, by its rank
        self._bound = bound
        self._away: set[int] = set()
        self._asking: dict[int, None] = {}  # a set that keeps the order of arrival

    @property
    def slowest(self) -> float:
        """Minimum over the workers that have not left; infinity when all have."""
        return min((clock for worker, clock in self.vector.items() if worker not in self._away), default=math.inf)

    def push(self, worker: int, clock: int) -> bool:
        """Record push ``clock``, counted from 1; return False for a repeated one, which must not be applied again.

        Raises ValueError when pushes in between are missing.
        """
        if clock <= self.vector[worker]:
            return False
        if clock != self.vector[worker] + 1:
            raise ValueError(f"push {clock} of worker {worker} came after push {self.vector[worker]}: one is missing")
        self.vector[worker] = clock
        return True

    def ask(self, worker: int) -> None:
        """Record that ``worker`` waits for an answer, to start the iteration of its clock."""
        self._asking[worker] = None

    def answerable(self) -> list[int]:
        """Return the workers that may be answered now, in the order of their requests, and end their wait."""
        workers = [worker for worker in self._asking if self.may_start(worker)]
        for worker in workers:
            del self._asking[worker]
        return workers

    def may_start(self, worker: int) -> bool:
        """Whether ``worker`` may start the iteration of its clock."""
        return self.vector[worker] - self.slowest <= self._bound

    def leave(self, worker: int) -> None:
        """Wait for ``worker`` no more."""
        self._away.add(worker)

    def rejoin(self, worker: int) -> int:
        """Count ``worker`` among those that are waited for again; return the clock from which it goes on.

        That is its own, or the slowest one's where the others are beyond it.
        """
        slowest = self.slowest
        if worker in self._away and slowest < math.inf:
            self.vector[worker] = max(self.vector[worker], int(slowest))
        self._away.discard(worker)
        return self.vector[worker]

    def convene(self, clocks: Mapping[int, int]) -> None:
        """Let all workers rejoin at once, each at its own of ``clocks``, after a rendezvous."""
        self._away = set(clocks)
        self.vector = dict.fromkeys(clocks, 0)
        for worker, clock in sorted(clocks.items(), key=lambda item: item[1]):  # nobody is beyond one who comes later
            self.vector[worker] = clock
            self.rejoin(worker)


class AsynchronousExchange(AsynchronousServerExchange):
    """Exchange of one rank under asp (``bound`` infinite) or ssp."""

    def __init__(self, context: RankContext, roles: Roles, bound: float, *, staleness_aware: bool) -> None:
        super().__init__(context, roles, per_push_context(context, len(roles.workers)))
        self._channel.answers |= {ControlKind.READ: self._on_read}
        self._bound, self._aware = bound, staleness_aware
        self._vector = VersionVector(roles.workers, bound)  # of this rank's shard
        self._read = dict.fromkeys(roles.workers, 0)  # updates that the values have that each worker was given
        self._staleness = dict.fromkeys(roles.workers, 0)
        self._scale = 1.0

    @property
    def seen(self) -> Mapping[int, int]:
        """The clock of each worker, as this server knows it."""
        return self._vector.vector

    def begin_update(self, scale: float) -> None:
        """Record the factor by which servers multiply this rank's gradient."""
        self._scale = scale

    def pull(self, op: Operation) -> None:
        """Let every server apply this rank's gradient, and wait for the new values; serve others meanwhile (local)."""
        self.meetings.consider()
        self.clock += 1
        self._request(ControlKind.PUSH, ControlFields(clock=self.clock, scale=self._scale), self.roles.servers)

    def _on_push(self, worker: int, what: ControlFields) -> None:
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

    def _on_read(self, worker: int, what: ControlFields) -> None:
        self._vector.ask(worker)
        self._answer_all()

    def _on_left(self, worker: int) -> None:
        self._vector.leave(worker)
        self._answer_all()

    def _answer_all(self) -> None:
        """Send the values to all workers that wait for them and may have them."""
        assert self.shard is not None
        for worker in self._vector.answerable():
            self._read[worker] = updates = self.shard.updates
            staleness, called = self._staleness[worker], self.meetings.due
            self._answer(worker, ControlFields(self.seen[worker], updates=updates, called=called, staleness=staleness))

    def _told(self, what: ControlFields) -> None:
        self.staleness = what.staleness

    def _factor(self, staleness: int) -> float:
        return 1.0 / max(1, staleness) if self._aware else 1.0

    def leave(self, clocks: Sequence[int], updates: int, calls: int) -> None:
        """Record the results of the rendezvous: clocks of the workers, updates, calls that were sent (local)."""
        super().leave(clocks, updates, calls)
        clock_of = dict(zip(self.roles.workers, self.clocks, strict=True))
        assert self.shard is None or self.seen == clock_of, (
            f"pushes {self.seen} came to server {self.rank} of {clock_of}"
        )
        self._vector.convene(clock_of)

    def part(self) -> None:
        """End the rendezvous: every rank goes on by itself, once it may (local)."""
        super().part()
        left = self.clock < self.context.total_steps
        if self.works and left and self.clock - min(self.clocks) > self._bound:
            self._request(ControlKind.READ, ControlFields(clock=self.clock), self.roles.servers)

    @property
    def share(self) -> float:
        """Part of a global batch that one update takes."""
        return 1 / len(self.roles.workers)

    @property
    def learning_rate(self) -> float:
        """Rate of the last update that this rank knows of (local)."""
        context = per_push_context(self.context, len(self.roles.workers))
        rate = rates.learning_rate(context.optimizer, max(1, self.updates), context.total_steps)
        return rate * self._factor(self.staleness)

    def state(self) -> dict[str, Any]:
        """Return clocks and updates as of the last rendezvous; ``count`` is for other architectures.

        In a rendezvous the version vectors of all shards are the same: these clocks.
        """
        return {"count": min(self.clocks), "clocks": self.clocks, "updates": self.updates}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the clocks; with another number of workers all go on from the slowest of them.

        A worker that is then too far ahead for the bound waits in `part`.
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
