"""The loop saves by the clock, keeps the best, and stops before the job ends, on all ranks after the same step."""

import math
import time

import pytest

from harness.inputs import write_text
from harness.marks import cases
from harness.trainings import assemble_trainer, assert_rejected, session_of
from hpcdist.checkpoint import listing
from hpcdist.checkpoint.directory import loss_of
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.telemetry.metrics import step_metrics as files
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.observe.instrumentation import ConsoleProgress
from hpcdist.training.run.loop import TrainingLoop
from hpcdist.training.run.stop_requests import StopReason, StopRequests

STEPS = 12


@pytest.fixture
def settings(tmp_path, rng):
    path = write_text(tmp_path / "text.txt", rng)
    return {"data.path": path, "run.steps": STEPS, "energy.sources": "none", "checkpoint.keep": 99}


def train(settings, out, ends=math.inf):
    """Train on two ranks. Return the outcome of each."""
    out.mkdir()

    def body(comm):
        trainer = assemble_trainer(comm, settings)
        session = session_of(comm)
        progress, energy = ConsoleProgress(STEPS, 0, 1e9, shown=False), EnergyRecorder(comm, trainer.recipe, None)
        with energy.monitor:
            return TrainingLoop(session, trainer, out, progress, {}, StopRequests(ends=ends), energy).run()

    return run_threads(2, body)


def steps_in(run):
    return sorted(one.step for one in listing.list_checkpoints(run))


@pytest.mark.full
def test_run_saves_by_the_time_between_failures(settings, tmp_path):
    often = train({**settings, "checkpoint.mtbf_s": 1e-9}, tmp_path / "often")  # the interval is no time at all
    assert steps_in(tmp_path / "often") == list(range(1, STEPS + 1))
    assert [one.done for one in often] == [STEPS, STEPS]
    train({**settings, "checkpoint.mtbf_s": 1e9}, tmp_path / "seldom")
    assert steps_in(tmp_path / "seldom") == [STEPS], "at its end only"


def losses(run):
    return files.read(run / "metrics.h5").steps["loss"].tolist()


@pytest.mark.full
def test_best_checkpoints_are_kept_without_changing_the_losses(settings, tmp_path):
    rule = {"checkpoint.every_steps": 1, "checkpoint.keep": 1, "checkpoint.keep_best": 2, "checkpoint.keep_every": 5}
    train({**settings, **rule, "run.validation_samples": 4}, tmp_path / "best")
    train({**settings, "run.validation_samples": 4}, tmp_path / "plain")
    left = steps_in(tmp_path / "best")
    reference = {step: loss_of(tmp_path / f"best/checkpoints/step-{step}") for step in left}
    assert {5, 10, 12} <= set(left) and len(left) <= 5 and not any(map(math.isnan, reference.values()))
    assert math.isnan(loss_of(tmp_path / "plain/checkpoints/step-12"))
    assert losses(tmp_path / "best") == losses(tmp_path / "plain")


def test_run_stops_if_another_save_would_not_fit(settings, tmp_path):
    result = train(settings, tmp_path / "run", ends=time.time() + 1.0)
    assert [one.stop_request for one in result] == [StopReason.REQUEUE, StopReason.REQUEUE]
    assert [one.done for one in result] == [1, 1] and steps_in(tmp_path / "run") == [1]


@cases(
    "settings, output",
    (("checkpoint.mtbf_s=60", "checkpoint.every_steps=5"), "two may set the interval"),
    (("checkpoint.mtbf_s=-1",), "checkpoint.mtbf_s = -1"),
    (("checkpoint.keep_best=-1",), "checkpoint.keep_best = -1"),
    (("checkpoint.keep_best=1", "data.validation_fraction=0.0"), "no validation loss"),
    *(
        ((f"checkpoint.{key}=9", "parallel.strategy=parameter_server", "parameter_server.consistency=asp"), key)
        for key in ("mtbf_s", "keep_best")
    ),
)
def test_invalid_checkpoint_settings_are_rejected(settings, output):
    assert_rejected(settings, output)
