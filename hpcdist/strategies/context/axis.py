"""The context axis of one rank: its part of each sample, and the blocks that travel round the ring."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np

from hpcdist.arrays.backend import Array, ArrayGroup, is_device, namespace
from hpcdist.arrays.ranges import Range
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.comm.record.spans import NULL_SPANS, SpanSink, now_ns
from hpcdist.errors import DataError
from hpcdist.models.stage import Saved
from hpcdist.strategies.context.operations import GRADIENTS, MEMORY, MESSAGES, Action, Messages, RingOperation
from hpcdist.strategies.context.passes import paths, pieces, tokens
from hpcdist.strategies.context.proof import prove_messages
from hpcdist.strategies.schedule.observers import NanFinder


class ContextAxis:
    """The ranks ``comm`` that share the samples of ``context`` tokens, each with its own pieces.

    ``method`` is that of attention, never "auto", and ``window`` that of the model, 0 for none; ``spans`` gets the
    waits for passes of a ring. ``watch`` looks for this rank's own bad values: where those of another rank come in, it
    stops. Methods are local unless they say otherwise.
    """

    def __init__(
        self,
        comm: Communicator,
        context: int,
        method: str = "ring",
        *,
        window: int = 0,
        spans: SpanSink = NULL_SPANS,
    ) -> None:
        self.comm, self.context, self.method, self.window, self._spans = comm, context, method, window, spans
        self.rank, self.size = comm.rank, comm.size
        self.pieces = pieces(context, comm.size)
        self.own = self.pieces[comm.rank]
        self.tokens, self.most_tokens = tokens(self.own), max(map(tokens, self.pieces))
        self._messages = {window: self._of_rank(comm.rank, window)}
        self.watch = NanFinder()
        self._spent_s = 0.0

    def messages(self, window: int) -> tuple[Messages, Messages]:
        """Return what this rank sends and awaits within one attention with a ``window``, forward and back.

        That of another window than the model's, which only its own modules know, is proven at its first use.
        """
        if window not in self._messages:
            lists = zip(*(self._of_rank(rank, window) for rank in range(self.size)), strict=True)
            for back, of_ranks in enumerate(lists):
                prove_messages(of_ranks, range(self.size), self.visited(window), back=bool(back))
            self._messages[window] = self._of_rank(self.rank, window)
        return self._messages[window]

    def _of_rank(self, rank: int, window: int) -> tuple[Messages, Messages]:
        make = MESSAGES[self.method]
        return make(self.pieces, window, rank, False), make(self.pieces, window, rank, True)

    def visited(self, window: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that each block of keys visits round a ring: the `passes.paths`."""
        return paths(self.pieces, window)

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

    def wait(self, request: Request, like: Array, name: str) -> None:
        """Wait for a message of an array such as ``like``; count the time, and leave a span of it called ``name``.

        A message that is complete by now was hidden: it leaves none.
        """
        if is_device(like):  # a call there waits for the computation before it
            request.wait()
        elif not request.test():
            begin_ns = now_ns()
            request.wait()
            end_ns = now_ns()
            self._spent_s += (end_ns - begin_ns) / 1e9
            self._spans.add("communication", name, -1, begin_ns, end_ns)

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

    Those of `operations.MEMORY`, of ``most`` columns, are scratch of ``saved``, whatever the number of ranks. With a
    ``window`` they travel no further than they are seen.
    """

    def __init__(self, axis: ContextAxis, saved: Saved, like: Array, columns: int, most: int, window: int) -> None:
        self._axis, self._saved, self._like, self._columns, self._most = axis, saved, like, columns, most
        self._messages = cast(tuple[tuple[RingOperation, ...], ...], axis.messages(window))

    def block(self, memory: str, source: int) -> Array:
        """Return uninitialised scratch, one of `MEMORY`, for the block of rank ``source``."""
        batch, most = self._like.shape[0], self._axis.most_tokens
        flat = self._saved.scratch(f"context.{memory}", (batch * most * self._most,), self._like.dtype)
        shape = batch, tokens(self._axis.pieces[source]), self._columns
        return flat[: shape[0] * shape[1] * shape[2]].reshape(shape)

    def rounds(
        self, own: Array, *, back: bool = False
    ) -> Iterator[tuple[int, Array, Array | None, Callable[[], None]]]:
        """Carry out the list of this rank; yield at its tiles rank and block: first ``own``, then those that come.

        ``own`` lies in memory of the caller, or in ``block("keys0", ...)``. The third of what is yielded is memory for
        the gradients of the block where that is another rank's, the fourth lets messages progress. Afterwards the
        gradients of the own block that the others have made are in ``block(HOME, ...)``, if any sees it. Collective
        over the axis.
        """
        axis, blocks = self._axis, {"keys0": own}
        under_way: dict[str, tuple[Request, RingOperation]] = {}  # by memory
        was_finite = axis.watch.sees_only_finite(own)
        for op in self._messages[back]:
            if op.action is Action.TILES:
                if op.into:
                    blocks[op.into] = self.block(op.into, op.source)
                yield op.source, blocks[op.memory], blocks.get(op.into), partial(_poll, under_way)
            elif op.action is Action.ADD:
                blocks[op.into] += blocks[op.memory]
            elif op.action is Action.WAIT:
                request, begun = under_way.pop(op.memory)
                axis.wait(request, blocks[op.memory], f"WAIT {op.memory[:-1]}")
                if begun.action is Action.RECEIVE and (was_finite or MEMORY[op.memory] == GRADIENTS):
                    axis.watch.distrust(blocks[op.memory])
            else:
                receives = op.action is Action.RECEIVE
                if receives:
                    blocks[op.memory] = self.block(op.memory, op.source)
                start = axis.comm.irecv if receives else axis.comm.isend
                under_way[op.memory] = start(blocks[op.memory].reshape(-1), op.peer, MEMORY[op.memory]), op


def _poll(under_way: Mapping[str, tuple[Request, RingOperation]]) -> None:
    for request, _ in under_way.values():
        request.test()
