"""Which gradients a clock takes when there are backup workers. Pure: no message, no array.

Chen et al. 2016 (arXiv:1604.00981), Algorithms 3 and 4: of N workers the first N - b that push for a clock are taken,
and those that come later for it are dropped; they are never added to another clock. One place decides for all servers,
and what it decides is a list of `Turn`s that every server carries out in the same order. So all servers take the same
gradients, and whoever reads between two turns reads the same version everywhere.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One entry of the list.

    Sum the gradients of ``taken`` (ascending), multiply the sum by ``scale`` and step to the values of ``clock``; or,
    where nobody is taken, drop the gradient of ``dropped``. Then answer: these workers go on at ``clock``.
    """

    clock: int
    taken: tuple[int, ...] = ()
    scale: float = 1.0
    dropped: int = -1


class Quorum:
    """The decisions for ``workers``, of which ``spare`` are not waited for; ``clock`` updates are decided."""

    def __init__(self, workers: Iterable[int], spare: int) -> None:
        self._workers = set(workers)
        self._needed = len(self._workers) - spare
        self._away: set[int] = set()
        self._here: dict[int, int] = {}  # worker -> samples of its gradient for this clock
        self.clock = 0
        self.dropped = 0  # gradients, so far

    def push(self, worker: int, clock: int, samples: int, divisor: int) -> list[Turn]:
        """Take note of the gradient of ``worker`` for the update to ``clock``; return what is decided by it.

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
        return [Turn(self.clock, taken, divisor / total if total else 0.0)]

    def leave(self, worker: int) -> list[Turn]:
        """Take note that ``worker`` pushes no more before a meeting; return what is decided by it."""
        self._away.add(worker)
        return self._release()

    def convene(self, clock: int) -> None:
        """Let all workers come back at ``clock``: after a meeting."""
        self._away.clear()
        self.clock = clock

    def _release(self) -> list[Turn]:
        """Let those go who would wait for ever, because too many have left for this clock to be complete."""
        if len(self._workers - self._away) >= self._needed:
            return []
        turns = [self._drop(worker) for worker in sorted(self._here)]
        self._here.clear()
        return turns

    def _drop(self, worker: int) -> Turn:
        self.dropped += 1
        return Turn(self.clock, dropped=worker)
