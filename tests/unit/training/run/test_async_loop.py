"""The training loop under asp: no worker waits for a slow worker, and the rows of all workers are written."""

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from harness.jobs import LIMIT_S
from harness.marks import cases
from harness.trainings import assemble_trainer, recipe_keys, session_of
from hpcdist.checkpoint.lock import RunLock
from hpcdist.comm.launch import exit_file
from hpcdist.comm.record.timing import OperationTiming
from hpcdist.comm.threads.communicator import ThreadCommunicator, run_threads
from hpcdist.errors import NonFiniteError
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.telemetry.metrics import step_metrics as files
from hpcdist.telemetry.metrics.step_metrics import PER_RANK, MetricsWriter
from hpcdist.training.observe import metrics
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.observe.event_publisher import EventPublisher
from hpcdist.training.observe.instrumentation import ConsoleProgress
from hpcdist.training.observe.metrics import ROWS_PER_MESSAGE, AsyncRunMetrics
from hpcdist.training.run.async_loop import AsyncTrainingLoop, loop_class
from hpcdist.training.run.job import TrainingJob
from hpcdist.training.run.loop import TrainingLoop
from hpcdist.training.run.stop_requests import StopReason, StopRequests
from hpcdist.training.run.summary import NO_STEP_MADE, describe, summarise
from hpcdist.training.run_directory import RunDirectory

STEPS = 12
ASP = recipe_keys(
    f"strategy=parameter_server parameter_server.consistency=asp steps={STEPS} checkpoint.every_steps=0 "
    "energy.sources=none"
)


class Watched(AsyncTrainingLoop):
    """Calls ``before`` before each of its steps, and ``after`` when the rows of the step are in flight."""

    before: Callable[["Watched", int], None]
    after: Callable[["Watched", int], None]

    def _step(self, step, batches):
        self.before(self, step)
        super()._step(step, batches)
        self._attend()
        self.after(self, step)

    @property
    def held(self):
        """The number of meetings so far."""
        return self.exchange.meetings._held


def do_nothing(loop, step):
    return None


@pytest.fixture
def text(text):
    return {**ASP, "data.path": text}


def loop_on(comm, settings, out, before=do_nothing, after=do_nothing, clocks=None):
    """Return the loop of one rank. ``clocks`` are the clocks of the checkpoint from which it resumes."""
    trainer = assemble_trainer(comm, settings)
    assert loop_class(trainer) is AsyncTrainingLoop
    if clocks is not None:
        trainer = replace(trainer, first_step=min(clocks))
        trainer.exchange.restore({"count": min(clocks), "clocks": clocks, "updates": sum(clocks)})
    session = session_of(comm)
    energy = EnergyRecorder(comm, trainer.recipe, None)
    loop = Watched(session, trainer, out, ConsoleProgress(STEPS, 0, 1e9, shown=False), {}, StopRequests(), energy)
    loop.before, loop.after = before, after
    return loop


def serve_until(loop, ready):
    """Compute for a long time. A colocated rank serves its workers meanwhile."""
    limit = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < limit, f"worker {loop.trainer.comm.rank} was waited for"
        loop.exchange.serve(Operation(Kind.COLLECT))
        time.sleep(1e-3)


def test_loop_class_follows_the_architecture(text):
    for name in ("allreduce", "zero1", "zero3"):
        settings = {**text, "parallel.strategy": name, "parameter_server.consistency": "bsp"}
        assert run_threads(1, lambda comm, settings=settings: loop_class(assemble_trainer(comm, settings))) == [
            TrainingLoop
        ]
    settings = {**text, "parameter_server.consistency": "bsp"}
    assert run_threads(2, lambda comm: loop_class(assemble_trainer(comm, settings))) == [TrainingLoop] * 2


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
@pytest.mark.full_except("dedicated-0")
def test_no_worker_waits_for_another_to_write_rows(placement, slow, text, tmp_path, monkeypatch):
    """The quick worker makes all its steps during the third step of the slow worker.

    Rows are written without any meeting.
    """
    monkeypatch.setattr(metrics, "FLUSH_EVERY_S", 0.0)
    quick_is_done = threading.Event()
    meetings_at_steps = []
    written = []
    append = MetricsWriter.append

    def note_row(writer, **row):
        written.append(row["step"])
        append(writer, **row)

    monkeypatch.setattr(MetricsWriter, "append", note_row)

    def before(loop, step):
        if loop.trainer.comm.rank == slow and step == 3:
            serve_until(loop, quick_is_done.is_set)
        if loop.trainer.comm.rank == slow and step == STEPS:
            # Rank 0 writes what has come, be it at work or done with it.
            serve_until(loop, lambda: loop.metrics.serve() or len(written) >= 5)

    def after(loop, step):
        meetings_at_steps.append(loop.held)
        if loop.trainer.comm.rank != slow and step == STEPS:
            quick_is_done.set()

    def body(comm):
        loop = loop_on(comm, {**text, "parameter_server.placement": placement}, tmp_path, before, after)
        return loop.run().done, loop.held

    size = 2 + (placement == "dedicated")
    assert run_threads(size, body) == [(STEPS, 1)] * size
    assert meetings_at_steps == [0] * 2 * STEPS
    rows = files.read(tmp_path / "metrics.h5").steps
    assert rows["step"].tolist() == written == list(range(1, STEPS + 1))
    assert np.isfinite(rows["loss"]).all() and (rows["tokens"] == 7 * 8).all()
    assert (rows["compute_s"][:, :2] > 0).all() and np.isnan(rows["compute_s"][:, 2:]).all()


def test_end_of_a_job_frees_the_row_channel(text, tmp_path, monkeypatch):
    """Garbage collection would not: an MPI communicator lives until it is freed."""
    freed = []
    monkeypatch.setattr(ThreadCommunicator, "free", lambda comm: freed.append(comm.name))
    monkeypatch.setattr(gc, "get_threshold", lambda: exit_file.SELDOM)  # as after the start of `hpcdist train`
    thresholds = []
    monkeypatch.setattr(gc, "set_threshold", lambda *those: thresholds.append(those))

    def body(comm):
        loop = loop_on(comm, text, tmp_path)
        run = RunDirectory(tmp_path, None)
        job = TrainingJob(loop.trainer.recipe, run, loop.stop_requests, RunLock({}), as_json=True)
        made = job.steps(loop)
        comm.barrier()
        assert not freed and thresholds == [exit_file.USUAL] * 2
        comm.barrier()
        return job.finish(loop, *made)

    assert run_threads(2, body) == [0, 0]
    assert sum("/rows" in name for name in freed) == 2


def test_rows_of_many_steps_are_sent_in_order_in_short_messages(text, tmp_path):
    """Worker 1 is first ahead, then late; rank 2 has no steps.

    The written rows contain the steps of both, with their mean.
    """
    ends = [(3 * ROWS_PER_MESSAGE, 2 * ROWS_PER_MESSAGE + 5), (3 * ROWS_PER_MESSAGE + 1, 4 * ROWS_PER_MESSAGE)]
    size = 3

    def row(rank, step):
        return [float(100 * step + 10 * rank + column) for column in range(len(PER_RANK))]

    def body(comm):
        trainer = assemble_trainer(comm, text)
        streaming = EventPublisher(session_of(comm), trainer, OperationTiming(), tmp_path, print, None)
        energy = EnergyRecorder(comm, trainer.recipe, None)
        rows = AsyncRunMetrics(comm, tmp_path / "metrics.h5", None, {}, energy, streaming)
        rows.begin({0: 0, 1: 0})
        made = 0
        for end in ends:
            for step in range(made + 1, end[comm.rank] + 1) if comm.rank < 2 else ():
                figures = dict(zip(PER_RANK, row(comm.rank, step), strict=True))
                sent = figures.pop("sent_bytes")
                rows.add(step, float(step + comm.rank), 0.5, 1 + 2 * comm.rank, figures, sent)
                rows.serve()
            made = end[comm.rank] if comm.rank < 2 else 0
            rows.flush()
            if comm.rank == 0:
                assert len(files.read(tmp_path / "metrics.h5").steps["step"]) == min(end), "the rows of the slowest"
            comm.barrier()
        return rows._channel._sent

    assert run_threads(size, body) == [0, 3 + 2, 0], "full messages, and one that is not"
    result = files.read(tmp_path / "metrics.h5").steps
    steps = np.arange(1, min(ends[-1]) + 1)
    assert result["step"].tolist() == steps.tolist()
    np.testing.assert_allclose(result["loss"], (steps + 3 * (steps + 1)) / 4)
    assert (result["tokens"] == 4).all() and (result["learning_rate"] == 0.5).all()
    for column, name in enumerate(PER_RANK):
        expected = [[row(rank, step)[column] for rank in range(2)] for step in steps]
        assert result[name][:, :2].tolist() == expected and np.isnan(result[name][:, 2]).all()


def test_rows_far_ahead_of_the_slowest_worker_do_not_wait(text, tmp_path, monkeypatch):
    """Beyond `LEAD`, rows have only the values of faster workers, so the memory of rank 0 is bounded."""
    monkeypatch.setattr("hpcdist.training.observe.metrics.MOST_LEAD_STEPS", 5)

    def body(comm):
        trainer = assemble_trainer(comm, text)
        streaming = EventPublisher(session_of(comm), trainer, OperationTiming(), tmp_path, print, None)
        rows = AsyncRunMetrics(
            comm, tmp_path / "metrics.h5", None, {}, EnergyRecorder(comm, trainer.recipe, None), streaming
        )
        rows.begin({0: 0, 1: 0})
        for step in range(1, 21) if comm.rank == 1 else ():
            rows.add(step, 1.0, 0.5, 1, dict.fromkeys(PER_RANK, float(step)), 1.0)
        rows.flush()
        held = len(rows._waiting)
        for step in range(1, 21) if comm.rank == 0 else ():
            rows.add(step, 3.0, 0.5, 1, dict.fromkeys(PER_RANK, float(step)), 1.0)
        rows.flush()
        return held

    assert run_threads(3, body) == [5, 0, 0]
    result = files.read(tmp_path / "metrics.h5").steps
    assert result["loss"].tolist() == [2.0] * 5 + [3.0] * 15
    assert np.isnan(result["step_s"][5:, 1]).all() and np.isfinite(result["step_s"][:, 0]).all()


def test_stop_needs_one_meeting(text, tmp_path):
    def after(loop, step):
        if loop.trainer.comm.rank == 1 and step == 4:
            loop.stop_requests._wanted[StopReason.REQUEUE] = 1

    def body(comm):
        loop = loop_on(comm, {**text, "run.steps": 10_000}, tmp_path, after=after)
        outcome = loop.run()
        return loop.held, outcome.done, outcome.stop_request

    results = run_threads(3, body)
    assert len(set(results)) == 1 and results[0][0] == 1 and results[0][2] is StopReason.REQUEUE
    assert results[0][1] < 10_000
    assert len(files.read(tmp_path / "metrics.h5").steps["step"]) == results[0][1]


@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
@pytest.mark.parametrize("clocks", [[STEPS, 4], [STEPS, STEPS]], ids=["one is done", "all are done"])
def test_summary_counts_the_steps_of_each_worker(clocks, placement, text, tmp_path):
    """The steps of a worker count even if another worker made none."""

    def body(comm):
        loop = loop_on(comm, {**text, "parameter_server.placement": placement}, tmp_path, clocks=clocks)
        outcome = loop.run()
        assert outcome.steps.count == (STEPS - 4 if comm.rank == 1 and 4 in clocks else 0)
        return summarise(comm, loop.trainer, outcome, tmp_path, 1.0, {})

    results = run_threads(2 + (placement == "dedicated"), body)
    assert all(one == results[0] for one in results) and results[0]["steps"] == STEPS
    measured = ("tokens_per_s", "step_s_median", "comm_fraction", "bytes_sent_per_step", "train_loss")
    if 4 in clocks:
        assert all(results[0][name] is not None for name in measured) and "tokens_reason" not in results[0]
        assert not [name for name in results[0] if name.endswith("_reason") and name != "energy_reason"]
        # The worker and the server send Psi each; where both serve, each sends the half of the other.
        psi = 4 * results[0]["parameters"]
        sent = psi if placement == "dedicated" else psi / 2
        assert results[0]["bytes_sent_per_step"] == pytest.approx(sent, rel=0.05)
    else:
        assert [results[0][name] for name in measured] == [None] * len(measured)
        reasons = {results[0][f"{name}_reason"] for name in ("tokens", "step", "comm", "bytes_sent", "train")}
        assert reasons == {NO_STEP_MADE} and NO_STEP_MADE in describe(results[0], [])


@cases(
    "keys, failing",
    ({}, [1]),
    ({"parameter_server.consistency": "ssp", "parameter_server.staleness": 1}, [1]),
    ({"parameter_server.consistency": "bsp", "parameter_server.backup_workers": 1}, [1]),
    ({"parameter_server.consistency": "bsp", "parameter_server.backup_workers": 1}, [1, 2]),
    ids=["asp", "ssp", "backup", "more than the backups"],
)
def test_non_finite_loss_stops_all_ranks_and_names_the_tensor(keys, failing, text, tmp_path):
    """No rank waits for the push that will not come."""
    ready = threading.Barrier(3)

    def before(loop, step):
        if step == 1:
            ready.wait(LIMIT_S)
        if loop.trainer.comm.rank in failing:
            loop.exchange.parameters.view(loop.trainer.model.layout.segments[0].key)[...] = np.nan

    def body(comm):
        with pytest.raises(NonFiniteError) as error:
            loop_on(comm, {**text, **keys}, tmp_path, before).run()
        return str(error.value)

    first, *others = run_threads(4, body)
    assert others == [first] * 3 and all(f"worker {rank}: step 1" in first for rank in failing)
    assert "(parameter " in first


@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
@pytest.mark.full
def test_gradient_of_a_late_worker_is_dropped(placement, text, tmp_path):
    """Worker 1 computes its step 3 while the others make all their steps. Steps without worker 1 still have rows.


    A meeting in the middle saves although worker 1 is late.
    """
    quick_are_done = threading.Semaphore(0)
    settings = {**text, "parameter_server.consistency": "bsp", "parameter_server.backup_workers": 1}
    settings |= {"parameter_server.placement": placement, "checkpoint.every_steps": 2}

    def before(loop, step):
        if loop.trainer.comm.rank == 1 and step == 5:
            done = [False, False]

            def ready():
                for index, there in enumerate(done):
                    done[index] = there or quick_are_done.acquire(blocking=False)
                return all(done)

            serve_until(loop, ready)

    def after(loop, step):
        if loop.trainer.comm.rank != 1 and loop.exchange.clock == 5:
            quick_are_done.release()

    def body(comm):
        loop = loop_on(comm, settings | {"parameter_server.servers": 2}, tmp_path, before, after)
        outcome = loop.run()
        results = summarise(comm, loop.trainer, outcome, tmp_path, 1.0, {})
        return outcome.done, outcome.steps.count, results

    size = 3 + 2 * (placement == "dedicated")
    results = run_threads(size, body)
    assert [done for done, _, _ in results] == [STEPS] * size
    summary = results[0][2]
    assert summary["dropped_gradients"] >= 1 and " came too late" in describe(summary, [])
    rows = files.read(tmp_path / "metrics.h5").steps
    assert rows["step"].tolist() == list(range(1, STEPS + 1)) and np.isfinite(rows["loss"]).all()
    samples = rows["tokens"] / 8
    assert (samples >= 7 - 3).all() and (samples <= 7 - 2).all(), "those of two of three workers"
    assert np.isfinite(rows["step_s"][4, 1]) and rows["tokens"].sum() < 7 * 8 * STEPS
    assert sum(np.isnan(rows["step_s"][:, 1])) == STEPS - results[1][1]
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) >= 2


def test_quick_worker_waits_at_the_bound(text, tmp_path):
    """Worker 0 begins no step before the other is at its bound. Meetings still take place."""
    settings = {**text, "parameter_server.consistency": "ssp", "parameter_server.staleness": 2}
    settings |= {"checkpoint.every_steps": 5, "parameter_server.staleness_aware": "true"}
    loops = {}
    begun = {0: 0, 1: 0}

    def before(loop, step):
        rank = loop.trainer.comm.rank
        begun[rank] = step
        assert step - 1 - min(loops[2].trainer.exchange.seen.values()) <= 2
        if rank == 0:
            serve_until(loop, lambda: begun[1] >= min(step + 2, STEPS))

    def body(comm):
        loop = loops[comm.rank] = loop_on(comm, settings, tmp_path, before)
        comm.barrier()
        outcome = loop.run()
        results = summarise(comm, loop.trainer, outcome, tmp_path, 1.0, {})
        return outcome.done, loop.held, results

    results = run_threads(3, body)
    assert [(done, held) for done, held, _ in results] == [(STEPS, results[0][1])] * 3 and results[0][1] >= 3
    assert 0 < results[0][2]["staleness_mean"] <= results[0][2]["staleness_most"] <= 4
    assert "updates old" in describe(results[0][2], [])
    rows = files.read(tmp_path / "metrics.h5").steps
    assert rows["step"].tolist() == list(range(1, STEPS + 1)) and np.isfinite(rows["loss"]).all()
