"""Helpers for tests of ZeRO with compressed messages: an exchange without a model, and its definition."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from harness.rank_run import seat
from harness.trainings import gather_tensors
from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.compression.compressor import RandomKey
from hpcdist.compression.uniform import Blockwise
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.compressed.registry import Compression, compressor
from hpcdist.strategies.core.grid import ShardingDegrees
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.data import catalogue
from hpcdist.strategies.data.config import ZeroConfig

MODEL = ModelConfig(layers=1, hidden=16, heads=2, vocabulary=64)
RATE, SEED, STEPS = 0.125, 11, 10


class DrivenExchange:
    """An exchange on one rank with generated gradients instead of a model: new ones for each step and micro-batch."""

    def __init__(
        self,
        comm: Communicator,
        stage: int = 3,
        zero: ZeroConfig = ZeroConfig(),  # noqa: B008 (frozen)
        name: str = "int8",
        working: str | None = None,
        microbatches: int = 1,
        algorithm: str = "ring",
        on: str = "cpu",
        draw: int = 0,
        **keys: Any,
    ) -> None:
        self.comm, self.microbatches, self.draw, self.step = comm, microbatches, draw, 0
        model = models.build(MODEL, "float32", context=8)
        self.layout = model.layout
        sgd = OptimizerConfig(
            name="sgd", learning_rate=RATE, momentum=0.0, weight_decay=0.0, warmup_steps=0, decay="constant"
        )
        kept = None if working is None else dtype_of(working)
        self.context = seat(comm, model, sgd, algorithm=algorithm, working=kept, on=on)
        self.exchange = catalogue.zero(
            self.context, stage, zero, compression=Compression(name, CompressionConfig(**keys), SEED)
        )
        initial = FlatStore(self.layout, np.dtype(np.float32))
        initial.array[...] = weights(self.layout)
        self.exchange.load_initial(initial)

    def gradients(self, step: int, micro: int, bad: int | None = None) -> np.ndarray:
        made = draw_gradients(self.layout, step, micro, self.comm.rank, self.comm.size, self.draw)
        if bad == self.comm.rank:
            made[self.layout.units[1].start + 3] = np.inf
        return made

    def do(self, kind: Kind, **given: Any) -> None:
        op = Operation(kind, **given)
        self.exchange.handlers[kind](op)

    def run(self, steps: int = 1, bad: int | None = None, scale: float = 1.0) -> list[float]:
        """Make steps and return the norms of their gradients. A step that is not finite is skipped. Collective."""
        return [self._run(bad, scale) for _ in range(steps)]

    def _run(self, bad: int | None, scale: float) -> float:
        self.step += 1
        exchange, plan = self.exchange, self.exchange.plan()
        rounds = 1 if exchange.traits.accumulates else self.microbatches
        reduces = [op for op in plan if op.kind is Kind.REDUCE]
        at = plan.index(Operation(Kind.AGREE))
        exchange.begin([*reduces * (rounds - 1), *plan])
        exchange.scaled_by(scale)
        fresh = [self.gradients(self.step, micro, bad) for micro in range(self.microbatches)]
        for values in [sum(fresh)] if rounds == 1 else fresh:
            for op in reduces:
                self.fill(op, values, scale)
                exchange.handlers[op.kind](op)
        for op in plan[len(reduces) : at]:
            exchange.handlers[op.kind](op)
        norm = float(np.sqrt(exchange.agree(np.array([exchange.norm_squared()]))[0])) / scale
        if np.isfinite(norm):
            exchange.begin_update(1.0 / scale)
            for op in plan[at + 1 :]:
                exchange.handlers[op.kind](op)
        return norm

    def fill(self, op: Operation, values: np.ndarray, scale: float) -> None:
        layer = next(layer for layer, part in self.layout.units.items() if part == op.range)
        store = self.exchange.gradients_at(layer)
        wide = FlatStore(self.layout, np.dtype(np.float32), op.range)
        wide.array[...] = values[op.range.slice] * np.float32(scale)
        store.range(op.range)[...] = 0
        for _, where in self.layout.within(op.range):
            store.write(where, wide.range(where).astype(store.dtype))

    def computed_with(self) -> np.ndarray:
        """Return the weights of all layers as a stage sees them, with zeros in the padding. Collective."""
        gathers = sorted({used for needs in self.exchange.traits.gathers.values() for used in needs})
        self.exchange.begin([Operation(Kind.GATHER, 0, unit) for unit in gathers])
        received = np.zeros(self.layout.size, np.float32)
        for unit, part in self.context.ranges.items():
            if unit in gathers:
                self.do(Kind.GATHER, microbatch=0, unit=unit)
            store = self.exchange.parameters_at(self.context.model.stages[unit].layer)
            for _, where in self.layout.within(part):
                received[where.slice] = backend.to_host(store.range(where))
            if unit in gathers:
                self.do(Kind.FREE, microbatch=0, unit=unit)
        return received

    def saved(self) -> dict[tuple[str, str], np.ndarray]:
        """Return all that the ranks save, flat. Collective."""
        return gather_tensors(self.comm, self.exchange.pieces())

    def load(self, state: dict[tuple[str, str], np.ndarray], numbers: dict[str, Any], steps: int) -> None:
        may_lack = self.exchange.prepare_restore(numbers)
        for piece in self.exchange.wanted():
            if (piece.kind, piece.tensor) in state:
                piece.array[...] = state[piece.kind, piece.tensor][piece.flat.slice]
            else:
                assert piece.kind in may_lack, f"{piece.kind} of {piece.tensor}"
        self.exchange.restore(numbers)
        self.step = steps


def tensors(layout: Layout) -> Iterator[Range]:
    for part in layout.units.values():
        for _, where in layout.within(part):
            yield where


def weights(layout: Layout) -> np.ndarray:
    made = np.zeros(layout.size, np.float32)
    rng = np.random.default_rng(3)
    for where in tensors(layout):
        made[where.slice] = rng.standard_normal(where.size)
    return made


def draw_gradients(layout: Layout, step: int, micro: int, rank: int, ranks: int, draw: int = 0) -> np.ndarray:
    made = np.zeros(layout.size, np.float32)
    rng = np.random.default_rng([draw, step, micro, rank])
    for where in tensors(layout):
        made[where.slice] = rng.standard_t(3, where.size) / ranks
    return made


class DefinedExchange:
    """The definition of the exchange: all ranks in one process, sums in float64."""

    def __init__(
        self,
        degrees: ShardingDegrees,
        ranks: int,
        name: str,
        coded: Callable[[int], bool] = lambda level: True,
        **keys: Any,
    ) -> None:
        self.layout = models.build(MODEL, "float32", context=8).layout
        self.degrees, self.ranks, self.name = degrees, ranks, name
        self.config = CompressionConfig(**keys)
        self.compressor = compressor(name, self.config)
        self.owed = np.zeros((ranks, self.layout.size), np.float32)
        bounds = (1, degrees.parameters, degrees.gradients, degrees.optimizer)
        self.blocks, self.coded = list(pairwise(bounds)), [coded(level) for level in range(4)]

    def encoded(self, rank: int, values: np.ndarray, part: Range, step: int, micro: int) -> np.ndarray:
        """Return the decoded values that other ranks get for the values of ``part`` of a rank."""
        out = np.zeros(part.size)
        for _, where in self.layout.within(part):
            given = values[where.slice].astype(np.float32)
            if self.config.error_feedback:
                given = given + self.owed[rank, where.slice]
            key = RandomKey(SEED, step - 1 + (micro << 24), 0 if self.name == "randomk" else rank, where.start // 16)
            payload = np.zeros(self.compressor.payload_bytes(where.size), np.uint8)
            self.compressor.encode(given, payload, key)
            got = np.zeros(where.size, np.float32)
            self.compressor.decode(payload, got)
            if self.config.error_feedback:
                self.owed[rank, where.slice] = given - got
            out[where.shift(-part.start).slice] = got
        return out

    def reduced(self, values: np.ndarray, layer: Range, step: int, micro: int, first: int, last: int) -> None:
        """Sum ``values`` (ranks, size) of a layer in place, along the levels ``first`` to ``last``."""
        cuts = list(zip(*(cuts_of(layer, self.degrees, rank) for rank in range(self.ranks)), strict=True))
        for level in range(first, last):
            inner, outer = self.blocks[level]
            if outer > inner:
                self._level(values, cuts[level + 1], inner, outer, self.coded[level], step, micro)
        if last == 3 and self.degrees.optimizer < self.ranks:
            self._replicas(values, cuts[3], step, micro)

    def _level(
        self,
        values: np.ndarray,
        local_data: tuple[Range, ...],
        inner: int,
        outer: int,
        coded: bool,
        step: int,
        micro: int,
    ) -> None:
        before = values.copy()
        for owner in range(self.ranks):
            peers = [r for r in range(self.ranks) if r // outer == owner // outer and r % inner == owner % inner]
            for peer in peers:
                if peer != owner:
                    part = local_data[owner]
                    sent = self.encoded(peer, before[peer], part, step, micro) if coded else before[peer, part.slice]
                    values[owner, part.slice] += sent

    def _replicas(self, values: np.ndarray, local_data: tuple[Range, ...], step: int, micro: int) -> None:
        degree, count = self.degrees.optimizer, self.ranks // self.degrees.optimizer
        before = values.copy()
        for first in range(degree):
            peers = list(range(first, self.ranks, degree))
            if not self.coded[3]:
                total = sum(before[peer, local_data[first].slice] for peer in peers)
            elif self.name in ("topk", "randomk"):
                total = sum(self.encoded(peer, before[peer], local_data[first], step, micro) for peer in peers)
            else:
                shares = [share.shift(local_data[first].start) for share in split(local_data[first].size, count, 4)]
                for owner, share in zip(peers, shares, strict=True):
                    for peer in peers:
                        if peer != owner:
                            values[owner, share.slice] += self.encoded(peer, before[peer], share, step, micro)
                own_shares = zip(peers, shares, strict=True)
                total = np.concatenate(
                    [self.encoded(rank, values[rank], part, step, micro) for rank, part in own_shares]
                )
            for peer in peers:
                values[peer, local_data[first].slice] = total

    def step(self, step: int, microbatches: int, draw: int, *, once: bool) -> np.ndarray:
        """Return the gradient sum of a step at its owners."""
        total = np.zeros(self.layout.size)
        fresh = [
            np.stack([draw_gradients(self.layout, step, micro, rank, self.ranks, draw) for rank in range(self.ranks)])
            for micro in range(microbatches)
        ]
        if once:
            fresh = [sum(fresh)]
        for layer in self.layout.units.values():
            kept = np.zeros((self.ranks, self.layout.size))
            for micro, drawn_now in enumerate(fresh):
                values = drawn_now.astype(np.float64)
                self.reduced(values, layer, step, micro, 0, 3 if once else 2)
                kept += values
            if not once:
                self.reduced(kept, layer, step, len(fresh) - 1, 2, 3)
            total[layer.slice] = self._of_owners(kept, layer)
        return total

    def _of_owners(self, values: np.ndarray, layer: Range) -> np.ndarray:
        received = np.zeros(layer.size)
        for rank in range(self.degrees.optimizer):
            part = cuts_of(layer, self.degrees, rank)[-1]
            received[part.shift(-layer.start).slice] = values[rank, part.slice]
        return received


def compare(driven: DrivenExchange, defined: DefinedExchange, steps: int) -> None:
    """Make ``steps`` of both on the same gradients. The first rank of each group compares for all. Collective."""
    expected = weights(driven.layout).astype(np.float64)
    norms = driven.run(steps)
    state = driven.saved()
    if driven.comm.rank:
        return
    for step, norm in enumerate(norms, start=1):
        total = defined.step(step, driven.microbatches, driven.draw, once=driven.exchange.traits.accumulates)
        assert norm == pytest.approx(np.linalg.norm(total), rel=1e-6)
        expected -= RATE * total
    for part in driven.layout.units.values():
        for segment, where in driven.layout.within(part):
            got, want = state["parameters", segment.key], expected[where.slice]
            assert np.linalg.norm(got - want) <= 1e-6 * np.linalg.norm(want), segment.key
            if defined.config.error_feedback:
                kept = np.stack([state[f"residual.{rank}", segment.key] for rank in range(driven.comm.size)])
                np.testing.assert_allclose(kept, defined.owed[:, where.slice], rtol=1e-4, atol=1e-4)


def cuts_of(layer: Range, degrees: ShardingDegrees, rank: int, itemsize: int = 4) -> list[Range]:
    """Return the ranges of a layer on a rank, one for each level, each inside the previous one."""
    results = [layer]
    for inner, outer in pairwise((1, degrees.parameters, degrees.gradients, degrees.optimizer)):
        results.append(
            split(results[-1].size, outer // inner, itemsize)[rank % outer // inner].shift(results[-1].start)
        )
    return results


def rounded_weights(
    layout: Layout, exact: np.ndarray, degrees: ShardingDegrees, bits: int, levels: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """Return the weights of a computation where gathers over ``levels`` send integers for ``exact`` weights."""
    result = exact.copy()
    way = Blockwise(bits=bits)
    for layer in layout.units.values():
        cuts = [cuts_of(layer, degrees, rank, dtype.itemsize) for rank in range(degrees.optimizer)]
        for level in sorted(levels, reverse=True):
            for part in {tuple(local_data)[level + 1] for local_data in cuts}:
                for _, where in layout.within(part):
                    payload = np.zeros(way.payload_bytes(where.size), np.uint8)
                    way.encode(result[where.slice].copy(), payload, RandomKey(0, 0, 0, 0))
                    way.decode(payload, result[where.slice])
                    result[where.slice] = result[where.slice].astype(dtype)
    return result
