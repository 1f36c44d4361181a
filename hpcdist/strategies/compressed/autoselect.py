"""Automatic choice of a compressor: measure at the start of a run whether compression pays on this network.

The largest bucket of gradients of the run's own ranks is summed dense and by each candidate, in turns; the slowest
rank counts, and of all turns the fastest: what else a machine does only makes them longer. What a candidate takes is
encoding, the wire, and decoding; with B the bytes of a bucket, c the ratio of compression, and W the bytes a second
of the slowest link, it wins where

    codec + wire(B / c) < wire(B),        about       codec < (1 - 1/c) B / W

so that a fast network needs no compression however good it is. A candidate has to be clearly faster, else gradients
stay as they are: compression is a loss of information, and has to be worth it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
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
CLEARLY: Final = 0.95  # of the dense time: worth an error in every gradient
BUDGET_S: Final = 1.5
FEWEST, MOST = 3, 25  # rounds, behind one that compiles and connects
_FLOAT32: Final = np.dtype(np.float32)


@dataclass(frozen=True)
class CandidateTiming:
    """Seconds of one way to sum a bucket; ``codec_s`` of them encode and decode, without any message."""

    name: str
    seconds: float
    codec_s: float

    def __str__(self) -> str:
        codec = f" ({self.codec_s * 1e3:.2f} of it encoding and decoding)" if self.name != NONE else ""
        return f"{'dense' if self.name == NONE else self.name} {self.seconds * 1e3:.2f} ms{codec}"


@dataclass(frozen=True)
class CompressionDecision:
    """Compression of the gradients of a run, and the reason for it.

    ``source`` is "recipe", "checkpoint", "measured" or "default".
    """

    name: str
    source: str
    rows: tuple[CandidateTiming, ...] = ()  # dense first
    bucket_bytes: int = 0
    note: str = ""

    def described(self) -> str:
        """Return the choice in words for a log, "" where there was none (local)."""
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
        """Return the decision as JSON values (local)."""
        rows = [vars(row) for row in self.rows]
        return {"name": self.name, "source": self.source, "bucket_bytes": self.bucket_bytes, "measured": rows}


def decide(
    context: RankContext,
    config: CompressionConfig,
    seed: int,
    *,
    halved: bool,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> CompressionDecision:
    """Return the fastest of ``config.candidates``, or none of them. Collective over the world.

    ``halved``: gradients are summed to those who own them, and nobody else. The same on all ranks of the world, all of
    whose data axes measure at once, as they will exchange.
    """
    if context.world.size == 1 or _most(context, context.data.size) == 1:
        return CompressionDecision(NONE, "default", note="one data rank, and nothing travels")
    if config.across_nodes and _most(context, context.data.nodes().count) == 1:
        return CompressionDecision(NONE, "default", note="one node, and nothing leaves it")
    contenders = [
        _Dense(context, halved),
        *(_Candidate(context, name, config, seed, halved) for name in config.candidates),
    ]
    taken: list[list[float]] = [[] for _ in contenders]
    began = clock()
    for number in range(MOST + 1):
        for contender, times in zip(contenders, taken, strict=True):
            context.data.barrier()
            before = clock()
            contender.run()
            backend.synchronise(contender.values)
            times.append(_most(context, clock() - before))
            contender.settle()
        if number >= FEWEST and _most(context, clock() - began) > budget_s:
            break
    rows = tuple(  # stages have buckets of their own: the slowest counts here too
        CandidateTiming(
            candidate.name,
            _most(context, candidate.share * min(times[1:])),
            _most(context, candidate.share * candidate.codec_s(clock)),
        )
        for candidate, times in zip(contenders, taken, strict=True)
    )
    best = min(rows[1:], key=lambda row: row.seconds)
    pays = best.seconds < CLEARLY * rows[0].seconds
    collectives.release(context.data)
    longest = int(_most(context, contenders[0].bucket.size))
    return CompressionDecision(best.name if pays else NONE, "measured", rows, longest * _FLOAT32.itemsize)


def _most(context: RankContext, value: float) -> float:
    maximum = np.array([value], np.float64)
    context.world.allreduce(maximum, "max")
    return float(maximum[0])


class _Dense:
    """Uncompressed contender: the largest bucket, summed as it is."""

    name = NONE
    share = 1.0  # of what `run` takes that counts, where it sums more or less than the largest bucket

    def __init__(self, context: RankContext, halved: bool) -> None:
        self.context, self._halved = context, halved
        config = CompressionConfig(error_feedback=False)
        self.bucket = max(bucket_reduction(context, "float16", config, 0).buckets, key=lambda bucket: bucket.size)
        self.values = _like_gradients(context, self.bucket).astype(context.dtype)

    def run(self) -> None:
        """Sum the bucket. Collective over the data axis."""
        data, algorithm = self.context.data, self.context.algorithm
        if not self._halved:
            collectives.allreduce(data, self.values, algorithm)
            return
        sharding = SHARDED.get(algorithm, SHARDED["native"])
        sharding.reduce_scatter(data, self.values, sharding.shares(data, self.values.size, self.values.itemsize))

    def settle(self) -> None:
        """Prepare the next round: nothing, since a dense sum takes as long whatever the values are (local)."""

    def codec_s(self, clock: Callable[[], float]) -> float:
        """Return 0: nothing is encoded."""
        return 0.0


class _Candidate(_Dense):
    """Compressed contender: the same bucket through a compressor, with its feedback."""

    def __init__(self, context: RankContext, name: str, config: CompressionConfig, seed: int, halved: bool) -> None:
        super().__init__(context, halved and not config.across_nodes)
        self.name = name
        self._summing = bucket_reduction(context, name, config, seed)
        longest = max(self._summing.buckets, key=lambda bucket: bucket.size)
        self.share = self.bucket.size / longest.size  # factors have whole layers for buckets
        self.bucket = longest
        self.values = _like_gradients(context, longest)
        if config.error_feedback:
            parts = self._summing.reduction.kept(longest)
            self._summing.codes.feedback = ErrorFeedback(context.layout, parts, on=context.on, can_roll_back=False)

    def run(self) -> None:
        """Sum the bucket. Collective over the data axis."""
        codes = self._summing.codes
        if self._halved and isinstance(codes, GradientCoder):
            reduction = QuantisedReduction(self._summing.comm, codes)
            reduction.reduce_scatter(self.values, self.bucket, reduction.shares(self.bucket))
        else:
            self._summing.reduction.allreduce(self.values, self.bucket)
        if codes.feedback is not None:
            codes.feedback.keep()

    def settle(self) -> None:
        """Divide the sum by the ranks: after many rounds it would be infinite, and not encoded (local)."""
        if not self._halved:
            self.values *= np.float32(1.0 / self.context.data.size)

    def codec_s(self, clock: Callable[[], float]) -> float:
        """Return the seconds of encoding and decoding alone, as often as `run` does (local)."""
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
    taken = []
    for _ in range(FEWEST):
        before = clock()
        call()
        backend.synchronise(values)
        taken.append(clock() - before)
    return min(taken)


def _like_gradients(context: RankContext, bucket: Range) -> Array:
    drawn = np.random.default_rng(context.data.rank).standard_normal(bucket.size, np.float32)
    return backend.place(drawn, context.on)
