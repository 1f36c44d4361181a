"""What a training that did not come to its end says: the command that goes on, and what a resume changes."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.marks import cases
from harness.trainings import assembled
from hpcdist.checkpoint.lock import RunLock
from hpcdist.cli import run as run_command
from hpcdist.comm.launch import exit_file
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.training.recipe import recipe
from hpcdist.training.run import job
from hpcdist.training.run.job import TrainingJob
from hpcdist.training.run.stop_requests import StopRequests
from hpcdist.training.run_directory import RunDirectory

TYPED = ["hpcdist", "run", "-n", "2", "train", "my recipe.toml"]


@pytest.fixture
def text(text):
    return {"data.path": text, "run.steps": 40}


@cases(
    "command, resumed",
    (["train"], ["train", "--out", "runs/1", "--resume", "auto"]),
    (["train", "--out", "a"], ["train", "--out", "a", "--resume", "auto"]),
    (["train", "--out=a", "--resume=never"], ["train", "--out=a", "--resume", "auto"]),
    (["train", "--resume", "never", "r"], ["train", "r", "--out", "runs/1", "--resume", "auto"]),
    (["run", "-n", "2", "--", "train"], ["run", "-n", "2", "--", "train", "--out", "runs/1", "--resume", "auto"]),
    (["train", "--", "-x"], ["train", "--out", "runs/1", "--resume", "auto", "--", "-x"]),
)
def test_the_command_that_goes_on(command, resumed):
    assert exit_file.resume_command(command, Path("runs/1")) == resumed


@cases(
    "command, resumed",
    (["run", "-n", "2", "--", "python", "train"], ["run", "--out", "r", "--resume", "auto", "-n", "2"]),
    (["run", "--out", "a", "--resume=never", "--", "python", "train"], ["run", "--resume", "auto", "--out", "a"]),
)
def test_the_command_that_goes_on_with_a_script(command, resumed):
    assert exit_file.resume_command(command, Path("r"), script=True) == [*resumed, "--", "python", "train"]


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_the_options_of_a_script_stay_as_they_are(dashes, monkeypatch):
    script = ["python", "train.py", "--out", "foo", "--resume", "never", "--", "-x"]
    monkeypatch.setattr("sys.argv", ["/venv/bin/hpcdist", "run", "-n", "4", *dashes, *script])
    resumed = exit_file.resume_command(run_command._typed_command(len(script)), Path("r"), script=True)
    assert resumed == ["hpcdist", "run", "--out", "r", "--resume", "auto", "-n", "4", "--", *script]


def test_a_stopped_run_ends_with_the_very_command(text, monkeypatch):
    def said(comm):
        trainer = assembled(comm, text)
        made = TrainingJob(trainer.recipe, RunDirectory(Path("runs/1"), None), StopRequests(), RunLock(), as_json=False)
        return made._how_to_go_on(7, trainer)

    monkeypatch.setenv(exit_file.COMMAND, "hpcdist run -n 2 train 'my recipe.toml'")
    (typed,) = run_threads(1, said)
    assert typed == (
        "stopped at 7 of 40 steps, saved; go on with hpcdist run -n 2 train 'my recipe.toml' --out runs/1 --resume auto"
    )
    monkeypatch.delenv(exit_file.COMMAND)
    monkeypatch.setattr("sys.argv", ["/venv/hpcdist/__main__.py", "train", "--out=a"])
    alone, others = run_threads(1, said) + run_threads(2, said)[:1]
    assert alone.endswith("; go on with hpcdist train --out=a --resume auto")
    assert others.endswith("; go on with hpcdist train --out=a --resume auto, on 2 ranks by the same launcher")


def test_hpcdist_run_is_told_and_shows_it_last(tmp_path, monkeypatch):
    """It knows the directory of a run that died; of one that ended as it should, nothing, or how it goes on."""
    assert not exit_file.announce_completion("stopped"), "nobody listens"
    monkeypatch.setenv(exit_file.LAUNCH_DIR, str(tmp_path / "elsewhere"))
    assert not exit_file.announce_completion("stopped"), "it is on another host"
    monkeypatch.setenv(exit_file.LAUNCH_DIR, str(tmp_path))
    assert exit_file.read_announcements(tmp_path) == ("", "")
    exit_file.announce_run(Path("runs/1"))
    assert exit_file.read_announcements(tmp_path) == ("runs/1", "")
    exit_file.announce_run(Path("runs/\udcff"))  # a byte that is not valid UTF-8
    assert exit_file.read_announcements(tmp_path) == ("runs/\udcff", "")
    assert exit_file.announce_completion("stopped") and exit_file.read_announcements(tmp_path) == ("", "stopped")


def test_after_a_kill_the_newest_checkpoint_and_hang_are_named(tmp_path, capsys):
    run_command._print_resume_command(tmp_path, TYPED)
    assert "there is no checkpoint yet; begin again with hpcdist run -n 2 train" in capsys.readouterr().err
    for step in (50, 100):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step}" / "manifest.json").touch()
    run_command._print_resume_command(tmp_path, TYPED)
    shown = capsys.readouterr().err
    assert f"the newest checkpoint is {tmp_path}/checkpoints/step-100; go on with hpcdist run -n 2 train " in shown
    assert f"'my recipe.toml' --out {tmp_path} --resume auto\n" in shown and f"hpcdist hang {tmp_path}\n" in shown


def test_another_number_of_steps_says_what_it_makes_of_the_learning_rate(text):
    def said(comm):
        trainer = assembled(comm, text)
        trainer = replace(trainer, first_step=10)
        shorter, same, first = (job._changed_rate_text(trainer, steps) for steps in (20, 40, None))
        constant = assembled(comm, text | {"optimizer.decay": "constant"})
        constant = replace(constant, first_step=10)
        trainer = replace(trainer, first_step=0)  # in the warm-up of two steps, which is the same
        return [shorter, job._changed_rate_text(trainer, 20), same, first, job._changed_rate_text(constant, 20)]

    (found,) = run_threads(1, said)
    reshaped = "run.steps was 20 and is 40, where optimizer.decay = 'cosine' ends: the learning rate of step "
    assert found[0] == reshaped + "11 is 0.00264 instead of 0.00165"
    assert found[1].startswith(reshaped + "3 is ") and found[2:] == ["", "", ""]


def test_a_changed_learning_rate_is_told_of_a_run_that_begins_with_the_parameters():
    rate, model = "optimizer.learning_rate = 0.003 there, 0.1 now", "model.hidden = 8 there, 16 now"
    assert recipe.init_from_hint("runs/1", [rate]).endswith("its parameters: --out OTHER --init-from runs/1")
    assert recipe.init_from_hint("runs/1", [rate, model]) == ""
