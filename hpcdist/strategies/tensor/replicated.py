"""Replicated tensors of the tensor axis: norms, biases behind a sum, and positions, which every rank has whole.

They count once in norms and checkpoints, and are the same bits on all ranks. Where activations are cut by tokens,
each rank's gradient is that of its own rows, and the sum over the axis is taken once a step: behind the sums over the
data axis, so that a rank sends no more than its optimizer steps.
"""

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
    """Return the ranges within ``parts`` of tensors that are not cut (local)."""
    return [where for part in parts for segment, where in layout.within(part) if not segment.spec.whole]


def counted(layout: Layout, parts: Sequence[Range], comm: Communicator) -> list[Range]:
    """Return what of ``parts`` this rank counts, so that the tensor axis ``comm`` counts every element once (local)."""
    if comm.rank == 0:
        return list(parts)
    return [where for part in parts for segment, where in layout.within(part) if segment.spec.whole]


def sum_norms(norms: np.ndarray, layout: Layout, comm: Communicator, algorithm: str) -> None:
    """Sum ``norms`` (segments, ...) over the tensor axis, those of tensors that are not cut once. Collective."""
    if comm.size == 1:
        return
    if comm.rank:
        norms[[not segment.spec.whole for segment in layout.segments]] = 0
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
