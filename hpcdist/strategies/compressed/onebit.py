"""1-bit Adam as an exchange: dense Adam first, then signs of the momentum, Tang et al. (arXiv:2102.02888).

See `hpcdist.compression.quantise.onebit_adam` for the maths. In the first ``compression.warmup_steps`` updates
gradients are summed and clipped as without compression, and the steps are those of AdamW. Then the variance is
frozen: each of p ranks advances the momentum that all have by its own gradient, and sends signs of it. All scale
groups of a rank travel together: with M_q the bytes of the payloads of all chunks of rank q, 4 + n/8 for n elements
and placed by words, rank r sends

    the M_q of all q but r to their owners, and those of all q but r + 1 around a ring:  2 (p-1)/p n/8 and a little

bytes for n elements, where a dense sum takes 2 (p-1)/p 4 n.

A scale group is one tensor, or many small ones, encoded together. Every chunk of a group, one for each rank, has a
scale of its own: 4 bytes, and up to 63 to align its payload. With `LEAST` elements in a chunk that is 576 bytes for
16384, 28 times fewer; with more, up to 32 times. Tensors of that many elements for each rank are a group of their
own. All smaller ones lie in packs, whose elements have one scale for each chunk: matrices together, and biases and
norm scales together, since their gradients differ most; tensors that all ranks of the tensor axis have apart from
those that it cuts, since they must come to the same bits there.

Weight decay is decoupled and the rate is that of the step, as in AdamW: only the momentum travels. Gradients are
clipped by their global norm in the warm-up, where it is known; afterwards each replica clips its own at clip_norm /
sqrt(p), see `LocalGradients`. (Under DeepSpeed each clips the mean of its own samples at the limit of the global
norm, which is sqrt(p) times harder, and harder the more ranks there are.)

On one data rank nothing is compressed, and nothing is frozen: it is AdamW. A checkpoint has the moments once, of each
rank the worker errors, and the server errors once, of all owners. For another number of ranks the mean of the
worker errors is kept: each takes p'/p of their sum in its own chunks. A checkpoint of AdamW, or of the warm-up,
begins with no errors; one that is frozen stays so, but for one data rank, which pays the errors at once and goes on
with Adam.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import Layout, Segment
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.segments import scratch
from hpcdist.compression.compressor import RandomKey, align
from hpcdist.compression.quantise.onebit_adam import AdamMoments, OneBitAdam, places
from hpcdist.errors import StorageError
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.compressed.exchange import LocalGradients
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.tensor.axis import counted

LEAST: Final = 1 << 12  # elements of a chunk


@dataclass(frozen=True)
class ScaleGroup:
    """Tensors that are encoded together: ``tensors`` one behind the other, each with its range of the flat space."""

    tensors: tuple[tuple[Segment, Range], ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(where.size for _, where in self.tensors)

    @property
    def places(self) -> list[Range]:
        """Places of the tensors within the group."""
        starts = accumulate((where.size for _, where in self.tensors), initial=0)
        return [where.shift(start - where.start) for (_, where), start in zip(self.tensors, starts, strict=False)]

    def gather(self, store: FlatStore) -> Array:
        """Return the elements of the group: a view, or a copy in scratch memory, which `scatter` writes back."""
        if len(self.tensors) == 1:
            return store.range(self.tensors[0][1])
        copy = scratch("compressed.stretch", self.size, np.dtype(store.dtype), store.array)
        for (_, where), place in zip(self.tensors, self.places, strict=True):
            copy[place.slice] = store.range(where)
        return copy

    def scatter(self, values: Array, store: FlatStore) -> None:
        """Write ``values``, which `gather` returned, back to ``store``."""
        if len(self.tensors) == 1:
            return
        for (_, where), place in zip(self.tensors, self.places, strict=True):
            store.range(where)[...] = values[place.slice]

    def pieces(self, kind: str, array: Array, within: Range, parts: Iterable[Range]) -> Iterator[Piece]:
        """Yield pieces, in ``parts`` of the flat space, of ``array``, the elements ``within`` of the group."""
        ranges = list(parts)
        for (segment, where), place in zip(self.tensors, self.places, strict=True):
            held = place.intersect(within)
            flat = held.shift(where.start - place.start) if held else Range(where.start, where.start)
            for part in ranges:
                common = flat.intersect(part)
                if common:
                    at = common.shift(place.start - where.start).shift(-within.start)
                    yield Piece.of(kind, segment, common, array[at.slice])


def scale_groups(layout: Layout, part: Range, ranks: int) -> list[ScaleGroup]:
    """Return the scale groups of ``part`` of the flat space on so many ranks (local)."""
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
FROZEN: Final = "frozen"  # among the numbers of a checkpoint: how many ranks have worker errors, 0 before the freeze
_BYTES: Final = np.dtype(np.uint8)
_FLOAT32: Final = np.dtype(np.float32)


class OneBitExchange(LocalGradients):
    """Exchange of signs of momenta over the data axis. Collective over it, but where it says local."""

    restores: Collection[str] = (FROZEN,)

    def __init__(self, context: RankContext, config: CompressionConfig, seed: int = 0) -> None:
        optimizer = context.optimizer
        # What is left of AdamW for the owner: the decay, and the rate.
        super().__init__(context, replace(optimizer, name="sgd", momentum=0.0))
        self.config, self._seed, self._scale = config, seed, 1.0
        moments = AdamMoments(beta1=optimizer.beta1, beta2=optimizer.beta2, epsilon=optimizer.epsilon)
        data = context.data
        # The scale groups of each part, with the Adam state of their elements.
        self.held = {
            part: [
                (group, OneBitAdam(group.size, data.rank, data.size, moments, on=context.on))
                for group in scale_groups(context.layout, part, data.size)
            ]
            for part in context.parts
        }
        for _, adam in self._all():
            for array in adam.arrays().values():
                context.counted(array, "optimizer")
        self._is_frozen = False
        self._before = data.size  # the ranks that had worker errors in the checkpoint that is read; 0: none
        self._taken: list[list[Array]] = []

    def _all(self) -> Iterator[tuple[ScaleGroup, OneBitAdam]]:
        return chain.from_iterable(self.held.values())

    @property
    def is_compressing(self) -> bool:
        """Whether the step that begins sends signs of the momentum (local)."""
        warm = self.sharded_update.optimizer.count < self.config.warmup_steps
        return self.context.data.size > 1 and (self._is_frozen or not warm)

    def plan(self) -> list[Operation]:
        """Return REDUCE per bucket (of the warm-up), AGREE, COMPRESS of each part, and the update."""
        steps = super().plan()
        agreed = steps.index(Operation(Kind.AGREE)) + 1
        return [*steps[:agreed], *(Operation(Kind.COMPRESS, range=part) for part in self.held), *steps[agreed:]]

    def reduce(self, op: Operation) -> None:
        """Sum the gradients of the range in place, in the warm-up."""
        if not self.is_compressing:
            super().reduce(op)

    def norm_squared(self) -> float:
        """Return this rank's share of the squared norm: of the sum in the warm-up, then of its own gradients."""
        if self.is_compressing:
            return super().norm_squared()
        return super(LocalGradients, self).norm_squared()

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step, and freeze the variance where it is due."""
        freezes = self.is_compressing
        if freezes:
            # Gradients are shares of the mean over all samples; the mean over the ranks is taken when they have come.
            scale = self.clip_factor() * self.context.data.size
        for _, adam in self._all():
            if freezes and not adam.is_frozen:
                adam.freeze()
            elif adam.is_frozen and not freezes:
                adam.thaw()
        self._scale, self._is_frozen = scale, freezes
        super().begin_update(1.0)

    def compress(self, op: Operation) -> None:
        """Replace the gradients of the range, a part of this rank, by the step of Adam."""
        held = self.held[op.part]
        for group, adam in held:
            gradient = group.gather(self.gradients)
            gradient *= np.float32(self._scale)
            if self._is_frozen:
                adam.accumulate(gradient)
            else:
                adam.warm(gradient)
                group.scatter(gradient, self.gradients)
        if self._is_frozen:
            self._send([adam for _, adam in held])
            for group, adam in held:
                direction = group.gather(self.gradients)
                adam.direction(direction)
                group.scatter(direction, self.gradients)

    def _send(self, adams: Sequence[OneBitAdam]) -> None:
        """Reduce-scatter the signs of the momenta to the owners of chunks, and all-gather the means."""
        comm, like = self.context.data, self.gradients.array
        # Payloads lie alike in every message of a chunk; (ranks, groups)
        lie = [places([a.compressor.payload_bytes(a.chunks[q].size) for a in adams]) for q in range(comm.size)]
        sizes = [row[-1].stop if row else 0 for row in lie]
        outgoing, arrived, all_means = places(sizes), places([sizes[comm.rank]] * comm.size), places(sizes)
        send = scratch("compressed.outgoing", align(outgoing[-1].stop), _BYTES, like)
        receive = scratch("compressed.arrived", align(arrived[-1].stop), _BYTES, like)
        for owner, row in enumerate(outgoing):
            for number, (adam, place) in enumerate(zip(adams, lie[owner], strict=True)):
                adam.encode_worker(owner, send[row.slice][place.slice], self._key(number, owner))
        collectives.all_to_all(comm, send, receive, outgoing, arrived)
        means = send  # what has been sent is not needed any more
        for number, (adam, place) in enumerate(zip(adams, lie[comm.rank], strict=True)):
            for row in arrived:
                adam.add_worker(receive[row.slice][place.slice])
            adam.encode_server(means[all_means[comm.rank].slice][place.slice], self._key(number, comm.size))
        collectives.all_gather(comm, means, all_means)
        for owner, row in enumerate(all_means):
            for adam, place in zip(adams, lie[owner], strict=True):
                adam.receive(owner, means[row.slice][place.slice])

    def _key(self, group: int, phase: int) -> RandomKey:
        data = self.context.data
        return RandomKey(self._seed, self.sharded_update.optimizer.count, data.rank, group * (data.size + 1) + phase)

    def pieces(self) -> Sequence[Piece]:
        """Return the pieces of the base class, this rank's share of the moments, and its errors."""
        context, shares, pieces = self.context, self.shares(), list(super().pieces())
        once = counted(context.layout, context.parts, context.tensor)
        for group, adam in self._all():
            whole = Range(0, group.size)
            for name in ("m", "v"):
                pieces += group.pieces(f"optimizer.{name}", adam.arrays()[name], whole, shares)
            if adam.is_frozen:
                pieces += group.pieces(f"{WORKER}.{context.data.rank}", adam.worker_error, whole, once)
                pieces += group.pieces(SERVER, adam.server_error, adam.own, once)
        return pieces

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        """Record the ranks whose errors a checkpoint has; it may lack them (local)."""
        self._before = state.get(FROZEN, 0)
        if not (isinstance(self._before, int) and self._before >= 0):
            raise StorageError(f"the checkpoint says that {self._before!r} ranks had errors of signs; it is damaged")
        return {*super().prepare_restore(state), SERVER, *(f"{WORKER}.{rank}" for rank in range(self._before))}

    def wanted(self) -> Sequence[Piece]:
        """Return the pieces of the base class, moments and errors, to be restored."""
        context, pieces = self.context, list(super().wanted())
        self._taken = []
        for group, adam in self._all():
            whole = Range(0, group.size)
            for name in ("m", "v"):
                pieces += group.pieces(f"optimizer.{name}", adam.arrays()[name], whole, context.parts)
            if self._before:
                pieces += group.pieces(SERVER, adam.server_error, adam.own, context.parts)
            if self._before == context.data.size:
                pieces += group.pieces(f"{WORKER}.{context.data.rank}", adam.worker_error, whole, context.parts)
            elif self._before:
                taken = [backend.zeros(adam.own.size, _FLOAT32, context.on) for _ in range(self._before)]
                for rank, array in enumerate(taken):
                    pieces += group.pieces(f"{WORKER}.{rank}", array, adam.own, context.parts)
                self._taken.append(taken)
        return pieces

    def state(self) -> dict[str, Any]:
        """Return the clock, and how many ranks have errors."""
        return super().state() | {FROZEN: self.context.data.size if self._is_frozen else 0}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, once the pieces are there (local)."""
        super().restore(state)
        self._is_frozen = state.get(FROZEN, 0) > 0
        for _, adam in self._all():
            adam.count, adam.is_frozen = self.sharded_update.optimizer.count, self._is_frozen
        for (_, adam), taken in zip(self._all(), self._taken, strict=False):
            # The mean over the ranks goes on where it is added up: by the rank that owns the chunk.
            own = adam.worker_error[adam.own.slice]
            adam.worker_error[...] = 0
            for errors in taken:
                own += errors
            own *= np.float32(self.context.data.size / self._before)
        self._taken, self._before = [], self.context.data.size
