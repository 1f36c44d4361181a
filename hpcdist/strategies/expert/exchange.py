"""Gradient exchange of a mixture of experts: one exchange for dense tensors and one for experts.

Dense tensors are replicated over all p ranks of data x context, experts over the p/e ranks that hold the same experts.
With Psi bytes of dense tensors and X of experts, a rank sends 2 Psi (p-1)/p and 2 X/e (p/e - 1)/(p/e) for gradients.
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
from hpcdist.strategies.core.exchange import Exchange, Handlers, Traits
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext

Make = Callable[[RankContext], Exchange]
OF_UNITS: Final = (Kind.GATHER, Kind.FREE, Kind.REFRESH)


class ExpertExchange(Exchange):
    """Strategy of a mixture of experts: one exchange of dense tensors, and one exchange of experts. Collective."""

    def __init__(self, context: RankContext, replicas: Communicator, make: Make) -> None:
        self._replicas = replicas  # freed by `close`
        self.dense = make(replace(context, portion="dense"))
        every_microbatch = not self.dense.traits.accumulates
        self.experts = make(replace(context, portion="expert", data=replicas, every_microbatch=every_microbatch))
        self.both = self.dense, self.experts
        dense, experts = self.dense.traits, self.experts.traits
        if replicas.size > 1 and experts.identical:
            self.other_replicas = [(replicas, self.experts.parameters)]
        self.traits = Traits(
            algorithm=dense.algorithm,
            identical=dense.identical,
            accumulates=dense.accumulates,
            degrees=dense.degrees,
            keeps_parameters=dense.keeps_parameters,
            gathers={
                unit: sorted({*dense.gathers.get(unit, ()), *experts.gathers.get(unit, ())})
                for unit in ({**dense.gathers, **experts.gathers})
            },
        )
        layout = context.layout
        self._border = {layer: layout.range_of(layer, "expert").start for layer in layout.units}
        self._portions = [replace(context, portion=name).parts for name in ("dense", "expert")]
        self._of_unit = [_units_by_kind(exchange) for exchange in self.both]
        kinds = dict.fromkeys((*self.dense.handlers, *self.experts.handlers))
        self.handlers: Handlers = dict.fromkeys(kinds, self._carry_out)

    def _carry_out(self, op: Operation) -> None:
        for index, exchange in enumerate(self.both):
            for part in self._own(index, op):
                exchange.handlers[op.kind](part)

    def _own(self, index: int, op: Operation) -> list[Operation]:
        if op.range is not None:
            parts = [part.intersect(op.range) for part in self._portions[index]]
            return [replace(op, range=part) for part in parts if part]
        return [op] if op.kind not in OF_UNITS or op.unit in self._of_unit[index][op.kind] else []

    @property
    def loaded_bytes(self) -> int:
        return sum(exchange.loaded_bytes for exchange in self.both)

    @property
    def parameters(self) -> FlatStore:
        """Store of this rank's dense parameters, without the parameters of experts."""
        return self.dense.parameters

    @property
    def parameter_stores(self) -> Sequence[FlatStore]:
        return self.dense.parameters, self.experts.parameters

    @property
    def gradients(self) -> FlatStore:
        return self.dense.gradients

    def plan(self) -> list[Operation]:
        agree = Operation(Kind.AGREE)
        plans = [exchange.plan() for exchange in self.both]
        dense, experts = (plan[: plan.index(agree)] for plan in plans)
        after = [op for plan in plans for op in plan[plan.index(agree) + 1 :]]
        if not self.traits.accumulates:  # take a unit as a whole, because the next micro-batch overwrites it
            stops = {op.part.start: op.part.stop for op in experts}
            dense = [replace(op, range=Range(op.part.start, stops.get(op.part.stop, op.part.stop))) for op in dense]
            experts = []
        order = (Kind.DIRECTION, Kind.NORMS, Kind.APPLY)  # norms need all directions, updates need all norms
        after.sort(key=lambda op: order.index(op.kind) if op.kind in order else len(order))
        return [*dense, *experts, agree, *dict.fromkeys(after)]

    def begin(self, operations: Sequence[Operation]) -> None:
        for index, exchange in enumerate(self.both):
            exchange.begin([part for op in operations for part in self._own(index, op)])

    def parameters_at(self, layer: int) -> FlatStore:
        return self._joined(layer, *(exchange.parameters_at for exchange in self.both))

    def gradients_at(self, layer: int) -> FlatStore:
        return self._joined(layer, *(exchange.gradients_at for exchange in self.both))

    def _joined(self, layer: int, dense: Callable[[int], FlatStore], experts: Callable[[int], FlatStore]) -> FlatStore:
        border = self._border[layer]
        if border == self.dense.parameters.layout.units[layer].stop:  # no experts
            return dense(layer)
        return cast(FlatStore, JoinedStore(dense(layer), experts(layer), border))

    def norm_squared(self) -> float:
        return sum(exchange.norm_squared() for exchange in self.both)

    def agree(self, values: np.ndarray) -> np.ndarray:
        return self.dense.agree(values)

    def agree_losses(self, losses: Sequence[float], values: np.ndarray) -> tuple[float, np.ndarray]:
        return self.dense.agree_losses(losses, values)

    def begin_update(self, scale: float) -> None:
        for exchange in self.both:
            exchange.rate_factor = self.rate_factor
            exchange.begin_update(scale)

    def count_samples(self, local_samples: int, samples: int) -> None:
        for exchange in self.both:
            exchange.count_samples(local_samples, samples)

    def applied_gradients(self) -> Iterable[Array]:
        return [part for exchange in self.both for part in exchange.applied_gradients()]

    def load_initial(self, initial: FlatStore) -> None:
        for exchange in self.both:
            exchange.load_initial(initial)

    def pieces(self) -> Sequence[Piece]:
        return [piece for exchange in self.both for piece in exchange.pieces()]

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        return {kind for exchange in self.both for kind in exchange.prepare_restore(state)}

    def wanted(self) -> Sequence[Piece]:
        return [piece for exchange in self.both for piece in exchange.wanted()]

    def state(self) -> dict[str, Any]:
        return self.dense.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        for exchange in self.both:
            exchange.restore(state)

    def close(self) -> None:
        for exchange in self.both:
            exchange.close()
        self._replicas.free()


def _units_by_kind(exchange: Exchange) -> dict[Kind, set[int]]:
    gathered = {unit for used in exchange.traits.gathers.values() for unit in used}
    units = {kind: {op.unit for op in exchange.plan() if op.kind is kind} for kind in OF_UNITS}
    return units | {Kind.GATHER: units[Kind.GATHER] | gathered, Kind.FREE: gathered}


class JoinedStore:
    """Store of a layer's tensors that joins a store of dense tensors and a store of expert tensors."""

    def __init__(self, dense: FlatStore, experts: FlatStore, border: int) -> None:
        self._dense, self._experts, self._border = dense, experts, border
        self.layout, self.dtype = dense.layout, dense.dtype

    def _of(self, part: Range) -> FlatStore:
        return self._experts if part.start >= self._border else self._dense

    def range(self, part: Range) -> Array:
        return self._of(part).range(part)

    def view(self, key: str) -> Array:
        return self._of(self.layout.by_key[key].range).view(key)

    def add(self, part: Range, values: Array) -> None:
        self._of(part).add(part, values)

    def blocks(self, part: Range) -> Iterable[Array]:
        return self._of(part).blocks(part)
