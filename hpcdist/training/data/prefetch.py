"""Prefetching of batches: a thread reads the next ones while this one is computed.

`ReadAhead` runs any iterator in a thread, `Prefetcher` that of this rank's shares of the global batches. No message is
sent: the samples of a batch follow from the recipe, and those of this rank from its place on the data axis, or from
measured shares.
"""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import numpy as np

from hpcdist.arrays.ranges import Range
from hpcdist.comm.communicator import Communicator
from hpcdist.training.data.sampler import UNIFORM, Sampler, SampleShares, even_part
from hpcdist.training.data.samples import Batch
from hpcdist.training.data.source import Source

if TYPE_CHECKING:
    from hpcdist.training.recipe.recipe import Recipe

T = TypeVar("T")
PREFETCH_DEPTH = 2  # one batch ready and one being read hide the reading; more would only take memory
POLL_S = 0.1  # how long the thread sleeps on a full queue before it looks whether it was closed
CLOSE_S = 1.0  # how long `close` waits for a thread that is in a read


class _End:
    """Mark behind the last item, with the exception that ended the iteration, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class ReadAhead(Generic[T]):
    """Iterator over ``items``, which a thread reads at most ``depth`` ahead.

    An exception of the thread is raised in place of the item that it could not read. A context manager: leaving it ends
    the thread.
    """

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
        except BaseException as error:  # noqa: BLE001 - raised again where the items are taken
            # Behind the items before it in the queue: these are still handed out, so that the error comes at the step
            # that lacks its batch, on this rank as on others that read the same file.
            end = _End(error)
        self._put(end)

    def _put(self, item: T | _End) -> bool:
        """Append ``item``, once there is room; return False where the iterator was closed before."""
        # A put without a time limit could never end: `close` takes nothing out of the queue, so that the thread has to
        # look at the event itself.
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
            self._end = item  # kept: the thread has ended, and a further `get` would wait for ever
            if item.error is not None:
                raise item.error
        raise StopIteration

    def close(self) -> None:
        """End the thread; what it has read is dropped."""
        self._closed.set()
        self._end = self._end or _End(None)
        self._thread.join(CLOSE_S)  # it is a daemon: one that hangs in a file system must not hold up the end of a job

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def own_samples(recipe: "Recipe", data_axis: Communicator, batch: int, shares: SampleShares | None = None) -> Range:
    """Return the samples of this rank's replica in ``batch``, counted from 0, as a range of the batch (local)."""
    if shares is not None:
        return shares.own(batch, data_axis.rank)
    size = recipe.run.batches.size(batch)
    parts = recipe.run.logical_shards or size  # a logical shard stays whole: its sum is a leaf of the fixed tree
    each, some = size // parts, even_part(parts, data_axis.size, data_axis.rank)
    return Range(each * some.start, each * some.stop)


class Prefetcher(ReadAhead[Batch]):
    """Iterator over this rank's shares of the global batches of steps ``first_step`` to ``steps - 1``, from 0.

    With ``reads`` false nothing is read: batches have as many samples, without columns. ``shares`` are the measured
    ones, None for even ones. ``rule`` is that of the order; see `sampler`.
    """

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
        sampler = Sampler(source.training, recipe.run.seed, rule)

        def batch(step: int) -> Batch:
            # Called in the thread, up to the depth of the queue and one item ahead of the step that is made: `shares`
            # may only change for batches beyond that (`sampler.READ_AHEAD`).
            part = own_samples(recipe, data_axis, step, shares)
            blank = np.empty((part.size, 0), np.uint8)
            return sampler.batch(batches.samples_before(step) + part.start, part.size) if reads else (blank, blank)

        super().__init__(batch(step) for step in range(first_step, steps))
