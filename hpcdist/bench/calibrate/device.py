"""Measure a device: products of matrices, copies and sums, and operations of models, alone and side by side.

Everything is measured twice: while the first rank of a node works and the others wait, and while all of them work at
the same time. A time is the first quartile of several rounds, in which all sizes take turns: other processes make
some repetitions longer, none shorter. It is that of the slowest rank.
"""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.backend import namespace
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.bench.calibrate.points import BusySeconds, KindPoint, ModelPoint, MovePoint, ProductPoint
from hpcdist.bench.step.timed_model import TimedRun
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig

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


def shapes(on: str) -> tuple[tuple[int, int, int], ...]:
    """Return the (m, k, n) that are measured: squares, and what a transformer multiplies."""
    found = [(side, side, side) for side in SIDES[on]]
    for width in WIDTHS[on]:
        for tokens in TOKENS[on]:
            for inner, outer in ((1, 3), (1, 1), (1, 4), (4, 1)):
                found += [(tokens, inner * width, outer * width), (inner * width, tokens, outer * width)]
    return tuple(dict.fromkeys(found))


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
    found: list[tuple[str, int, Call]] = []
    nbytes = least
    while nbytes <= most:
        source, target = (backend.zeros(nbytes // 4, np.dtype(np.float32), on) for _ in range(2))
        found.append(("copy", 2 * nbytes, _copy(source, target)))
        found.append(("add", 3 * nbytes, _add(source, target)))
        nbytes *= 4
    busy = both(comm, [call for _, _, call in found], seconds)
    return tuple(MovePoint(name, moved, each) for (name, moved, _), each in zip(found, busy, strict=True))


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
        return [BusySeconds(one, one, spread) for one, spread in alone]
    found = zip(alone, _rounds(comm, calls, seconds / 2, works=True), strict=True)
    return [BusySeconds(one[0], every[0], max(one[1], every[1])) for one, every in found]


def _rounds(comm: Communicator, calls: Sequence[Call], seconds: float, *, works: bool) -> list[tuple[float, float]]:
    """Return each call's first quartile and how far its mean is above, of the slowest rank at work. Collective."""
    taken: list[list[float]] = []
    clock = time.perf_counter
    for call in calls if works else ():
        call()
    collecting = gc.isenabled()
    gc.disable()
    try:
        comm.barrier()
        end_s = clock() + seconds
        while works and len(taken) < MOST_ROUNDS and (len(taken) < LEAST_ROUNDS or clock() < end_s):
            row = []
            for call in calls:
                begin_s = clock()
                call()
                row.append(clock() - begin_s)
            taken.append(row)
    finally:
        if collecting:
            gc.enable()
    comm.barrier()
    own = np.zeros((2, len(calls)))
    if works:
        own[0] = np.percentile(taken, 25, axis=0)
        own[1] = np.mean(taken, axis=0) / own[0] - 1
    slowest = np.max(comm.allgather_object(own), axis=0)
    return list(zip(*slowest.tolist(), strict=True))


def model(comm: Communicator, config: ModelConfig, context: int, samples: int, on: str) -> ModelPoint:
    """Return what the operations of a step of a gpt take, each rank for itself. Collective over ``comm``."""
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
    found: dict[tuple[str, str], float] = {}
    for one in comm.allgather_object(own):
        for key, seconds in one.items():
            found[key] = max(seconds, found.get(key, 0.0))
    return found
