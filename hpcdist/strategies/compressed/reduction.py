"""Reductions of compressed gradients over the ranks of a communicator, to the same bits on all of them.

`GradientCoder` encodes and decodes the gradients of a rank, tensor by tensor: a payload for each, all of one message.
The reductions send its messages. With n values and p ranks, c the bytes of a payload of one value, a rank sends

  QuantisedReduction  2 (p-1)/p c n    each share goes to its owner, who sums in float32 and hands the sum on, encoded
                                       once more: two errors of the compressor in all, whatever p (qgZ of ZeRO++, Wang
                                       et al., arXiv:2306.10209). Along a ring each of p-1 partial sums would be
                                       encoded again.
  GatheredReduction   (p-1) c n        every rank gets the payloads of all others and adds them in order of ranks:
                                       sums of sparse payloads are less sparse
  PayloadAllreduce    2 (p-1)/p c n    payloads of which sums decode to sums: an allreduce of them

What a rank owns of a quantised sum does not travel, so it is not encoded before it is summed. The residuals of error
feedback are those of what the rank encodes: its gradients in the shares of others, the sum in its own. So one
residual per element is enough, and each counts once in what a later sum makes up for.

`InterNodeReduction` compresses between nodes only. The ranks of a node sum in float32, since links within a node are
fast and a float32 sum there costs no error; each of its l ranks has a share of that sum, and exchanges it with the
ranks of the same number in the other nodes. With n values on k nodes a rank sends 2 n 4 (l-1)/l bytes within its
node, and what the reduction between nodes sends of n/l values for k ranks.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final, Protocol

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import ALIGN_BYTES, Range, split
from hpcdist.collectives.segments import scratch, wait_all
from hpcdist.collectives.sharded import SHARDED
from hpcdist.comm import checks
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.compression.compressor import Compressor, ErrorFeedback, RandomKey, align, is_finite
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.compressed.low_rank import PowerSgdReduction

_LINE: Final = ALIGN_BYTES // np.dtype(np.float32).itemsize  # elements: tensors and shares begin at a multiple


@dataclass(frozen=True)
class CodedUnit:
    """One payload: its values ``where`` in the flat space, and its ``place`` in bytes of the message."""

    where: Range
    place: Range


@dataclass(frozen=True)
class CodedMessage:
    """Payloads of a range of the flat space, one for each tensor, and their bytes together."""

    units: tuple[CodedUnit, ...]
    nbytes: int


class GradientCoder:
    """Encoder and decoder of the gradients of one rank. All of it is local.

    ``rank`` names the streams of this rank among those whose payloads meet. ``feedback`` keeps what is lost, where
    there is one. ``step`` is set before each step to a number that no other step of the run has.
    """

    def __init__(self, layout: Layout, compressor: Compressor, seed: int, rank: int) -> None:
        self.layout, self.compressor = layout, compressor
        self.feedback: ErrorFeedback | None = None
        self.seed, self.rank, self.step = seed, rank, 0
        self.message = lru_cache(maxsize=None)(self._message)

    def _message(self, part: Range) -> CodedMessage:
        """Return the layout of the payloads of ``part`` in a message."""
        units, offset = [], 0
        for _, where in self.layout.within(part):
            start = align(offset)
            offset = start + self.compressor.payload_bytes(where.size)
            units.append(CodedUnit(where, Range(start, offset)))
        return CodedMessage(tuple(units), offset)

    def encode(self, values: Array, part: Range, payloads: Array) -> None:
        """Write the payloads of the float32 ``values`` of ``part``, which are kept, to ``payloads`` (nbytes,)."""
        for unit in self.message(part).units:
            self.encode_unit(unit, values[unit.where.shift(-part.start).slice], payloads[unit.place.slice])

    def encode_unit(self, unit: CodedUnit, values: Array, payload: Array) -> None:
        """Write the payload of the ``values`` of one unit."""
        key = self._key(unit)
        if not is_finite(values):  # the payload decodes to NaN: no scale encodes infinity, and it must not be lost
            self.compressor.poison(payload, key)
        elif self.feedback is None:
            self.compressor.encode(values, payload, key)
        else:
            self.feedback.encode(unit.where, values, self.compressor, payload, key)

    def _key(self, unit: CodedUnit) -> RandomKey:
        return RandomKey(self.seed, self.step, self.rank, unit.where.start // _LINE)

    def decode(self, payloads: Array, part: Range, out: Array) -> None:
        """Decode ``payloads`` of ``part`` to ``out``; padding between tensors is not touched."""
        for unit in self.message(part).units:
            self.compressor.decode(payloads[unit.place.slice], out[unit.where.shift(-part.start).slice])

    def add(self, payloads: Array, part: Range, out: Array) -> None:
        """Decode ``payloads`` of ``part`` and add them to ``out``."""
        for unit in self.message(part).units:
            self.compressor.add(payloads[unit.place.slice], out[unit.where.shift(-part.start).slice])


# Of a message between nodes, below what MPI libraries send at once. Longer ones are announced first, and Open MPI's
# answer over TCP waits behind the data that goes the same way: two hosts that send each other 1 MiB over 100 Mbit/s
# take half as long again, or twice as long.
SEGMENT_BYTES: Final = 60 << 10
_BYTES, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)


class CompressedReduction(Protocol):
    """Base of sums of float32 gradients over the ranks, in place."""

    @property
    def passes(self) -> tuple[float, float]:
        """Times that a rank encodes, and decodes, each value, on average."""

    def kept(self, part: Range) -> list[Range]:
        """Return the ranges of ``part``, disjoint and ascending, of which this rank may have residuals (local).

        All of ``part`` where a rank encodes its own share of a sum too.
        """
        return [part]

    def allreduce(self, values: Array, part: Range) -> None:
        """Sum the ``values`` of ``part``, a range of the flat space. Collective over its communicator."""


class _Messages:
    """Point-to-point messages of bytes, in segments between nodes. Construction is collective over ``comm``."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._longest = SEGMENT_BYTES if comm.nodes().count > 1 else sys.maxsize

    def _segments(self, row: Array) -> list[Array]:
        return [row[start : start + self._longest] for start in range(0, row.size, self._longest)]

    def send(self, row: Array, peer: int) -> list[Request]:
        """Begin to send ``row`` to ``peer``; nothing where it is empty (local)."""
        return [self._comm.isend(segment, peer) for segment in self._segments(row)]

    def receive(self, row: Array, peer: int) -> list[Request]:
        """Begin to receive ``row`` from ``peer`` (local)."""
        return [self._comm.irecv(segment, peer) for segment in self._segments(row)]

    def gather_and_take(self, rows: Sequence[Array], encode: Callable[[], None], take: Callable[[int], None]) -> None:
        """Fill the own row by ``encode``, all-gather, and ``take`` the rows in order of ranks. Collective."""
        rank, size = self._comm.rank, self._comm.size
        receives = {peer: self.receive(row, peer) for peer, row in enumerate(rows) if peer != rank}
        encode()  # while the first messages are on their way
        ahead = [(rank + distance) % size for distance in range(1, size)]
        sends = [request for peer in ahead for request in self.send(rows[rank], peer)]
        for peer in range(size):
            wait_all(receives.get(peer, ()))
            take(peer)
        wait_all(sends)


class QuantisedReduction(CompressedReduction):
    """Reduce-scatter and all-gather of payloads: owners sum in float32, and encode the sum once more."""

    def __init__(self, comm: Communicator, coder: GradientCoder) -> None:
        self.comm, self.coder, self._messages = comm, coder, _Messages(comm)

    @property
    def passes(self) -> tuple[float, float]:
        """One encoding, by all but the owner and once by it; as many decodings by the owner, and one by all."""
        return 1.0, 2.0 - 1.0 / self.comm.size

    def shares(self, part: Range) -> list[Range]:
        """Return the share of ``part`` that each rank owns (local)."""
        return [share.shift(part.start) for share in split(part.size, self.comm.size, _FLOAT32.itemsize)]

    def allreduce(self, values: Array, part: Range) -> None:
        """Sum ``values`` (part.size,) in place. Collective."""
        shares = self.shares(part)
        self.reduce_scatter(values, part, shares)
        self.all_gather(values, part, shares)

    def reduce_scatter(self, values: Array, part: Range, shares: Sequence[Range]) -> None:
        """Sum ``values`` of ``part`` to the ``shares`` of the ranks, ranges within it, in place. Collective.

        Own values first, then those of the others in order of ranks, in float32; the sum is not encoded. What
        ``values`` hold beyond the own share is undefined afterwards.
        """
        comm, own = self.comm, shares[self.comm.rank]
        _compare(comm, "reduce_scatter", self.coder, part, shares)
        # Receives of the own share are posted from everybody, then the shares of others are encoded and sent; sums go
        # in order of ranks, whatever comes first, for the same bits in every run.
        rows = _rows("compressed.arrived", [self.coder.message(own).nbytes] * comm.size, values)
        others = [peer for peer, row in enumerate(rows) if peer != comm.rank and row.size]
        receives = {peer: self._messages.receive(rows[peer], peer) for peer in others}
        sends = self._send_shares(values, part, shares)
        total = _within(values, part, own)
        for peer in others:
            wait_all(receives[peer])
            self.coder.add(rows[peer], own, total)
        wait_all(sends)

    def _send_shares(self, values: Array, part: Range, shares: Sequence[Range]) -> list[Request]:
        """Encode and send the shares of the others, the next rank's first, to spread the load of receivers."""
        comm, sent = self.comm, list[Request]()
        rows = _rows("compressed.outgoing", [self.coder.message(share).nbytes for share in shares], values)
        for distance in range(1, comm.size):
            peer = (comm.rank + distance) % comm.size
            if rows[peer].size:
                self.coder.encode(_within(values, part, shares[peer]), shares[peer], rows[peer])
                sent += self._messages.send(rows[peer], peer)
        return sent

    def all_gather(self, values: Array, part: Range, shares: Sequence[Range]) -> None:
        """Fill ``values`` from the shares of the ranks, each encoded by its owner, who decodes it too. Collective."""
        comm = self.comm
        _compare(comm, "all_gather", self.coder, part, shares)
        rows = _rows("compressed.arrived", [self.coder.message(share).nbytes for share in shares], values)
        self._messages.gather_and_take(
            rows,
            lambda: self.coder.encode(_within(values, part, shares[comm.rank]), shares[comm.rank], rows[comm.rank]),
            lambda peer: self.coder.decode(rows[peer], shares[peer], _within(values, part, shares[peer])),
        )


class GatheredReduction(CompressedReduction):
    """All-gather of the payloads of all ranks, which every rank sums."""

    def __init__(self, comm: Communicator, coder: GradientCoder) -> None:
        self.comm, self.coder, self._messages = comm, coder, _Messages(comm)

    @property
    def passes(self) -> tuple[float, float]:
        """One encoding, and one decoding for every rank."""
        return 1.0, float(self.comm.size)

    def allreduce(self, values: Array, part: Range) -> None:
        """Sum ``values`` (part.size,) in place, the payloads of the ranks in their order. Collective."""
        comm = self.comm
        _compare(comm, "gather", self.coder, part, [part])
        rows = _rows("compressed.arrived", [self.coder.message(part).nbytes] * comm.size, values)

        def take(peer: int) -> None:
            if peer == 0:
                values[...] = 0
            self.coder.add(rows[peer], part, values)

        self._messages.gather_and_take(rows, lambda: self.coder.encode(values, part, rows[comm.rank]), take)


class PayloadAllreduce(CompressedReduction):
    """Allreduce of payloads that name the same elements on all ranks, so that the coder's rank is 0."""

    def __init__(self, comm: Communicator, coder: GradientCoder, algorithm: str) -> None:
        assert coder.compressor.is_linear and coder.rank == 0
        self.comm, self.coder, self.algorithm = comm, coder, algorithm

    @property
    def passes(self) -> tuple[float, float]:
        """One encoding, and one decoding of the sum."""
        return 1.0, 1.0

    def allreduce(self, values: Array, part: Range) -> None:
        """Sum ``values`` (part.size,) in place. Collective."""
        message, compressor = self.coder.message(part), self.coder.compressor
        payloads = scratch("compressed.arrived", message.nbytes, _BYTES, values)
        self.coder.encode(values, part, payloads)
        # The parts of the payloads that may be summed as floats, copied into one buffer for one allreduce, and back.
        floats = [compressor.summable(payloads[unit.place.slice]) for unit in message.units]
        total = scratch("compressed.summed", sum(piece.size for piece in floats), _FLOAT32, values)
        ends = np.cumsum([0, *(piece.size for piece in floats)]).tolist()
        for piece, start in zip(floats, ends, strict=False):
            total[start : start + piece.size] = piece
        collectives.allreduce(self.comm, total, self.algorithm)
        for piece, start in zip(floats, ends, strict=False):
            piece[...] = total[start : start + piece.size]
        self.coder.decode(payloads, part, values)


def _within(values: Array, part: Range, share: Range) -> Array:
    return values[share.shift(-part.start).slice]


def _rows(name: str, sizes: Sequence[int], like: Array) -> list[Array]:
    """Return scratch memory for messages of these ``sizes`` in bytes, each where payloads may begin (local)."""
    starts = list(accumulate(map(align, sizes), initial=0))
    memory = scratch(name, starts[-1], _BYTES, like)
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _compare(comm: Communicator, call: str, coder: GradientCoder, part: Range, shares: Sequence[Range]) -> None:
    """Raise on all ranks unless all make the same call, where calls are checked. Collective over ``comm``."""
    if comm.checked and comm.size > 1:
        count = f"{part.size} in {len(shares)} shares"
        checks.compare_calls(comm, checks.CollectiveCall(f"compressed {call}", coder.compressor.name, "float32", count))


def inter_node(data: Communicator) -> Communicator:
    """Return the ranks with this rank's number in their nodes, one of each node. Collective over ``data``.

    Raises ConfigurationError, on every rank, where nodes have different numbers of ranks.
    """
    nodes = data.nodes()
    if not nodes.uniform:
        raise ConfigurationError(
            f"compression.across_nodes = true with {', '.join(str(len(own)) for own in nodes.members)} data ranks on "
            f"{nodes.count} nodes: each needs as many as the others; start equally many ranks on each node, or set it "
            "to false"
        )
    return nodes.peers


class InterNodeReduction(CompressedReduction):
    """Reduction that compresses between nodes only; ``between_nodes`` sums over the ranks of `inter_node`."""

    def __init__(self, data: Communicator, between_nodes: CompressedReduction) -> None:
        self._between_nodes = between_nodes
        self._node, self._sharding = data.nodes().intra, SHARDED["ring"]

    def _shares(self, part: Range) -> list[Range]:
        """Return the share of each rank of the node, from the start of ``part``: whole tensors for factors."""
        shares = self._sharding.shares(self._node, part.size, np.dtype(np.float32).itemsize)
        if not isinstance(self._between_nodes, PowerSgdReduction):
            return shares
        # Factors are of whole tensors: each edge between shares moves to the nearest edge of a tensor.
        starts = [where.start - part.start for _, where in self._between_nodes.layout.within(part)]
        edges = [0, *(min([*starts, part.size], key=lambda at: abs(at - share.stop)) for share in shares[:-1])]
        return [Range(start, stop) for start, stop in pairwise([*edges, part.size])]

    @property
    def passes(self) -> tuple[float, float]:
        """Those of the reduction between nodes, for a share."""
        encodes, decodes = self._between_nodes.passes
        return encodes / self._node.size, decodes / self._node.size

    def kept(self, part: Range) -> list[Range]:
        """Return the ranges of this rank's share that the reduction between nodes has residuals of."""
        own = self._shares(part)[self._node.rank].shift(part.start)
        return self._between_nodes.kept(own) if own else []

    def allreduce(self, values: Array, part: Range) -> None:
        """Sum ``values`` (part.size,) in place. Collective over the data axis."""
        shares = self._shares(part)
        own = shares[self._node.rank]
        self._sharding.reduce_scatter(self._node, values, shares)
        if own:
            self._between_nodes.allreduce(values[own.slice], own.shift(part.start))
        self._sharding.all_gather(self._node, values, shares)
