"""Exchange of a model whose experts are shared out: two exchanges, each over the ranks that have the same tensors.

Dense tensors are replicated over all p ranks of data x context, experts over the p/e of them that have the same ones.
So the one strategy (allreduce, or a stage of ZeRO) is made twice, over other ranks and other ranges of the flat space
(`RankContext.portion`), and a step has the operations of both. A gradient of an expert comes from the tokens of all
ranks of its group already: summed over the replicas it is whole. With Psi bytes of dense tensors and X of experts, a
rank sends on the ring 2 Psi (p-1)/p and 2 X/e (p/e - 1)/(p/e) for gradients, where it would send 2 X (p-1)/p without
expert parallelism, and all-to-alls in return (see `axis`).

Norms: every element is on the first replicas of a group once, so shares of the global norm add up over the world; the
norm of a stack of experts for layer-wise rates is summed over the group besides.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.core.exchange import Exchange, Handlers
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.operations import Kind, Operation

Make = Callable[[RankContext], Exchange]
OF_UNITS: Final = (Kind.GATHER, Kind.FREE, Kind.REFRESH)


class ExpertExchange(Exchange):
    """Exchanges of the dense tensors and of the experts of this rank, made by ``make``. Collective over the world.

    ``replicas`` joins those replicas that have the experts of this one; `close` frees it.
    """

    lock_step = True

    def __init__(self, context: RankContext, replicas: Communicator, make: Make) -> None:
        self._replicas = replicas
        self.dense = make(replace(context, portion="dense"))
        each = not self.dense.accumulates
        self.experts = make(replace(context, portion="expert", data=replicas, every_microbatch=each))
        self.both = self.dense, self.experts
        self.algorithm, self.degrees = self.dense.algorithm, self.dense.degrees
        self.replicas_identical, self.accumulates = self.dense.replicas_identical, self.dense.accumulates
        self.keeps_parameters = self.dense.keeps_parameters
        if replicas.size > 1 and self.experts.replicas_identical:
            self.other_replicas = [(replicas, self.experts.parameters)]
        self.gathers: Mapping[int, Sequence[int]] = {
            unit: sorted({*self.dense.gathers.get(unit, ()), *self.experts.gathers.get(unit, ())})
            for unit in ({**self.dense.gathers, **self.experts.gathers})
        }
        layout = context.layout
        self._border = {layer: layout.part_of(layer, "expert").start for layer in layout.units}
        self._portions = [replace(context, portion=name).parts for name in ("dense", "expert")]
        self._of_unit = [_units_by_kind(exchange) for exchange in self.both]
        kinds = dict.fromkeys((*self.dense.handlers, *self.experts.handlers))
        self.handlers: Handlers = dict.fromkeys(kinds, self._carry_out)

    def _carry_out(self, op: Operation) -> None:
        """Hand ``op`` to the exchange of its range or unit; without one it is for both."""
        for place, exchange in enumerate(self.both):
            for own in self._own(place, op):
                exchange.handlers[op.kind](own)

    def _own(self, place: int, op: Operation) -> list[Operation]:
        """Return what of ``op`` is for the dense exchange (0), or for that of experts (1) (local)."""
        if op.range is not None:
            parts = [part.intersect(op.range) for part in self._portions[place]]
            return [replace(op, range=part) for part in parts if part]
        return [op] if op.kind not in OF_UNITS or op.unit in self._of_unit[place][op.kind] else []

    @property
    def loaded_bytes(self) -> int:
        """The bytes that this rank has read from memory that others of its node wrote."""
        return sum(exchange.loaded_bytes for exchange in self.both)

    @property
    def parameters(self) -> FlatStore:
        """The dense parameters, which all replicas share."""
        return self.dense.parameters

    @property
    def parameter_stores(self) -> Sequence[FlatStore]:
        """The dense parameters, and those of the experts."""
        return self.dense.parameters, self.experts.parameters

    @property
    def gradients(self) -> FlatStore:
        """The dense gradients."""
        return self.dense.gradients

    def plan(self) -> list[Operation]:
        """Return the operations of both up to AGREE, that once, and what follows it (local)."""
        agree = Operation(Kind.AGREE)
        plans = [exchange.plan() for exchange in self.both]
        dense, experts = (plan[: plan.index(agree)] for plan in plans)
        after = [op for plan in plans for op in plan[plan.index(agree) + 1 :]]
        if not self.accumulates:  # a unit is taken as a whole: then the next micro-batch overwrites it
            stops = {op.part.start: op.part.stop for op in experts}
            dense = [replace(op, range=Range(op.part.start, stops.get(op.part.stop, op.part.stop))) for op in dense]
            experts = []
        order = (Kind.DIRECTION, Kind.NORMS, Kind.APPLY)  # norms need all directions, and steps all norms
        after.sort(key=lambda op: order.index(op.kind) if op.kind in order else len(order))
        return [*dense, *experts, agree, *dict.fromkeys(after)]

    def begin(self, operations: Sequence[Operation]) -> None:
        """Prepare both for their operations of a list."""
        for place, exchange in enumerate(self.both):
            exchange.begin([own for op in operations for own in self._own(place, op)])

    def parameters_at(self, layer: int) -> FlatStore:
        """Return the store of a layer: two, side by side."""
        return self._joined(layer, *(exchange.parameters_at for exchange in self.both))

    def gradients_at(self, layer: int) -> FlatStore:
        """Return the store of the gradients of a layer: two, side by side."""
        return self._joined(layer, *(exchange.gradients_at for exchange in self.both))

    def _joined(self, layer: int, dense: Callable[[int], FlatStore], experts: Callable[[int], FlatStore]) -> FlatStore:
        border = self._border[layer]
        if border == self.dense.parameters.layout.units[layer].stop:  # no experts
            return dense(layer)
        return cast(FlatStore, JoinedStore(dense(layer), experts(layer), border))

    def norm_squared(self) -> float:
        """Return this rank's share of the squared norm of the mean gradient (local)."""
        return sum(exchange.norm_squared() for exchange in self.both)

    def agree(self, values: np.ndarray) -> np.ndarray:
        """Sum ``values`` over the world, in place. Collective."""
        return self.dense.agree(values)

    def agree_losses(self, losses: Sequence[float], values: np.ndarray) -> tuple[float, np.ndarray]:
        """Sum ``losses`` and ``values`` over the world. Collective."""
        return self.dense.agree_losses(losses, values)

    def begin_update(self, scale: float) -> None:
        """Begin the update of both."""
        for exchange in self.both:
            exchange.begin_update(scale)

    def count_samples(self, own: int, samples: int) -> None:
        """Record the samples of the step with both (local)."""
        for exchange in self.both:
            exchange.count_samples(own, samples)

    def summed_gradients(self) -> Iterable[Array]:
        """Return the summed gradients that this rank updates by (local)."""
        return [part for exchange in self.both for part in exchange.summed_gradients()]

    def load_initial(self, initial: FlatStore) -> None:
        """Load this rank's part of the initial values (local)."""
        for exchange in self.both:
            exchange.load_initial(initial)

    def pieces(self) -> Sequence[Piece]:
        """Return what this rank saves of both (local)."""
        return [piece for exchange in self.both for piece in exchange.pieces()]

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        """Record the state that will be restored (local)."""
        return {kind for exchange in self.both for kind in exchange.prepare_restore(state)}

    def wanted(self) -> Sequence[Piece]:
        """Return what this rank restores of both (local)."""
        return [piece for exchange in self.both for piece in exchange.wanted()]

    def state(self) -> dict[str, Any]:
        """Return the optimizer's clock: that of both (local)."""
        return self.dense.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the clocks of both."""
        for exchange in self.both:
            exchange.restore(state)

    def close(self) -> None:
        """Free what both have made, and the replicas. Collective over the world."""
        for exchange in self.both:
            exchange.close()
        self._replicas.free()


def _units_by_kind(exchange: Exchange) -> dict[Kind, set[int]]:
    """Return the units that operations of an exchange concern, by kind: for a use, or after an update (local)."""
    cut = {unit for needed in exchange.gathers.values() for unit in needed}
    units = {kind: {op.unit for op in exchange.plan() if op.kind is kind} for kind in OF_UNITS}
    return units | {Kind.GATHER: units[Kind.GATHER] | cut, Kind.FREE: cut}


class JoinedStore:
    """Store of the dense tensors of a layer, and of its experts, which begin at ``border`` of the flat space."""

    def __init__(self, dense: FlatStore, experts: FlatStore, border: int) -> None:
        self._dense, self._experts, self._border = dense, experts, border
        self.layout, self.dtype = dense.layout, dense.dtype

    def _of(self, where: Range) -> FlatStore:
        return self._experts if where.start >= self._border else self._dense

    def range(self, wanted: Range) -> Array:
        """Return the view of ``wanted``, which lies in one of both."""
        return self._of(wanted).range(wanted)

    def view(self, key: str) -> Array:
        """Return tensor ``key`` in its shape."""
        return self._of(self.layout.by_key[key].range).view(key)

    def add(self, wanted: Range, values: Array) -> None:
        """Add ``values`` to ``wanted``."""
        self._of(wanted).add(wanted, values)

    def blocks(self, wanted: Range) -> Iterable[Array]:
        """Yield ``wanted`` in blocks."""
        return self._of(wanted).blocks(wanted)
