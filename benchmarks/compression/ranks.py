"""Ranks of the compression study: whole trainings for their losses, or alternating steps for their times.

    python -m benchmarks.compression.ranks ORDER.json

ORDER.json has the task: {"what": "losses" | "times", "trainings": [keys, ...], ...}. Rank 0 prints each result as a
line of FOUND and JSON.

A timed step has the trainer's phases (compute, update), the wall time, and the time in `hpcdist.compression`. Calls of
`hpcdist.compression` are timed within the exchange, so buffers and caches are as in training. Bytes count all messages.
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

WARM_UP: Final = 3  # untimed first steps of each training, which compile kernels and touch pages
PHASES: Final = ("step_s", "compute_s", "update_s", "codec_s", "sent_bytes")


@contextmanager
def compressors_timed() -> Iterator[Stopwatch]:
    """Time all public methods of `hpcdist.compression`, and of the encoder that calls them. Local."""
    modules = [
        importlib.import_module(f"{compression.__name__}.{item.name}")
        for item in pkgutil.iter_modules(compression.__path__)
    ]
    watch, originals = Stopwatch(), []
    for module in [*modules, reduction]:
        for kind in [
            item for item in vars(module).values() if inspect.isclass(item) and item.__module__ == module.__name__
        ]:
            for name, method in [*vars(kind).items()]:
                if inspect.isfunction(method) and not name.startswith("_"):
                    originals.append((kind, name, method))
                    setattr(kind, name, watch.around(method))
    try:
        yield watch
    finally:
        for kind, name, method in originals:
            setattr(kind, name, method)


def train(session: Session, keys: dict[str, Any], evaluations: int) -> dict[str, Any]:
    """Train to the end; return validation losses and sent bytes. A diverged training ends with NaN. Collective."""
    comm, begin = session.comm, time.perf_counter()
    losses, sent, points = [], [], []
    with count_traffic(comm) as traffic:
        trainer = assemble(session, made(keys))
        steps = trainer.recipe.run.steps
        evaluation_steps = {round(steps * number / evaluations) for number in range(1, evaluations + 1)}
        try:
            with trainer.batches(steps) as batches, np.errstate(over="ignore", invalid="ignore"):
                for number, batch in enumerate(batches, start=1):
                    previous_bytes, unknown = traffic.sent_bytes, traffic.unknown.total()
                    result = trainer.step(number, trainer.cut(trainer.place(batch)), np.zeros(1))
                    assert traffic.unknown.total() == unknown, "the MPI library chose an algorithm: bytes are unknown"
                    sent.append(traffic.sent_bytes - previous_bytes)
                    losses.append(result.loss)
                    if number in evaluation_steps:
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
    step, results = training.next_step(), list[StepResult]()
    watch.taken()
    previous_bytes = sent()
    step_s = harness.seconds(lambda: results.append(step()), comm)
    seconds = results[0].seconds
    return [step_s, seconds["compute_s"], seconds["update_s"], watch.taken(), sent() - previous_bytes]


def measure(session: Session, order: dict[str, Any]) -> dict[str, Any]:
    """Time the raw links and ``turn`` steps of each training, in each of ``rounds`` rounds. Collective."""
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
        for round_number in range(rounds):
            raw.append(_raw(comm, wire, order["raw_bytes"]))
            for index in np.random.default_rng(round_number).permutation(len(contenders)):
                timed_step(contenders[index], comm, watch, sent)  # untimed: loads the weights into the caches
                figures[index, round_number] = [timed_step(contenders[index], comm, watch, sent) for _ in range(turn)]
        for contender in contenders:
            contender.close()
    return {"figures": comm.allgather_object(figures.tolist()), "raw_bytes_per_s": raw}


def _raw(comm: Communicator, wire: Wire, nbytes: int) -> float:
    """Return the TCP rate per direction with traffic both ways, in bytes/s, of the slowest rank. Collective."""
    wire.stream(DRAIN_BYTES)  # after a pause, a token bucket passes its first bytes at any speed
    return nbytes / max(comm.allgather_object(harness.seconds(lambda: wire.stream(nbytes), comm)))


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    if threads := order.get("threads", 0):
        run_threads(threads, lambda comm: work(Session(comm, locate(comm, None), "none", os._exit), order))
    else:
        session = start.start()
        work(session, order)
        session.leave(0)


def work(session: Session, order: dict[str, Any]) -> None:

    def report(result: dict[str, Any]) -> None:
        if session.comm.rank == 0:
            print(FOUND + json.dumps(result | {"mpi_library": session.library}), flush=True)

    if order["what"] == "times":
        report(measure(session, order))
    else:
        for keys in order["trainings"]:
            report(train(session, keys, order["evaluations"]))
            gc.collect()


if __name__ == "__main__":
    main()
