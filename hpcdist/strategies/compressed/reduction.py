"""Reductions of compressed gradients over the ranks of a communicator, with the same bits on all ranks.

With n values on p ranks, and c bytes of payload per value, a rank sends

  QuantisedReduction  2 (p-1)/p c n    an allreduce: two compression errors for any p
                      (p-1)/p c n      a reduce-scatter: one error (qgZ of ZeRO++, Wang et al., arXiv:2306.10209)
  GatheredReduction   (p-1) c n
  PayloadAllreduce    2 (p-1)/p c n

`InterNodeReduction` sends 2 n 4 (l-1)/l bytes within a node of l ranks, and reduces n/l compressed values between ranks
of equal local rank.
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
from hpcdist.arrays.dtypes import FLOAT32
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import ALIGN_BYTES, Range, split
from hpcdist.collectives.segments import scratch, wait_all
from hpcdist.collectives.sharded import SHARDED
from hpcdist.comm import checks
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import Request
from hpcdist.compression.compressor import Compressor, ErrorFeedback, RandomKey, align, is_finite
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.compressed.low_rank import PowerSgdReduction

_LINE: Final = ALIGN_BYTES // np.dtype(np.float32).itemsize  # alignment of tensors and shares in elements


@dataclass(frozen=True)
class CodedUnit:
    """Tensor, or its part in a ZeRO shard, in a compressed message: its flat range, and the bytes of its payload."""

    where: Range  # flat parameter range of the tensor
    place: Range  # byte range in the message


@dataclass(frozen=True)
class CodedMessage:
    """Layout of a message that holds several compressed tensors: byte range of each tensor, and message size."""

    units: tuple[CodedUnit, ...]
    nbytes: int


class GradientCoder:
    """Encoder and decoder of gradients with a ``compressor``. Local."""

    def __init__(self, layout: Layout, compressor: Compressor, seed: int, rank: int) -> None:
        self.layout, self.compressor = layout, compressor
        self.feedback: ErrorFeedback | None = None  # compression errors; None: no error feedback
        # They select the random stream. Before each step, the caller sets `step` to a number unique in the run.
        self.seed, self.rank, self.step = seed, rank, 0
        self.message = lru_cache(maxsize=None)(self._message)

    def _message(self, part: Range) -> CodedMessage:
        units, offset = [], 0
        for _, positions in self.layout.within(part):
            start = align(offset)
            offset = start + self.compressor.payload_bytes(positions.size)
            units.append(CodedUnit(positions, Range(start, offset)))
        return CodedMessage(tuple(units), offset)

    def encode(self, values: Array, part: Range, payloads: Array) -> None:
        """Compress ``values``, the float32 gradients of the flat range ``part``, into the byte array ``payloads``."""
        for unit in self.message(part).units:
            self.encode_unit(unit, values[unit.where.shift(-part.start).slice], payloads[unit.place.slice])

    def encode_unit(self, unit: CodedUnit, values: Array, payload: Array) -> None:
        """Compress ``values``, the gradient of the tensor ``unit``, into the byte array ``payload``."""
        key = self._key(unit)
        if not is_finite(values):  # the payload decodes to NaN, because no scale encodes infinity
            self.compressor.poison(payload, key)
        elif self.feedback is None:
            self.compressor.encode(values, payload, key)
        else:
            self.feedback.encode(unit.where, values, self.compressor, payload, key)

    def _key(self, unit: CodedUnit) -> RandomKey:
        return RandomKey(self.seed, self.step, self.rank, unit.where.start // _LINE)

    def decode(self, payloads: Array, part: Range, out: Array) -> None:
        """Decode ``payloads`` of the flat range ``part`` into ``out``. Padding between tensors stays unchanged."""
        for unit in self.message(part).units:
            self.compressor.decode(payloads[unit.place.slice], out[unit.where.shift(-part.start).slice])

    def add(self, payloads: Array, part: Range, out: Array) -> None:
        """Decode ``payloads`` of the flat range ``part``, and add the decoded values to ``out``."""
        for unit in self.message(part).units:
            self.compressor.add(payloads[unit.place.slice], out[unit.where.shift(-part.start).slice])


# Segment of a message between nodes, below the eager limit of MPI libraries. Longer messages need a handshake, whose
# answer Open MPI over TCP queues after data in the same direction: swapping 1 MiB over 100 Mbit/s takes 1.5 to 2 times
# as long.
SEGMENT_BYTES: Final = 60 << 10
_BYTES: Final = np.dtype(np.uint8)


class CompressedReduction(Protocol):
    """Interface of allreduces that compress float32 gradients."""

    @property
    def passes(self) -> tuple[float, float]:
        """(encodings, decodings): mean number of times that a rank encodes or decodes a gradient value."""

    def kept(self, part: Range) -> list[Range]:
        """Return a list of the disjoint ranges within ``part`` that this rank compresses, in ascending order. Local."""
        return [part]

    def allreduce(self, values: Array, part: Range) -> None:
        """Sum ``values``, the gradients of the flat range ``part``, over all ranks in place. Collective."""


class _Messages:
    # Messages between nodes are cut in segments. Construction is collective.
    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._longest = SEGMENT_BYTES if comm.nodes().count > 1 else sys.maxsize

    def _segments(self, row: Array) -> list[Array]:
        return [row[start : start + self._longest] for start in range(0, row.size, self._longest)]

    def send(self, row: Array, peer: int) -> list[Request]:
        return [self._comm.isend(segment, peer) for segment in self._segments(row)]

    def receive(self, row: Array, peer: int) -> list[Request]:
        return [self._comm.irecv(segment, peer) for segment in self._segments(row)]

    def gather_and_take(self, rows: Sequence[Array], encode: Callable[[], None], take: Callable[[int], None]) -> None:
        rank, size = self._comm.rank, self._comm.size
        receives = {peer: self.receive(row, peer) for peer, row in enumerate(rows) if peer != rank}
        encode()  # while the first messages are in flight
        ahead = [(rank + distance) % size for distance in range(1, size)]
        sends = [request for peer in ahead for request in self.send(rows[rank], peer)]
        for peer in range(size):
            wait_all(receives.get(peer, ()))
            take(peer)
        wait_all(sends)


class QuantisedReduction(CompressedReduction):
    """Compressed reduce-scatter (ZeRO, any compressor), all-gather and allreduce. A rank sums one shard in float32.

    An allreduce is a reduce-scatter followed by an all-gather. It compresses the gradients, and then the sums.
    """

    def __init__(self, comm: Communicator, coder: GradientCoder) -> None:
        self.comm, self.coder, self._messages = comm, coder, _Messages(comm)

    @property
    def passes(self) -> tuple[float, float]:
        return 1.0, 2.0 - 1.0 / self.comm.size

    def shares(self, part: Range) -> list[Range]:
        """Return a list. Item r is the subrange of the flat range ``part`` that rank r sums. Local."""
        return [share.shift(part.start) for share in split(part.size, self.comm.size, FLOAT32.itemsize)]

    def allreduce(self, values: Array, part: Range) -> None:
        shares = self.shares(part)
        self.reduce_scatter(values, part, shares)
        self.all_gather(values, part, shares)

    def reduce_scatter(self, values: Array, part: Range, shares: Sequence[Range]) -> None:
        """Reduce-scatter ``values``, the gradients of the flat range ``part``, in compressed messages. Collective.

        Afterwards, ``values`` of rank r contain the sum for ``shares[r]``, a subrange of ``part``.
        """
        comm, share = self.comm, shares[self.comm.rank]
        _compare(comm, "reduce_scatter", self.coder, part, shares)
        # Receives for the local share are posted first, then the shares of others are encoded and sent. The owner adds
        # the others' payloads to its own values in rank order, whatever arrives first, for equal bits in every run.
        rows = _rows("compressed.arrived", [self.coder.message(share).nbytes] * comm.size, values)
        others = [peer for peer, row in enumerate(rows) if peer != comm.rank and row.size]
        receives = {peer: self._messages.receive(rows[peer], peer) for peer in others}
        sends = self._send_shares(values, part, shares)
        total = _within(values, part, share)
        for peer in others:
            wait_all(receives[peer])
            self.coder.add(rows[peer], share, total)
        wait_all(sends)

    def _send_shares(self, values: Array, part: Range, shares: Sequence[Range]) -> list[Request]:
        comm, sent = self.comm, list[Request]()
        rows = _rows("compressed.outgoing", [self.coder.message(share).nbytes for share in shares], values)
        for distance in range(1, comm.size):
            peer = (comm.rank + distance) % comm.size
            if rows[peer].size:
                self.coder.encode(_within(values, part, shares[peer]), shares[peer], rows[peer])
                sent += self._messages.send(rows[peer], peer)
        return sent

    def all_gather(self, values: Array, part: Range, shares: Sequence[Range]) -> None:
        """All-gather ``values`` of the flat range ``part`` in compressed messages. Collective.

        Rank r sends its values of ``shares[r]``, a subrange of ``part``.
        """
        comm = self.comm
        _compare(comm, "all_gather", self.coder, part, shares)
        rows = _rows("compressed.arrived", [self.coder.message(share).nbytes for share in shares], values)
        self._messages.gather_and_take(
            rows,
            lambda: self.coder.encode(_within(values, part, shares[comm.rank]), shares[comm.rank], rows[comm.rank]),
            lambda peer: self.coder.decode(rows[peer], shares[peer], _within(values, part, shares[peer])),
        )


class GatheredReduction(CompressedReduction):
    """Allreduce in which every rank gathers the compressed gradients of all ranks, then decodes and sums them."""

    def __init__(self, comm: Communicator, coder: GradientCoder) -> None:
        self.comm, self.coder, self._messages = comm, coder, _Messages(comm)

    @property
    def passes(self) -> tuple[float, float]:
        return 1.0, float(self.comm.size)

    def allreduce(self, values: Array, part: Range) -> None:
        comm = self.comm
        _compare(comm, "gather", self.coder, part, [part])
        rows = _rows("compressed.arrived", [self.coder.message(part).nbytes] * comm.size, values)

        def take(peer: int) -> None:
            if peer == 0:
                values[...] = 0
            self.coder.add(rows[peer], part, values)

        self._messages.gather_and_take(rows, lambda: self.coder.encode(values, part, rows[comm.rank]), take)


class PayloadAllreduce(CompressedReduction):
    """Allreduce for linear compressors. It sums gradients in compressed form, and decodes only the sum."""

    def __init__(self, comm: Communicator, coder: GradientCoder, algorithm: str) -> None:
        assert coder.compressor.is_linear and coder.rank == 0
        self.comm, self.coder, self.algorithm = comm, coder, algorithm

    @property
    def passes(self) -> tuple[float, float]:
        return 1.0, 1.0

    def allreduce(self, values: Array, part: Range) -> None:
        message, compressor = self.coder.message(part), self.coder.compressor
        payloads = scratch("compressed.arrived", message.nbytes, _BYTES, values)
        self.coder.encode(values, part, payloads)
        # The summable parts of the payloads are copied to one buffer for one allreduce, and back.
        floats = [compressor.summable(payloads[unit.place.slice]) for unit in message.units]
        total = scratch("compressed.summed", sum(piece.size for piece in floats), FLOAT32, values)
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
    # A later call with this ``name`` reuses the memory.
    starts = list(accumulate(map(align, sizes), initial=0))
    memory = scratch(name, starts[-1], _BYTES, like)
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _compare(comm: Communicator, call: str, coder: GradientCoder, part: Range, shares: Sequence[Range]) -> None:
    if comm.checked and comm.size > 1:
        count = f"{part.size} in {len(shares)} shares"
        checks.compare_calls(comm, checks.CollectiveCall(f"compressed {call}", coder.compressor.name, "float32", count))


def inter_node(data: Communicator) -> Communicator:
    """Return a communicator of one data rank per node, all with this rank's local rank. Collective over ``data``."""
    nodes = data.nodes()
    if not nodes.uniform:
        raise ConfigurationError(
            "compression.across_nodes = true needs equal numbers of data ranks on all nodes, but the nodes have "
            f"{', '.join(str(len(node)) for node in nodes.members)} data ranks; start equally many ranks on each node, "
            "or set compression.across_nodes = false"
        )
    return nodes.peers


class InterNodeReduction(CompressedReduction):
    """Allreduce that compresses only the messages between nodes."""

    def __init__(self, data: Communicator, between_nodes: CompressedReduction) -> None:
        self._between_nodes = between_nodes
        self._node, self._sharding = data.nodes().intra, SHARDED["ring"]

    def _shares(self, part: Range) -> list[Range]:
        shares = self._sharding.shares(self._node, part.size, np.dtype(np.float32).itemsize)
        if not isinstance(self._between_nodes, PowerSgdReduction):
            return shares
        # Factors need whole tensors: each edge between shares moves to the nearest edge of a tensor.
        starts = [tensor.start - part.start for _, tensor in self._between_nodes.layout.within(part)]
        edges = [0, *(min([*starts, part.size], key=lambda at: abs(at - share.stop)) for share in shares[:-1])]
        return [Range(start, stop) for start, stop in pairwise([*edges, part.size])]

    @property
    def passes(self) -> tuple[float, float]:
        encodes, decodes = self._between_nodes.passes
        return encodes / self._node.size, decodes / self._node.size

    def kept(self, part: Range) -> list[Range]:
        share = self._shares(part)[self._node.rank].shift(part.start)
        return self._between_nodes.kept(share) if share else []

    def allreduce(self, values: Array, part: Range) -> None:
        shares = self._shares(part)
        share = shares[self._node.rank]
        self._sharding.reduce_scatter(self._node, values, shares)
        if share:
            self._between_nodes.allreduce(values[share.slice], share.shift(part.start))
        self._sharding.all_gather(self._node, values, shares)
