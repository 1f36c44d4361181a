"""The context axis of one rank: its part of each sample, and the blocks that travel round the ring."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from hpcdist.arrays.backend import Array, ArrayGroup, is_device, namespace
from hpcdist.arrays.ranges import Range
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.errors import DataError
from hpcdist.models.stage import Saved
from hpcdist.strategies.context.passes import pieces, tokens
from hpcdist.strategies.schedule.observers import NanFinder

KEYS, GRADIENTS = range(2)  # tags
SLOTS: Final = 2  # blocks of a kind in memory: one that is used, one on its way


class ContextAxis:
    """The ranks ``comm`` that share the samples of ``context`` tokens, each with its own pieces.

    ``method`` is that of attention, never "auto". ``watch`` looks for this rank's own bad values: where those of
    another rank come in, it stops. Methods are local unless they say otherwise.
    """

    def __init__(self, comm: Communicator, context: int, method: str = "ring", watch: NanFinder | None = None) -> None:
        self.comm, self.context, self.method = comm, context, method
        self.rank, self.size = comm.rank, comm.size
        self.pieces = pieces(context, comm.size)
        self.own = self.pieces[comm.rank]
        self.tokens, self.most_tokens = tokens(self.own), max(map(tokens, self.pieces))
        self.watch = NanFinder() if watch is None else watch
        self._spent_s = 0.0

    def cut(self, samples: Array) -> Array:
        """Return this rank's tokens of ``samples`` (n, context, ...), contiguous; without columns as they are.

        Raises DataError for samples of another length.
        """
        if not isinstance(samples, ArrayGroup) and samples.ndim == 2 and samples.shape[1] == 0:
            return samples  # of a rank that does not look at them
        if isinstance(samples, ArrayGroup) or samples.ndim < 2 or samples.shape[1] != self.context:
            got = "several arrays" if isinstance(samples, ArrayGroup) else f"a batch of shape {samples.shape}"
            raise DataError(
                f"parallel.context = {self.size} cuts samples of {self.context} tokens (data.context), and got {got}; "
                "give (samples, tokens) inputs and targets, or set data.context"
            )
        return self.rows(samples, 1)

    def rows(self, whole: Array, dim: int = 0) -> Array:
        """Return the elements of ``whole`` at this rank's places along ``dim``, a new array."""
        before = (slice(None),) * dim
        parts = [whole[(*before, slice(place, place + end - start))] for start, end, place in self.own]
        taken: Array = namespace(whole).concatenate(parts, axis=dim)
        return taken

    def wait(self, requests: Sequence[Request], like: Array) -> None:
        """Wait for messages of arrays such as ``like``, and count the time."""
        begin = time.perf_counter()
        for request in requests:
            request.wait()
        if not is_device(like):  # a call there waits for the computation before it
            self._spent_s += time.perf_counter() - begin

    def all_to_all(
        self, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
    ) -> None:
        """Exchange parts of ``send`` with all ranks; see `Communicator.all_to_all`. Collective over the axis."""
        was_finite, begin = self.watch.sees_only_finite(send), time.perf_counter()
        self.comm.all_to_all(send, receive, send_ranges, receive_ranges)
        if not is_device(send):
            self._spent_s += time.perf_counter() - begin
        if was_finite:
            self.watch.distrust(receive)

    def all_gather(self, own: np.ndarray) -> np.ndarray:
        """Return the integers ``own`` of all ranks, (ranks, ...). Collective over the axis."""
        whole, begin = np.empty((self.size, *own.shape), own.dtype), time.perf_counter()
        whole[self.rank] = own
        self.comm.all_gather(whole.reshape(-1), [Range(r * own.size, (r + 1) * own.size) for r in range(self.size)])
        self._spent_s += time.perf_counter() - begin
        return whole

    def taken_s(self) -> float:
        """Return the seconds that this rank waited in messages since the last query."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


class Ring:
    """Blocks (batch, tokens of their rank, columns) that travel from each rank to the next.

    Two of a kind are in memory, scratch of ``saved``, whatever the number of ranks: of ``most`` columns.
    """

    def __init__(self, axis: ContextAxis, saved: Saved, like: Array, columns: int, most: int) -> None:
        self._axis, self._saved, self._like, self._columns, self._most = axis, saved, like, columns, most
        self._next, self._before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        self._passing: list[Request] = []

    def block(self, name: str, source: int) -> Array:
        """Return uninitialised scratch for the block of rank ``source``."""
        batch, most = self._like.shape[0], self._axis.most_tokens
        flat = self._saved.scratch(f"context.{name}", (batch * most * self._most,), self._like.dtype)
        shape = batch, tokens(self._axis.pieces[source]), self._columns
        return flat[: shape[0] * shape[1] * shape[2]].reshape(shape)

    def rounds(self, own: Array) -> Iterator[tuple[int, Array, Callable[[], None]]]:
        """Yield rank and block: first ``own``, then those of the ranks before, each while the next is on its way.

        ``own`` lies in memory of the caller, or in ``block("keys0", ...)``. The third of what is yielded lets messages
        progress. Collective over the axis.
        """
        axis, current = self._axis, own
        was_finite = axis.watch.sees_only_finite(own)
        for step in range(axis.size):
            requests: list[Request] = []
            if step + 1 < axis.size:
                coming = self.block(f"keys{(step + 1) % SLOTS}", (axis.rank - step - 1) % axis.size)
                requests = [
                    axis.comm.irecv(coming.reshape(-1), self._before, KEYS),
                    axis.comm.isend(current.reshape(-1), self._next, KEYS),
                ]
            yield (axis.rank - step) % axis.size, current, partial(_poll, requests)
            if requests:
                axis.wait(requests, own)
                current = coming
                if was_finite:
                    axis.watch.distrust(current)

    def contribution(self, source: int) -> Array:
        """Return memory for this rank's part of the gradients of the block of ``source``.

        What it held before, on its way to the next rank, has been sent.
        """
        self._axis.wait(self._passing[1:], self._like)
        del self._passing[1:]
        return self.block("gradients0", source)

    def pass_on(self, part: Array, source: int) -> None:
        """Add to ``part`` what the ranks before have of it, and send the sum to the next rank."""
        self._take(part, source)
        after = (source - 1) % self._axis.size
        arriving = self.block("gradients1", after)
        comm = self._axis.comm
        self._passing = [
            comm.irecv(arriving.reshape(-1), self._before, GRADIENTS),
            comm.isend(part.reshape(-1), self._next, GRADIENTS),
        ]

    def finish(self) -> Array:
        """Return the gradients of the own block that the others have made, once all messages have come."""
        home = self.block("gradients1", self._axis.rank)
        self._axis.wait(self._passing, self._like)
        self._axis.watch.distrust(home)
        self._passing = []
        return home

    def _take(self, part: Array, source: int) -> None:
        if not self._passing:
            return  # this rank is the first that the block visits
        arrived = self.block("gradients1", source)
        self._axis.wait(self._passing, self._like)
        self._axis.watch.distrust(arrived)
        self._passing = []
        part += arrived


def _poll(requests: Sequence[Request]) -> None:
    for request in requests:
        request.test()
