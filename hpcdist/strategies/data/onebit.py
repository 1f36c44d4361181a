"""1-bit Adam (Tang et al., arXiv:2102.02888): dense Adam first, then signs of the momentum.

In the first ``compression.warmup_steps`` updates, gradients are summed and clipped without compression, as in
AdamW. Then the variance is frozen: each rank advances the common momentum by its own gradient, and sends
signs of it. With M_q bytes of payload for all chunks of rank q, rank r sends

    M_q for all q but r to their owners, and M_q for all q but r + 1 around a ring:  about 2 (p-1)/p n/8

bytes for n elements; a dense sum sends 2 (p-1)/p 4 n.

A scale group is one tensor, or many small tensors that are encoded together. It has one chunk per rank, each with its
own scale: 4 bytes, plus at most 63 of alignment. A chunk of `LEAST` elements takes 576 bytes instead of 16384; larger
chunks take up to 32 times fewer. Tensors with fewer elements per rank share groups: matrices in one, biases and norm
scales in another, because their gradients differ most. Tensors that the tensor axis does not shard are separate from
sharded ones, because they must have equal bits on all tensor ranks.

Weight decay is decoupled, as in AdamW: only the momentum travels. In the warm-up, gradients are clipped by their global
norm; afterwards each replica clips its gradients, see `hpcdist.strategies.data.coded_allreduce`.

One data rank compresses and freezes nothing: the step is AdamW. A checkpoint has the moments once, the worker errors of
each rank, and the server errors once. For another number of ranks p', the mean of the worker errors is kept: each rank
takes p'/p of their sum in its own chunks. A checkpoint of AdamW, or of the warm-up, starts with no errors. A frozen
variance stays frozen, except on one data rank, which applies the errors at once and continues with Adam.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import FLOAT32
from hpcdist.arrays.layout import Layout, Segment
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.segments import scratch
from hpcdist.compression.compressor import RandomKey, align
from hpcdist.compression.onebit_adam import AdamMoments, OneBitAdam, places
from hpcdist.errors import StorageError
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext, buckets_of_rank
from hpcdist.strategies.core.sharded_update import ShardedUpdate, counted
from hpcdist.strategies.data.coded_allreduce import LocalGradients
from hpcdist.strategies.data.exchange import saved_shares
from hpcdist.strategies.data.reducers import Reducer

LEAST: Final = 1 << 12  # smallest number of elements in a chunk of a single tensor


@dataclass(frozen=True)
class ScaleGroup:
    """Tensors that are quantised together as one array."""

    tensors: tuple[tuple[Segment, Range], ...]  # (tensor, its flat parameter range), in order

    @property
    def size(self) -> int:
        """Total number of elements of the tensors."""
        return sum(where.size for _, where in self.tensors)

    @property
    def places(self) -> list[Range]:
        """List of the range of each tensor in the array that `gather` returns."""
        starts = accumulate((where.size for _, where in self.tensors), initial=0)
        return [where.shift(start - where.start) for (_, where), start in zip(self.tensors, starts, strict=False)]

    def gather(self, store: FlatStore) -> Array:
        """Return the group's elements of ``store`` as one array: a view, or a copy in scratch memory. Local."""
        if len(self.tensors) == 1:
            return store.range(self.tensors[0][1])
        copy = scratch("compressed.stretch", self.size, np.dtype(store.dtype), store.array)
        for (_, where), place in zip(self.tensors, self.places, strict=True):
            copy[place.slice] = store.range(where)
        return copy

    def scatter(self, values: Array, store: FlatStore) -> None:
        """Write ``values``, the result of `gather`, back to ``store``. Local."""
        if len(self.tensors) == 1:
            return
        for (_, where), place in zip(self.tensors, self.places, strict=True):
            store.range(where)[...] = values[place.slice]

    def pieces(self, kind: str, array: Array, within: Range, parts: Iterable[Range]) -> Iterator[Piece]:
        """Yield checkpoint pieces of the tensors in ``array``, restricted to the flat ranges ``parts``.

        ``array``: elements in the range ``within`` of the array that `gather` returns. ``kind``: kind of the pieces.
        """
        ranges = list(parts)
        for (segment, where), place in zip(self.tensors, self.places, strict=True):
            common_places = place.intersect(within)
            flat = common_places.shift(where.start - place.start) if common_places else Range(where.start, where.start)
            for part in ranges:
                common = flat.intersect(part)
                if common:
                    at = common.shift(place.start - where.start).shift(-within.start)
                    yield Piece.of(kind, segment, common, array[at.slice])


def scale_groups(layout: Layout, part: Range, ranks: int) -> list[ScaleGroup]:
    """Return a list of the groups of tensors in the flat range ``part`` that are quantised together.

    ``ranks``: number of data ranks. Small tensors share a group.
    """
    groups: list[ScaleGroup] = []
    packs: dict[tuple[bool, bool], list[tuple[Segment, Range]]] = {}
    for segment, where in layout.within(part):
        if where.size >= LEAST * ranks:
            groups.append(ScaleGroup(((segment, where),)))
        else:
            packs.setdefault((bool(segment.spec.whole), segment.spec.adapted), []).append((segment, where))
    return groups + [ScaleGroup(tuple(packs[key])) for key in sorted(packs)]


WORKER: Final = "onebit.worker_error"
SERVER: Final = "onebit.server_error"
FROZEN: Final = "frozen"  # in a checkpoint's scalars: the number of ranks with worker errors, 0 before the freeze
_BYTES: Final = np.dtype(np.uint8)


class OneBit(LocalGradients):
    """1-bit Adam: after a warm-up with full gradients, ranks exchange the signs of their Adam momentum."""

    # ``context.optimizer`` configures Adam. The optimizer of ``update`` only applies weight decay and learning rate.

    def __init__(self, context: RankContext, update: ShardedUpdate, config: CompressionConfig, seed: int) -> None:
        super().__init__(context, update, buckets_of_rank(context, context.dtype.itemsize))
        self.counts = context.data.rank == 0
        self.config, self._seed, self._scale = config, seed, 1.0
        adamw, data = context.optimizer, context.data
        moments = AdamMoments(beta1=adamw.beta1, beta2=adamw.beta2, epsilon=adamw.epsilon)
        # The scale groups of each part, with the Adam state of their elements.
        self.groups = {
            part: [
                (group, OneBitAdam(group.size, data.rank, data.size, moments, on=context.on))
                for group in scale_groups(context.layout, part, data.size)
            ]
            for part in context.parts
        }
        for _, adam in self.all_groups():
            for array in adam.arrays().values():
                context.counted(array, "optimizer")
        self._is_frozen = False
        self._old_ranks = data.size  # ranks with worker errors in the checkpoint that is read, or 0
        self._old_errors: list[list[Array]] = []
        self.handlers = {Kind.REDUCE: self.reduce, Kind.COMPRESS: self.compress}

    def all_groups(self) -> Iterator[tuple[ScaleGroup, OneBitAdam]]:
        """Yield pairs (`ScaleGroup`, `OneBitAdam` state of this group). Local."""
        return chain.from_iterable(self.groups.values())

    @property
    def is_compressing(self) -> bool:
        """True if the current step sends signs of the momentum."""
        is_warm = self.update.optimizer.count >= self.config.warmup_steps
        return self.context.data.size > 1 and (self._is_frozen or is_warm)

    def plan(self) -> list[Operation]:
        return [Operation(Kind.REDUCE, range=bucket) for bucket in self.buckets]

    def plan_after_agreement(self) -> list[Operation]:
        return [Operation(Kind.COMPRESS, range=part) for part in self.groups]

    def reduce(self, op: Operation) -> None:
        """Allreduce the gradients of ``op.range`` in the warm-up. Do nothing after the warm-up."""
        if not self.is_compressing:
            collectives.allreduce(self.context.data, self.update.gradients.range(op.part), self.context.algorithm)

    def norm_squared(self) -> float:
        return super().norm_squared() if self.is_compressing else Reducer.norm_squared(self)

    def begin_update(self, scale: float, correction: float) -> float:
        """Freeze Adam's variance after the warm-up. Return 1, because `compress` scales the gradients. Local.

        ``scale``, ``correction``: as in `Reducer.begin_update`.
        """
        freezes = self.is_compressing
        if freezes:
            # Gradients are summands of the mean over all samples; later the mean over the ranks is taken.
            scale = self.clip_factor(correction) * self.context.data.size
        for _, adam in self.all_groups():
            if freezes and not adam.is_frozen:
                adam.freeze()
            elif adam.is_frozen and not freezes:
                adam.thaw()
        self._scale, self._is_frozen = scale, freezes
        return super().begin_update(1.0, correction)

    def compress(self, op: Operation) -> None:
        groups, gradients = self.groups[op.part], self.update.gradients
        for group, adam in groups:
            gradient = group.gather(gradients)
            gradient *= np.float32(self._scale)
            if self._is_frozen:
                adam.accumulate(gradient)
            else:
                adam.warm(gradient)
                group.scatter(gradient, gradients)
        if self._is_frozen:
            self._send([adam for _, adam in groups])
            for group, adam in groups:
                direction = group.gather(gradients)
                adam.direction(direction)
                group.scatter(direction, gradients)

    def _send(self, adams: Sequence[OneBitAdam]) -> None:
        comm, like = self.context.data, self.update.gradients.array
        # Byte ranges of the groups' payloads in the message about each rank's chunks.
        ranges = [places([a.compressor.payload_bytes(a.chunks[q].size) for a in adams]) for q in range(comm.size)]
        sizes = [row[-1].stop if row else 0 for row in ranges]
        outgoing, arrived, all_means = places(sizes), places([sizes[comm.rank]] * comm.size), places(sizes)
        send = scratch("compressed.outgoing", align(outgoing[-1].stop), _BYTES, like)
        receive = scratch("compressed.arrived", align(arrived[-1].stop), _BYTES, like)
        for owner, row in enumerate(outgoing):
            for number, (adam, place) in enumerate(zip(adams, ranges[owner], strict=True)):
                adam.encode_worker(owner, send[row.slice][place.slice], self._key(number, owner))
        collectives.all_to_all(comm, send, receive, outgoing, arrived)
        means = send  # the sent payloads are no longer needed
        for number, (adam, place) in enumerate(zip(adams, ranges[comm.rank], strict=True)):
            for row in arrived:
                adam.add_worker(receive[row.slice][place.slice])
            adam.encode_server(means[all_means[comm.rank].slice][place.slice], self._key(number, comm.size))
        collectives.all_gather(comm, means, all_means)
        for owner, row in enumerate(all_means):
            for adam, place in zip(adams, ranges[owner], strict=True):
                adam.receive(owner, means[row.slice][place.slice])

    def _key(self, group: int, phase: int) -> RandomKey:
        data = self.context.data
        return RandomKey(self._seed, self.update.optimizer.count, data.rank, group * (data.size + 1) + phase)

    def pieces(self) -> list[Piece]:
        context, pieces = self.context, list[Piece]()
        once = counted(context.layout, context.parts, context.tensor)
        shares = saved_shares(context)
        for group, adam in self.all_groups():
            whole = Range(0, group.size)
            for name in ("m", "v"):
                pieces += group.pieces(f"optimizer.{name}", adam.arrays()[name], whole, shares)
            if adam.is_frozen:
                pieces += group.pieces(f"{WORKER}.{context.data.rank}", adam.worker_error, whole, once)
                pieces += group.pieces(SERVER, adam.server_error, adam.own, once)
        return pieces

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        self._old_ranks = state.get(FROZEN, 0)
        if not (isinstance(self._old_ranks, int) and self._old_ranks >= 0):
            raise StorageError(
                f"the checkpoint is damaged: the number of ranks with 1-bit Adam errors is {self._old_ranks!r}, "
                "expected an integer of at least 0; resume from another checkpoint"
            )
        return [SERVER, *(f"{WORKER}.{rank}" for rank in range(self._old_ranks))]

    def wanted(self) -> list[Piece]:
        context, pieces = self.context, list[Piece]()
        self._old_errors = []
        for group, adam in self.all_groups():
            whole = Range(0, group.size)
            for name in ("m", "v"):
                pieces += group.pieces(f"optimizer.{name}", adam.arrays()[name], whole, context.parts)
            if self._old_ranks:
                pieces += group.pieces(SERVER, adam.server_error, adam.own, context.parts)
            if self._old_ranks == context.data.size:
                pieces += group.pieces(f"{WORKER}.{context.data.rank}", adam.worker_error, whole, context.parts)
            elif self._old_ranks:
                errors = [backend.zeros(adam.own.size, FLOAT32, context.on) for _ in range(self._old_ranks)]
                for rank, array in enumerate(errors):
                    pieces += group.pieces(f"{WORKER}.{rank}", array, adam.own, context.parts)
                self._old_errors.append(errors)
        return pieces

    def state(self) -> dict[str, Any]:
        return {FROZEN: self.context.data.size if self._is_frozen else 0}

    def restored(self, state: Mapping[str, Any]) -> None:
        self._is_frozen = state.get(FROZEN, 0) > 0
        for _, adam in self.all_groups():
            adam.count, adam.is_frozen = self.update.optimizer.count, self._is_frozen
        for (_, adam), old_errors in zip(self.all_groups(), self._old_errors, strict=False):
            # The owner of a chunk continues with the mean of the worker errors, so that they are added up only there.
            chunk = adam.worker_error[adam.own.slice]
            adam.worker_error[...] = 0
            for errors in old_errors:
                chunk += errors
            chunk *= np.float32(self.context.data.size / self._old_ranks)
        self._old_errors, self._old_ranks = [], self.context.data.size
