"""Measurements of a device (matrix products, copies, model steps), and the dataclasses of all measurements.

Each operation is timed twice (`BusySeconds`), because ranks share caches, memory and perhaps cores. A time is the first
quartile over several rounds, on the slowest rank. Every round runs all sizes. Other processes only lengthen
repetitions, so the first quartile is closer to the time on an idle machine than the median.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.backend import namespace
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.bench.step.run import TimedRun
from hpcdist.bench.timing import without_collection
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig

OPERATIONS: Final = ("allreduce", "reduce_scatter", "all_gather")
Call = Callable[[], object]
SIDES: Final = {"cpu": (16, 32, 64, 128, 256, 512, 1024), "gpu": (64, 128, 256, 512, 1024, 2048, 4096, 8192)}
# Products of a transformer. WIDTHS: hidden sizes. TOKENS: tokens of a micro-batch.
WIDTHS: Final = {"cpu": (64, 128, 256, 512), "gpu": (512, 1024, 2048, 4096)}
TOKENS: Final = {"cpu": (128, 1024), "gpu": (2048, 16384)}
MOVED: Final = {"cpu": (1 << 14, 64 << 20), "gpu": (1 << 18, 1 << 30)}  # smallest and largest array, in bytes
LEAST_ROUNDS: Final = 5
MOST_ROUNDS: Final = 200
WARM: Final = 2  # untimed steps of a model
STEPS: Final = 10  # timed steps of a model


class BusySeconds(NamedTuple):
    """Duration of an operation in seconds: ``one`` with one busy rank per node, ``all`` with all ranks busy."""

    one: float
    all: float
    spread: float | None = None  # variation of the repetitions: mean / first quartile - 1


class ProductPoint(NamedTuple):
    """Duration of the product of two matrices, with shapes (m, k) and (k, n)."""

    m: int
    k: int
    n: int
    seconds: BusySeconds


class MovePoint(NamedTuple):
    """Duration of an array ``operation``, "copy" or "add". ``nbytes``: bytes read plus bytes written."""

    operation: str
    nbytes: int
    seconds: BusySeconds


class KindPoint(NamedTuple):
    """Total duration per training step of all operations of one ``kind``, for example "matmul" or "attention"."""

    kind: str
    forward: BusySeconds
    backward: BusySeconds


@dataclass(frozen=True, kw_only=True)
class ModelPoint:
    """Durations in a training step of a model on one rank, with ``samples`` sequences of ``context`` tokens."""

    config: ModelConfig
    context: int
    samples: int
    kinds: tuple[KindPoint, ...]
    norm: BusySeconds
    update: BusySeconds
    step: BusySeconds
    parameters: int
    operations: int


class LinkPoint(NamedTuple):
    """Duration of a message between two ranks, on one node (``level`` "node") or on two nodes ("network")."""

    level: str
    ranks: int
    nbytes: int
    seconds: BusySeconds  # one pair: half a round trip; all pairs: in both directions at the same time
    border: bool = False  # a size that was added where the duration jumps


class CollectivePoint(NamedTuple):
    """Duration of a collective on the slowest rank (first quartile), at the ``level`` "node" or "network"."""

    operation: str
    algorithm: str
    level: str
    ranks: int
    nbytes: int
    seconds: float
    border: bool = False


@dataclass(frozen=True, kw_only=True)
class CalibratedMachine:
    """Device of a rank, and the machine: ``hosts`` hosts, with at most ``ranks_per_host`` ranks on each host."""

    device: str
    on: str  # "cpu", or "gpu"
    hosts: int
    ranks_per_host: int
    devices_per_host: int
    threads: int
    memory_bytes: int  # of a device; for CPUs: host memory / devices per host
    host_memory_bytes: int
    blas: str
    mpi_library: str


@dataclass(frozen=True, kw_only=True)
class CalibrationPoints:
    """Measurements of a calibration. ``links`` and ``collectives`` are empty if there is only one rank."""

    machine: CalibratedMachine
    products: dict[str, tuple[ProductPoint, ...]]  # by dtype
    moves: tuple[MovePoint, ...]
    models: tuple[ModelPoint, ...]
    links: tuple[LinkPoint, ...]
    collectives: tuple[CollectivePoint, ...]
    seconds: float  # duration of the calibration
    busy: str = ""  # evidence that the machine was busy with other processes, or ""


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """Settings of a calibration. ``models``: tuples (model, sequence length, micro-batch sizes)."""

    dtypes: tuple[str, ...] = ("float32",)
    on: str = "cpu"
    models: tuple[tuple[ModelConfig, int, tuple[int, ...]], ...] = ()
    algorithms: tuple[str, ...] = ("auto", "ring")
    least_bytes: int = 1 << 10
    most_bytes: int = 32 << 20
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.most_bytes < 64 * self.least_bytes:
            raise UsageError(
                f"message sizes from {self.least_bytes} to {self.most_bytes} bytes are too similar for a fit; set the "
                f"largest size (--max-bytes) to at least {64 * self.least_bytes} bytes"
            )


def sizes(smallest: int, largest: int, per_octave: int = 4) -> tuple[int, ...]:
    """Return a tuple of sizes in bytes from ``smallest`` to ``largest``, with ``per_octave`` sizes per doubling."""
    rounded, step = [], 0
    while (size := smallest * 2 ** (step / per_octave)) <= largest * 1.0001:
        rounded.append(max(64, round(size / 64) * 64))
        step += 1
    return tuple(dict.fromkeys(rounded))


def default_models() -> tuple[tuple[ModelConfig, int, tuple[int, ...]], ...]:
    """Return the default GPT models to time, as tuples (model, sequence length, micro-batch sizes)."""
    return (
        (ModelConfig(layers=2, hidden=128, heads=2, vocabulary=256), 128, (1, 4)),
        (ModelConfig(layers=2, hidden=256, heads=4, vocabulary=256), 128, (2, 4)),
        (ModelConfig(layers=2, hidden=256, heads=4, vocabulary=256), 256, (1, 2)),
    )


def shapes(device_kind: str) -> tuple[tuple[int, int, int], ...]:
    """Return the shapes (m, k, n) of matrix products to time. ``device_kind``: "cpu" or "gpu"."""
    products = [(side, side, side) for side in SIDES[device_kind]]
    for width in WIDTHS[device_kind]:
        for tokens in TOKENS[device_kind]:
            for inner, outer in ((1, 3), (1, 1), (1, 4), (4, 1)):
                products += [(tokens, inner * width, outer * width), (inner * width, tokens, outer * width)]
    return tuple(dict.fromkeys(products))


def products(comm: Communicator, dtype: str, device_kind: str, seconds: float) -> tuple[ProductPoint, ...]:
    """Return a `ProductPoint` for each of the `shapes`, measured in about ``seconds`` seconds in total. Collective.

    ``dtype``: type of the matrix elements. ``device_kind``: "cpu" or "gpu".
    """
    draw, item = np.random.default_rng(0), dtype_of(dtype)
    calls = []
    for m, k, n in shapes(device_kind):
        factors = [draw.standard_normal(shape, np.float32).astype(item) for shape in ((m, k), (k, n))]
        target = backend.empty((m, n), item, device_kind)
        multiply = partial(
            namespace(target).matmul, *(backend.place(factor, device_kind) for factor in factors), out=target
        )
        calls.append(_synchronised(multiply, target))
    return tuple(
        ProductPoint(*shape, busy) for shape, busy in zip(shapes(device_kind), both(comm, calls, seconds), strict=True)
    )


def _synchronised(operation: Call, result: Any) -> Call:
    def call() -> None:
        operation()
        backend.synchronise(result)

    return call


def moves(comm: Communicator, device_kind: str, seconds: float) -> tuple[MovePoint, ...]:
    """Return a `MovePoint` for an array copy and sum of each size, measured in about ``seconds`` s. Collective."""
    nbytes, largest_bytes = MOVED[device_kind]
    calls: list[tuple[str, int, Call]] = []
    while nbytes <= largest_bytes:
        source, target = (backend.zeros(nbytes // 4, np.dtype(np.float32), device_kind) for _ in range(2))
        add = partial(namespace(target).add, source, target, out=target)
        calls.append(("copy", 2 * nbytes, _synchronised(partial(target.__setitem__, ..., source), target)))
        calls.append(("add", 3 * nbytes, _synchronised(add, target)))
        nbytes *= 4
    times = both(comm, [call for _, _, call in calls], seconds)
    return tuple(MovePoint(name, moved, busy) for (name, moved, _), busy in zip(calls, times, strict=True))


def both(comm: Communicator, calls: Sequence[Call], seconds: float) -> list[BusySeconds]:
    """Return a `BusySeconds` for each function in ``calls``, measured in about ``seconds`` seconds. Collective."""
    alone = _rounds(comm, calls, seconds / 2, works=comm.nodes().intra.rank == 0)
    if comm.nodes().intra.size == 1:
        return [BusySeconds(time_s, time_s, spread) for time_s, spread in alone]
    pairs = zip(alone, _rounds(comm, calls, seconds / 2, works=True), strict=True)
    return [BusySeconds(lone[0], every[0], max(lone[1], every[1])) for lone, every in pairs]


def _rounds(comm: Communicator, calls: Sequence[Call], seconds: float, *, works: bool) -> list[tuple[float, float]]:
    # The result has the pair (first quartile, spread) of each call on the slowest rank.
    rounds: list[list[float]] = []
    clock = time.perf_counter
    for call in calls if works else ():
        call()
    with without_collection():
        comm.barrier()
        end_s = clock() + seconds
        while works and len(rounds) < MOST_ROUNDS and (len(rounds) < LEAST_ROUNDS or clock() < end_s):
            row = []
            for call in calls:
                begin_s = clock()
                call()
                row.append(clock() - begin_s)
            rounds.append(row)
    comm.barrier()
    figures = np.zeros((2, len(calls)))
    if works:
        figures[0] = np.percentile(rounds, 25, axis=0)
        figures[1] = np.mean(rounds, axis=0) / figures[0] - 1
    slowest = np.max(comm.allgather_object(figures), axis=0)
    return list(zip(*slowest.tolist(), strict=True))


def model(comm: Communicator, config: ModelConfig, context: int, samples: int, device_kind: str) -> ModelPoint:
    """Time training steps of a model on this rank. Return the durations by kind of operation. Collective.

    ``config``: model configuration. ``context``: tokens per sequence. ``samples``: sequences per step.
    ``device_kind``: "cpu" or "gpu".
    """
    nodes, network = comm.nodes(), models.build(config, "float32", context=context)
    run = TimedRun(
        solo(), "calibration", network, OptimizerConfig(learning_rate=1e-4), 2 * (WARM + STEPS), None, device_kind
    )
    rows: list[dict[tuple[str, str], float]] = []
    for works in ([nodes.intra.rank == 0, True])[: 1 + (nodes.intra.size > 1)]:
        comm.barrier()
        times = _profile(run, config, context, samples, device_kind) if works else {}
        comm.barrier()
        rows.append(_slowest(comm, times))
    alone, together = rows[0], rows[-1]

    def busy(kind: str, phase: str) -> BusySeconds:
        return BusySeconds(alone.get((kind, phase), 0.0), together.get((kind, phase), 0.0))

    names = dict.fromkeys(kind for kind, phase in together if phase != "step")
    return ModelPoint(
        config=config,
        context=context,
        samples=samples,
        kinds=tuple(KindPoint(name, busy(name, "forward"), busy(name, "backward")) for name in names),
        norm=busy("clipping", "step"),
        update=busy("update", "step"),
        step=busy("all", "step"),
        parameters=network.layout.parameters,
        operations=len(run.operations),
    )


def _profile(run: TimedRun, config: ModelConfig, context: int, samples: int, on: str) -> dict[tuple[str, str], float]:
    draw = np.random.default_rng(1)
    rows = []
    for _ in range(WARM + STEPS):
        tokens = draw.integers(0, config.vocabulary, (samples, context + 1)).astype(np.uint8)
        x, targets = (backend.place(array, on) for array in (tokens[:, :-1], tokens[:, 1:]))
        rows.append(run.profile(x, targets, solo()))
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: float(np.percentile([row.get(key, 0.0) for row in rows[WARM:]], 25)) for key in keys}


def _slowest(comm: Communicator, times: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    greatest: dict[tuple[str, str], float] = {}
    for rank_times in comm.allgather_object(times):
        for key, seconds in rank_times.items():
            greatest[key] = max(seconds, greatest.get(key, 0.0))
    return greatest
