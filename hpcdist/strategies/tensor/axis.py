"""The tensor axis: its collectives, and the borders between replicated and parallel parts of a layer.

`TensorAxis` sums and gathers activations over the ranks of the axis, and measures how long that takes. A border is a
pair of conjugate operators: what is the identity in the forward is a sum in the backward, and the other way round (f
and g of arXiv:1909.08053, `Borders`). `SequenceBorders` has the pair of arXiv:2205.05198: an all-gather and
a reduce-scatter. When one rank calls a method here, all ranks of the axis do, in the same order.

Tensors that the axis does not cut (norm scales, biases of outputs) are on all of its ranks: `counted`, `sum_norms`
and `sum_gradients` see to it that each counts once in norms, checkpoints and sums.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives import ON_GPUS, SHARDED, SHARDED_ON_GPUS, Sharding
from hpcdist.collectives.dispatch import parse_algorithm
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.communicator import Communicator
from hpcdist.models.attention.tiles import Pieces, blocks, one_piece
from hpcdist.models.stage import Saved
from hpcdist.strategies.schedule.observers import NanFinder


def ranges_of(layout: Layout, parts: Iterable[Range]) -> list[Range]:
    """Return the ranges within ``parts`` of tensors that are not cut (local)."""
    return [where for part in parts for segment, where in layout.within(part) if segment.spec.cut is None]


def counted(layout: Layout, parts: Sequence[Range], comm: Communicator) -> list[Range]:
    """Return the ranges of ``parts`` that this rank counts: together the axis ``comm`` counts each element once."""
    if comm.rank == 0:
        return list(parts)
    return [where for part in parts for segment, where in layout.within(part) if segment.spec.cut is not None]


def sum_norms(norms: np.ndarray, layout: Layout, comm: Communicator, algorithm: str) -> None:
    """Sum ``norms`` (segments, ...) over the tensor axis, those of tensors that are not cut once. Collective."""
    if comm.size == 1:
        return
    if comm.rank:
        norms[[segment.spec.cut is None for segment in layout.segments]] = 0
    collectives.allreduce(comm, norms.reshape(-1), algorithm)


def sum_gradients(gradients: FlatStore, parts: Iterable[Range], comm: Communicator, algorithm: str) -> None:
    """Sum the gradients of tensors that are not cut over the tensor axis, in one message. Collective."""
    ranges = ranges_of(gradients.layout, parts)
    on = "gpu" if backend.is_device(gradients.array) else "cpu"
    message = backend.empty(sum(part.size for part in ranges), gradients.dtype, on)
    if not message.size:
        return  # the ranks of the axis have the same parts
    ends = list(accumulate((part.size for part in ranges), initial=0))
    places = [Range(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
    for part, place in zip(ranges, places, strict=True):
        gradients.read(part, message[place.slice])
    collectives.allreduce(comm, message, algorithm)
    for part, place in zip(ranges, places, strict=True):
        gradients.write(part, message[place.slice])


ONE_NODE: Final = "node_shared"


def algorithm_on(comm: Communicator, chosen: str, *, settled: bool, on: str) -> str:
    """Return the algorithm for activations: ``chosen`` or, if not ``settled``, a node's shared memory.

    Collective over ``comm``. Activations are large, and summed many times a step: what was chosen for gradients over
    another axis says little about them.
    """
    if not settled and on == "cpu" and shared_memory.is_available(comm):
        return ONE_NODE
    return suited(comm, chosen)


def suited(comm: Communicator, algorithm: str) -> str:
    """Return ``algorithm`` if it can sum over ``comm``, the MPI library's own if not. Collective over ``comm``."""
    if comm.size > 1 and ONE_NODE in algorithm and comm.nodes().count > 1:
        return "native"
    return algorithm


class TensorAxis:
    """Collectives over the tensor axis ``comm`` by ``algorithm``, or the closest that works there. Collective.

    ``watch`` looks for this rank's own bad values: where those of another rank come in by a sum, it stops.
    """

    def __init__(self, comm: Communicator, algorithm: str, watch: NanFinder | None = None) -> None:
        self.comm, self.algorithm = comm, suited(comm, algorithm)
        self.rank, self.size = comm.rank, comm.size
        self._spent_s = 0.0
        self.watch = NanFinder() if watch is None else watch

    def allreduce(self, buffer: Array, op: str = "sum") -> None:
        """Reduce ``buffer``, 1-D, in place."""
        self._timed(buffer, buffer, buffer, lambda: collectives.allreduce(self.comm, buffer, self.algorithm, op))

    def reduce_scatter(self, buffer: Array, shares: Sequence[Range]) -> None:
        """Sum in place; afterwards the own share of ``shares``, in rank order, is defined."""
        own, halves = buffer[shares[self.rank].slice], self._sharding(buffer, shares)
        self._timed(buffer, buffer, own, lambda: halves.reduce_scatter(self.comm, buffer, shares))

    def all_gather(self, buffer: Array, shares: Sequence[Range]) -> None:
        """Gather the shares of all ranks, in place."""
        own, halves = buffer[shares[self.rank].slice], self._sharding(buffer, shares)
        self._timed(buffer, own, buffer, lambda: halves.all_gather(self.comm, buffer, shares))

    def taken_s(self) -> float:
        """Return the seconds that this rank spent in these calls since the last query (local).

        Buffers on a GPU are left out: a call on them waits for the computation before it.
        """
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def _timed(self, buffer: Array, given: Array, taken: Array, call: Callable[[], None]) -> None:
        """Time ``call``, which sends ``given`` and receives ``taken``, both parts of ``buffer``."""
        was_finite = self.watch.sees_only_finite(given)
        begin = time.perf_counter()
        call()
        if not is_device(buffer):
            self._spent_s += time.perf_counter() - begin
        if was_finite:
            self.watch.distrust(taken)

    def _sharding(self, buffer: Array, shares: Sequence[Range]) -> Sharding:
        """Return the two halves of the allreduce in use, or of the ring where it has none for these shares."""
        name = parse_algorithm(self.algorithm).at(buffer.nbytes)
        if name in ON_GPUS:
            return SHARDED_ON_GPUS[name] if len({part.size for part in shares}) == 1 else SHARDED["ring"]
        in_order = name in SHARDED and not (name == "hierarchical" and self.comm.nodes().count > 1)
        return SHARDED[name if in_order else "ring"]


class Borders:
    """Borders of the parallel parts of a layer: outside a rank has its activations, inside those of all tokens.

    Here outside too: every rank has all activations, the same bits.
    """

    by_rows = False  # whether a rank has only some of the tokens

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis

    def enter(self, x: Array, saved: Saved) -> Array:
        """Return all tokens of ``x``: itself, or a scratch array (batch, context, hidden)."""
        return x

    def enter_backward(self, dx: Array, saved: Saved) -> Array:
        """Sum the gradient of the entered activations over the ranks, in place; return this rank's part."""
        self.axis.allreduce(dx.reshape(-1))
        return dx

    def partial(self, shape: tuple[int, ...], dtype: Any, name: str, saved: Saved) -> Array:
        """Return uninitialised memory (..., hidden) for this rank's summand of a result, all tokens of it."""
        return saved.empty(name, shape, dtype)

    def leave(self, partial: Array, name: str, saved: Saved) -> Array:
        """Sum the ranks' summands; return this rank's part of the result, kept under ``name``."""
        self.axis.allreduce(partial.reshape(-1))
        return partial

    def leave_backward(self, dy: Array, saved: Saved) -> Array:
        """Return the gradient of all tokens: ``dy`` itself, or a scratch array."""
        return dy

    def first_token(self, y: Array) -> int:
        """Return the index, among all tokens, of the first token of ``y`` (local)."""
        return 0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this rank's part of activations of the shape ``whole`` (local)."""
        return whole


class SequenceBorders(Borders):
    """Borders where activations (batch x context, hidden) are cut by rows, unevenly if need be.

    All samples have ``context`` tokens here, at least one a rank: so the own rows tell how many there are in all. Where
    a context axis cuts samples of ``whole`` tokens first, they are its ``pieces``.
    """

    by_rows = True

    def __init__(self, axis: TensorAxis, context: int, pieces: Pieces | None = None, whole: int = 0) -> None:
        super().__init__(axis)
        self.context, self.whole = context, whole or context
        self._pieces = one_piece(context) if pieces is None else pieces
        assert context >= axis.size

    def stretches(self, y: Array) -> Iterator[tuple[slice, int, int]]:
        """Yield rows of y (own rows, ...), the number of their sample, and the place of the first in it (local)."""
        first, row = self.first_token(y), 0
        while row < y.shape[0]:
            sample, token = divmod(first + row, self.context)
            _, end, place = next(piece for piece in blocks(self._pieces, self.context, token))
            size = min(end - token, y.shape[0] - row)
            yield slice(row, row + size), sample, place
            row += size

    def enter(self, x: Array, saved: Saved) -> Array:
        """Gather the rows of x (rows, hidden)."""
        return self._gather(x, saved)

    def enter_backward(self, dx: Array, saved: Saved) -> Array:
        """Sum dx (..., hidden) to the ranks that have its rows; return the own ones, a part of its memory."""
        return self._scatter(dx)

    def partial(self, shape: tuple[int, ...], dtype: Any, name: str, saved: Saved) -> Array:
        """Return a scratch array (local)."""
        return saved.scratch("tensor.partial", shape, dtype)

    def leave(self, partial: Array, name: str, saved: Saved) -> Array:
        """Sum to the ranks that have the rows; return the own ones (rows, hidden)."""
        own = self._scatter(partial)
        y = saved.empty(name, own.shape, own.dtype)
        y[...] = own
        return y

    def leave_backward(self, dy: Array, saved: Saved) -> Array:
        """Gather the rows of dy (rows, hidden)."""
        return self._gather(dy, saved)

    def first_token(self, y: Array) -> int:
        """Return the index of the first own row among all (local)."""
        return self._rows(self._tokens(y.shape[0]))[self.axis.rank].start

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return (own rows, hidden) for (batch, context, hidden)."""
        batch, context, hidden = whole
        return self._rows(batch * context)[self.axis.rank].size, hidden

    def _rows(self, tokens: int) -> list[Range]:
        return split(tokens, self.axis.size, itemsize=1, align_bytes=1)

    def _tokens(self, own: int) -> int:
        # `split` gives the first ranks a row more, so ``own`` rows fit `axis.size` consecutive totals, of which exactly
        # one is a multiple of `context` (context >= axis.size): the largest multiple up to the last of them.
        return (own * self.axis.size + self.axis.rank) // self.context * self.context

    def _gather(self, own: Array, saved: Saved) -> Array:
        own = own.reshape(-1, own.shape[-1])  # without samples there are no rows to say how many tokens they are of
        rows, hidden = own.shape
        tokens = self._tokens(rows)
        whole = saved.scratch("tensor.gathered", (tokens // self.context, self.context, hidden), own.dtype)
        buffer = whole.reshape(-1)
        shares = self._shares(tokens, hidden)
        buffer[shares[self.axis.rank].slice] = own.reshape(-1)
        self.axis.all_gather(buffer, shares)
        return whole

    def _scatter(self, whole: Array) -> Array:
        hidden = whole.shape[-1]
        buffer = whole.reshape(-1)
        shares = self._shares(buffer.size // hidden, hidden)
        self.axis.reduce_scatter(buffer, shares)
        return buffer[shares[self.axis.rank].slice].reshape(-1, hidden)

    def _shares(self, tokens: int, hidden: int) -> list[Range]:
        return [Range(rows.start * hidden, rows.stop * hidden) for rows in self._rows(tokens)]
