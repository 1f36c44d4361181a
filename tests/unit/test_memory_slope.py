"""A run takes no more memory, however many steps it makes: what Python and numpy hold, between two steps."""

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_runs import assembled, write_text

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.placement import locate
from hpcdist.comm.session import Session
from hpcdist.comm.spans import Spans
from hpcdist.comm.threads import run_threads
from hpcdist.telemetry import anomalies
from hpcdist.training import outcome, pace
from hpcdist.training.asynchronous import loop_of
from hpcdist.training.energy import Energy
from hpcdist.training.metrics import Metrics
from hpcdist.training.progress import Progress
from hpcdist.training.survival import StopWishes

FIRST = 150  # by then all that has a bound has reached it, but for a few kB
FLUSH_STEPS = 50  # a clock would leave other rows in memory each time
BYTES_A_STEP = 40.0  # of both ranks together: a number in a list of each would be 64


@pytest.mark.parametrize(
    ("last", "keys"),
    [
        (350, {"parallel.strategy": "local_sgd", "telemetry.jsonl": "true"}),
        (600, {"parallel.strategy": "parameter_server", "parameter_server.consistency": "asp"}),
    ],
    ids=["replicas", "asynchronous"],
)
def test_memory_does_not_grow_with_the_steps(
    last: int, keys: dict[str, object], tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = {(outcome, "SAMPLED"): 32, (pace, "REMEMBERED"): 32, (anomalies, "BLOCK_S"): 0.0, (anomalies, "BLOCKS"): 6}
    for (module, name), least in bounds.items():  # reached before the first look
        monkeypatch.setattr(module, name, least)
    monkeypatch.setattr(Metrics, "_overdue", lambda rows: len(rows._common) >= FLUSH_STEPS)
    settings = {
        "model.layers": 1, "model.hidden": 4, "model.heads": 1, "data.context": 4, "run.global_batch": 2,
        "data.path": write_text(tmp_path / "text.txt", rng), "run.steps": last + 1, "checkpoint.every_steps": 0,
        "energy.sources": "none", "energy.utilisation_s": 0, "run.sentinel_every_steps": 0, **keys,
    }  # fmt: skip
    held: dict[int, tracemalloc.Snapshot] = {}

    def body(comm: Communicator) -> Any:
        trainer = assembled(comm, settings)
        session = Session(comm, locate(comm, None), "threads", lambda code: None)
        session.spans = Spans(tmp_path / f"rank-{comm.rank}.spans", comm.rank, comm.size, capacity=64)
        energy = Energy(comm, trainer.recipe, None, tmp_path)
        progress = Progress(last + 1, 0, 1e9, shown=False)
        loop = loop_of(trainer)(session, trainer, tmp_path, progress, {}, StopWishes(), energy)
        after = loop.pace.stepped

        def stepped(seconds: float) -> None:
            after(seconds)
            made = loop.outcome.steps.count
            if comm.rank == 0 and made in (FIRST, last):
                gc.collect()
                held[made] = tracemalloc.take_snapshot()

        loop.pace.stepped = stepped  # type: ignore[method-assign]
        return loop.run()

    tracemalloc.start()
    try:
        run_threads(2, body)
    finally:
        tracemalloc.stop()
    grown = sum(line.size_diff for line in held[last].compare_to(held[FIRST], "filename"))
    where = "\n".join(map(str, held[last].compare_to(held[FIRST], "lineno")[:10]))
    assert grown / (last - FIRST) < BYTES_A_STEP, where
