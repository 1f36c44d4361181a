"""The optimizer update of the ranges that a rank owns.

The update computes directions, then the norms for layer-wise learning rates, then the new parameters. Sums over the
tensor axis count each tensor once, whether the axis shards or replicates it.
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
from hpcdist.comm.threads.communicator import solo
from hpcdist.optim import exact, norms
from hpcdist.optim.master_weights import MasterWeights
from hpcdist.optim.optimizer import Optimizer
from hpcdist.strategies.core.operations import Kind, Operation


def unsharded_ranges(layout: Layout, parts: Iterable[Range]) -> list[Range]:
    """Return a list of the ranges within ``parts`` whose tensors are not sharded over the tensor axis."""
    return [touched for part in parts for segment, touched in layout.within(part) if segment.spec.cut is None]


def counted(layout: Layout, parts: Sequence[Range], comm: Communicator) -> list[Range]:
    """Return a list of the subranges of ``parts`` that this rank adds to a sum over ``comm``. Local.

    Every rank counts its shards of tensors. Only rank 0 counts tensors that ``comm`` does not shard.
    """
    if comm.rank == 0:
        return list(parts)
    return [touched for part in parts for segment, touched in layout.within(part) if segment.spec.cut is not None]


def sum_norms(norms: np.ndarray, layout: Layout, comm: Communicator, algorithm: str) -> None:
    """Sum ``norms``, the squared norms of all tensors of ``layout``, over ``comm`` in place. Collective.

    Only rank 0 contributes the norms of unsharded tensors. ``algorithm``: allreduce algorithm.
    """
    if comm.size == 1:
        return
    if comm.rank:
        norms[[segment.spec.cut is None for segment in layout.segments]] = 0
    collectives.allreduce(comm, norms.reshape(-1), algorithm)


def sum_gradients(gradients: FlatStore, parts: Iterable[Range], comm: Communicator, algorithm: str) -> None:
    """Sum partial gradients in the flat ranges ``parts`` over the tensor axis ``comm``, in one message. Collective."""
    within = gradients.layout.within
    ranges = [touched for part in parts for segment, touched in within(part) if segment.spec.partial]
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


class ShardedUpdate:
    """Optimizer update of the flat ranges ``parts`` of the parameters, with reduced gradients."""

    # Norms are summed over the communicators ``sharers``, ``tensor`` and ``experts``.

    def __init__(
        self,
        parameters: FlatStore,
        gradients: FlatStore,
        optimizer: Optimizer,
        parts: Sequence[Range],
        sharers: Communicator | None,  # ranks that update other parts of the same tensors
        agree_algorithm: str,
        *,
        exactly: bool = False,  # sum squares without rounding, so that sharding does not change norms
        tensor: Communicator | None = None,  # ranks of the tensor axis
        experts: Communicator | None = None,  # ranks that have other experts of the same tensors
    ) -> None:
        self.parameters, self.gradients, self.optimizer = parameters, gradients, optimizer
        self.parts = [part for part in parts if part]
        self._sharers, self._algorithm, self._exactly = sharers, agree_algorithm, exactly
        if exactly:
            optimizer.sum_exactly()
        self._tensor, self._experts = tensor or solo(), experts
        self.counted = counted(gradients.layout, self.parts, self._tensor)
        # Tensors that the tensor axis does not cut are counted by its first rank alone.
        self._elsewhere = unsharded_ranges(gradients.layout, self.parts) if self._tensor.rank else []
        self.loss_scale = 1.0  # factor in this step's gradients
        self._scale = 1.0
        self._norms: np.ndarray | None = None  # (segments, 2)
        self.handlers = {
            Kind.DIRECTION: self.direction,
            Kind.NORMS: self.norms,
            Kind.APPLY: self.apply,
            Kind.SUM_ROWS: self.sum_rows,
        }

    def plan(self) -> list[Operation]:
        """Return a list of the operations of the update: compute directions, sum norms if needed, apply. Local."""
        norms = [Operation(Kind.NORMS)] if self.optimizer.needs_norms else []
        return [
            *(Operation(Kind.DIRECTION, range=part) for part in self.parts),
            *norms,
            *(Operation(Kind.APPLY, range=part) for part in self.parts),
        ]

    def norm_squared(self) -> float:
        """Return the sum of squares of this rank's reduced gradients.

        Collective if sums are exact. Then rank 0 returns the sum over all ranks, and the other ranks return 0.
        """
        if not self._exactly:
            return norms.sum_of_squares(self.gradients, self.counted, self._elsewhere)
        # Exact sums are collective over the sharers: their rank 0 returns the sum over all of them, the others 0.
        # Sums of digits are exact in any order. They are rounded to a float only at the end.
        digits = norms.exact_squares(self.gradients, self.parts)
        if self._sharers is not None:
            collectives.allreduce(self._sharers, digits, self._algorithm)
        counts = self._sharers is None or self._sharers.rank == 0  # the caller sums the results of all ranks
        return float(exact.rounded(digits)) if counts else 0.0

    def begin_update(self, scale: float, rate_factor: float = 1.0) -> None:
        """Advance the optimizer's step count. Local.

        ``scale``: factor that the update applies to gradients. ``rate_factor``: factor of the scheduled learning rate.
        """
        self._scale = scale
        self.optimizer.begin_step(rate_factor)

    def direction(self, op: Operation) -> None:
        """Compute the optimizer's update directions for the parameters in the range of ``op``. Local."""
        self.optimizer.direction(op.part, self.parameters, self.gradients, self._scale)

    def norms(self, op: Operation) -> None:
        """Sum the squared norm of each tensor over the ranks that hold its shards. Collective over these ranks."""
        norms = self.optimizer.partial_norms()  # of the pieces on this rank; a tensor may lie on several sharers
        if self._sharers is not None:
            collectives.allreduce(self._sharers, norms.reshape(-1), self._algorithm)
        if self._experts is not None:
            collectives.allreduce(self._experts, norms.reshape(-1), self._algorithm)
        sum_norms(norms, self.gradients.layout, self._tensor, self._algorithm)
        self._norms = exact.rounded(norms) if self._exactly else norms

    def sum_rows(self, op: Operation) -> None:
        """Sum the partial gradients of tensors that the tensor axis does not shard. Collective over the tensor axis."""
        sum_gradients(self.gradients, self.parts, self._tensor, self._algorithm)

    def apply(self, op: Operation) -> None:
        """Update the parameters in the range of ``op`` along the update directions. Local."""
        self.optimizer.apply(op.part, self.parameters, self.gradients, None, self._norms)

    @property
    def master(self) -> MasterWeights | None:
        """The optimizer with float32 master weights if the parameters are 16-bit copies, or None."""
        return self.optimizer if isinstance(self.optimizer, MasterWeights) else None

    def slots(self) -> dict[str, FlatStore]:
        """Return a dict {kind of optimizer state, such as "optimizer.m": store}. Local."""
        return {f"optimizer.{name}": store for name, store in self.optimizer.slots.items()}
