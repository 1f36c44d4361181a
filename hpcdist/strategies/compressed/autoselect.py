"""Automatic choice of a compressor: measure at the start of a run whether compression pays.

The largest gradient bucket is summed several times without and with each compressor; the fastest time counts. With B
bytes of a bucket, compression ratio c, and W bytes/s of the slowest link, a compressor wins if it is clearly faster:

    codec + wire(B / c) < wire(B),        about       codec < (1 - 1/c) B / W
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import FLOAT32
from hpcdist.arrays.ranges import Range
from hpcdist.collectives.autotune import CLEARLY
from hpcdist.collectives.sharded import SHARDED
from hpcdist.comm.threads.communicator import solo
from hpcdist.compression.compressor import ErrorFeedback
from hpcdist.reporting.units import format_bytes
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.compressed.low_rank import PowerSgdReduction
from hpcdist.strategies.compressed.reduction import GradientCoder, QuantisedReduction
from hpcdist.strategies.compressed.registry import bucket_reduction
from hpcdist.strategies.core.rank_context import RankContext

NONE: Final = "none"
BUDGET_S: Final = 1.5
FEWEST, MOST = 3, 25  # rounds, after one that compiles and connects


@dataclass(frozen=True)
class CandidateTiming:
    """Measured time in seconds of one gradient allreduce with the compressor ``name``."""

    name: str
    seconds: float
    codec_s: float  # seconds of encoding and decoding

    def __str__(self) -> str:
        codec = f" ({self.codec_s * 1e3:.2f} of it encoding and decoding)" if self.name != NONE else ""
        return f"{'dense' if self.name == NONE else self.name} {self.seconds * 1e3:.2f} ms{codec}"


@dataclass(frozen=True)
class CompressionDecision:
    """Gradient compressor that a run uses, and the source of the choice, such as the recipe or a measurement."""

    name: str
    source: str  # "recipe", "checkpoint", "measured" or "default"
    rows: tuple[CandidateTiming, ...] = ()  # dense first
    bucket_bytes: int = 0
    note: str = ""

    def described(self) -> str:
        """Return a log message with the chosen compressor and the reason. Local.

        Returns "" if the recipe names the compressor.
        """
        if self.source == "recipe":
            return ""
        if not self.rows:
            return f"communication.compression = auto: {self.name}, {self.note or 'kept from the checkpoint'}"
        dense, best = self.rows[0], min(self.rows[1:], key=lambda row: row.seconds)
        ratio = dense.seconds / best.seconds
        verdict = f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"
        unworthy = ", which is not worth its error" if ratio > 1 and self.name == NONE else ""
        why = f"{best.name} is {verdict}{unworthy}"
        shown = "; ".join(map(str, self.rows))
        return f"communication.compression = auto: {self.name}: {why}; {format_bytes(self.bucket_bytes)}: {shown}"

    def numbers(self) -> dict[str, Any]:
        """Return the chosen compressor and the measured times of all tried compressors as a dict for JSON. Local."""
        rows = [vars(row) for row in self.rows]
        return {"name": self.name, "source": self.source, "bucket_bytes": self.bucket_bytes, "measured": rows}


def decide(
    context: RankContext,
    config: CompressionConfig,
    seed: int,
    *,
    halved: bool,  # gradients need a reduce-scatter, not an allreduce
    budget_s: float = BUDGET_S,  # time limit
    clock: Callable[[], float] = time.perf_counter,
) -> CompressionDecision:
    """Measure and return the fastest compressor in ``config.candidates``, or "none". Collective over the world.

    ``seed``: seed of the run, for compressors with random numbers.
    """
    if context.world.size == 1 or _most(context, context.data.size) == 1:
        return CompressionDecision(NONE, "default", note="one data rank: no gradients are sent")
    if config.across_nodes and _most(context, context.data.nodes().count) == 1:
        return CompressionDecision(NONE, "default", note="one node: no gradients are sent between nodes")
    contenders = [
        _Dense(context, halved),
        *(_Candidate(context, name, config, seed, halved) for name in config.candidates),
    ]
    durations: list[list[float]] = [[] for _ in contenders]
    start_s = clock()
    for number in range(MOST + 1):
        for contender, times in zip(contenders, durations, strict=True):
            context.data.barrier()
            before = clock()
            contender.run()
            backend.synchronise(contender.values)
            times.append(_most(context, clock() - before))
            contender.settle()
        if number >= FEWEST and _most(context, clock() - start_s) > budget_s:
            break
    rows = tuple(  # stages have different buckets: the slowest counts
        CandidateTiming(
            candidate.name,
            _most(context, candidate.share * min(times[1:])),
            _most(context, candidate.share * candidate.codec_s(clock)),
        )
        for candidate, times in zip(contenders, durations, strict=True)
    )
    best = min(rows[1:], key=lambda row: row.seconds)
    pays = best.seconds < CLEARLY * rows[0].seconds
    collectives.release(context.data)
    longest = int(_most(context, contenders[0].bucket.size))
    return CompressionDecision(best.name if pays else NONE, "measured", rows, longest * FLOAT32.itemsize)


def _most(context: RankContext, value: float) -> float:
    maximum = np.array([value], np.float64)
    context.world.allreduce(maximum, "max")
    return float(maximum[0])


class _Dense:
    # Benchmark of the uncompressed sum of the largest gradient bucket over the data axis.
    name = NONE
    share = 1.0  # factor of the time of `run`, if it sums more or less than the largest bucket

    def __init__(self, context: RankContext, halved: bool) -> None:
        self.context, self._halved = context, halved
        config = CompressionConfig(error_feedback=False)
        self.bucket = max(bucket_reduction(context, "float16", config, 0).buckets, key=lambda bucket: bucket.size)
        self.values = _like_gradients(context, self.bucket).astype(context.dtype)

    def run(self) -> None:
        data, algorithm = self.context.data, self.context.algorithm
        if not self._halved:
            collectives.allreduce(data, self.values, algorithm)
            return
        sharding = SHARDED.get(algorithm, SHARDED["native"])
        sharding.reduce_scatter(data, self.values, sharding.shares(data, self.values.size, self.values.itemsize))

    def settle(self) -> None:
        """Scale the gradient values down if the next timed repetition of `run` could overflow."""

    def codec_s(self, clock: Callable[[], float]) -> float:
        return 0.0


class _Candidate(_Dense):
    def __init__(self, context: RankContext, name: str, config: CompressionConfig, seed: int, halved: bool) -> None:
        super().__init__(context, halved and not config.across_nodes)
        self.name = name
        self._summing = bucket_reduction(context, name, config, seed)
        longest = max(self._summing.buckets, key=lambda bucket: bucket.size)
        self.share = self.bucket.size / longest.size  # low-rank buckets are whole layers
        self.bucket = longest
        self.values = _like_gradients(context, longest)
        if config.error_feedback:
            parts = self._summing.reduction.kept(longest)
            self._summing.codes.feedback = ErrorFeedback(context.layout, parts, on=context.on, can_roll_back=False)

    def run(self) -> None:
        codes = self._summing.codes
        if self._halved and isinstance(codes, GradientCoder):
            reduction = QuantisedReduction(self._summing.comm, codes)
            reduction.reduce_scatter(self.values, self.bucket, reduction.shares(self.bucket))
        else:
            self._summing.reduction.allreduce(self.values, self.bucket)
        if codes.feedback is not None:
            codes.feedback.keep()

    def settle(self) -> None:
        if not self._halved:
            self.values *= np.float32(1.0 / self.context.data.size)  # or they overflow over many rounds

    def codec_s(self, clock: Callable[[], float]) -> float:
        codes = self._summing.codes
        if isinstance(codes, PowerSgdReduction):
            alone = PowerSgdReduction(solo(), codes.layout, [self.bucket], codes.rank, 0, "native", self.context.on)
            return _timed(lambda: alone.allreduce(self.values, self.bucket), self.values, clock)
        payloads = backend.empty(codes.message(self.bucket).nbytes, np.dtype(np.uint8), self.context.on)
        feedback, codes.feedback = codes.feedback, None
        encode_s = _timed(lambda: codes.encode(self.values, self.bucket, payloads), self.values, clock)
        decode_s = _timed(lambda: codes.decode(payloads, self.bucket, self.values), self.values, clock)
        codes.feedback = feedback
        encodes, decodes = self._summing.reduction.passes
        return encodes * encode_s + decodes * decode_s


def _timed(call: Callable[[], None], values: Array, clock: Callable[[], float]) -> float:
    durations = []
    for _ in range(FEWEST):
        before = clock()
        call()
        backend.synchronise(values)
        durations.append(clock() - before)
    return min(durations)


def _like_gradients(context: RankContext, bucket: Range) -> Array:
    drawn = np.random.default_rng(context.data.rank).standard_normal(bucket.size, np.float32)
    return backend.place(drawn, context.on)
