"""Measure a device: products of matrices, copies and sums, and operations of models, alone and side by side.

Everything is measured twice (`BusySeconds`): while the first rank of a node works and the others wait, and while all of
them work at the same time, since ranks share caches, memory and, where cores are few, the cores. A time is the first
quartile of several rounds, in which all sizes take turns: other processes make some repetitions longer, none shorter.
It is that of the slowest rank. The dataclasses of all points of a calibration are here, those of links included.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
# (rows, inner, columns) as multiples of a transformer's width, rows being tokens: query, key and value; the projection;
# both ways through the feed-forward; and their weight gradients, whose inner extent are the tokens
WIDTHS: Final = {"cpu": (64, 128, 256, 512), "gpu": (512, 1024, 2048, 4096)}
TOKENS: Final = {"cpu": (128, 1024), "gpu": (2048, 16384)}
MOVED: Final = {"cpu": (1 << 14, 64 << 20), "gpu": (1 << 18, 1 << 30)}
LEAST_ROUNDS: Final = 5
MOST_ROUNDS: Final = 200
WARM: Final = 2
STEPS: Final = 10
OPTIMIZER: Final = OptimizerConfig(learning_rate=1e-4)


class BusySeconds(NamedTuple):
    """Seconds while one rank of a node works, and while all of them do: the first quartile on the slowest rank.

    A calibration is of the machine alone. What else runs there makes repetitions longer and none shorter, so that their
    first quartile is nearer to that than their median. ``spread`` is how far their mean lies above it, relative; None
    where that is not kept.
    """

    one: float
    all: float
    spread: float | None = None


class ProductPoint(NamedTuple):
    """A product of (m, k) and (k, n)."""

    m: int
    k: int
    n: int
    seconds: BusySeconds


class MovePoint(NamedTuple):
    """An operation that reads and writes ``nbytes`` together: "copy", or "add" of one array to another."""

    operation: str
    nbytes: int
    seconds: BusySeconds


class KindPoint(NamedTuple):
    """The operations of one kind in a step, forward and back: "matmul", "attention", "norm", "activation", ..."""

    kind: str
    forward: BusySeconds
    backward: BusySeconds


@dataclass(frozen=True, kw_only=True)
class ModelPoint:
    """A step of a model on one rank, of one micro-batch of ``samples``, by what its seconds are.

    ``update`` is that of the optimizer, ``norm`` that of all gradients; ``operations`` are those of the step's list.
    """

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
    """Messages of ``nbytes`` over the links of a level: one pair alone, and all pairs at once, both ways.

    ``border``: measured to find where times jump, as an MPI library changes its protocol there.
    """

    level: str
    ranks: int
    nbytes: int
    seconds: BusySeconds
    border: bool = False


class CollectivePoint(NamedTuple):
    """A collective of the ``ranks`` that a level joins, on buffers of ``nbytes``.

    The first quartile of iterations, each of which is that of its slowest rank. ``border``: as in `LinkPoint`.
    """

    operation: str
    algorithm: str
    level: str
    ranks: int
    nbytes: int
    seconds: float
    border: bool = False


@dataclass(frozen=True, kw_only=True)
class CalibratedMachine:
    """Device that a rank computes on."""

    device: str
    on: str  # "cpu", or "gpu"
    hosts: int
    ranks_per_host: int
    devices_per_host: int
    threads: int
    memory_bytes: int  # of a device; of a host divided by its ranks
    host_memory_bytes: int
    blas: str
    mpi_library: str


@dataclass(frozen=True, kw_only=True)
class CalibrationPoints:
    """Measured points of a calibration; empty tuples where there was nothing to measure (links of a single rank)."""

    machine: CalibratedMachine
    products: dict[str, tuple[ProductPoint, ...]]  # by dtype
    moves: tuple[MovePoint, ...]
    models: tuple[ModelPoint, ...]
    links: tuple[LinkPoint, ...]
    collectives: tuple[CollectivePoint, ...]
    seconds: float  # that measuring took
    busy: str = ""  # how one sees that the machine did something else meanwhile


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """Request of a calibration: types of numbers, models, algorithms; ``seconds`` are for each of the three parts."""

    dtypes: tuple[str, ...] = ("float32",)
    on: str = "cpu"
    models: tuple[tuple[ModelConfig, int, tuple[int, ...]], ...] = ()  # (config, context, samples)
    algorithms: tuple[str, ...] = ("auto", "ring")
    least_bytes: int = 1 << 10
    most_bytes: int = 32 << 20
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.most_bytes < 64 * self.least_bytes:
            raise UsageError(
                f"sizes from {self.least_bytes} to {self.most_bytes} bytes are too few to fit; let the largest be at "
                f"least {64 * self.least_bytes}"
            )


def sizes(least: int, most: int, per_octave: int = 4) -> tuple[int, ...]:
    """Return sizes from ``least`` to ``most``, ``per_octave`` between each and its double, multiples of 64 bytes."""
    rounded, step = [], 0
    while (size := least * 2 ** (step / per_octave)) <= most * 1.0001:
        rounded.append(max(64, round(size / 64) * 64))
        step += 1
    return tuple(dict.fromkeys(rounded))


def default_models() -> tuple[tuple[ModelConfig, int, tuple[int, ...]], ...]:
    """Return gpts whose operations are timed: two widths, two contexts, and small and larger micro-batches."""
    return (
        (ModelConfig(layers=2, hidden=128, heads=2, vocabulary=256), 128, (1, 4)),
        (ModelConfig(layers=2, hidden=256, heads=4, vocabulary=256), 128, (2, 4)),
        (ModelConfig(layers=2, hidden=256, heads=4, vocabulary=256), 256, (1, 2)),
    )


def shapes(on: str) -> tuple[tuple[int, int, int], ...]:
    """Return the (m, k, n) that are measured: squares, and what a transformer multiplies."""
    products = [(side, side, side) for side in SIDES[on]]
    for width in WIDTHS[on]:
        for tokens in TOKENS[on]:
            for inner, outer in ((1, 3), (1, 1), (1, 4), (4, 1)):
                products += [(tokens, inner * width, outer * width), (inner * width, tokens, outer * width)]
    return tuple(dict.fromkeys(products))


def products(comm: Communicator, dtype: str, on: str, seconds: float) -> tuple[ProductPoint, ...]:
    """Return products of all `shapes`, in about ``seconds``. Collective over ``comm``."""
    wanted = shapes(on)
    draw = np.random.default_rng(0)
    calls = [_product(m, k, n, dtype_of(dtype), on, draw) for m, k, n in wanted]
    return tuple(ProductPoint(*at, busy) for at, busy in zip(wanted, both(comm, calls, seconds), strict=True))


def _product(m: int, k: int, n: int, dtype: np.dtype, on: str, draw: np.random.Generator) -> Call:
    left, right = (backend.place(draw.standard_normal(at, np.float32).astype(dtype), on) for at in ((m, k), (k, n)))
    into = backend.empty((m, n), dtype, on)
    multiply = namespace(into).matmul

    def call() -> None:
        multiply(left, right, out=into)
        backend.synchronise(into)

    return call


def moves(comm: Communicator, on: str, seconds: float) -> tuple[MovePoint, ...]:
    """Return copies and sums of arrays, of a cache and beyond, in about ``seconds``. Collective over ``comm``."""
    least, most = MOVED[on]
    calls: list[tuple[str, int, Call]] = []
    nbytes = least
    while nbytes <= most:
        source, target = (backend.zeros(nbytes // 4, np.dtype(np.float32), on) for _ in range(2))
        calls.append(("copy", 2 * nbytes, _copy(source, target)))
        calls.append(("add", 3 * nbytes, _add(source, target)))
        nbytes *= 4
    busy = both(comm, [call for _, _, call in calls], seconds)
    return tuple(MovePoint(name, moved, each) for (name, moved, _), each in zip(calls, busy, strict=True))


def _copy(source: Any, target: Any) -> Call:
    def call() -> None:
        target[...] = source
        backend.synchronise(target)

    return call


def _add(source: Any, target: Any) -> Call:
    add = namespace(target).add

    def call() -> None:
        add(source, target, out=target)
        backend.synchronise(target)

    return call


def both(comm: Communicator, calls: Sequence[Call], seconds: float) -> list[BusySeconds]:
    """Return each call's seconds with one rank of each node at work, and with all. Collective over ``comm``."""
    first = comm.nodes().intra.rank == 0
    alone = _rounds(comm, calls, seconds / 2, works=first)
    if comm.nodes().intra.size == 1:  # nobody to share anything with
        return [BusySeconds(time_s, time_s, spread) for time_s, spread in alone]
    pairs = zip(alone, _rounds(comm, calls, seconds / 2, works=True), strict=True)
    return [BusySeconds(lone[0], every[0], max(lone[1], every[1])) for lone, every in pairs]


def _rounds(comm: Communicator, calls: Sequence[Call], seconds: float, *, works: bool) -> list[tuple[float, float]]:
    """Return each call's first quartile and how far its mean is above, of the slowest rank at work. Collective."""
    taken: list[list[float]] = []
    clock = time.perf_counter
    for call in calls if works else ():
        call()
    with without_collection():
        comm.barrier()
        end_s = clock() + seconds
        while works and len(taken) < MOST_ROUNDS and (len(taken) < LEAST_ROUNDS or clock() < end_s):
            row = []
            for call in calls:
                begin_s = clock()
                call()
                row.append(clock() - begin_s)
            taken.append(row)
    comm.barrier()
    own = np.zeros((2, len(calls)))
    if works:
        own[0] = np.percentile(taken, 25, axis=0)
        own[1] = np.mean(taken, axis=0) / own[0] - 1
    slowest = np.max(comm.allgather_object(own), axis=0)
    return list(zip(*slowest.tolist(), strict=True))


def model(comm: Communicator, config: ModelConfig, context: int, samples: int, on: str) -> ModelPoint:
    """Return the seconds of the operations of a gpt's step, each rank for itself. Collective over ``comm``."""
    nodes, made = comm.nodes(), models.build(config, "float32", context=context)
    run = TimedRun(solo(), "calibration", made, OPTIMIZER, 2 * (WARM + STEPS), None, on)
    rows: list[dict[tuple[str, str], float]] = []
    for works in ([nodes.intra.rank == 0, True])[: 1 + (nodes.intra.size > 1)]:
        comm.barrier()
        own = _profile(run, config, context, samples, on) if works else {}
        comm.barrier()
        rows.append(_of_slowest(comm, own))
    alone, together = rows[0], rows[-1]

    def busy(kind: str, way: str) -> BusySeconds:
        return BusySeconds(alone.get((kind, way), 0.0), together.get((kind, way), 0.0))

    names = dict.fromkeys(kind for kind, way in together if way != "step")
    return ModelPoint(
        config=config,
        context=context,
        samples=samples,
        kinds=tuple(KindPoint(name, busy(name, "forward"), busy(name, "backward")) for name in names),
        norm=busy("clipping", "step"),
        update=busy("update", "step"),
        step=busy("all", "step"),
        parameters=made.layout.parameters,
        operations=len(run.operations),
    )


def _profile(run: TimedRun, config: ModelConfig, context: int, samples: int, on: str) -> dict[tuple[str, str], float]:
    """Return the seconds of each kind of operation and way, the first quartile of `STEPS` steps (local)."""
    draw = np.random.default_rng(1)
    rows = []
    for _ in range(WARM + STEPS):
        tokens = draw.integers(0, config.vocabulary, (samples, context + 1)).astype(np.uint8)
        x, targets = (backend.place(part, on) for part in (tokens[:, :-1], tokens[:, 1:]))
        rows.append(run.profile(x, targets, solo()))
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: float(np.percentile([row.get(key, 0.0) for row in rows[WARM:]], 25)) for key in keys}


def _of_slowest(comm: Communicator, own: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Return the greatest seconds by key of the ranks that have any. Collective over ``comm``."""
    greatest: dict[tuple[str, str], float] = {}
    for of_rank in comm.allgather_object(own):
        for key, seconds in of_rank.items():
            greatest[key] = max(seconds, greatest.get(key, 0.0))
    return greatest
