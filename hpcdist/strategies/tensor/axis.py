"""The tensor axis: its collectives, and the borders between replicated and parallel layers.

A border has an operator for the forward and one for the backward pass. `Borders`: identity and sum, or the reverse (f
and g of arXiv:1909.08053). `SequenceBorders`: all-gather and reduce-scatter (arXiv:2205.05198). Methods are collective
unless marked local.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from hpcdist import collectives
from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives import ON_GPUS, SHARDED, SHARDED_ON_GPUS, Sharding
from hpcdist.collectives.dispatch import parse_algorithm
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.communicator import Communicator
from hpcdist.models.attention.tiles import Pieces, blocks, consecutive_positions
from hpcdist.models.stage import Saved
from hpcdist.strategies.schedule.step import NanFinder

NODE_SHARED: Final = "node_shared"


def algorithm_on(comm: Communicator, gradient_algorithm: str, *, settled: bool, on: str) -> str:
    """Return the name of the algorithm for allreduces of activations over ``comm``. Collective.

    ``gradient_algorithm``: allreduce algorithm that the recipe sets for gradients.
    """
    # If the recipe names no algorithm, ranks on CPUs that can share memory use "node_shared".
    if not settled and on == "cpu" and shared_memory.is_available(comm):
        return NODE_SHARED
    return suited(comm, gradient_algorithm)


def suited(comm: Communicator, algorithm: str) -> str:
    """Return "native" if ``algorithm`` needs shared memory and ``comm`` spans nodes, else ``algorithm``. Collective."""
    if comm.size > 1 and NODE_SHARED in algorithm and comm.nodes().count > 1:
        return "native"
    return algorithm


class TensorAxis:
    """Collectives over the ranks of the tensor axis ``comm``. Construction is collective over ``comm``."""

    def __init__(self, comm: Communicator, algorithm: str, watch: NanFinder | None = None) -> None:
        self.comm, self.algorithm = comm, suited(comm, algorithm)
        self.rank, self.size = comm.rank, comm.size
        self._spent_s = 0.0
        self.watch = NanFinder() if watch is None else watch

    def allreduce(self, buffer: Array, op: str = "sum") -> None:
        """Reduce the 1-D ``buffer`` over the tensor axis by ``op``, in place."""
        self._timed(buffer, buffer, buffer, lambda: collectives.allreduce(self.comm, buffer, self.algorithm, op))

    def reduce_scatter(self, buffer: Array, shares: Sequence[Range]) -> None:
        """Reduce-scatter ``buffer`` in place: afterwards, only this rank's range ``shares[rank]`` has valid sums.

        ``shares``: one range of ``buffer`` per rank.
        """
        share, halves = buffer[shares[self.rank].slice], self._sharding(buffer, shares)
        self._timed(buffer, buffer, share, lambda: halves.reduce_scatter(self.comm, buffer, shares))

    def all_gather(self, buffer: Array, shares: Sequence[Range]) -> None:
        """All-gather ``buffer`` in place: each rank r sends its range ``shares[r]``."""
        share, halves = buffer[shares[self.rank].slice], self._sharding(buffer, shares)
        self._timed(buffer, share, buffer, lambda: halves.all_gather(self.comm, buffer, shares))

    def taken_s(self) -> float:
        """Return the seconds spent in collectives on CPU buffers since the last call of this method. Local."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def _timed(self, buffer: Array, sent: Array, received: Array, call: Callable[[], None]) -> None:
        was_finite = self.watch.sees_only_finite(sent)
        begin = time.perf_counter()
        call()
        if not is_device(buffer):
            self._spent_s += time.perf_counter() - begin
        if was_finite:
            self.watch.distrust(received)

    def _sharding(self, buffer: Array, shares: Sequence[Range]) -> Sharding:
        # The ring replaces algorithms that do not support these ranges.
        name = parse_algorithm(self.algorithm).at(buffer.nbytes)
        if name in ON_GPUS:
            return SHARDED_ON_GPUS[name] if len({part.size for part in shares}) == 1 else SHARDED["ring"]
        in_order = name in SHARDED and not (name == "hierarchical" and self.comm.nodes().count > 1)
        return SHARDED[name if in_order else "ring"]


class Borders:
    """Collectives before and after a tensor-parallel layer whose input and output are whole on each rank."""

    by_rows = False  # whether a rank has only some of the tokens

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis

    def enter(self, x: Array, saved: Saved) -> Array:
        """Return the input activations of all tokens, for a layer with input ``x``.

        If ``x`` is sharded by tokens, gather the shards into memory of ``saved``.
        """
        return x

    def enter_backward(self, dx: Array, saved: Saved) -> Array:
        """Sum the input gradient ``dx`` over the ranks in place. Return the part of the sum for this rank's input.

        ``saved``: arrays kept for the backward pass.
        """
        self.axis.allreduce(dx.reshape(-1))
        return dx

    def partial(self, shape: tuple[int, ...], dtype: Any, name: str, saved: Saved) -> Array:
        """Return an uninitialised array of ``shape`` and ``dtype`` for this rank's partial sum of the layer's output.

        The array is stored in ``saved``. ``name``: name of the layer's output in ``saved``.
        """
        return saved.empty(name, shape, dtype)

    def leave(self, partial: Array, name: str, saved: Saved) -> Array:
        """Sum ``partial`` over the ranks, and return the sum for this rank's tokens.

        ``name``: name of the layer's output in ``saved``.
        """
        self.axis.allreduce(partial.reshape(-1))
        return partial

    def leave_backward(self, dy: Array, saved: Saved) -> Array:
        """Return the output gradient of all tokens, for a layer with output gradient ``dy``.

        If ``dy`` is sharded by tokens, gather all shards into memory of ``saved``.
        """
        return dy

    def first_token(self, y: Array) -> int:
        """Return the index of this rank's first token. ``y``: activations of this rank's tokens. Local."""
        return 0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this rank's activations, if the activations of all tokens have shape ``whole``."""
        return whole


class SequenceBorders(Borders):
    """Collectives before and after a tensor-parallel layer, whose input and output are sharded by tokens."""

    # Activations, of shape (batch x context, hidden), are sharded by rows. ``context``: tokens per sample on this
    # tensor axis. With context parallelism, ``pieces`` are their token ranges, and ``whole`` is the tokens of a whole
    # sample.
    by_rows = True

    def __init__(self, axis: TensorAxis, context: int, pieces: Pieces | None = None, whole: int = 0) -> None:
        super().__init__(axis)
        self.context, self.whole = context, whole or context
        self._pieces = consecutive_positions(context) if pieces is None else pieces
        assert context >= axis.size

    def stretches(self, y: Array) -> Iterator[tuple[slice, int, int]]:
        """Yield (slice of rows in ``y``, sample, first token position) for each run of consecutive tokens. Local."""
        first, row = self.first_token(y), 0
        while row < y.shape[0]:
            sample, token = divmod(first + row, self.context)
            _, end, position = next(piece for piece in blocks(self._pieces, self.context, token))
            size = min(end - token, y.shape[0] - row)
            yield slice(row, row + size), sample, position
            row += size

    def enter(self, x: Array, saved: Saved) -> Array:
        return self._gather(x, saved)

    def enter_backward(self, dx: Array, saved: Saved) -> Array:
        return self._scatter(dx)

    def partial(self, shape: tuple[int, ...], dtype: Any, name: str, saved: Saved) -> Array:
        return saved.scratch("tensor.partial", shape, dtype)

    def leave(self, partial: Array, name: str, saved: Saved) -> Array:
        rows = self._scatter(partial)
        y = saved.empty(name, rows.shape, rows.dtype)
        y[...] = rows
        return y

    def leave_backward(self, dy: Array, saved: Saved) -> Array:
        return self._gather(dy, saved)

    def first_token(self, y: Array) -> int:
        return self._rows(self._tokens(y.shape[0]))[self.axis.rank].start

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        batch, context, hidden = whole
        return self._rows(batch * context)[self.axis.rank].size, hidden

    def _rows(self, tokens: int) -> list[Range]:
        return split(tokens, self.axis.size, itemsize=1, align_bytes=1)

    def _tokens(self, num_rows: int) -> int:
        # `split` gives the first ranks a row more, so ``num_rows`` fits `axis.size` consecutive totals, of which
        # exactly one is a multiple of `context` (context >= axis.size): the largest multiple up to the last total.
        return (num_rows * self.axis.size + self.axis.rank) // self.context * self.context

    def _gather(self, local_rows: Array, saved: Saved) -> Array:
        local_rows = local_rows.reshape(-1, local_rows.shape[-1])  # batches without samples have other dimensions
        rows, hidden = local_rows.shape
        tokens = self._tokens(rows)
        whole = saved.scratch("tensor.gathered", (tokens // self.context, self.context, hidden), local_rows.dtype)
        buffer = whole.reshape(-1)
        shares = self._shares(tokens, hidden)
        buffer[shares[self.axis.rank].slice] = local_rows.reshape(-1)
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
