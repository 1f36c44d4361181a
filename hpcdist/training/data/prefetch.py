"""Prefetching of batches: a thread reads the next batches during the current step.

No messages are needed: a rank's samples follow from the recipe and its rank on the data axis, or from measured shares.
"""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import numpy as np

from hpcdist.arrays.ranges import Range
from hpcdist.comm.communicator import Communicator
from hpcdist.training.data.mixture import sampler_of
from hpcdist.training.data.sampler import UNIFORM, SampleShares, even_part
from hpcdist.training.data.samples import Batch
from hpcdist.training.data.source import Source

if TYPE_CHECKING:
    from hpcdist.training.recipe.recipe import Recipe

T = TypeVar("T")
PREFETCH_DEPTH = 2  # one batch ready and one being read hide the reading
POLL_S = 0.1  # interval at which a thread with a full queue checks for `close`
CLOSE_S = 1.0  # time that `close` waits for a thread in a read


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class ReadAhead(Generic[T]):
    """Iterator over ``items``, also a context manager. A thread reads ahead into a queue of ``depth`` items."""

    def __init__(self, items: Iterable[T], depth: int = PREFETCH_DEPTH) -> None:
        self._queue: queue.Queue[T | _End] = queue.Queue(depth)
        self._closed = threading.Event()
        self._end: _End | None = None
        self._thread = threading.Thread(target=self._read, args=(items,), name="read-ahead", daemon=True)
        self._thread.start()

    def _read(self, items: Iterable[T]) -> None:
        end = _End(None)
        try:
            for item in items:
                if not self._put(item):
                    return
        except BaseException as error:  # noqa: BLE001 - raised again in `__next__`
            # The items before the error are still delivered, so that the error is raised at the step that lacks its
            # batch, on this rank as on other ranks that read the same file.
            end = _End(error)
        self._put(end)

    def _put(self, item: T | _End) -> bool:
        # With a timeout: `close` does not empty the queue, so the thread must check the event.
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._end is None:
            item = self._queue.get()
            if not isinstance(item, _End):
                return item
            self._end = item  # the thread has ended: another `get` would block forever
            if item.error is not None:
                raise item.error
        raise StopIteration

    def close(self) -> None:
        """End the thread, and drop the items in the queue."""
        self._closed.set()
        self._end = self._end or _End(None)
        self._thread.join(CLOSE_S)  # a daemon thread that hangs in the file system must not delay the exit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def own_samples(recipe: "Recipe", data_axis: Communicator, batch: int, shares: SampleShares | None = None) -> Range:
    """Return the range of this replica's samples within global batch number ``batch`` (from 0). Local.

    ``data_axis``: communicator over the replicas. ``shares``: samples per replica, or None to divide batches evenly.
    """
    if shares is not None:
        return shares.range_of(batch, data_axis.rank)
    size = recipe.run.batches.size(batch)
    parts = recipe.run.logical_shards or size  # a logical shard is not split: its sum is a leaf of the fixed tree
    unit, units = size // parts, even_part(parts, data_axis.size, data_axis.rank)
    return Range(unit * units.start, unit * units.stop)


class Prefetcher(ReadAhead[Batch]):
    """Iterator over this replica's batches, for batch numbers ``first_step`` to ``steps - 1``. A thread reads ahead."""

    # ``reads`` False: placeholders without data. ``shares``: samples of each replica (None: equal). ``rule``: for
    # `SampleOrder`.
    def __init__(
        self,
        source: Source,
        recipe: "Recipe",
        data_axis: Communicator,
        first_step: int,
        steps: int,
        *,
        reads: bool = True,
        shares: SampleShares | None = None,
        rule: int = UNIFORM,
    ) -> None:
        batches = recipe.run.batches
        sampler = sampler_of(source.training, recipe.run.seed, rule)

        def batch(step: int) -> Batch:
            # Runs in the thread, at most the queue depth plus one item ahead of the current step: `shares` may only
            # change for later batches (`sampler.READ_AHEAD`).
            part = own_samples(recipe, data_axis, step, shares)
            blank = np.empty((part.size, 0), np.uint8)
            return sampler.batch(batches.samples_before(step) + part.start, part.size) if reads else (blank, blank)

        super().__init__(batch(step) for step in range(first_step, steps))
