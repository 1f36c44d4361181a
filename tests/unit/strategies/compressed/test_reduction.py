"""Sums of compressed gradients, compared with one process that encodes for all ranks, and with the residuals."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from hpcdist import models
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range, split
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.compression import powersgd
from hpcdist.compression.compressor import ErrorFeedback, RandomKey, align
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.compressed import reduction
from hpcdist.strategies.compressed.config import COMPRESSORS, LOW_RANK, QUANTISED, SUMMED, CompressionConfig
from hpcdist.strategies.compressed.low_rank import PowerSgdReduction
from hpcdist.strategies.compressed.reduction import (
    CompressedReduction,
    GatheredReduction,
    GradientCoder,
    InterNodeReduction,
    PayloadAllreduce,
    QuantisedReduction,
    inter_node,
)
from hpcdist.strategies.compressed.registry import bucket_reduction, compressor
from hpcdist.strategies.core.rank_context import RankContext

SPECS = [
    TensorSpec(0, "embedding", (40, 24)),
    TensorSpec(0, "bias", (5,)),
    TensorSpec(1, "weight", (33, 17)),
    TensorSpec(1, "norm", (24,)),
]
LAYOUT = Layout.of(SPECS)
PARTS = [LAYOUT.units[1], LAYOUT.units[0]]  # as backward completes them
CONFIG = CompressionConfig(density=0.05, rank=3)
STEPS = 3


@dataclass
class Made:
    """The encoder and the reduction of one rank."""

    codes: GradientCoder | PowerSgdReduction
    reduction: CompressedReduction

    def step(self, number, gradient):
        result = gradient.copy()
        if isinstance(self.codes, GradientCoder):
            self.codes.step = number
        for part in PARTS:
            self.reduction.allreduce(result[part.slice], part)
        if self.codes.feedback is not None:
            self.codes.feedback.keep()
        return result


def make(comm, name, *, feedback, across=False, seed=3):
    config = replace(CONFIG, error_feedback=feedback)
    over = inter_node(comm) if across else comm
    codes: GradientCoder | PowerSgdReduction
    way: CompressedReduction
    if name in LOW_RANK:
        codes = way = PowerSgdReduction(over, LAYOUT, PARTS, config.rank, seed, "ring")
    else:
        codes = GradientCoder(LAYOUT, compressor(name, config), seed, 0 if name in SUMMED else over.rank)
        gathered = PayloadAllreduce(over, codes, "ring") if name in SUMMED else GatheredReduction(over, codes)
        way = QuantisedReduction(over, codes) if name in QUANTISED else gathered
    way = InterNodeReduction(comm, way) if across else way
    if feedback:
        codes.feedback = ErrorFeedback(LAYOUT, sorted((k for p in PARTS for k in way.kept(p)), key=lambda k: k.start))
    return Made(codes, way)


def gradients(rng, ranks):  # (ranks, size), zero where the layout pads
    received = np.zeros((ranks, LAYOUT.size), np.float32)
    for segment in LAYOUT.segments:
        received[:, segment.range.slice] = rng.standard_t(3, (ranks, segment.range.size))
    return received


def pieces(part):
    return [where for _, where in LAYOUT.within(part)]


def encode_and_decode(name, feedback, values, where, step, rank):
    """Return the values of one piece after encoding and decoding."""
    made = compressor(name, replace(CONFIG, error_feedback=feedback))
    payload = np.zeros(made.payload_bytes(values.size), np.uint8)
    made.encode(values, payload, RandomKey(3, step, 0 if name in SUMMED else rank, where.start // 16))
    out = np.empty_like(values)
    made.decode(payload, out)
    return out


class OneProcess:
    """All ranks of a reduction in one process: pieces through the compressor, float32 sums in its order."""

    def __init__(self, name, ranks, feedback):
        self.name, self.ranks, self.feedback = name, ranks, feedback
        self.residual = np.zeros((ranks, LAYOUT.size), np.float32)

    def sent(self, step, rank, where, values):
        given = (self.residual[rank, where.slice] + values).astype(np.float32) if self.feedback else values
        out = encode_and_decode(self.name, self.feedback, given, where, step, rank)
        if self.feedback:
            self.residual[rank, where.slice] = given - out
        return out

    def step(self, step, given):
        total = np.zeros(LAYOUT.size, np.float32)
        for part in PARTS:
            if self.name in QUANTISED:
                self._owned(step, part, given, total)
            else:
                for where in pieces(part):
                    for rank in range(self.ranks):
                        total[where.slice] += self.sent(step, rank, where, given[rank, where.slice])
        return total

    def _owned(self, step, part, given, total):
        for owner, share in enumerate(split(part.size, self.ranks, 4)):
            for where in pieces(share.shift(part.start)):
                mine = given[owner, where.slice].copy()
                for rank in range(self.ranks):
                    if rank != owner:
                        mine += self.sent(step, rank, where, given[rank, where.slice])
                total[where.slice] = self.sent(step, owner, where, mine)


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("name", [name for name in COMPRESSORS if name not in LOW_RANK])
def test_compressed_sum_matches_one_process(rng, name, feedback):
    for ranks in (2, 3, 4):
        given = [gradients(rng, ranks) for _ in range(STEPS)]

        def run(comm, given=given):
            made = make(comm, name, feedback=feedback)
            return [made.step(step, given[step][comm.rank]) for step in range(STEPS)]

        results = run_threads(ranks, run)
        expected = OneProcess(name, ranks, feedback)
        for step in range(STEPS):
            requested = expected.step(step, given[step])
            for local_data in results:
                if name in SUMMED:  # the order of a ring
                    np.testing.assert_allclose(local_data[step], requested, rtol=1e-5, atol=1e-5)
                else:
                    np.testing.assert_array_equal(local_data[step], requested)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("name", [*COMPRESSORS])
def test_lost_values_of_a_sum_are_in_the_residuals(rng, name, across):
    ranks, nodes = (4, 2) if across else (3, 3)
    given = [gradients(rng, ranks) for _ in range(STEPS)]

    def run(comm):
        made = make(comm, name, feedback=True, across=across)
        sums = [made.step(step, given[step][comm.rank]) for step in range(STEPS)]
        assert made.codes.feedback is not None
        store = made.codes.feedback.residuals
        return sums, [(part, store.range(part).copy()) for part in store.parts]

    results = run_threads(ranks, run, ranks_per_node=ranks // nodes)
    owed = np.zeros(LAYOUT.size)
    for _, residuals in results:
        for part, values in residuals:
            owed[part.slice] += values
    true = sum(step.astype(np.float64).sum(axis=0) for step in given)
    applied = sum(step.astype(np.float64) for step in results[0][0])
    assert np.abs(true - applied).max() > 1e-4, "something is lost"
    np.testing.assert_allclose(true - applied, owed, atol=2e-4)
    for sums, _ in results:
        for local_data, first in zip(sums, results[0][0], strict=True):
            np.testing.assert_array_equal(local_data, first)


def test_powersgd_computes_the_projection_of_the_mean(rng):
    """The reference is a subspace iteration in float64 with a QR factorisation, which spans the same columns."""
    ranks = 3
    given = [gradients(rng, ranks) for _ in range(STEPS)]

    def run(comm):
        made = make(comm, "powersgd", feedback=True)
        assert isinstance(made.codes, PowerSgdReduction)
        first = {key: matrix.query.copy() for key, matrix in made.codes.matrices.items()}
        return [made.step(step, given[step][comm.rank]) for step in range(STEPS)], first

    sums, queries = run_threads(ranks, run)[0]
    assert set(queries) == {"0.embedding", "1.weight"}
    for segment in LAYOUT.segments:
        rows, columns = powersgd.matrix_shape(segment.spec.shape)
        residual, query = np.zeros((ranks, rows, columns)), queries.get(segment.key)
        for step in range(STEPS):
            exact = given[step][:, segment.range.slice].astype(np.float64)
            if query is None:
                np.testing.assert_allclose(sums[step][segment.range.slice], exact.sum(axis=0), rtol=1e-5, atol=1e-5)
                continue
            matrices = exact.reshape(ranks, rows, columns) + residual
            spanned = np.linalg.qr(matrices.sum(axis=0) @ query)[0]
            query = matrices.sum(axis=0).T @ spanned
            total = spanned @ query.T
            residual = matrices - total / ranks
            np.testing.assert_allclose(sums[step][segment.range.slice], total.reshape(-1), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("name", [*COMPRESSORS])
def test_nan_reaches_all_ranks_but_no_residual(rng, name):
    given = gradients(rng, 3)
    bad = LAYOUT.by_key["1.weight"].range
    given[1, bad.start + 7] = np.inf

    def run(comm):
        made = make(comm, name, feedback=True)
        result = made.step(0, given[comm.rank])
        assert made.codes.feedback is not None
        return result, bool(np.isfinite(made.codes.feedback.residuals.array).all())

    for rank, (result, clean) in enumerate(run_threads(3, run)):
        assert not np.isfinite(result[bad.slice]).all(), "whoever takes the norm sees it"
        assert clean or rank != 1


def expected_bytes(name, ranks, rank):
    """Return the bytes that a rank sends to sum all of PARTS."""
    made = None if name in LOW_RANK else compressor(name, CONFIG)
    total = 0
    for part in PARTS:
        if made is None:
            total += powersgd.wire_bytes([segment.spec.shape for segment, _ in LAYOUT.within(part)], CONFIG.rank)
        elif name in SUMMED:
            total += sum(made.payload_bytes(where.size) - 16 for where in pieces(part))
        else:
            shares = [share.shift(part.start) for share in split(part.size, ranks, 4)]
            sizes = [message_bytes([made.payload_bytes(where.size) for where in pieces(share)]) for share in shares]
            whole = message_bytes([made.payload_bytes(where.size) for where in pieces(part)])
            total += (sum(sizes) + (ranks - 2) * sizes[rank]) if name in QUANTISED else (ranks - 1) * whole
    return total


def message_bytes(payloads):
    end = 0
    for size in payloads:
        end = align(end) + size
    return end


@pytest.mark.parametrize("name", [*COMPRESSORS])
def test_bytes_follow_the_formula(rng, name):
    given = gradients(rng, 2)

    def run(comm):
        made = make(comm, name, feedback=True)
        with count_traffic(comm) as traffic:
            made.step(0, given[comm.rank])
        assert not traffic.unknown
        return traffic.sent_bytes

    results = run_threads(2, run)
    if name in (*LOW_RANK, *SUMMED):  # a ring of 2 ranks: each sends the whole once, half down and half up
        assert sum(results) == 2 * expected_bytes(name, 2, 0)
    else:
        assert results == [expected_bytes(name, 2, rank) for rank in range(2)]


def test_sum_of_one_rank_is_not_encoded(rng):
    given = gradients(rng, 1)

    def run(comm):
        way = make(comm, "float16", feedback=False).reduction
        assert isinstance(way, QuantisedReduction)
        result = given[0].copy()
        way.reduce_scatter(result, Range(0, LAYOUT.size), [Range(0, LAYOUT.size)])
        return result

    np.testing.assert_array_equal(run_threads(1, run)[0], given[0])


@pytest.mark.parametrize("name", ["float16", "topk"])
def test_long_messages_between_nodes_are_segmented(rng, monkeypatch, name):
    monkeypatch.setattr(reduction, "SEGMENT_BYTES", 100)
    given = gradients(rng, 3)

    def run(comm):
        made = make(comm, name, feedback=True)
        with count_traffic(comm) as traffic:
            result = made.step(0, given[comm.rank])
        return result, traffic.calls["isend"], traffic.sent_bytes

    whole, segmented = (run_threads(3, run, ranks_per_node=per_node) for per_node in (3, 1))
    for one, other in zip(whole, segmented, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        assert one[2] == other[2]
        assert one[1] < one[2] / 100 <= other[1] < one[1] + one[2] / 100, "each but the last of a message is full"


def test_nodes_of_different_sizes_are_rejected():
    def run(comm):
        with pytest.raises(ConfigurationError, match="across_nodes"):
            make(comm, "int8", feedback=True, across=True)
        return "refused"

    assert run_threads(3, run, ranks_per_node=2) == ["refused"] * 3


@pytest.mark.parametrize("bucket_bytes", [100, 1000])
def test_random_draws_have_unique_names(rng, monkeypatch, bucket_bytes):
    """Names are unique for any bucket size, in both phases and on all ranks."""
    results = []
    named = GradientCoder._key

    def note_name(coder, unit):
        results.append(named(coder, unit))
        return results[-1]

    monkeypatch.setattr(GradientCoder, "_key", note_name)

    def run(comm):
        made = models.build(ModelConfig(layers=1, hidden=16, heads=2, vocabulary=64), "float32", context=8)
        given = {"world": comm, "data": comm, "pipeline": comm.split(comm.rank), "model": made, "total_steps": 1}
        context = RankContext(optimizer=OptimizerConfig(), bucket_bytes=bucket_bytes, **given)
        sums = bucket_reduction(context, "qsgd", CompressionConfig(), 3)
        for part in sums.buckets:
            sums.reduction.allreduce(np.ones(part.size, np.float32), part)

    run_threads(3, run)
    assert len(results) == len(set(results)) > 100


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_powersgd_sends_stacked_biases_uncompressed(rng, rank):
    """Three biases of shape (3, h) look like a matrix, but rank 1 would lose two thirds of their information."""
    config = ModelConfig(kind="gpt", layers=1, hidden=16, heads=2, vocabulary=32, kv_heads=1)
    for made in (config, replace(config, kv_heads=0)):
        layout = models.build(made, context=8).layout
        given = rng.standard_normal((2, layout.size)).astype(np.float32)
        biases = [segment for segment in layout.segments if segment.spec.name in ("qkv.bias", "kv.bias")]
        assert biases and all(len(segment.spec.shape) == 2 for segment in biases)

        def run(comm, layout=layout, given=given):
            parts = list(layout.units.values())
            way, result = PowerSgdReduction(comm, layout, parts, rank, 3, "ring"), given[comm.rank].copy()
            for part in parts:
                way.allreduce(result[part.slice], part)
            return result, set(way.matrices)

        for result, matrices in run_threads(2, run):
            assert {key for key in matrices if key.endswith((".bias", ".scale"))} == set()
            assert any("weight" in key for key in matrices)
            for segment in biases:
                exact = given[:, segment.range.slice].sum(axis=0)
                np.testing.assert_allclose(result[segment.range.slice], exact, rtol=1e-6, atol=1e-6)
