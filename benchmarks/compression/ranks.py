"""Ranks of the study of compression: trainings to the end for their losses, or steps of each in turns for their times.

    python -m benchmarks.compression.ranks ORDER.json

ORDER.json says what to do: {"what": "losses" | "times", "trainings": [keys, ...], ...}.

Rank 0 prints what was found, one line each: FOUND and JSON.

Seconds of a step are those of the phases that the trainer tells (compute, update), the wall time of the step, and what
is spent in `hpcdist.compression`, whose calls are timed where the exchange makes them: on the same buffers, in the same
state of the caches. Bytes are those of all messages of the step.
"""

import gc
import importlib
import inspect
import json
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.compression.plan import FOUND, made
from benchmarks.harness import Stopwatch
from benchmarks.hosts.hierarchical import DRAIN_BYTES, Wire
from benchmarks.training.turns import Training
from hpcdist import compression
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.placement import locate
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import NonFiniteError
from hpcdist.strategies.compressed import reduction
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.training.build.assemble import assemble
from hpcdist.training.run.loop import mean_validation_loss

WARM_UP: Final = 3  # steps of each training that are not timed: kernels are compiled, pages touched
PHASES: Final = ("step_s", "compute_s", "update_s", "codec_s", "sent_bytes")


@contextmanager
def compressors_timed() -> Iterator[Stopwatch]:
    """Take the time of all public methods of `hpcdist.compression`, and of the coder that calls them (local)."""
    modules = [
        importlib.import_module(f"{compression.__name__}.{one.name}")
        for one in pkgutil.iter_modules(compression.__path__)
    ]
    watch, before = Stopwatch(), []
    for module in [*modules, reduction]:
        for kind in [
            one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__
        ]:
            for name, method in [*vars(kind).items()]:
                if inspect.isfunction(method) and not name.startswith("_"):
                    before.append((kind, name, method))
                    setattr(kind, name, watch.around(method))
    try:
        yield watch
    finally:
        for kind, name, method in before:
            setattr(kind, name, method)


def train(session: Session, keys: dict[str, Any], evaluations: int) -> dict[str, Any]:
    """Train to the end; return losses and bytes on the way, or that it diverged. Collective."""
    comm, begin = session.comm, time.perf_counter()
    losses, sent, points = [], [], []
    with count_traffic(comm) as traffic:
        trainer = assemble(session, made(keys))
        steps = trainer.recipe.run.steps
        due = {round(steps * number / evaluations) for number in range(1, evaluations + 1)}
        try:
            with trainer.batches(steps) as batches, np.errstate(over="ignore", invalid="ignore"):
                for number, batch in enumerate(batches, start=1):
                    before, unknown = traffic.sent_bytes, traffic.unknown.total()
                    found = trainer.step(number, trainer.cut(trainer.place(batch)), np.zeros(1))
                    assert traffic.unknown.total() == unknown, "the MPI library chose an algorithm: bytes are unknown"
                    sent.append(traffic.sent_bytes - before)
                    losses.append(found.loss)
                    if number in due:
                        points.append((number, mean_validation_loss(trainer)))
        except NonFiniteError:
            points.append((len(losses), float("nan")))
        finally:
            trainer.close()
    most = np.max(comm.allgather_object(sent), axis=0) if sent else np.zeros(0)
    return {
        "points": points,
        "losses": losses,
        "sent_bytes": [float(value) for value in most],
        "parameters": trainer.model.layout.parameters,
        "wall_s": time.perf_counter() - begin,
    }


def timed_step(training: Training, comm: Communicator, watch: Stopwatch, sent: Callable[[], int]) -> list[float]:
    """Make a step and return its figures in the order of `PHASES`. Collective over the world."""
    step, done = training.next_step(), list[StepResult]()
    watch.taken()
    before = sent()
    step_s = harness.seconds(lambda: done.append(step()), comm)
    seconds = done[0].seconds
    return [step_s, seconds["compute_s"], seconds["update_s"], watch.taken(), sent() - before]


def measure(session: Session, order: dict[str, Any]) -> dict[str, Any]:
    """Time ``turn`` steps of each training in each of ``rounds`` rounds, and the raw links in each. Collective."""
    comm, rounds, turn = session.comm, order["rounds"], order["turn"]
    wire = Wire(comm)
    raw, figures = [], np.full((len(order["trainings"]), rounds, turn, len(PHASES)), np.nan)
    steps = WARM_UP + rounds * (turn + 1)
    with compressors_timed() as watch, count_traffic(comm) as traffic:
        contenders = [Training(session, keys, steps) for keys in order["trainings"]]

        def sent() -> int:
            return traffic.sent_bytes

        for contender in contenders:
            for _ in range(WARM_UP):
                timed_step(contender, comm, watch, sent)
        for number in range(rounds):
            raw.append(_raw(comm, wire, order["raw_bytes"]))
            for place in np.random.default_rng(number).permutation(len(contenders)):
                timed_step(contenders[place], comm, watch, sent)  # its weights were not in the caches
                figures[place, number] = [timed_step(contenders[place], comm, watch, sent) for _ in range(turn)]
        for contender in contenders:
            contender.close()
    return {"figures": comm.allgather_object(figures.tolist()), "raw_bytes_per_s": raw}


def _raw(comm: Communicator, wire: Wire, nbytes: int) -> float:
    """Return what TCP carries over the link each way at once in bytes/s, the slowest rank counts. Collective."""
    wire.stream(DRAIN_BYTES)  # token buckets let the first bytes of a pause pass at any speed
    return nbytes / max(comm.allgather_object(harness.seconds(lambda: wire.stream(nbytes), comm)))


def main() -> None:
    """Be one rank of those that the launcher started, or all of them as threads."""
    order = json.loads(Path(sys.argv[1]).read_text())
    if threads := order.get("threads", 0):
        run_threads(threads, lambda comm: work(Session(comm, locate(comm, None), "none", os._exit), order))
    else:
        session = start.start()
        work(session, order)
        session.leave(0)


def work(session: Session, order: dict[str, Any]) -> None:
    """Do what the order says. Collective over the world."""

    def tell(found: dict[str, Any]) -> None:
        if session.comm.rank == 0:
            print(FOUND + json.dumps(found | {"mpi_library": session.library}), flush=True)

    if order["what"] == "times":
        tell(measure(session, order))
    else:
        for keys in order["trainings"]:
            tell(train(session, keys, order["evaluations"]))
            gc.collect()


if __name__ == "__main__":
    main()
