"""The event stream of a running training: every step once, of all ranks, with names of the catalogue."""

import json
import math
from collections import defaultdict

import numpy as np
import pytest

from harness.trainings import assemble_trainer, recipe_keys, session_of
from hpcdist.comm.record import spans as record_spans
from hpcdist.comm.record.spans import Spans
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.energy.part_time_sensor import PowerSensor, SensorShift
from hpcdist.errors import StorageError
from hpcdist.hdf5 import files
from hpcdist.telemetry.metrics import observations, quantities, side_tables, step_metrics
from hpcdist.telemetry.metrics.quantities import COUNTER, QUANTITIES
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.observe.instrumentation import ConsoleProgress
from hpcdist.training.run.job import TrainingJob
from hpcdist.training.run.loop import TrainingLoop
from hpcdist.training.run.stop_requests import StopRequests

STEPS = 12


@pytest.fixture(scope="module")
def settings(shared_text):
    keys = f"steps={STEPS} checkpoint.every_steps=5 energy.sources=none telemetry.jsonl=true"
    return {"data.path": shared_text} | recipe_keys(keys)


class Said(ConsoleProgress):
    """A progress output that keeps the printed lines."""

    def __init__(self):
        super().__init__(STEPS, 0, 1e9, shown=False)
        self.lines = []

    def say(self, text):
        self.lines.append(text)


def train_to_end(comm, settings, out, **changes):
    """Train to the end on the ranks of ``comm``, as a job does."""
    session = session_of(comm)
    session.spans = Spans(out / f"rank-{comm.rank:05d}.spans", comm.rank, comm.size)
    keys = settings | {key.replace("__", "."): value for key, value in changes.items()}
    trainer = assemble_trainer(comm, keys, session=session)
    energy = EnergyRecorder(comm, trainer.recipe, None, out)
    loop = TrainingLoop(session, trainer, out, Said(), {}, StopRequests(), energy)
    outcome, val_loss = TrainingJob.steps(None, loop)
    loop.metrics.finish(outcome.done, val_loss)
    return loop


@pytest.fixture(scope="module")
def two_ranks(settings, tmp_path_factory):
    """The directory of a training of three micro-batches on two ranks, and the spans of each rank."""
    out = tmp_path_factory.mktemp("run")
    return out, run_threads(2, lambda comm: train_to_end(comm, settings, out, parallel__microbatches=3))


def events_of(out):
    result = defaultdict(list)
    for line in (out / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        result[event["kind"]].append(event)
    return result


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.full_except("1")
def test_run_reports_every_step_once(settings, tmp_path, ranks):
    loops = run_threads(ranks, lambda comm: train_to_end(comm, settings, tmp_path))
    output, rows = events_of(tmp_path), step_metrics.read(tmp_path / "metrics.h5").steps
    steps = output["step"]
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert [event["values"]["training_loss_nats"] for event in steps] == rows["loss"].tolist()
    assert [event["values"]["step_seconds"] for event in steps] == rows["step_s"].max(axis=1).tolist()
    np.testing.assert_allclose([event["ranks"]["compute_seconds"] for event in steps], rows["compute_s"], rtol=1e-8)
    assert [event["values"]["tokens_total"] for event in steps] == np.cumsum(rows["tokens"]).tolist()
    norms = [event["values"]["gradient_norm"] for event in steps]
    assert all(norm > 0 for norm in norms) and len(set(norms)) == STEPS
    assert steps[-1]["values"]["phase_seconds[data]"] >= 0
    assert [len(output[kind]) for kind in ("begin", "end")] == [1, 1]
    saves = [(event["step"], event["values"]["checkpoints_total"]) for event in output["checkpoint"]]
    assert saves == [(5, 1), (10, 2), (STEPS, 3)]
    assert output["checkpoint"][0]["values"]["checkpoint_bytes"] == sum(loop.trainer.state_bytes() for loop in loops)
    (evaluated,) = output["evaluation"]
    assert math.isfinite(evaluated["values"]["validation_loss_nats"])
    held = max(loop.trainer.ledger.peak["parameters"] for loop in loops)
    assert output["memory"][-1]["values"]["memory_peak_bytes[parameters]"] == held
    assert all(loop.streaming._events is None for loop in loops[1:])  # nothing grows where no rows come
    if ranks > 1:
        assert any("allreduce" in key for key in output["collectives"][-1]["values"])


def test_names_are_in_the_catalogue_and_counters_never_fall(two_ranks):
    last = {}
    for events in events_of(two_ranks[0]).values():
        for event in events:
            for key, value in event["values"].items():
                if isinstance(value, str):
                    continue
                name, label = quantities.split(key)
                assert bool(QUANTITIES[name].label) == (label is not None), key
                if QUANTITIES[name].kind == COUNTER:
                    assert value >= last.get(key, 0.0), key
                    last[key] = value


def test_figures_without_a_table_are_stored_in_the_metrics_file(two_ranks):
    out, _ = two_ranks
    with files.open_read(out / "metrics.h5") as file:
        series = observations.read(file).series
    assert series["checkpoints_total"].value.tolist() == [0, 1, 2, 3]
    assert "memory_bytes[activations]" in series and "training_loss_nats" not in series
    (session,) = side_tables.read_clocks(out / "metrics.h5")
    assert session.hosts.of_rank == (0, 0) and len(session.readings) == 2


def test_spans_cover_the_steps_of_a_rank(two_ranks):
    out, loops = two_ranks
    for rank, loop in enumerate(loops):
        spans = record_spans.read(out / f"rank-{rank:05d}.spans").spans
        steps = [span for span in spans if span.phase == "step"]
        assert [span.step for span in steps] == list(range(1, STEPS + 1))
        for before, after in zip(steps, steps[1:], strict=False):
            assert abs(after.begin_ns - before.end_ns) < 1e6 or after.begin_ns >= before.end_ns
        made = [span for span in spans if span.phase in ("compute", "communication", "update") and span.step]
        of_step = [span for span in made if span.step == 1]
        assert [span.name for span in of_step] == [operation.kind.name for operation in loop.trainer.operations]
        assert {span.microbatch for span in of_step if span.name == "FORWARD"} == {0, 1, 2}
        for first, second in zip(of_step, of_step[1:], strict=False):
            assert first.begin_ns <= first.end_ns == second.begin_ns
        assert sum(span.name == "wait for data" for span in spans) == STEPS + 1
        assert sum(span.name == "save" for span in spans) == 3
        assert {span.name for span in spans if span.phase == "validation"} == {"validation"}


def test_rank_0_waits_for_sensors_with_partial_sampling(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(EnergyRecorder, "part_time_sensor", lambda energy: PowerSensor(0.02, 0.005))
    settings = settings | {"energy.sources": "auto", "energy.shift": "true", "energy.powercap": tmp_path / "nowhere"}
    # Which steps wait follows from the clock, and is tested together with the sensor: here all of them wait.
    monkeypatch.setattr(SensorShift, "pause_s", lambda shift, now_ns: 1e-3)
    run_threads(2, lambda comm: train_to_end(comm, settings, tmp_path))
    shifts = [
        [span for span in record_spans.read(tmp_path / f"rank-{rank:05d}.spans").spans if span.name == "shift"]
        for rank in range(2)
    ]
    assert shifts[0] and not shifts[1] and {span.phase for span in shifts[0]} == {"other"}


def test_unusable_sink_is_rejected_before_the_first_step(settings, tmp_path):
    (tmp_path / "blocked").write_text("no directory")
    blocked = {"telemetry.prometheus": "textfile", "telemetry.textfile_directory": str(tmp_path / "blocked")}
    with pytest.raises(StorageError, match="blocked"):
        run_threads(1, lambda comm: train_to_end(comm, settings | blocked, tmp_path))
    assert not (tmp_path / "checkpoints").exists()


def test_anomaly_is_printed_and_streamed(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("hpcdist.telemetry.anomalies.MIN_STEPS", 4)
    original = TrainingLoop._train

    def spiking(loop, step, batches):
        result = original(loop, step, batches)
        result.loss += 50.0 * (step == 9)
        return result

    monkeypatch.setattr(TrainingLoop, "_train", spiking)
    (loop,) = run_threads(1, lambda comm: train_to_end(comm, settings, tmp_path))
    (flag,) = [event for event in events_of(tmp_path)["anomaly"] if "anomalies_total[loss_spike]" in event["values"]]
    assert flag["step"] == 9 and flag["values"]["text"] in loop.progress.lines


def test_expensive_flushes_become_rare(settings, tmp_path, monkeypatch):
    (loop,) = run_threads(1, lambda comm: train_to_end(comm, settings, tmp_path))
    rows = loop.metrics

    def due_after(seconds, cost_s):
        rows._costs_s.extend([cost_s] * 5)
        monkeypatch.setattr("hpcdist.training.observe.metrics.time.monotonic", lambda: rows._flushed + seconds)
        return rows.due()

    assert [due_after(seconds, 0.001) for seconds in (4.9, 5.1)] == [False, True]
    assert [due_after(seconds, 0.1) for seconds in (24.9, 25.1)] == [False, True]
    assert [due_after(seconds, 100.0) for seconds in (59.9, 60.1)] == [False, True]
    rows._own = [[0.0]] * 4095
    assert not due_after(1.0, 100.0)
    rows._own.append([0.0])
    assert due_after(1.0, 100.0), "the memory of rows has a bound"


def test_stopped_start_does_not_evaluate(settings, tmp_path):
    """An earlier validation loss remains the last one, also next to a NaN of an earlier version."""
    (tmp_path / "stop").touch()
    (loop,) = run_threads(1, lambda comm: train_to_end(comm, settings, tmp_path))
    assert loop.outcome.stop_request is not None and 0 < loop.outcome.done < STEPS
    result = step_metrics.read(tmp_path / "metrics.h5")
    assert len(result.evaluations["step"]) == 0 and step_metrics.summarise(result)["val_loss"] is None
    with step_metrics.MetricsWriter(tmp_path / "metrics.h5", 1, loop.outcome.done) as writer:
        writer.evaluation(STEPS, 2.5)
        writer.evaluation(STEPS, math.nan)
    assert step_metrics.summarise(step_metrics.read(tmp_path / "metrics.h5"))["val_loss"] == 2.5
