"""The bound holds for any message order, and no worker waits forever, wherever a worker stops."""

import math
import random
from collections import deque

import pytest

from hpcdist.strategies.parameter_server.bounded_staleness import VersionVector

SCHEDULES = 10_000


class World:
    """Workers, and shards that decide with `Clocks` only. Applied and read clocks are recorded separately.


    Messages of a worker to one shard stay in order, messages to several shards do not. ``stops`` is the clock at which
    a worker leaves. ``returns``, with a single shard, makes it come back later.
    """

    def __init__(self, draw):
        self.draw = draw
        self.workers, self.steps = range(draw.randint(1, 4)), draw.randint(1, 5)
        self.shards, self.bound = draw.randint(1, 2), draw.choice([0, 1, 2, 3, math.inf])
        self.clocks = [VersionVector(self.workers, self.bound) for _ in range(self.shards)]
        self.applied = [dict.fromkeys(self.workers, 0) for _ in range(self.shards)]
        self.lines = {(w, shard): deque() for w in self.workers for shard in range(self.shards)}
        self.made = dict.fromkeys(self.workers, 0)  # iterations whose push was sent
        self.missing = {worker: set() for worker in self.workers}  # shards that owe an answer
        stopping = draw.random() < 0.7
        self.stops = {w: draw.randint(0, self.steps) for w in self.workers if stopping and draw.random() < 0.5}
        self.returns = self.shards == 1 and draw.random() < 0.5
        self.gone = set()
        self.away_at = [set() for _ in range(self.shards)]

    def possible(self):
        """Return the possible next events: a message arrives, a worker ends its iteration, or a worker stops."""
        results = [("comes", worker, shard) for (worker, shard), line in self.lines.items() if line]
        for worker in self.workers:
            if worker in self.gone:
                idle = self.returns and not self.lines[worker, 0] and self.made[worker] < self.steps
                results += [("returns", worker, 0)] if idle and worker in self.away_at[0] else []
            elif not self.missing[worker] and self.made[worker] < self.steps:
                results.append(("ends", worker, 0))
        return results

    def happen(self, what, worker, shard):
        if what == "comes":
            self.receive(worker, shard)
        elif what == "returns":
            self.gone.discard(worker)
            self.away_at[0].discard(worker)
            there = [self.applied[0][w] for w in self.workers if w not in self.away_at[0] and w != worker]
            self.made[worker] = self.clocks[0].rejoin(worker)
            assert self.made[worker] == max(self.applied[0][worker], min(there, default=0))
            self.applied[0][worker] = self.made[worker]
            self.stops.pop(worker)
            self.clocks[0].ask(worker)
            self.missing[worker] = {0}
            self.answer(0)
        elif self.stops.get(worker) == self.made[worker]:
            self.gone.add(worker)
            self.tell(worker, "leave")
        else:
            self.made[worker] += 1
            self.missing[worker] = set(range(self.shards))
            self.tell(worker, "push")

    def tell(self, worker, what):
        for shard in range(self.shards):
            self.lines[worker, shard].append((what, self.made[worker]))
            if what == "push" and self.draw.random() < 0.2:
                self.lines[worker, shard].append((what, self.made[worker]))  # the same once more

    def receive(self, worker, shard):
        what, clock = self.lines[worker, shard].popleft()
        if what == "leave":
            self.clocks[shard].leave(worker)
            self.away_at[shard].add(worker)
        elif self.clocks[shard].push(worker, clock):
            self.applied[shard][worker] += 1
            self.clocks[shard].ask(worker)
        else:
            assert clock <= self.applied[shard][worker], "only what was applied before is refused"
        self.answer(shard)

    def answer(self, shard):
        for worker in self.clocks[shard].answerable():
            assert worker in self.workers and shard in self.missing[worker], "answered once"
            self.missing[worker].discard(shard)
            clock, there = self.made[worker], [w for w in self.workers if w not in self.away_at[shard]]
            assert self.applied[shard][worker] == clock, "it reads its own writes"
            assert all(self.applied[shard][other] >= clock - self.bound for other in there), "all up to c - s - 1"

    def check_progress(self):
        """Check, when no event is possible, that all workers that did not stop have made all their steps."""
        for worker in self.workers:
            if worker not in self.gone:
                assert not self.missing[worker] and self.made[worker] == self.steps, "it waits for ever"


@pytest.mark.full
def test_no_read_violates_the_bound_and_no_worker_hangs():
    met = set()
    held = stopped = returned = 0
    for seed in range(SCHEDULES):
        world = World(random.Random(seed))
        while choice := world.possible():
            what, worker, shard = world.draw.choice(choice)
            world.happen(what, worker, shard)
            returned += what == "returns"
            held += any(world.missing.values())
        world.check_progress()
        stopped += len(world.gone)
        met.add(world.bound)
    assert met == {0, 1, 2, 3, math.inf} and held > SCHEDULES and min(stopped, returned) > SCHEDULES // 20


def test_answers_wait_for_the_slowest_and_keep_the_order():
    clocks = VersionVector([3, 5, 7], 1)
    for worker in (7, 5):
        for clock in (1, 2):
            assert clocks.push(worker, clock)
        clocks.ask(worker)
    assert clocks.slowest == 0 and clocks.answerable() == []
    assert clocks.push(3, 1)
    assert clocks.answerable() == [7, 5] and clocks.answerable() == []
    assert clocks.vector == {3: 1, 5: 2, 7: 2}


def test_absent_worker_is_not_waited_for_and_returns_at_the_clock():
    clocks = VersionVector([0, 1], 0)
    clocks.push(0, 1)
    clocks.ask(0)
    assert clocks.answerable() == []
    clocks.leave(1)
    assert clocks.answerable() == [0]
    clocks.push(0, 2)
    assert clocks.rejoin(1) == 2 and not clocks.push(1, 2) and clocks.push(1, 3)
    clocks.leave(0)
    clocks.leave(1)
    assert clocks.slowest == math.inf
    assert clocks.rejoin(0) == 2, "nobody is there, so it goes on from its own"


def test_workers_continue_from_their_clocks_after_a_meeting():
    clocks = VersionVector(range(3), 1)
    for worker in range(3):
        clocks.leave(worker)
    clocks.convene({0: 4, 1: 2, 2: 3})
    assert clocks.vector == {0: 4, 1: 2, 2: 3} and clocks.slowest == 2
    assert [clocks.may_start(worker) for worker in range(3)] == [False, True, True]


def test_missing_push_raises():
    with pytest.raises(ValueError, match="worker 0 sent push 2 after push 0"):
        VersionVector([0], 1).push(0, 2)
