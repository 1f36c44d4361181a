"""Backup workers ("bsp" but for stragglers): take the first N - b of N gradients, drop the late ones.

Chen et al. 2016 (arXiv:1604.00981), Algorithms 3 and 4. Late gradients are never added to another clock; the late
worker goes on at the current step with the newest values. Gradients are summed in the order of the ranks and divided
by the number of samples that were taken: their exact mean, clipped by its norm. The order of arrival decides which
are taken and nothing else; it depends on time, so runs are not reproducible.

    worker        FORWARD BACKWARD PUSH ...   AGREE (with itself)   PULL: tell the first server, wait for all
    first server  decides: a turn (`ControlKind.TURN`); sends it to the other servers
    every server  carries out the turns in their order: sum, norm (sent to the other servers), update, answer

The first server decides for all (`Quorum`), so all servers take the same gradients for a clock; and since turns are
carried out in one order, a late worker reads the same version from all of them. A server takes gradients off the wire
in its turn only: one buffer is enough for the sum, and gradients wait where they are. Nobody waits in a collective: a
server that lacks the norms of others goes on with what else it does.

In a step a worker that is taken sends what it sends under bsp, and the first server control messages of a hundred
bytes besides.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcdist.collectives.reduction import ufunc
from hpcdist.collectives.segments import scratch
from hpcdist.optim import norms as optim_norms
from hpcdist.optim import rates
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.parameter_server.asynchronous.base import AsynchronousServerExchange
from hpcdist.strategies.parameter_server.asynchronous.control_messages import ControlFields, ControlKind
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.strategies.parameter_server.transport import GRADIENT
from hpcdist.strategies.schedule.operations import Operation


class Quorum:
    """Decisions of the first server: a step waits for all ``workers`` but ``spare`` of them.

    In a turn the gradients of ``workers`` (ascending) are summed, the sum is multiplied by ``scale``, and the update
    leads to ``clock``; or the gradient of the one worker is ``dropped``. These workers are then answered, and go on at
    ``clock``.
    """

    def __init__(self, workers: Iterable[int], spare: int) -> None:
        self._workers = set(workers)
        self._needed = len(self._workers) - spare
        self._away: set[int] = set()
        self._here: dict[int, int] = {}  # worker -> samples of its gradient for this clock
        self.clock = 0
        self.dropped = 0  # gradients, so far

    def push(self, worker: int, clock: int, samples: int, divisor: int) -> list[ControlFields]:
        """Record the gradient of ``worker`` for the update to ``clock``; return the turns that follow from it.

        It is the sum over ``samples`` samples, divided by ``divisor``: by the samples of all workers together. So with
        all of them taken the scale is exactly 1.
        """
        if clock <= self.clock:
            return [self._drop(worker)]
        assert clock == self.clock + 1, "a worker goes on at the clock that it was told"
        self._here[worker] = samples
        if len(self._here) < self._needed:
            return self._release()
        taken = tuple(sorted(self._here))
        total = sum(self._here.values())
        self._here.clear()
        self.clock += 1
        return [ControlFields(self.clock, divisor / total if total else 0.0, workers=taken)]

    def leave(self, worker: int) -> list[ControlFields]:
        """Record that ``worker`` pushes no more before a rendezvous; return the turns that follow from it."""
        self._away.add(worker)
        return self._release()

    def convene(self, clock: int) -> None:
        """Let all workers go on at ``clock``, after a rendezvous."""
        self._away.clear()
        self.clock = clock

    def _release(self) -> list[ControlFields]:
        """Return a drop for each waiting worker, where too many have left for this clock to be complete."""
        if len(self._workers - self._away) >= self._needed:
            return []
        turns = [self._drop(worker) for worker in sorted(self._here)]
        self._here.clear()
        return turns

    def _drop(self, worker: int) -> ControlFields:
        self.dropped += 1
        return ControlFields(self.clock, dropped=True, workers=(worker,))


class BackupExchange(AsynchronousServerExchange):
    """Exchange of one rank with backup workers: ``spare`` of the workers are not waited for."""

    drops_late = True
    corrects = False  # its servers weigh a gradient by its samples

    def __init__(self, context: RankContext, roles: Roles, spare: int) -> None:
        super().__init__(context, roles, context)
        self._channel.answers |= {ControlKind.TURN: self._on_turn, ControlKind.NORM: self._on_norm}
        self._quorum = Quorum(roles.workers, spare) if self.rank == self._first else None
        self._turns: deque[ControlFields] = deque()
        self._summed = False  # whether the gradients of the first turn are summed
        self._norms: dict[int, dict[int, float]] = {}  # clock -> server -> squared norm of its part of the sum
        self.seen = dict.fromkeys(roles.workers, 0)  # clock of each worker, as this server has sent it
        self._weight = (0, 1)
        self.share = (len(roles.workers) - spare) / len(roles.workers)

    def weigh(self, samples: int, batch: int) -> int:
        """Divide by the samples of all workers, as bsp does; the servers know how many of them they took (local)."""
        self._weight = samples, batch
        return batch

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step; servers clip the mean of the gradients that they take."""

    def pull(self, op: Operation) -> None:
        """Tell the first server that the gradient is complete, and wait for the new values (local)."""
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
        """Send the decisions of the first server to the other servers, and carry them out."""
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
        """Carry out the turns whose norms have come from the other servers."""
        while self._turns:
            turn = self._turns[0]
            if turn.dropped:
                self._discard(*turn.workers)
            elif not self._update(turn):
                return
            self._turns.popleft()
            assert self.shard is not None and self.shard.updates == turn.clock
            called = self.meetings.due
            for worker in turn.workers:
                self.seen[worker] = turn.clock
                self._answer(worker, ControlFields(turn.clock, updates=turn.clock, called=called, dropped=turn.dropped))

    def _update(self, turn: ControlFields) -> bool:
        """Update by the mean of the taken gradients; return False while norms of other servers are missing."""
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
        own = optim_norms.sum_of_squares(self.shard.inbox, self.shard.parts)
        self._norms.setdefault(turn.clock, {})[self.rank] = own
        self._tell_servers(ControlKind.NORM, ControlFields(turn.clock, scale=own))

    def _sum(self, workers: Sequence[int]) -> None:
        """Sum the gradients of ``workers``, the first one's first."""
        assert self.shard is not None
        for part in self._served():
            total = self.shard.inbox.range(part)
            arrived, add = scratch("parameter_server.arrived", total.size, total.dtype, total), ufunc(total, "sum")
            for worker in workers:
                own = self.gradients.range(part) if worker == self.rank else arrived
                if worker != self.rank:
                    own = total if worker == workers[0] else arrived
                    self._values.recv(own, worker, GRADIENT)
                elif worker == workers[0]:
                    total[...] = own
                if worker != workers[0]:
                    add(total, own, total)

    def _told(self, what: ControlFields) -> None:
        self.clock, self.taken = what.clock, not what.dropped

    def leave(self, clocks: Sequence[int], updates: int, calls: int) -> None:
        """Record the results of the rendezvous: clocks of the workers, updates, calls. Collective over the world.

        A late worker that called before the others made their last step has missed it, and goes on where they are.
        """
        super().leave([updates] * len(clocks), updates, calls)
        if self._quorum is not None:
            self._quorum.convene(updates)
        if min(clocks) < updates:
            self.refresh()
        if self.works:
            self.clock = updates

    @property
    def learning_rate(self) -> float:
        """Rate of the last update that this rank knows of (local)."""
        return rates.learning_rate(self.context.optimizer, max(1, self.updates), self.context.total_steps)

    def state(self) -> dict[str, Any]:
        """Return the number of updates: the clock of all workers in a rendezvous."""
        return {"count": min(self.clocks)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the clock; whatever wrote the state, all workers go on from the slowest of them."""
        count = int(state["count"])
        self.clock = self.updates = count
        self.clocks = [count] * len(self.roles.workers)
        self.seen = dict.fromkeys(self.roles.workers, count)
        if self._quorum is not None:
            self._quorum.convene(count)
        if self.shard is not None:
            self.shard.optimizer.restore({"count": count})
