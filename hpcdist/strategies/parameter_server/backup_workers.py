"""Backup workers (bsp without stragglers): apply the first N - b of N gradients, drop the late ones.

Chen et al. 2016 (arXiv:1604.00981), Algorithms 3 and 4. A late worker continues with the newest values. Gradients are
summed in rank order, averaged over samples, and clipped by the norm of the mean. Runs are not reproducible.

The first server decides for all servers (`Quorum`). No server waits in a collective.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcdist.collectives.reduction import ufunc
from hpcdist.collectives.segments import scratch
from hpcdist.optim import norms as optim_norms
from hpcdist.optim import rates
from hpcdist.strategies.core.operations import Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.parameter_server.asynchronous import AsynchronousServerExchange
from hpcdist.strategies.parameter_server.control_messages import ControlFields, ControlKind
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.strategies.parameter_server.transport import GRADIENT


class Quorum:
    """Decisions of the first server to apply or to drop the gradients of workers. Local."""

    # ``decision.workers`` of a `ControlFields` lists the workers whose gradients are applied, or dropped if
    # ``decision.dropped``. All servers follow. The applied sum is multiplied by ``decision.scale``.

    def __init__(self, workers: Iterable[int], spare: int) -> None:
        self._workers = set(workers)
        self._needed = len(self._workers) - spare
        self._away: set[int] = set()
        self._here: dict[int, int] = {}  # worker -> samples of its gradient for the current clock
        self.clock = 0
        self.dropped = 0  # number of dropped gradients

    def push(self, worker: int, clock: int, samples: int, divisor: int) -> list[ControlFields]:
        """Record the gradient of ``worker`` for step ``clock``. Return a list of decisions to apply or drop gradients.

        ``samples``: number of samples in the gradient. ``divisor``: number by which workers have divided the gradient.
        """
        if clock <= self.clock:
            return [self._drop(worker)]
        assert clock == self.clock + 1, "a worker continues at the clock in its reply"
        self._here[worker] = samples
        if len(self._here) < self._needed:
            return self._release()
        workers = tuple(sorted(self._here))
        total = sum(self._here.values())
        self._here.clear()
        self.clock += 1
        # The workers have divided their gradients by ``divisor``.
        return [ControlFields(self.clock, divisor / total if total else 0.0, workers=workers)]

    def leave(self, worker: int) -> list[ControlFields]:
        """Record that ``worker`` stops pushing. Return a list of the resulting decisions to apply or drop gradients."""
        self._away.add(worker)
        return self._release()

    def convene(self, clock: int) -> None:
        """End a pause. All workers then push again, starting with the gradient of step ``clock`` + 1."""
        self._away.clear()
        self.clock = clock

    def _release(self) -> list[ControlFields]:
        if len(self._workers - self._away) >= self._needed:
            return []
        turns = [self._drop(worker) for worker in sorted(self._here)]
        self._here.clear()
        return turns

    def _drop(self, worker: int) -> ControlFields:
        self.dropped += 1
        return ControlFields(self.clock, dropped=True, workers=(worker,))


class BackupExchange(AsynchronousServerExchange):
    """Parameter-server strategy with backup workers: a step does not wait for the slowest workers."""

    drops_late = True
    corrects = False  # the servers weigh a gradient by its samples

    def __init__(self, context: RankContext, roles: Roles, spare: int) -> None:
        super().__init__(context, roles, context)
        self._channel.answers |= {ControlKind.TURN: self._on_turn, ControlKind.NORM: self._on_norm}
        self._quorum = Quorum(roles.workers, spare) if self.rank == self._first else None
        self._turns: deque[ControlFields] = deque()
        self._summed = False  # whether the gradients of the first turn are summed
        self._norms: dict[int, dict[int, float]] = {}  # clock -> server -> squared norm of its part of the sum
        self.seen = dict.fromkeys(roles.workers, 0)  # clock that this server last sent to each worker
        self._weight = (0, 1)
        self.share = (len(roles.workers) - spare) / len(roles.workers)

    def weigh(self, samples: int, global_samples: int) -> int:
        self._weight = samples, global_samples
        return global_samples

    def begin_update(self, scale: float) -> None:
        """Ignore the clipping factor ``scale``, because the servers clip the mean gradient."""

    def pull(self, op: Operation) -> None:
        self.meetings.consider()
        samples, divisor = self._weight
        self._request(ControlKind.PUSH, ControlFields(self.clock + 1, samples=samples, divisor=divisor), [self._first])

    def _on_push(self, worker: int, what: ControlFields) -> None:
        assert self._quorum is not None
        self._decide(self._quorum.push(worker, what.clock, what.samples, what.divisor))

    def _on_left(self, worker: int) -> None:
        if self._quorum is not None:
            self._decide(self._quorum.leave(worker))

    def _decide(self, turns: Sequence[ControlFields]) -> None:
        for turn in turns:
            self._tell_servers(ControlKind.TURN, turn)
        self._turns.extend(turns)
        self._advance()

    def _tell_servers(self, kind: ControlKind, what: ControlFields) -> None:
        for server in self.roles.servers:
            if server != self.rank:
                self._channel.tell(server, kind, what)

    def _on_turn(self, server: int, what: ControlFields) -> None:
        self._turns.append(what)
        self._advance()

    def _on_norm(self, server: int, what: ControlFields) -> None:
        self._norms.setdefault(what.clock, {})[server] = what.scale
        self._advance()

    def _advance(self) -> None:
        while self._turns:
            turn = self._turns[0]
            if turn.dropped:
                self._discard(*turn.workers)
            elif not self._update(turn):
                return  # the norms of other servers are missing
            self._turns.popleft()
            assert self.shard is not None and self.shard.updates == turn.clock
            called = self.meetings.due
            for worker in turn.workers:
                self.seen[worker] = turn.clock
                self._answer(worker, ControlFields(turn.clock, updates=turn.clock, called=called, dropped=turn.dropped))

    def _update(self, turn: ControlFields) -> bool:
        # Returns False if other servers' norms are missing.
        shard, scale, limit = self.shard, turn.scale, self.context.optimizer.clip_norm
        normalizes = self.context.optimizer.normalize_gradient
        assert shard is not None
        if not self._summed:
            self._sum(turn.workers)
            self._summed = True
            if limit or normalizes:
                self._tell_norm(turn)
        if limit or normalizes:
            norms = self._norms[turn.clock]
            if len(norms) < len(self.roles.servers):
                return False
            total = sum(norms[server] for server in self.roles.servers)
            scale *= optim_norms.clip_scale(scale * scale * total, limit, normalize=normalizes)
            del self._norms[turn.clock]
        shard.step(shard.inbox, scale)
        self._summed = False
        if self.rank == self._first:
            self.updates = turn.clock
            self.meetings.due |= 0 < self.meet_at <= turn.clock
        self.meetings.consider()
        return True

    def _tell_norm(self, turn: ControlFields) -> None:
        assert self.shard is not None
        squared = optim_norms.sum_of_squares(self.shard.inbox, self.shard.parts)
        self._norms.setdefault(turn.clock, {})[self.rank] = squared
        self._tell_servers(ControlKind.NORM, ControlFields(turn.clock, scale=squared))

    def _sum(self, workers: Sequence[int]) -> None:
        assert self.shard is not None
        for part in self._served():
            total = self.shard.inbox.range(part)
            arrived, add = scratch("parameter_server.arrived", total.size, total.dtype, total), ufunc(total, "sum")
            for worker in workers:
                values = self.gradients.range(part) if worker == self.rank else arrived
                if worker != self.rank:
                    values = total if worker == workers[0] else arrived
                    self._values.recv(values, worker, GRADIENT)
                elif worker == workers[0]:
                    total[...] = values
                if worker != workers[0]:
                    add(total, values, total)

    def _told(self, what: ControlFields) -> None:
        self.clock, self.taken = what.clock, not what.dropped

    def leave(self, clocks: Sequence[int], updates: int, pause_requests: int) -> None:
        """During a pause, set the step counts of all workers to the number of server ``updates``. Collective.

        ``clocks``, ``pause_requests``: see `AsynchronousServerExchange.leave`.
        """
        super().leave([updates] * len(clocks), updates, pause_requests)
        if self._quorum is not None:
            self._quorum.convene(updates)
        # A worker has fewer steps: all workers receive the newest parameters.
        if min(clocks) < updates:
            self.refresh()
        if self.works:
            self.clock = updates

    @property
    def learning_rate(self) -> float:
        """Learning rate of the latest update on this rank."""
        return rates.learning_rate(self.context.optimizer, max(1, self.updates), self.context.total_steps)

    def state(self) -> dict[str, Any]:
        return {"count": min(self.clocks)}

    def restore(self, state: Mapping[str, Any]) -> None:
        count = int(state["count"])
        self.clock = self.updates = count
        self.clocks = [count] * len(self.roles.workers)
        self.seen = dict.fromkeys(self.roles.workers, count)
        if self._quorum is not None:
            self._quorum.convene(count)
        if self.shard is not None:
            self.shard.optimizer.restore({"count": count})
