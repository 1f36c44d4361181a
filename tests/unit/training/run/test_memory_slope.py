"""Memory of a run does not grow with the steps: Python and numpy memory between two steps."""

import gc
import tracemalloc

import numpy as np
import pytest

from harness.inputs import write_text
from harness.marks import cases
from harness.trainings import assemble_trainer, session_of
from hpcdist.comm.record.spans import Spans
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.telemetry import anomalies
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.observe.instrumentation import ConsoleProgress
from hpcdist.training.observe.metrics import RunMetrics
from hpcdist.training.run import loop, saving
from hpcdist.training.run.async_loop import loop_class
from hpcdist.training.run.stop_requests import StopRequests

FIRST = 150  # by then all that has a bound has reached it, but for a few kB
LOOKS = 80  # steps whose minimum counts, which excludes momentary memory of other threads
FLUSH_STEPS = 25  # a clock would leave other rows in memory each time
BYTES_A_STEP = 80.0  # of both ranks together; a list of three numbers a step in each would be 96 and more


@cases(
    "last, keys",
    (450, {"parallel.strategy": "local_sgd", "telemetry.jsonl": "true"}),
    (450, {"parallel.strategy": "parameter_server", "parameter_server.consistency": "asp"}),
    ids=["replicas", "asynchronous"],
)
@pytest.mark.full
@pytest.mark.matrix_except("asynchronous")
def test_memory_does_not_grow_with_the_steps(last, keys, tmp_path, rng, monkeypatch):
    bounds = {
        (loop, "SAMPLED_STEPS"): 32,
        (saving, "TIMINGS_KEPT"): 32,
        (anomalies, "BLOCK_S"): 0.0,
        (anomalies, "BLOCKS"): 6,
    }
    for (module, name), least in bounds.items():  # reached before the first look
        monkeypatch.setattr(module, name, least)
    monkeypatch.setattr(RunMetrics, "_overdue", lambda rows: len(rows._common) >= FLUSH_STEPS)
    settings = {
        "model.layers": 1, "model.hidden": 4, "model.heads": 1, "data.context": 4, "run.global_batch": 2,
        "data.path": write_text(tmp_path / "text.txt", rng), "run.steps": last + 1, "checkpoint.every_steps": 0,
        "energy.sources": "none", "energy.utilisation_s": 0, "run.sentinel_every_steps": 0, **keys,
    }  # fmt: skip
    held = np.full(last + 2, np.inf)  # made here: what it takes is no growth
    seen = []

    def body(comm):
        session = session_of(comm)
        session.spans = Spans(tmp_path / f"rank-{comm.rank}.spans", comm.rank, comm.size, capacity=64)
        trainer = assemble_trainer(comm, settings, session=session)
        energy = EnergyRecorder(comm, trainer.recipe, None, tmp_path)
        progress = ConsoleProgress(last + 1, 0, 1e9, shown=False)
        loop = loop_class(trainer)(session, trainer, tmp_path, progress, {}, StopRequests(), energy)
        after = loop.checkpoint_timer.stepped

        def stepped(seconds):
            after(seconds)
            made = loop.outcome.steps.count
            if comm.rank == 0 and made % 10 == 0 and not FIRST + LOOKS < made < last - LOOKS:
                gc.collect()
                held[made] = tracemalloc.get_traced_memory()[0]
                if made == last:
                    seen.append(tracemalloc.take_snapshot())

        loop.checkpoint_timer.stepped = stepped
        return loop.run()

    tracemalloc.start()
    try:
        run_threads(2, body)
    finally:
        tracemalloc.stop()
    before = held[FIRST : FIRST + LOOKS].min()
    grown = float(held[last - LOOKS : last + 1].min() - before)
    where = "\n".join(map(str, seen[0].statistics("lineno")[:20]))
    assert grown / (last - LOOKS - FIRST) < BYTES_A_STEP, where
