"""From the name of a compressor to what sums gradients with it."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.arrays.ranges import ALIGN_BYTES, Range, align_up
from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.allreduce import buckets
from hpcdist.strategies.compressed.across_nodes import AcrossNodes, between_nodes
from hpcdist.strategies.compressed.catalogue import compressor
from hpcdist.strategies.compressed.coder import Coder
from hpcdist.strategies.compressed.config import LOW_RANK, QUANTISED, SUMMED, CompressionConfig
from hpcdist.strategies.compressed.low_rank import LowRank
from hpcdist.strategies.compressed.ways import Gathered, Quantised, Summed, Way
from hpcdist.strategies.seat import Seat

_ITEMSIZE: Final = np.dtype(np.float32).itemsize  # of what is encoded, whatever gradients are kept as


@dataclass(frozen=True)
class Summing:
    """How the gradients of a seat are summed over the ranks of ``comm``, bucket by bucket.

    ``codes`` holds the state between steps; ``way`` is what sums: itself, or something around it.
    """

    comm: Communicator
    buckets: tuple[Range, ...]
    codes: Coder | LowRank
    way: Way

    def kept(self) -> list[Range]:
        """Return the ranges of which this rank may have residuals, ascending (local)."""
        found = [part for bucket in self.buckets for part in self.way.kept(bucket)]
        return sorted(found, key=lambda part: part.start)


def summing(seat: Seat, name: str, config: CompressionConfig, seed: int) -> Summing:
    """Return how ``name`` sums over the data axis of ``seat``, without feedback. Collective over it.

    Raises ConfigurationError where nodes that ``config`` tells apart have different numbers of ranks.
    """
    comm = between_nodes(seat.data) if config.across_nodes else seat.data
    found = tuple(bucket for part in reversed(seat.parts) for bucket in _cut(seat, name, part))
    codes, way = _way(seat, comm, found, name, config, seed)
    return Summing(comm, found, codes, AcrossNodes(seat.data, way) if config.across_nodes else way)


def _cut(seat: Seat, name: str, part: Range) -> list[Range]:
    """Return the buckets of ``part``, in the order in which gradients are complete (local).

    They are as long as those of float32 gradients. Factors are of whole tensors, and each bucket of them takes two
    rounds of messages: theirs are as many layers as make such a bucket.
    """
    if name not in LOW_RANK:
        # The draws of a piece are named by the line that it begins in: no two begin in the same one.
        return buckets(seat.layout, _ITEMSIZE, align_up(seat.bucket_bytes, ALIGN_BYTES), part)
    found: list[Range] = []
    stop = part.stop
    layers = (unit for unit in seat.layout.units.values() if unit.intersect(part))
    for layer in sorted(layers, reverse=True):
        if (stop - layer.start) * _ITEMSIZE >= seat.bucket_bytes or layer.start == part.start:
            found.append(Range(layer.start, stop))
            stop = layer.start
    return found


def _way(
    seat: Seat, comm: Communicator, parts: tuple[Range, ...], name: str, config: CompressionConfig, seed: int
) -> tuple[Coder | LowRank, Way]:
    if name in LOW_RANK:
        factors = LowRank(comm, seat.layout, parts, config.rank, seed, seat.algorithm, seat.on)
        return factors, factors
    made = compressor(name, config)
    # Payloads that are summed as they are name the same elements: their draws are those of rank 0 everywhere.
    coder = Coder(seat.layout, made, seed, 0 if name in SUMMED else comm.rank)
    if name in QUANTISED:
        return coder, Quantised(comm, coder)
    return coder, Summed(comm, coder, seat.algorithm) if name in SUMMED else Gathered(comm, coder)
