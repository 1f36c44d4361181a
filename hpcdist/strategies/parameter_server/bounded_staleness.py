"""Asynchronous and stale synchronous servers (asp, ssp): workers wait for none, or only for far slower workers.

- Each push is the clipped mean gradient of one worker, and one update.
- A pull waits for the update by the worker's own push. Under ssp the server delays the answer, never a push.
- Servers do not wait for each other, so the tensors in one pull may have different versions.
- With W workers a run of N steps has N W updates at each server. Update u uses the learning rate of step u / W of N.
- The staleness tau of a gradient is the number of updates between sending the values and applying the gradient.
  ``staleness_aware`` divides the rate of that update by tau if tau > 1 (Zhang et al. 2015, arXiv:1511.05950; asp is
  their n-softsync with n = W).
- A repeated push is answered, but not applied again.

A worker's clock is the number of its pushes that the shard has applied. With a bound s (Ho et al. 2013, "More effective
distributed ML via a stale synchronous parallel parameter server", NIPS) a worker may start iteration c, counted from 0,
only if

    c - min over q of clock(q) <= s.

s = 0 is lock-step, s = infinity has no bound. The slowest worker is never delayed, so there is no deadlock.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcdist.optim import rates
from hpcdist.strategies.core.operations import Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.parameter_server.asynchronous import AsynchronousServerExchange, per_push_context
from hpcdist.strategies.parameter_server.control_messages import ControlFields, ControlKind
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.strategies.parameter_server.transport import GRADIENT


class VersionVector:
    """Step counts (clocks) of workers. A worker may be at most ``bound`` steps ahead of the slowest worker."""

    def __init__(self, workers: Iterable[int], bound: float) -> None:
        self.vector = dict.fromkeys(workers, 0)  # clock of each worker, by rank
        self._bound = bound
        self._away: set[int] = set()
        self._asking: dict[int, None] = {}  # an ordered set, in order of arrival

    @property
    def slowest(self) -> float:
        """Smallest step count of the running workers, or infinity if no worker runs."""
        return min((clock for worker, clock in self.vector.items() if worker not in self._away), default=math.inf)

    def push(self, worker: int, clock: int) -> bool:
        """Record push number ``clock`` of ``worker``. Return True, or False if this push was recorded before."""
        if clock <= self.vector[worker]:
            return False
        if clock != self.vector[worker] + 1:
            raise ValueError(
                f"worker {worker} sent push {clock} after push {self.vector[worker]}, expected push "
                f"{self.vector[worker] + 1}: pushes must arrive in order"
            )
        self.vector[worker] = clock
        return True

    def ask(self, worker: int) -> None:
        """Record that ``worker`` waits for permission to start its next step."""
        self._asking[worker] = None

    def answerable(self) -> list[int]:
        """Remove and return the waiting workers that may start a step, as a list in the order of their requests."""
        workers = [worker for worker in self._asking if self.may_start(worker)]
        for worker in workers:
            del self._asking[worker]
        return workers

    def may_start(self, worker: int) -> bool:
        """Return True if the staleness bound allows ``worker`` to start its next step."""
        return self.vector[worker] - self.slowest <= self._bound

    def leave(self, worker: int) -> None:
        """Record that ``worker`` has stopped, so that other workers do not wait for it."""
        self._away.add(worker)

    def rejoin(self, worker: int) -> int:
        """Let a stopped ``worker`` push again. Return its step count, raised to the slowest running worker's count."""
        slowest = self.slowest
        if worker in self._away and slowest < math.inf:
            self.vector[worker] = max(self.vector[worker], int(slowest))
        self._away.discard(worker)
        return self.vector[worker]

    def convene(self, clocks: Mapping[int, int]) -> None:
        """Let all workers push again after a pause. ``clocks``: dict {worker: step count}."""
        self._away = set(clocks)
        self.vector = dict.fromkeys(clocks, 0)
        for worker, clock in sorted(clocks.items(), key=lambda item: item[1]):  # in ascending order, so none is raised
            self.vector[worker] = clock
            self.rejoin(worker)


class AsynchronousExchange(AsynchronousServerExchange):
    """Parameter-server strategy with workers at most ``bound`` steps ahead of the slowest worker."""

    def __init__(self, context: RankContext, roles: Roles, bound: float, *, staleness_aware: bool) -> None:
        super().__init__(context, roles, per_push_context(context, len(roles.workers)))
        self._channel.answers |= {ControlKind.READ: self._on_read}
        self._bound, self._aware = bound, staleness_aware
        self._vector = VersionVector(roles.workers, bound)  # of this rank's shard
        self._read = dict.fromkeys(roles.workers, 0)  # number of updates in the values that each worker got
        self._staleness = dict.fromkeys(roles.workers, 0)
        self._scale = 1.0

    @property
    def seen(self) -> Mapping[int, int]:
        """Mapping {worker: number of pushes of this worker that this server has applied}."""
        return self._vector.vector

    def begin_update(self, scale: float) -> None:
        self._scale = scale

    def pull(self, op: Operation) -> None:
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
        assert self.shard is not None
        for worker in self._vector.answerable():
            self._read[worker] = updates = self.shard.updates
            staleness, called = self._staleness[worker], self.meetings.due
            self._answer(worker, ControlFields(self.seen[worker], updates=updates, called=called, staleness=staleness))

    def _told(self, what: ControlFields) -> None:
        self.staleness = what.staleness

    def _factor(self, staleness: int) -> float:
        return 1.0 / max(1, staleness) if self._aware else 1.0

    def leave(self, clocks: Sequence[int], updates: int, pause_requests: int) -> None:
        super().leave(clocks, updates, pause_requests)
        clock_of = dict(zip(self.roles.workers, self.clocks, strict=True))
        assert self.shard is None or self.seen == clock_of, (
            f"server {self.rank} has applied pushes {self.seen}, but the clocks are {clock_of}"
        )
        self._vector.convene(clock_of)

    def resume(self) -> None:
        """End a pause. A worker beyond the staleness bound then waits for slower workers."""
        super().resume()
        has_steps = self.clock < self.context.total_steps
        if self.works and has_steps and self.clock - min(self.clocks) > self._bound:
            self._request(ControlKind.READ, ControlFields(clock=self.clock), self.roles.servers)

    @property
    def share(self) -> float:
        """Fraction of the global batch in one update: 1 / number of workers."""
        return 1 / len(self.roles.workers)

    @property
    def learning_rate(self) -> float:
        context = per_push_context(self.context, len(self.roles.workers))
        rate = rates.learning_rate(context.optimizer, max(1, self.updates), context.total_steps)
        return rate * self._factor(self.staleness)

    def state(self) -> dict[str, Any]:
        return {"count": min(self.clocks), "clocks": self.clocks, "updates": self.updates}

    def restore(self, state: Mapping[str, Any]) -> None:
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
