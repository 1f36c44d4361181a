"""How far workers may run apart: the version vector of one shard, and who may read it now. Pure: no message, no array.

A worker's clock is the number of its pushes that the shard has applied. With a bound s (Ho et al. 2013, "More
effective distributed ML via a stale synchronous parallel parameter server", NIPS; Petuum, arXiv:1312.7651) a worker
may start iteration c, counted from 0, only if

    c - min over q of clock(q) <= s.

A worker asks by the pull that follows its push c - 1, and it is the *answer* that waits: a push never does. So a read
at clock c has every update of iterations up to c - s - 1 of all workers, all of the reader's own, and perhaps newer
ones. s = 0 is lock-step, s = infinity no bound at all.

Each shard decides by its own vector: a worker starts when all shards have answered. That is enough: what holds of each
shard holds of all that was read, and the slowest worker is never held anywhere, so somebody can always go on.

A worker that `leave`s, because it is done or dead or pushes no more before a meeting, is not waited for. One that
comes back is not waited for either for what the others did meanwhile: it starts at the minimum of those who are there.
"""

import math
from collections.abc import Iterable, Mapping


class Clocks:
    """The clocks of ``workers`` as one shard knows them; ``bound`` is s."""

    def __init__(self, workers: Iterable[int], bound: float) -> None:
        self._clocks = dict.fromkeys(workers, 0)
        self._bound = bound
        self._away: set[int] = set()
        self._asking: dict[int, None] = {}  # a set that keeps the order of arrival

    @property
    def vector(self) -> Mapping[int, int]:
        """The clock of each worker, by its rank."""
        return self._clocks

    @property
    def slowest(self) -> float:
        """The minimum over the workers that are there; infinity when nobody is."""
        return min((clock for worker, clock in self._clocks.items() if worker not in self._away), default=math.inf)

    def push(self, worker: int, clock: int) -> bool:
        """Take note of push ``clock``, counted from 1; False when it was applied before: it is not to be added again.

        Raises ValueError when pushes in between are missing.
        """
        if clock <= self._clocks[worker]:
            return False
        if clock != self._clocks[worker] + 1:
            raise ValueError(f"push {clock} of worker {worker} came after push {self._clocks[worker]}: one is missing")
        self._clocks[worker] = clock
        return True

    def ask(self, worker: int) -> None:
        """Take note that ``worker`` waits for an answer: it wants to start the iteration of its clock."""
        self._asking[worker] = None

    def answerable(self) -> list[int]:
        """Return those who may be answered now, in the order in which they asked; they do not wait any more."""
        found = [worker for worker in self._asking if self.may_start(worker)]
        for worker in found:
            del self._asking[worker]
        return found

    def may_start(self, worker: int) -> bool:
        """Whether ``worker`` may start the iteration of its clock."""
        return self._clocks[worker] - self.slowest <= self._bound

    def leave(self, worker: int) -> None:
        """Wait for ``worker`` no more."""
        self._away.add(worker)

    def rejoin(self, worker: int) -> int:
        """Count ``worker`` among those who are there again; return the clock from which it goes on.

        That is its own, or the slowest one's where the others are beyond it.
        """
        slowest = self.slowest
        if worker in self._away and slowest < math.inf:
            self._clocks[worker] = max(self._clocks[worker], int(slowest))
        self._away.discard(worker)
        return self._clocks[worker]

    def convene(self, clocks: Mapping[int, int]) -> None:
        """Let all workers come back at once, each at its own of ``clocks``: after a meeting, which nobody missed."""
        self._away = set(clocks)
        self._clocks = dict.fromkeys(clocks, 0)
        for worker, clock in sorted(clocks.items(), key=lambda item: item[1]):  # nobody is beyond one who comes later
            self._clocks[worker] = clock
            self.rejoin(worker)
