"""Ranks of the study `own_runs`: alternate the trainings, and report their times, bytes, memory and bubble.

python -m benchmarks.own_runs.worker FILE.json TURNS cpu|gpu one|hosts [NAME ...]"""

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.own_runs.trainings import Row, chosen_rows
from benchmarks.training.turns import texts
from hpcdist import collectives
from hpcdist.arrays.backend import CATEGORIES
from hpcdist.arrays.gpu import device
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.start import Session
from hpcdist.strategies.core.operations import COMPUTE, Kind, Operation
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.recipe import recipe as recipes

RECEIVES: Final = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)
WARM: Final = 1  # dropped steps per turn, which refill the caches
KEPT: Final = 2
BATCHES: Final = 3


class Run:
    """A training with timed operations. Building it is collective over the world."""

    def __init__(self, session: Session, row: Row, on: str) -> None:
        self.row, self._comm, self._number, self._on = row, session.comm, 0, on
        collectives.release(session.comm)  # so that this training's buffers are in its own ledger
        self.trainer: Trainer = assemble(session, recipes.load(None, [*texts(row.keys), f"run.device={on}"], {}).recipe)
        with self.trainer.batches(BATCHES) as batches:
            self._batches = [self.trainer.cut(self.trainer.place(batch)) for batch in batches]
        self._timed: list[tuple[float, float]] = []
        self._clocked(self.trainer.executor._handlers)
        self.step()
        with count_traffic(session.comm) as traffic:
            self.step()
        self.sent, self.unknown = traffic.sent_bytes, sum(traffic.unknown.values())
        ledger = self.trainer.ledger
        self.peak, self.by_kind = ledger.peak_total, [ledger.peak[kind] for kind in CATEGORIES]

    def _clocked(self, handlers: dict[Kind, Callable[[Operation], None]]) -> None:
        for kind, handler in list(handlers.items()):
            handlers[kind] = self._around(handler)

    def _around(self, handler: Callable[[Operation], None]) -> Callable[[Operation], None]:
        def timed(operation: Operation) -> None:
            begin_s = time.perf_counter()
            handler(operation)
            self._timed.append((begin_s, time.perf_counter()))

        return timed

    def step(self) -> tuple[float, float]:
        """Run a step after a barrier; return its seconds and its bubble on this rank. Collective."""
        self._number += 1
        self._timed.clear()
        batches = self._batches[self._number % BATCHES]
        self._comm.barrier()
        begin_s = time.perf_counter()
        self.trainer.step(self._number, batches, np.zeros(2))
        if self._on == "gpu":
            device.synchronise()  # the update runs after the loss
        return time.perf_counter() - begin_s, self._bubble()

    def _bubble(self) -> float:
        """Return the time that this rank waits in receives, relative to its span from the first to the last pass."""
        steps = self.trainer.operations
        begin_s, end_s = np.array(self._timed).T
        computes = np.array([op.kind in COMPUTE for op in steps])
        first_s, last_s = begin_s[computes].min(), end_s[computes].max()
        waits = np.array([op.kind in RECEIVES for op in steps]) & (begin_s >= first_s) & (end_s <= last_s)
        return float((end_s - begin_s)[waits].sum() / (last_s - first_s))


def work(session: Session, rows: Sequence[Row], turns: int, path: Path, on: str) -> None:
    comm = session.comm
    runs = []
    for row in rows:
        if comm.rank == 0:
            print(f"  {row.name}", flush=True)
        runs.append(Run(session, row, on))
    order = np.random.default_rng(0)
    timings: list[list[tuple[float, float]]] = [[] for _ in runs]
    gc.collect()
    gc.disable()
    for _ in range(turns):
        for index in order.permutation(len(runs)).tolist():
            steps = [runs[index].step() for _ in range(WARM + KEPT)]
            timings[index] += steps[WARM:]
    gc.enable()
    results = [_of_all(comm, run, times) for run, times in zip(runs, timings, strict=True)]
    if comm.rank == 0:
        path.write_text(json.dumps({"library": session.library, "rows": results}), encoding="utf-8")
    comm.barrier()
    for run in runs:
        run.trainer.close()


def _of_all(comm: Communicator, run: Run, timings: Sequence[tuple[float, float]]) -> dict[str, Any]:
    step_s, bubble = np.array(comm.allgather_object(timings)).transpose(2, 1, 0)  # (steps, ranks) each
    of_ranks = comm.allgather_object((run.sent, run.unknown, run.peak, run.by_kind))
    return {
        "name": run.row.name,
        "step_s": step_s.max(axis=1).tolist(),
        "bubble": bubble.max(axis=1).tolist(),
        "sent_bytes": max(figures[0] for figures in of_ranks),
        "unknown_calls": max(figures[1] for figures in of_ranks),
        "peak_bytes": [figures[2] for figures in of_ranks],
        "peak_by_kind": [figures[3] for figures in of_ranks],
        "algorithm": run.trainer.selection.algorithm,
    }


def main(path: str, turns: str, on: str, place: str, *names: str) -> None:
    session = start.start(on)
    work(session, chosen_rows(session.comm.size, names, hosts=place == "hosts"), int(turns), Path(path), on)
    session.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
