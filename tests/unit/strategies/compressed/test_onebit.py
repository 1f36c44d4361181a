"""1-bit Adam as an exchange compared with the paper's algorithm in float64, with AdamW, and with its message sizes."""

from dataclasses import dataclass

import numpy as np
import pytest

from harness.compressed.optimizers import layout, pad_values, seat_of, step, steps
from harness.marks import on_threads
from hpcdist import models
from hpcdist.arrays.ranges import Range
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import StorageError
from hpcdist.models.config import ModelConfig
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.data import catalogue, onebit

WARM, STEPS = 4, 16
LAYOUT = layout()
LEAST = 32  # elements of a chunk of a tensor that is encoded by itself, so that there are some


@pytest.fixture(autouse=True)
def some_tensors_alone(monkeypatch):
    monkeypatch.setattr(onebit, "LEAST", LEAST)


def adamw(**keys):
    given = {"name": "adamw", "learning_rate": 0.01, "beta2": 0.9, "epsilon": 1e-6, "weight_decay": 0.1, "clip_norm": 0}
    return {**given, **keys}


def chunks(size, ranks):
    """Return chunks balanced in lines of 16 elements. The first chunks are longer."""
    lines = np.array_split(np.arange(-(-size // 16)), ranks)
    return [slice(16 * row[0], min(size, 16 * (row[-1] + 1))) if row.size else slice(0) for row in lines]


@dataclass
class Paper:
    """Algorithm 1 of the paper for all ranks in float64, with corrected moments and decoupled decay."""

    ranks: int
    clip: float = 0.0

    def __post_init__(self):
        self.w, self.m, self.v, self.server = np.zeros((4, LAYOUT.size))
        self.worker = np.zeros((self.ranks, LAYOUT.size))
        self.count = 0
        alone = [s for s in LAYOUT.segments if s.range.size >= LEAST * self.ranks]
        packs = [
            [s for s in LAYOUT.segments if s not in alone and s.spec.adapted == matrix] for matrix in (False, True)
        ]
        of = [[segment] for segment in alone] + [pack for pack in packs if pack]
        # The elements of each stretch, one after the other.
        self.stretches = [np.concatenate([np.r_[s.range.slice] for s in stretch]) for stretch in of]
        self.adapted = np.zeros(LAYOUT.size)
        for segment in LAYOUT.segments:
            self.adapted[segment.range.slice] = segment.spec.adapted

    def warm(self, gradients):
        g = gradients.sum(axis=0, dtype=np.float64)
        g *= min(1.0, self.clip / np.linalg.norm(g)) if self.clip else 1.0
        self.count += 1
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.9 * self.v + 0.1 * g * g
        self._descend(self.v / (1 - 0.9**self.count))

    def freeze(self):
        v = self.v / (1 - 0.9**self.count)
        for where in self.stretches:
            self.v[where] = np.where(v[where] > 0, np.maximum(v[where], 1e-4 * v[where].mean()), 0)

    def frozen(self, gradients):
        """Take a step. Return the smallest value whose sign was taken, relative to the mean."""
        gradients = gradients.astype(np.float64)
        if self.clip:
            norms = np.linalg.norm(gradients, axis=1, keepdims=True)
            gradients = gradients * np.minimum(1.0, self.clip / self.ranks**0.5 / norms)
        moves = self.v > 0
        self.count += 1
        self.worker = (self.worker + 0.9 * self.m + 0.1 * self.ranks * gradients) * moves  # of own samples alone
        taken, nearest = np.zeros_like(self.worker), np.inf
        for where in self.stretches:
            for chunk in chunks(where.size, self.ranks):
                here = where[chunk]
                for rank in range(self.ranks):
                    nearest = min(nearest, self._signs(self.worker[rank], taken[rank], here))
        self.worker = (self.worker - taken) * moves
        self.server = (self.server + taken.mean(axis=0)) * moves
        for where in self.stretches:
            for chunk in chunks(where.size, self.ranks):
                nearest = min(nearest, self._signs(self.server, self.m, where[chunk]))
        self.server = (self.server - self.m) * moves
        self.m = self.m * moves
        self._descend(self.v)
        return nearest

    def _signs(self, values, out, here):
        if not here.size:
            return np.inf
        scale = np.abs(values[here]).mean()
        out[here] = np.where(values[here] < 0, -scale, scale)
        of = np.abs(values[here][self.v[here] > 0])
        return float(of.min() / scale) if of.size else np.inf

    def _descend(self, v):
        u = self.m / (1 - 0.9**self.count) / (np.sqrt(v) + 1e-6)
        self.w = self.w - 0.01 * (u + 0.1 * self.adapted * self.w)

    def copy(self):
        other = Paper(self.ranks, self.clip)
        for name in ("w", "m", "v", "server", "worker"):
            setattr(other, name, getattr(self, name).copy())
        other.count = self.count
        return other


def draw_gradients(rng, ranks):
    """Return gradients of all ranks. Some elements are always zero."""
    result = np.array([pad_values(rng.standard_normal) for _ in range(ranks)]) * np.float32(0.1)
    result[:, ::7] = 0
    return result


@pytest.mark.parametrize(("ranks", "clip"), [(2, 1.0), (3, 0.0), (4, 1.0)])
def test_one_bit_adam_matches_the_paper_algorithm(ranks, clip, rng):
    paper, given, expected = Paper(ranks, clip), [], []
    for number in range(STEPS):
        if number == WARM:
            paper.freeze()
        while True:  # until no sign hangs on rounding
            gradients, ahead = draw_gradients(rng, ranks), paper.copy()
            if number < WARM:
                ahead.warm(gradients)
                break
            if ahead.frozen(gradients) > 2e-5:
                break
        paper = ahead
        given.append(gradients)
        expected.append(paper.w)

    def body(comm):
        exchange = catalogue.onebit(seat_of(comm, adamw(clip_norm=clip)), CompressionConfig(warmup_steps=WARM))
        return steps(exchange, [gradients[comm.rank] for gradients in given]), exchange

    assert {len(where) for where in paper.stretches} >= {LAYOUT.by_key["0.tokens.weight"].range.size}
    results = run_threads(ranks, body)
    for weights, exchange in results:
        np.testing.assert_allclose(weights, expected, atol=2e-5)
        assert weights.tobytes() == results[0][0].tobytes()
        for group, adam in exchange.reducer.all_groups():
            where = np.concatenate([np.r_[part.slice] for _, part in group.tensors])
            moves = paper.v[where] > 0  # errors of what stays where it is count for nothing
            worker, local_slice = adam.worker_error * moves, adam.own.slice
            np.testing.assert_allclose(worker, paper.worker[exchange.context.data.rank, where], atol=1e-5)
            np.testing.assert_allclose(
                adam.server_error * moves[local_slice], paper.server[where[local_slice]], atol=1e-5
            )
    assert not paper.w[::7].any() and np.count_nonzero(paper.w) > LAYOUT.parameters / 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_warm_up_and_single_rank_are_adamw(ranks, rng):
    given = [draw_gradients(rng, ranks) for _ in range(STEPS if ranks == 1 else WARM)]
    start = pad_values(rng.standard_normal)

    def body(comm):
        context = seat_of(comm, adamw(clip_norm=0.5, warmup_steps=3, decay="cosine"))
        plain, exchange = catalogue.allreduce(context), catalogue.onebit(context, CompressionConfig(warmup_steps=WARM))
        norms = []
        for each in (plain, exchange):
            each.parameters.array[...] = start
            each.restore(each.state())  # as runs do that begin with the parameters of others
            norms.append([step(each, gradients[comm.rank]) for gradients in given])
        return *norms, plain.parameters.array, exchange.parameters.array

    for want, got, adamw_s, ours in run_threads(ranks, body):
        assert got == want
        np.testing.assert_allclose(ours, adamw_s, rtol=1e-6, atol=1e-7)


def bytes_of(space, ranks):
    """Return the bytes that each rank sends in a step: chunks to their owners, then a ring all-gather."""
    of_chunk = []
    for rank in range(ranks):
        end = 0
        for stretch in onebit.scale_groups(space, Range(0, space.size), ranks):
            lines, size = -(-stretch.size // 16), stretch.size
            first = 16 * (rank * (lines // ranks) + min(rank, lines % ranks))
            chunk = max(0, min(size, first + 16 * (lines // ranks + (rank < lines % ranks))) - first)
            end = -(-end // 4) * 4 + (4 + -(-chunk // 8) if chunk else 0)
        of_chunk.append(end)
    return [2 * sum(of_chunk) - of_chunk[rank] - of_chunk[(rank + 1) % ranks] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_sent_bytes_of_one_bit_adam_match_the_formula(ranks, rng):
    given = [draw_gradients(rng, ranks) for _ in range(WARM + 2)]

    def body(comm):
        exchange = catalogue.onebit(seat_of(comm, adamw()), CompressionConfig(warmup_steps=WARM))
        with count_traffic(comm) as agreed:
            exchange.agree(np.zeros(1))
        results = []
        for gradients in given:
            with count_traffic(comm) as traffic:
                step(exchange, gradients[comm.rank])
            results.append(traffic.sent_bytes - agreed.sent_bytes)
            assert not traffic.unknown
        return results

    results = run_threads(ranks, body)
    for sent, frozen in zip(results, bytes_of(LAYOUT, ranks), strict=True):
        assert len(set(sent[:WARM])) == 1 and sent[WARM:] == [frozen, frozen]
        assert sent[0] > 4 * frozen  # chunks are small here
    assert sum(sent[0] for sent in results) == 2 * (ranks - 1) * 4 * LAYOUT.size  # the ring


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_real_model_sends_28_times_fewer_bytes(ranks, monkeypatch):
    monkeypatch.undo()
    space = models.build(ModelConfig(layers=4, hidden=256, heads=4), "float32", context=256).layout
    dense, sent = 2 * (ranks - 1) / ranks * 4 * space.parameters, max(bytes_of(space, ranks))
    print(f"{ranks} ranks, {space.parameters} parameters: {sent} bytes a step, {dense / sent:.2f} times fewer")
    assert dense / sent > 28


@on_threads(1)
def test_restore_of_invalid_scalars_is_rejected(comm):
    exchange = catalogue.onebit(seat_of(comm, adamw()), CompressionConfig(warmup_steps=WARM))
    with pytest.raises(StorageError, match="damaged: the number of ranks with 1-bit Adam errors is -1"):
        exchange.prepare_restore({"frozen": -1})
