"""Experts on the ranks of a node: token rows travel through shared memory.

For each micro-batch `divide` lets busy ranks lend whole experts to idle ranks, with the same bits. For an expert with X
parameters, lending copies about 4 X numbers and moves 6 X operations per row.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.collectives.node.flow import PublishedMemory
from hpcdist.models.experts.mixture import DOWN, UP, ExpertGradients, ExpertTensors, StayingRows, matrices
from hpcdist.models.stage import Gradients, Parameters, Saved
from hpcdist.strategies.expert.axis import ExpertAxis

WORTH_ROWS: Final = 64  # rows that each lent expert must save on the busiest rank (empirical: copies cost about 30)
TENSORS: Final = tuple(f"{prefix}.{kind}" for prefix in (UP, DOWN) for kind in ("weight", "bias"))


def divide(rows_per_expert: np.ndarray, ranks: int, min_saved_rows: int) -> np.ndarray:
    """Assign experts to ``ranks`` ranks with balanced numbers of token rows. Return an array: rank of each expert.

    ``rows_per_expert``: token rows of each expert. ``min_saved_rows``: minimum gain, in rows, for moving an expert.
    """
    # Each rank starts with equally many consecutive experts. Then the busiest rank repeatedly gives an expert to the
    # least busy rank, or swaps two experts with it.
    at: np.ndarray = np.arange(rows_per_expert.size) * ranks // rows_per_expert.size
    for _ in range(2 * ranks):
        rows = np.bincount(at, rows_per_expert, ranks).astype(np.int64)
        busy, idle = int(rows.argmax()), int(rows.argmin())
        gap = rows[busy] - rows[idle]
        from_busy, from_idle = np.flatnonzero(at == busy), np.flatnonzero(at == idle)
        returned = np.concatenate([[0], rows_per_expert[from_idle]])  # nothing, or one expert taken in return
        moved = rows_per_expert[from_busy][:, None] - returned
        gains = gap - np.abs(gap - 2 * moved)  # twice the rows saved on the busier of both
        gains[:, 0] -= 2 * min_saved_rows
        gains[:, 1:] -= 4 * min_saved_rows
        first, second = np.unravel_index(int(gains.argmax()), gains.shape)
        if gains[first, second] <= 0:
            break
        at[from_busy[first]] = idle
        if second:
            at[from_idle[second - 1]] = busy
    return at


class Division:
    """Assignment of the experts of one layer to ranks, for one micro-batch. Local."""

    def __init__(self, counts: np.ndarray, at: np.ndarray, parameters: Parameters) -> None:
        ranks, experts = counts.shape  # of ``parameters``, only shapes and dtype are used
        # counts[r, e]: rows of rank r for expert e; at[e]: rank that computes expert e
        self.counts, self.at, self.each = counts, at, experts // ranks
        self.experts = [np.flatnonzero(at == rank).tolist() for rank in range(ranks)]
        owner = np.arange(experts) // self.each
        self.lent = [np.flatnonzero((at != owner) & (owner == rank)).tolist() for rank in range(ranks)]
        self.borrowed = [np.flatnonzero((at != owner) & (at == rank)).tolist() for rank in range(ranks)]
        totals = counts.sum(axis=0)
        self.starts = [np.concatenate([[0], np.cumsum(totals[experts_here])]) for experts_here in self.experts]
        self.sent = counts.sum(axis=1)
        # First row of rank r for expert e: among the rows of r, and among the rows of the rank that computes e.
        self.there = np.cumsum(counts, axis=1) - counts
        self.here = np.cumsum(counts, axis=0) - counts
        for experts_here, starts in zip(self.experts, self.starts, strict=True):
            self.here[:, experts_here] += starts[:-1]
        self.shapes = {
            name: matrices(parameters[name]).shape[1:] if name.endswith("weight") else (parameters[name][0].size,)
            for name in TENSORS
            if name in parameters
        }
        self.dtype = parameters[TENSORS[0]].dtype

    @property
    def numbers(self) -> int:
        """Number of elements of one expert, summed over all its tensors."""
        return sum(map(prod, self.shapes.values()))

    def here_of(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield (expert, owner rank, index among the owner's experts) for each expert that ``rank`` computes."""
        return ((expert, *divmod(expert, self.each)) for expert in self.experts[rank])

    def sizes(self, row_bytes: int) -> dict[str, int]:
        """Return a dict {section of shared memory: bytes per rank}. ``row_bytes``: bytes of one token row."""
        expert_bytes = self.numbers * self.dtype.itemsize
        return {
            "rows": int(self.sent.max()) * row_bytes,
            "results": int(max(starts[-1] for starts in self.starts)) * row_bytes,
            "tensors": max(map(len, self.lent)) * expert_bytes,
            "gradients": max(map(len, self.borrowed)) * expert_bytes,
        }


class SharedRows(StayingRows):
    """Exchange of token rows with experts on other ranks of the node, through shared memory. Collective."""

    attends = True

    def __init__(self, axis: ExpertAxis, memory: PublishedMemory) -> None:
        self.axis, self._memory, self._rank = axis, memory, axis.rank

    def send_buffer(self, starts: np.ndarray, like: Array, parameters: Parameters, saved: Saved) -> Array:
        head = self._memory.head
        head[self._rank][:-1], head[self._rank][-1] = np.diff(starts), self.axis.watch.is_awake
        self._memory.publish()
        self.axis.wait(self._memory, like)
        numbers = np.stack(head)
        counts = numbers[:, :-1]
        # During a NaN search no expert is lent.
        worth = counts.sum() if numbers[:, -1].any() else WORTH_ROWS
        division = Division(counts, divide(counts.sum(axis=0), self.axis.size, int(worth)), parameters)
        self._memory.grow(division.sizes(like.shape[1] * like.itemsize))
        saved.keep("experts.division", division)
        return self._rows(division, self._rank, like)

    def send_out(
        self, rows: Array, starts: np.ndarray, parameters: Parameters, saved: Saved, *, back: bool = False
    ) -> Callable[[], tuple[Array, np.ndarray]]:
        division: Division = saved["experts.division"]
        if back:
            self._rows(division, self._rank, rows)[...] = rows
        for expert in division.lent[self._rank]:
            for name, lent in self._of_expert(division, "tensors", self._rank, expert).items():
                index = expert % division.each
                if back and name.endswith(".bias"):
                    # The gradient so far: the borrower continues the column sums in the same order.
                    lent[...] = saved[f"{name.removesuffix('.bias')}.into"].biases[index][0]
                else:
                    lent[...] = parameters[name][index].reshape(lent.shape)
        was_finite = self.axis.watch.sees_only_finite(rows)
        self._memory.publish()

        def arrival() -> tuple[Array, np.ndarray]:
            self.axis.wait(self._memory, rows)
            here = division.starts[self._rank]
            memory = saved.scratch if back else saved.empty
            mine = memory("experts.dout" if back else "experts.received", (int(here[-1]), rows.shape[1]), rows.dtype)
            parts = [self._rows(division, rank, rows) for rank in range(self.axis.size)]
            for expert in division.experts[self._rank]:
                for rank, part in enumerate(parts):
                    places = division.there[rank, expert], division.here[rank, expert]
                    _copy(part, places[0], mine, places[1], division.counts[rank, expert])
            for expert in division.borrowed[self._rank] if back else ():
                sums_so_far = self._of_expert(division, "tensors", expert // division.each, expert)
                for name, sums in self._of_expert(division, "gradients", self._rank, expert).items():
                    if name.endswith(".bias"):
                        sums[...] = sums_so_far[name]
            if was_finite:
                self.axis.watch.distrust(mine)
            return mine, here

        return arrival

    def tensors(self, parameters: Parameters, prefix: str, saved: Saved) -> ExpertTensors:
        base = super().tensors(parameters, prefix, saved)
        division: Division = saved["experts.division"]

        # Tensors of another rank's expert are views of shared memory.
        def each(kind: str, tensors: Sequence[Array]) -> list[Array]:
            return [
                tensors[index]
                if owner == self._rank
                else self._of_expert(division, "tensors", owner, expert)[f"{prefix}.{kind}"]
                for expert, owner, index in division.here_of(self._rank)
            ]

        return ExpertTensors(each("weight", base.weights), None if base.biases is None else each("bias", base.biases))

    def gradients(self, parameters: Parameters, gradients: Gradients, prefix: str, saved: Saved) -> ExpertGradients:
        base = super().gradients(parameters, gradients, prefix, saved)
        division: Division = saved["experts.division"]
        saved.keep(f"{prefix}.into", base)

        # Gradients of another rank's expert are in shared memory, all others in ``gradients``.
        def each(kind: str, targets: Sequence[tuple[Array, bool]]) -> list[tuple[Array, bool]]:
            goes_on = kind == "bias" and targets[0][1]  # see `send_out`
            return [
                targets[index]
                if owner == self._rank
                else (self._of_expert(division, "gradients", self._rank, expert)[f"{prefix}.{kind}"], goes_on)
                for expert, owner, index in division.here_of(self._rank)
            ]

        return ExpertGradients(each("weight", base.weights), None if base.biases is None else each("bias", base.biases))

    def result_buffer(
        self, name: str, shape: tuple[int, int], dtype: Any, saved: Saved, *, back: bool = False
    ) -> Array:
        return self._memory.part(self._rank, "results", shape, np.dtype(dtype))

    def bring_back(self, rows: Array, name: str, saved: Saved, *, back: bool = False) -> Array:
        division: Division = saved["experts.division"]
        was_finite = self.axis.watch.sees_only_finite(rows)
        self._memory.publish()
        self.axis.wait(self._memory, rows)
        width, dtype = rows.shape[1], rows.dtype
        results = (saved.scratch if back else saved.empty)(name, (int(division.sent[self._rank]), width), dtype)
        parts = [
            self._memory.part(rank, "results", (int(starts[-1]), width), dtype)
            for rank, starts in enumerate(division.starts)
        ]
        for expert, rank in enumerate(division.at.tolist()):
            places = division.here[self._rank, expert], division.there[self._rank, expert]
            _copy(parts[rank], places[0], results, places[1], division.counts[self._rank, expert])
        if back:
            self._take_gradients(division, saved)
        if was_finite:
            self.axis.watch.distrust(results)
        return results

    def _take_gradients(self, division: Division, saved: Saved) -> None:
        for expert in division.lent[self._rank]:
            at, sums = expert % division.each, self._of_expert(division, "gradients", int(division.at[expert]), expert)
            for prefix in (UP, DOWN):
                targets: ExpertGradients = saved[f"{prefix}.into"]
                into, add = targets.weights[at]
                if add:
                    into += sums[f"{prefix}.weight"]
                else:
                    into[...] = sums[f"{prefix}.weight"]
                if targets.biases is not None:
                    targets.biases[at][0][...] = sums[f"{prefix}.bias"]

    def _rows(self, division: Division, rank: int, like: Array) -> np.ndarray:
        return self._memory.part(rank, "rows", (int(division.sent[rank]), like.shape[1]), like.dtype)

    def _of_expert(self, division: Division, part: str, rank: int, expert: int) -> dict[str, np.ndarray]:
        experts = (division.lent if part == "tensors" else division.borrowed)[rank]
        whole = self._memory.part(rank, part, (len(experts), division.numbers), division.dtype)
        flat, tensors, start = whole[experts.index(expert)], {}, 0
        for name, shape in division.shapes.items():
            tensors[name] = flat[start : start + prod(shape)].reshape(shape)
            start += prod(shape)
        return tensors


def _copy(source: Array, first: int, target: Array, start: int, count: int) -> None:
    target[start : start + count] = source[first : first + count]
