"""The context axis of one rank: its part of each sample, and the blocks that travel round the ring of ranks."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np

from hpcdist.arrays.backend import Array, ArrayGroup, is_device, namespace
from hpcdist.arrays.ranges import Range
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.record.spans import NULL_SPANS, SpanSink, now_ns
from hpcdist.comm.transport import Request
from hpcdist.errors import DataError
from hpcdist.models.stage import Saved
from hpcdist.strategies.context.operations import (
    GRADIENTS,
    MEMORY,
    MESSAGES,
    Action,
    Messages,
    RingOperation,
    paths,
    pieces,
    tokens,
)
from hpcdist.strategies.context.proof import prove_messages
from hpcdist.strategies.schedule.step import NanFinder


class ContextAxis:
    """Ranks of ``comm`` that divide each sample's tokens among them. Methods are local unless marked collective."""

    def __init__(
        self,
        comm: Communicator,
        context: int,
        method: str = "ring",
        *,
        window: int = 0,  # sliding window of the model in tokens, or 0
        spans: SpanSink = NULL_SPANS,  # records waiting times
    ) -> None:
        self.comm, self.context, self.method, self.window, self._spans = comm, context, method, window, spans
        self.rank, self.size = comm.rank, comm.size
        self.pieces = pieces(context, comm.size)
        self.own = self.pieces[comm.rank]
        self.tokens, self.most_tokens = tokens(self.own), max(map(tokens, self.pieces))
        self._messages = {window: self._of_rank(comm.rank, window)}
        self.watch = NanFinder()  # finds the first non-finite value that this rank computed
        self._spent_s = 0.0

    def messages(self, window: int) -> tuple[Messages, Messages]:
        """Return (forward, backward): tuples of this rank's sends, receives and computations in one attention layer.

        ``window``: sliding-window size in tokens, or 0 for full attention.
        """
        if window not in self._messages:
            lists = zip(*(self._of_rank(rank, window) for rank in range(self.size)), strict=True)
            for back, rank_lists in enumerate(lists):
                prove_messages(rank_lists, range(self.size), self.visited(window), back=bool(back))
            self._messages[window] = self._of_rank(self.rank, window)
        return self._messages[window]

    def _of_rank(self, rank: int, window: int) -> tuple[Messages, Messages]:
        make = MESSAGES[self.method]
        return make(self.pieces, window, rank, False), make(self.pieces, window, rank, True)

    def visited(self, window: int) -> tuple[tuple[int, ...], ...]:
        """Return a tuple. Item r is the tuple of ranks that use the keys of rank r: first r, then others in ring order.

        ``window``: sliding-window size in tokens, or 0 for full attention.
        """
        return paths(self.pieces, window)

    def cut(self, samples: Array) -> Array:
        """Return a copy of ``samples`` with only this rank's tokens. Raises DataError for a wrong sample length."""
        if not isinstance(samples, ArrayGroup) and samples.ndim == 2 and samples.shape[1] == 0:
            return samples  # on a rank that does not read its samples
        if isinstance(samples, ArrayGroup) or samples.ndim < 2 or samples.shape[1] != self.context:
            received = "several arrays" if isinstance(samples, ArrayGroup) else f"a batch of shape {samples.shape}"
            raise DataError(
                f"parallel.context = {self.size} needs samples of data.context = {self.context} tokens, but the "
                f"input is {received}; pass inputs and targets of shape (samples, {self.context}), or change "
                "data.context"
            )
        return self.rows(samples, 1)

    def rows(self, whole: Array, dim: int = 0) -> Array:
        """Return a copy of the array ``whole`` with only this rank's token positions along dimension ``dim``."""
        before = (slice(None),) * dim
        parts = [whole[(*before, slice(position, position + end - start))] for start, end, position in self.own]
        rows: Array = namespace(whole).concatenate(parts, axis=dim)
        return rows

    def wait(self, request: Request, like: Array, name: str) -> None:
        """Wait for the MPI ``request`` on the buffer ``like``, and record the wait in the trace as ``name``."""
        if is_device(like):  # the wait includes the computation before it
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
        """Send ``send[send_ranges[q]]`` to rank q, and receive ``receive[receive_ranges[q]]`` from q. Collective."""
        was_finite, begin = self.watch.sees_only_finite(send), time.perf_counter()
        self.comm.all_to_all(send, receive, send_ranges, receive_ranges)
        if not is_device(send):
            self._spent_s += time.perf_counter() - begin
        if was_finite:
            self.watch.distrust(receive)

    def all_gather(self, local: np.ndarray) -> np.ndarray:
        """Return the integer arrays ``local`` of all ranks, stacked along a new first axis of one array. Collective."""
        whole, begin = np.empty((self.size, *local.shape), local.dtype), time.perf_counter()
        whole[self.rank] = local
        self.comm.all_gather(whole.reshape(-1), [Range(r * local.size, (r + 1) * local.size) for r in range(self.size)])
        self._spent_s += time.perf_counter() - begin
        return whole

    def taken_s(self) -> float:
        """Return the seconds spent waiting for messages since the previous call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


class Ring:
    """Messages of ring attention. The keys and values of a rank go to all ranks whose queries use these keys."""

    # Keys and values of a rank have shape (batch, tokens of the rank, ``columns``). ``like``: array with the batch size
    # and dtype of the keys. ``saved``: scratch memory, enough for ``most`` columns. ``window``: sliding window in
    # tokens, or 0.

    def __init__(self, axis: ContextAxis, saved: Saved, like: Array, columns: int, most: int, window: int) -> None:
        self._axis, self._saved, self._like, self._columns, self._most = axis, saved, like, columns, most
        self._messages = cast(tuple[tuple[RingOperation, ...], ...], axis.messages(window))

    def block(self, memory: str, source: int) -> Array:
        """Return the scratch buffer named ``memory`` for the keys and values of rank ``source``."""
        batch, most = self._like.shape[0], self._axis.most_tokens
        flat = self._saved.scratch(f"context.{memory}", (batch * most * self._most,), self._like.dtype)
        shape = batch, tokens(self._axis.pieces[source]), self._columns
        return flat[: shape[0] * shape[1] * shape[2]].reshape(shape)

    def rounds(
        self, local_block: Array, *, back: bool = False
    ) -> Iterator[tuple[int, Array, Array | None, Callable[[], None]]]:
        """Yield (rank, keys, key gradients to fill or None, poll function) per rank whose keys are needed. Collective.

        ``local_block``: this rank's keys and values.
        """
        # This rank comes first, with gradients None; in a forward pass, gradients are always None. After the last round
        # of a backward pass, the buffer `operations.HOME` has the other ranks' summed gradients of ``local_block``.
        axis, blocks = self._axis, {"keys0": local_block}
        in_flight: dict[str, tuple[Request, RingOperation]] = {}  # by memory
        was_finite = axis.watch.sees_only_finite(local_block)
        for op in self._messages[back]:
            if op.action is Action.TILES:
                if op.into:
                    blocks[op.into] = self.block(op.into, op.source)
                yield op.source, blocks[op.memory], blocks.get(op.into), partial(_poll, in_flight)
            elif op.action is Action.ADD:
                blocks[op.into] += blocks[op.memory]
            elif op.action is Action.WAIT:
                request, started = in_flight.pop(op.memory)
                axis.wait(request, blocks[op.memory], f"WAIT {op.memory[:-1]}")
                if started.action is Action.RECEIVE and (was_finite or MEMORY[op.memory] == GRADIENTS):
                    axis.watch.distrust(blocks[op.memory])
            else:
                receives = op.action is Action.RECEIVE
                if receives:
                    blocks[op.memory] = self.block(op.memory, op.source)
                start = axis.comm.irecv if receives else axis.comm.isend
                in_flight[op.memory] = start(blocks[op.memory].reshape(-1), op.peer, MEMORY[op.memory]), op


def _poll(in_flight: Mapping[str, tuple[Request, RingOperation]]) -> None:
    for request, _ in in_flight.values():
        request.test()
