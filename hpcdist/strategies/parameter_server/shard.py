"""What a server holds: its part of the parameters, whole tensors, and the optimizer's state of them."""

import time
from collections.abc import Sequence
from dataclasses import replace

from hpcdist.arrays import backend
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.seat import Seat


def per_push(seat: Seat, workers: int) -> Seat:
    """Return ``seat`` for servers that update ``workers`` times where a lock-step run would once.

    The schedule of the learning rate is that of the steps of a worker: it goes by updates / workers.
    """
    optimizer = replace(seat.optimizer, warmup_steps=seat.optimizer.warmup_steps * workers)
    return replace(seat, optimizer=optimizer, total_steps=seat.total_steps * workers)


class Shard:
    """The parameters of ``parts``, and their updates. Nothing here communicates.

    They lie apart from the copy with which a colocated rank computes, so that a gradient is always one of parameters
    that stood still. ``inbox`` takes the gradient of another rank, or the sum of several. Tensors are whole, so
    layer-wise rates need nobody else's norms.
    """

    def __init__(self, seat: Seat, parts: Sequence[Range]) -> None:
        self.parts = parts
        self.parameters, self.inbox = seat.store("parameters", parts), seat.store("gradients", parts)
        self.optimizer = seat.build_optimizer(parts)
        self.busy_s = 0.0  # spent in updates

    @property
    def updates(self) -> int:
        """Number of updates so far: the version of the values."""
        return self.optimizer.count

    def step(self, gradients: FlatStore, scale: float, factor: float = 1.0) -> None:
        """Step along ``scale * gradients`` at ``factor`` times the rate; the parts of ``gradients`` are overwritten."""
        began = time.perf_counter()
        self.optimizer.begin_step(factor)
        for part in self.parts:
            self.optimizer.direction(part, self.parameters, gradients, scale)
        norms = self.optimizer.partial_norms() if self.optimizer.needs_norms else None
        for part in self.parts:
            self.optimizer.apply(part, self.parameters, gradients, None, norms)
        backend.synchronise(self.parameters.array)  # the time of a GPU counts; the answer would wait for it anyway
        self.busy_s += time.perf_counter() - began

    def stores(self) -> dict[str, FlatStore]:
        """Return what a checkpoint keeps of it, by kind."""
        return {"parameters": self.parameters} | {f"optimizer.{n}": s for n, s in self.optimizer.slots.items()}
