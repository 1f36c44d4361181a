"""The model of a rank that holds some of the experts, and the exchange of token rows by messages.

The router scores the local tokens for all experts, and capacity and losses are per sample, so results do not depend on
the number of expert ranks.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.node.flow import PublishedMemory
from hpcdist.errors import ConfigurationError
from hpcdist.models.experts import kernels
from hpcdist.models.experts.mixture import LocalExperts, StayingRows
from hpcdist.models.model import Model
from hpcdist.models.stage import Parameters, Saved, Stage, StreamOf, WrappedStage
from hpcdist.strategies.expert.axis import ExpertAxis
from hpcdist.strategies.expert.shared import SharedRows
from hpcdist.strategies.tensor.axis import NODE_SHARED


class TravellingRows(StayingRows):
    """Exchange of token rows with the ranks that hold the experts for these rows. Collective over ``axis``."""

    attends = True

    def __init__(self, axis: ExpertAxis) -> None:
        self.axis = axis

    def send_out(
        self, rows: Array, starts: np.ndarray, parameters: Parameters, saved: Saved, *, back: bool = False
    ) -> Callable[[], tuple[Array, np.ndarray]]:
        if not back:
            sent = np.diff(starts).reshape(self.axis.size, -1)  # (rank, expert of that rank)
            received = self.axis.counts(sent)
            saved.keep("experts.counts", (sent, received, _Blocks(received, rows)))
        sent, received, blocks = saved["experts.counts"]
        shape = int(received.sum()), rows.shape[1]
        arrived = saved.scratch("experts.arrived", shape, rows.dtype)
        self.axis.exchange(rows, arrived, sent.sum(axis=1), received.sum(axis=1))
        memory = saved.scratch if back else saved.empty
        local_rows = memory("experts.dout" if back else "experts.received", shape, rows.dtype)
        blocks.sort(arrived, local_rows)
        return lambda: (local_rows, np.concatenate([[0], np.cumsum(received.sum(axis=0))]))

    def result_buffer(
        self, name: str, shape: tuple[int, int], dtype: Any, saved: Saved, *, back: bool = False
    ) -> Array:
        return saved.scratch(name, shape, dtype)

    def bring_back(self, rows: Array, name: str, saved: Saved, *, back: bool = False) -> Array:
        sent, received, blocks = saved["experts.counts"]
        leaving = saved.scratch("experts.arrived", rows.shape, rows.dtype)
        blocks.sort_back(rows, leaving)
        memory = saved.scratch if back else saved.empty
        results = memory(name, (int(sent.sum()), rows.shape[1]), rows.dtype)
        self.axis.exchange(leaving, results, received.sum(axis=1), sent.sum(axis=1))
        return results


class _Blocks:
    # Reorders received token rows: from sorted by sender rank to sorted by expert, and back. ``received[r, e]``: number
    # of rows that rank r sent for local expert e. ``like``: array on the device of the rows.
    def __init__(self, received: np.ndarray, like: Array) -> None:
        by_rank = np.cumsum(received).reshape(received.shape) - received
        by_expert = np.cumsum(received.T).reshape(received.T.shape).T - received
        table = np.stack([by_rank.ravel(), by_expert.ravel(), received.ravel()], axis=1)
        self._table, self._longest = table[received.ravel() > 0], int(received.max(initial=0))
        self._there = backend.place(self._table, "gpu") if backend.is_device(like) else None

    def sort(self, arrived: Array, by_expert: Array) -> None:
        self._move(arrived, by_expert, back=False)

    def sort_back(self, by_expert: Array, leaving: Array) -> None:
        self._move(by_expert, leaving, back=True)

    def _move(self, source: Array, target: Array, *, back: bool) -> None:
        if self._there is not None:
            kernels.move_blocks(source, target, self._there, self._longest, back=back)
            return
        for start, end, count in (self._table[:, [1, 0, 2]] if back else self._table).tolist():
            target[end : end + count] = source[start : start + count]


class ExpertStage(WrappedStage):
    """Model stage with all dense tensors of the wrapped stage, but only this rank's experts."""

    # The gradients of an expert are sums over the tokens of all these ranks.

    def __init__(self, inner: Stage, experts: Range) -> None:
        super().__init__(inner, (spec.of_experts(experts) if spec.expert else spec for spec in inner.tensors()))
        self._own = experts

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        specs = {spec.name: spec for spec in self._specs}
        targets = {
            name: _OwnExperts(part, self._own) if name in specs and specs[name].expert else part
            for name, part in parameters.items()
        }
        self.inner.initialise(cast(Parameters, targets), rng_of)


class _OwnExperts:
    # Write-only stand-in for a tensor of all experts; it stores only the values of the local experts.
    def __init__(self, part: Array, experts: Range) -> None:
        self._part, self._own = part, experts

    def __setitem__(self, key: Any, values: np.ndarray | float) -> None:
        assert key is Ellipsis
        self._part[...] = values[self._own.slice] if isinstance(values, np.ndarray) else values


def share_out(model: Model, axis: ExpertAxis) -> Model:
    """Return a copy of ``model`` with only this rank's experts. Collective over ``axis``."""
    if axis.size == 1:
        return model
    experts = model.operations.experts
    if not isinstance(experts, LocalExperts):
        raise ConfigurationError(
            f"parallel.expert = {axis.size}, but the model has no experts to divide; set parallel.expert = 1, or add "
            "experts to the model with model.experts"
        )
    count = experts.config.experts
    assert count % axis.size == 0, f"{count} experts on {axis.size} ranks"
    owned = split(count, axis.size, itemsize=1, align_bytes=1)[axis.rank]
    shared = copy.copy(model)
    shared.stages = tuple(
        ExpertStage(stage, owned) if any(spec.expert for spec in stage.tensors()) else stage for stage in model.stages
    )
    shared.__dict__.pop("layout", None)  # the cached layout of all experts
    shared.operations = replace(model.operations, experts=replace(experts, travel=_travel(axis, count)))
    shared.clocks = (*model.clocks, axis.taken_s)
    shared.watch = axis.watch
    return shared


def _travel(axis: ExpertAxis, experts: int) -> TravellingRows | SharedRows:
    if axis.algorithm == NODE_SHARED:
        memory = PublishedMemory(axis.comm, experts + 1)
        if memory.is_shared:
            return SharedRows(axis, memory)
        axis.algorithm = "native"
    return TravellingRows(axis)
