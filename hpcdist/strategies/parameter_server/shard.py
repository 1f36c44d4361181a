"""What a server holds under asp: its part of the parameters, and how far each worker has come."""

import time
from collections.abc import Sequence
from dataclasses import replace

from hpcdist.arrays import backend
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.seat import Seat


def per_update(seat: Seat, workers: int) -> Seat:
    """Return ``seat`` for servers that update ``workers`` times where a lock-step run would once.

    The schedule of the learning rate is that of the steps of a worker: it goes by updates / workers.
    """
    optimizer = replace(seat.optimizer, warmup_steps=seat.optimizer.warmup_steps * workers)
    return replace(seat, optimizer=optimizer, total_steps=seat.total_steps * workers)


class Shard:
    """The parameters of ``parts``, updated once for every push of every worker. Nothing here communicates.

    They lie apart from the copy with which a colocated rank computes, so that a gradient is always one of parameters
    that stood still. ``inbox`` takes the gradient of another rank.
    """

    def __init__(self, seat: Seat, parts: Sequence[Range], workers: Sequence[int]) -> None:
        self.parts = parts
        self.parameters, self.inbox = seat.store("parameters", parts), seat.store("gradients", parts)
        self.optimizer = per_update(seat, len(workers)).build_optimizer(parts)
        self.clocks = dict.fromkeys(workers, 0)  # the last push of each that was applied
        self.busy_s = 0.0  # spent in updates

    @property
    def updates(self) -> int:
        """Number of updates, over all workers."""
        return self.optimizer.count

    def update(self, worker: int, clock: int, scale: float, gradients: FlatStore) -> bool:
        """Step along ``scale`` times push ``clock`` of ``worker``; False when that was applied before.

        The parts of ``gradients`` are overwritten.
        """
        if clock <= self.clocks[worker]:
            return False
        began = time.perf_counter()
        self.clocks[worker] = clock
        self.optimizer.begin_step()
        for part in self.parts:
            self.optimizer.direction(part, self.parameters, gradients, scale)
        for part in self.parts:
            self.optimizer.apply(part, self.parameters, gradients)
        backend.synchronise(self.parameters.array)  # the time of a GPU counts; the answer would wait for it anyway
        self.busy_s += time.perf_counter() - began
        return True

    def stores(self) -> dict[str, FlatStore]:
        """Return what a checkpoint keeps of it, by kind."""
        return {"parameters": self.parameters} | {f"optimizer.{n}": s for n, s in self.optimizer.slots.items()}
