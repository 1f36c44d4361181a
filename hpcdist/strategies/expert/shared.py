"""Experts of the ranks of a node: rows are read where other ranks have written them, and idle ranks help busy ones.

Rows travel through `PublishedMemory`: a rank writes those of its tokens sorted by expert, and each rank reads those of
the experts that it computes to where they are sorted by expert and rank. Back it is the same. A layer has three turns
in the forward (how often experts were chosen, rows, results) and two in the backward.

All ranks of a layer wait for the one with the most rows. So for each micro-batch `divide` lets busy ranks lend experts
to idle ones, whole ones, and the rows go there at once. The lender copies their tensors into its part of the memory,
forward and backward, and takes their gradients from that of the borrower. Everything is multiplied as it would be where
the expert belongs, so results are the same bits. With X parameters an expert, lending it costs about 4 X numbers copied
and saves 6 X operations a row. No expert is cut: the busiest rank has at least the rows of the busiest expert.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.collectives.node.published import PublishedMemory
from hpcdist.models.experts.mixture import DOWN, UP, ExpertGradients, ExpertTensors, StayingRows, matrices
from hpcdist.models.stage import Gradients, Parameters, Saved
from hpcdist.strategies.expert.axis import ExpertAxis

WORTH_ROWS: Final = 64  # less on the busiest rank for each expert that is lent (empirical: the copies cost about 30)
TENSORS: Final = tuple(f"{prefix}.{kind}" for prefix in (UP, DOWN) for kind in ("weight", "bias"))


def divide(loads: np.ndarray, ranks: int, worth: int) -> np.ndarray:
    """Return the rank that computes each expert, of which rank r has the r-th part, for so many rows of each.

    Busy ranks lend experts to idle ones, and take some in return, as long as the busiest rank then has fewer rows by
    ``worth`` for each.
    """
    at: np.ndarray = np.arange(loads.size) * ranks // loads.size
    for _ in range(2 * ranks):
        rows = np.bincount(at, loads, ranks).astype(np.int64)
        busy, idle = int(rows.argmax()), int(rows.argmin())
        gap = rows[busy] - rows[idle]
        given, taken = np.flatnonzero(at == busy), np.flatnonzero(at == idle)
        moved = loads[given][:, None] - np.concatenate([[0], loads[taken]])  # (given, none or taken in return)
        gains = gap - np.abs(gap - 2 * moved)  # twice what the busiest of both has less
        gains[:, 0] -= 2 * worth
        gains[:, 1:] -= 4 * worth
        first, second = np.unravel_index(int(gains.argmax()), gains.shape)
        if gains[first, second] <= 0:
            break
        at[given[first]] = idle
        if second:
            at[taken[second - 1]] = busy
    return at


class Division:
    """Division of the rows of a layer and micro-batch among ranks, and the places of them. Local.

    ``counts`` (ranks, experts) are the rows that each rank has for each expert, ``at`` the rank that computes it;
    ``parameters`` are those of the layer.
    """

    def __init__(self, counts: np.ndarray, at: np.ndarray, parameters: Parameters) -> None:
        ranks, experts = counts.shape
        self.counts, self.at, self.each = counts, at, experts // ranks
        self.experts = [np.flatnonzero(at == rank).tolist() for rank in range(ranks)]
        owner = np.arange(experts) // self.each
        self.lent = [np.flatnonzero((at != owner) & (owner == rank)).tolist() for rank in range(ranks)]
        self.borrowed = [np.flatnonzero((at != owner) & (at == rank)).tolist() for rank in range(ranks)]
        totals = counts.sum(axis=0)
        self.starts = [np.concatenate([[0], np.cumsum(totals[own])]) for own in self.experts]
        self.sent = counts.sum(axis=1)
        # The first row of rank r for expert e, among those of r, and among those of the rank that computes e.
        self.there = np.cumsum(counts, axis=1) - counts
        self.here = np.cumsum(counts, axis=0) - counts
        for own, starts in zip(self.experts, self.starts, strict=True):
            self.here[:, own] += starts[:-1]
        self.shapes = {
            name: matrices(parameters[name]).shape[1:] if name.endswith("weight") else (parameters[name][0].size,)
            for name in TENSORS
            if name in parameters
        }
        self.dtype = parameters[TENSORS[0]].dtype

    @property
    def numbers(self) -> int:
        """Numbers of the tensors of an expert."""
        return sum(map(prod, self.shapes.values()))

    def here_of(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield each expert whose rows come to ``rank``, its owner, and its place there."""
        return ((expert, *divmod(expert, self.each)) for expert in self.experts[rank])

    def sizes(self, row_bytes: int) -> dict[str, int]:
        """Return how many bytes the parts of the memory need, on the rank that needs the most."""
        expert_bytes = self.numbers * self.dtype.itemsize
        return {
            "rows": int(self.sent.max()) * row_bytes,
            "results": int(max(starts[-1] for starts in self.starts)) * row_bytes,
            "tensors": max(map(len, self.lent)) * expert_bytes,
            "gradients": max(map(len, self.borrowed)) * expert_bytes,
        }


class SharedRows(StayingRows):
    """Rows that go to the experts of other ranks through memory of the node. Collective over ``axis``."""

    attends = True

    def __init__(self, axis: ExpertAxis, memory: PublishedMemory) -> None:
        self.axis, self._memory, self._rank = axis, memory, axis.rank

    def send_buffer(self, starts: np.ndarray, like: Array, parameters: Parameters, saved: Saved) -> Array:
        """Return memory for the rows that the other ranks can read, once all know how many there are."""
        head = self._memory.head
        head[self._rank][:-1], head[self._rank][-1] = np.diff(starts), self.axis.watch.is_awake
        self._memory.publish()
        self.axis.wait(self._memory, like)
        numbers = np.stack(head)
        counts = numbers[:, :-1]
        # While a bad value is looked for, each rank computes what is its own.
        worth = counts.sum() if numbers[:, -1].any() else WORTH_ROWS
        division = Division(counts, divide(counts.sum(axis=0), self.axis.size, int(worth)), parameters)
        self._memory.grow(division.sizes(like.shape[1] * like.itemsize))
        saved.keep("experts.division", division)
        return self._rows(division, self._rank, like)

    def send_out(
        self, rows: Array, starts: np.ndarray, parameters: Parameters, saved: Saved, *, back: bool = False
    ) -> Callable[[], tuple[Array, np.ndarray]]:
        """Let the others read the rows, and return what waits for theirs."""
        division: Division = saved["experts.division"]
        if back:
            self._rows(division, self._rank, rows)[...] = rows
        for expert in division.lent[self._rank]:
            for name, lent in self._of_expert(division, "tensors", self._rank, expert).items():
                place = expert % division.each
                if back and name.endswith(".bias"):
                    # Its gradient so far: whoever sums columns goes on from there, and sums in the same order.
                    lent[...] = saved[f"{name.removesuffix('.bias')}.into"].biases[place][0]
                else:
                    lent[...] = parameters[name][place].reshape(lent.shape)
        was_finite = self.axis.watch.sees_only_finite(rows)
        self._memory.publish()

        def arrival() -> tuple[Array, np.ndarray]:
            self.axis.wait(self._memory, rows)
            here = division.starts[self._rank]
            memory = saved.scratch if back else saved.empty
            own = memory("experts.dout" if back else "experts.received", (int(here[-1]), rows.shape[1]), rows.dtype)
            parts = [self._rows(division, rank, rows) for rank in range(self.axis.size)]
            for expert in division.experts[self._rank]:
                for rank, part in enumerate(parts):
                    places = division.there[rank, expert], division.here[rank, expert]
                    _copy(part, places[0], own, places[1], division.counts[rank, expert])
            for expert in division.borrowed[self._rank] if back else ():
                begun = self._of_expert(division, "tensors", expert // division.each, expert)
                for name, sums in self._of_expert(division, "gradients", self._rank, expert).items():
                    if name.endswith(".bias"):
                        sums[...] = begun[name]
            if was_finite:
                self.axis.watch.distrust(own)
            return own, here

        return arrival

    def tensors(self, parameters: Parameters, prefix: str, saved: Saved) -> ExpertTensors:
        """Return the tensors of the experts whose rows `send_out` brings: own ones, and those that others lend."""
        own = super().tensors(parameters, prefix, saved)
        division: Division = saved["experts.division"]

        def each(kind: str, tensors: Sequence[Array]) -> list[Array]:
            return [
                tensors[place]
                if owner == self._rank
                else self._of_expert(division, "tensors", owner, expert)[f"{prefix}.{kind}"]
                for expert, owner, place in division.here_of(self._rank)
            ]

        return ExpertTensors(each("weight", own.weights), None if own.biases is None else each("bias", own.biases))

    def gradients(self, parameters: Parameters, gradients: Gradients, prefix: str, saved: Saved) -> ExpertGradients:
        """Return where the gradients of `tensors` go: those of lent ones to where their owners take them."""
        own = super().gradients(parameters, gradients, prefix, saved)
        division: Division = saved["experts.division"]
        saved.keep(f"{prefix}.into", own)

        def each(kind: str, targets: Sequence[tuple[Array, bool]]) -> list[tuple[Array, bool]]:
            goes_on = kind == "bias" and targets[0][1]  # see `send_out`
            return [
                targets[place]
                if owner == self._rank
                else (self._of_expert(division, "gradients", self._rank, expert)[f"{prefix}.{kind}"], goes_on)
                for expert, owner, place in division.here_of(self._rank)
            ]

        return ExpertGradients(each("weight", own.weights), None if own.biases is None else each("bias", own.biases))

    def result_buffer(
        self, name: str, shape: tuple[int, int], dtype: Any, saved: Saved, *, back: bool = False
    ) -> Array:
        """Return memory that the other ranks can read."""
        return self._memory.part(self._rank, "results", shape, np.dtype(dtype))

    def bring_back(self, rows: Array, name: str, saved: Saved, *, back: bool = False) -> Array:
        """Return what the experts of all ranks made of the rows of this rank, in the order in which it sent them."""
        division: Division = saved["experts.division"]
        was_finite = self.axis.watch.sees_only_finite(rows)
        self._memory.publish()
        self.axis.wait(self._memory, rows)
        width, dtype = rows.shape[1], rows.dtype
        own = (saved.scratch if back else saved.empty)(name, (int(division.sent[self._rank]), width), dtype)
        parts = [
            self._memory.part(rank, "results", (int(starts[-1]), width), dtype)
            for rank, starts in enumerate(division.starts)
        ]
        for expert, rank in enumerate(division.at.tolist()):
            places = division.here[self._rank, expert], division.there[self._rank, expert]
            _copy(parts[rank], places[0], own, places[1], division.counts[self._rank, expert])
        if back:
            self._take_gradients(division, saved)
        if was_finite:
            self.axis.watch.distrust(own)
        return own

    def _take_gradients(self, division: Division, saved: Saved) -> None:
        """Write or add the gradients of the experts that this rank has lent."""
        for expert in division.lent[self._rank]:
            place, of = expert % division.each, self._of_expert(division, "gradients", int(division.at[expert]), expert)
            for prefix in (UP, DOWN):
                own: ExpertGradients = saved[f"{prefix}.into"]
                into, add = own.weights[place]
                if add:
                    into += of[f"{prefix}.weight"]
                else:
                    into[...] = of[f"{prefix}.weight"]
                if own.biases is not None:
                    own.biases[place][0][...] = of[f"{prefix}.bias"]

    def _rows(self, division: Division, rank: int, like: Array) -> np.ndarray:
        """Return the rows that ``rank`` sends, as wide as ``like``."""
        return self._memory.part(rank, "rows", (int(division.sent[rank]), like.shape[1]), like.dtype)

    def _of_expert(self, division: Division, part: str, rank: int, expert: int) -> dict[str, np.ndarray]:
        """Return the tensors of a lent ``expert`` in a part of ``rank``: "tensors" of its owner, or "gradients"."""
        there = (division.lent if part == "tensors" else division.borrowed)[rank]
        whole = self._memory.part(rank, part, (len(there), division.numbers), division.dtype)
        flat, tensors, start = whole[there.index(expert)], {}, 0
        for name, shape in division.shapes.items():
            tensors[name] = flat[start : start + prod(shape)].reshape(shape)
            start += prod(shape)
        return tensors


def _copy(source: Array, first: int, target: Array, place: int, count: int) -> None:
    """Copy ``count`` rows from ``first`` on to those from ``place`` on."""
    target[place : place + count] = source[first : first + count]
