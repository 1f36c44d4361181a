"""Tensors that the tensor axis shards or replicates: count each once, and sum the gradients of replicated tensors."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator


def ranges_of(layout: Layout, parts: Iterable[Range]) -> list[Range]:
    """Return the subranges of ``parts`` (flat ranges of ``layout``) whose tensors the tensor axis does not shard."""
    return [touched for part in parts for segment, touched in layout.within(part) if segment.spec.cut is None]


def counted(layout: Layout, parts: Sequence[Range], comm: Communicator) -> list[Range]:
    """Return the subranges of ``parts`` that this rank adds to a sum over ``comm``, so that no tensor is added twice.

    ``parts``: ranges of the flat parameter vector. Only rank 0 adds unsharded tensors. Local.
    """
    if comm.rank == 0:
        return list(parts)
    return [touched for part in parts for segment, touched in layout.within(part) if segment.spec.cut is not None]


def sum_norms(norms: np.ndarray, layout: Layout, comm: Communicator, algorithm: str) -> None:
    """Sum ``norms``, the squared norms of tensors, over ``comm`` in place; unsharded tensors count once. Collective."""
    if comm.size == 1:
        return
    if comm.rank:
        norms[[segment.spec.cut is None for segment in layout.segments]] = 0
    collectives.allreduce(comm, norms.reshape(-1), algorithm)


def sum_gradients(gradients: FlatStore, parts: Iterable[Range], comm: Communicator, algorithm: str) -> None:
    """Sum the gradients of unsharded tensors in the flat ranges ``parts`` over ``comm``, in one message. Collective."""
    ranges = ranges_of(gradients.layout, parts)
    on = "gpu" if backend.is_device(gradients.array) else "cpu"
    message = backend.empty(sum(part.size for part in ranges), gradients.dtype, on)
    if not message.size:
        return  # the ranks of the axis have the same parts
    ends = list(accumulate((part.size for part in ranges), initial=0))
    slots = [Range(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
    for part, slot in zip(ranges, slots, strict=True):
        gradients.read(part, message[slot.slice])
    collectives.allreduce(comm, message, algorithm)
    for part, slot in zip(ranges, slots, strict=True):
        gradients.write(part, message[slot.slice])
