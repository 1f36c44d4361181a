"""The model of a rank that has some of the experts: its part of their tensors, and tokens that go to their experts.

`share_out` lets the rows of a model's experts travel (`TravellingRows`). Everything else stays: the router has all
scores of its own tokens, capacity and losses are those of a sample, so a run does not depend on how many ranks share
its experts out. Initial values are those of the whole model, of which a rank keeps its own experts.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.node.published import PublishedMemory
from hpcdist.errors import ConfigurationError
from hpcdist.models.experts import kernels
from hpcdist.models.experts.mixture import LocalExperts, StayingRows
from hpcdist.models.model import Model
from hpcdist.models.stage import Parameters, Saved, Stage, StreamOf, WrappedStage
from hpcdist.strategies.expert.axis import NODE_SHARED, ExpertAxis
from hpcdist.strategies.expert.shared import SharedRows


class TravellingRows(StayingRows):
    """Rows that go to the ranks of their experts, and come back, by messages. Collective over ``axis``.

    They go sorted by expert, and arrive sorted by rank, and there by expert: blocks of equal expert are brought
    together, so that each expert multiplies its rows at once, in the order of the ranks.
    """

    attends = True

    def __init__(self, axis: ExpertAxis) -> None:
        self.axis = axis

    def send_out(
        self, rows: Array, starts: np.ndarray, parameters: Parameters, saved: Saved, *, back: bool = False
    ) -> Callable[[], tuple[Array, np.ndarray]]:
        """Send the rows, and return what gives those of all ranks for the experts here, which have come by then."""
        if not back:
            sent = np.diff(starts).reshape(self.axis.size, -1)  # (rank, expert there)
            received = self.axis.counts(sent)
            saved.keep("experts.counts", (sent, received, _Blocks(received, rows)))
        sent, received, blocks = saved["experts.counts"]
        shape = int(received.sum()), rows.shape[1]
        arrived = saved.scratch("experts.arrived", shape, rows.dtype)
        self.axis.exchange(rows, arrived, sent.sum(axis=1), received.sum(axis=1))
        memory = saved.scratch if back else saved.empty
        own = memory("experts.dout" if back else "experts.received", shape, rows.dtype)
        blocks.sort(arrived, own)
        return lambda: (own, np.concatenate([[0], np.cumsum(received.sum(axis=0))]))

    def result_buffer(
        self, name: str, shape: tuple[int, int], dtype: Any, saved: Saved, *, back: bool = False
    ) -> Array:
        """Return scratch memory: what comes back is kept."""
        return saved.scratch(name, shape, dtype)

    def bring_back(self, rows: Array, name: str, saved: Saved, *, back: bool = False) -> Array:
        """Return what the experts of all ranks made of the rows of this rank, in the order in which it sent them."""
        sent, received, blocks = saved["experts.counts"]
        leaving = saved.scratch("experts.arrived", rows.shape, rows.dtype)
        blocks.sort_back(rows, leaving)
        memory = saved.scratch if back else saved.empty
        own = memory(name, (int(sent.sum()), rows.shape[1]), rows.dtype)
        self.axis.exchange(leaving, own, received.sum(axis=1), sent.sum(axis=1))
        return own


class _Blocks:
    """Places of the rows of each rank for each expert, sorted by rank and sorted by expert. Local.

    ``received`` (rank, own expert) are their numbers; they are moved where ``like`` is.
    """

    def __init__(self, received: np.ndarray, like: Array) -> None:
        by_rank = np.cumsum(received).reshape(received.shape) - received
        by_expert = np.cumsum(received.T).reshape(received.T.shape).T - received
        table = np.stack([by_rank.ravel(), by_expert.ravel(), received.ravel()], axis=1)
        self._table, self._longest = table[received.ravel() > 0], int(received.max(initial=0))
        self._there = backend.place(self._table, "gpu") if backend.is_device(like) else None

    def sort(self, arrived: Array, own: Array) -> None:
        """Copy rows that are sorted by rank to where they are sorted by expert."""
        self._move(arrived, own, back=False)

    def sort_back(self, own: Array, leaving: Array) -> None:
        """Copy rows that are sorted by expert to where they are sorted by rank."""
        self._move(own, leaving, back=True)

    def _move(self, source: Array, target: Array, *, back: bool) -> None:
        if self._there is not None:
            kernels.move_blocks(source, target, self._there, self._longest, back=back)
            return
        for start, end, count in (self._table[:, [1, 0, 2]] if back else self._table).tolist():
            target[end : end + count] = source[start : start + count]


class ExpertStage(WrappedStage):
    """Stage ``inner`` with the tensors of the experts ``own`` of its mixture, and all others.

    Its passes are collective over the ranks that share out the experts; gradients of experts are those of the tokens
    of all of these ranks.
    """

    def __init__(self, inner: Stage, own: Range) -> None:
        super().__init__(inner, (spec.of_experts(own) if spec.expert else spec for spec in inner.tensors()))
        self._own = own

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Draw the tensors of the inner one, and write the own experts of them."""
        specs = {spec.name: spec for spec in self._specs}
        own = {
            name: _OwnExperts(part, self._own) if name in specs and specs[name].expert else part
            for name, part in parameters.items()
        }
        self.inner.initialise(cast(Parameters, own), rng_of)


class _OwnExperts:
    """Write-only tensor of all experts that stores the own ones."""

    def __init__(self, part: Array, own: Range) -> None:
        self._part, self._own = part, own

    def __setitem__(self, key: Any, values: np.ndarray | float) -> None:
        assert key is Ellipsis
        self._part[...] = values[self._own.slice] if isinstance(values, np.ndarray) else values


def share_out(model: Model, axis: ExpertAxis) -> Model:
    """Return ``model`` with the experts of this rank of ``axis``, with one rank as it is. Collective.

    Raises ConfigurationError where it has no experts, or the ranks do not share them out evenly.
    """
    if axis.size == 1:
        return model
    experts = model.operations.experts
    if not isinstance(experts, LocalExperts):
        raise ConfigurationError(
            f"parallel.expert = {axis.size}: the model has no experts to share out; set it to 1, or set model.experts"
        )
    count = experts.config.experts
    assert count % axis.size == 0, f"{count} experts on {axis.size} ranks"
    own = split(count, axis.size, itemsize=1, align_bytes=1)[axis.rank]
    shared = copy.copy(model)
    shared.stages = tuple(
        ExpertStage(stage, own) if any(spec.expert for spec in stage.tensors()) else stage for stage in model.stages
    )
    shared.__dict__.pop("layout", None)  # of other tensors
    shared.operations = replace(model.operations, experts=replace(experts, travel=_travel(axis, count)))
    shared.clocks = (*model.clocks, axis.taken_s)
    shared.watch = axis.watch
    return shared


def _travel(axis: ExpertAxis, experts: int) -> TravellingRows | SharedRows:
    """Return how rows come to ``experts`` that the ranks of ``axis`` share out. Collective."""
    if axis.algorithm == NODE_SHARED:
        memory = PublishedMemory(axis.comm, experts + 1)
        if memory.is_shared:
            return SharedRows(axis, memory)
        axis.algorithm = "native"
    return TravellingRows(axis)
