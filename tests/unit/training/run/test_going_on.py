"""Messages of a training that did not complete: the command to resume, and the effects of a resume."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.marks import cases
from harness.trainings import SMALL, assemble_trainer, losses, recipe_of, run_single_process, trainer_of
from hpcdist.checkpoint.lock import RunLock
from hpcdist.cli import run as run_command
from hpcdist.comm.launch import exit_file
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.training import run_directory
from hpcdist.training.recipe import recipe
from hpcdist.training.run import job
from hpcdist.training.run.job import TrainingJob
from hpcdist.training.run.saving import CheckpointSaver
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
def test_resume_command_of_a_recipe(command, resumed):
    assert exit_file.resume_command(command, Path("runs/1")) == resumed


@cases(
    "command, resumed",
    (["run", "-n", "2", "--", "python", "train"], ["run", "--out", "r", "--resume", "auto", "-n", "2"]),
    (["run", "--out", "a", "--resume=never", "--", "python", "train"], ["run", "--resume", "auto", "--out", "a"]),
)
def test_resume_command_of_a_script(command, resumed):
    assert exit_file.resume_command(command, Path("r"), script=True) == [*resumed, "--", "python", "train"]


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_resume_command_keeps_the_options_of_a_script(dashes, monkeypatch):
    script = ["python", "train.py", "--out", "foo", "--resume", "never", "--", "-x"]
    monkeypatch.setattr("sys.argv", ["/venv/bin/hpcdist", "run", "-n", "4", *dashes, *script])
    resumed = exit_file.resume_command(run_command._typed_command(len(script)), Path("r"), script=True)
    assert resumed == ["hpcdist", "run", "--out", "r", "--resume", "auto", "-n", "4", "--", *script]


def test_stopped_run_prints_the_resume_command(text, monkeypatch):
    def resume_text(comm):
        trainer = assemble_trainer(comm, text)
        made = TrainingJob(trainer.recipe, RunDirectory(Path("runs/1"), None), StopRequests(), RunLock(), as_json=False)
        return made._how_to_go_on(7, trainer)

    monkeypatch.setenv(exit_file.COMMAND, "hpcdist run -n 2 train 'my recipe.toml'")
    (typed,) = run_threads(1, resume_text)
    assert typed == (
        "stopped at 7 of 40 steps, saved; go on with hpcdist run -n 2 train 'my recipe.toml' --out runs/1 --resume auto"
    )
    monkeypatch.delenv(exit_file.COMMAND)
    monkeypatch.setattr("sys.argv", ["/venv/hpcdist/__main__.py", "train", "--out=a"])
    alone, others = run_threads(1, resume_text) + run_threads(2, resume_text)[:1]
    assert alone.endswith("; go on with hpcdist train --out=a --resume auto")
    assert others.endswith("; go on with hpcdist train --out=a --resume auto, on 2 ranks by the same launcher")


def test_launcher_prints_the_resume_command_last(tmp_path, monkeypatch):
    """The launcher knows the directory of a run that died, and the resume command of a run that was stopped."""
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


def test_newest_checkpoint_and_hang_are_named_after_a_kill(tmp_path, capsys):
    run_command._print_resume_command(tmp_path, TYPED)
    assert "there is no checkpoint yet; start again with hpcdist run -n 2 train" in capsys.readouterr().err
    for step in (50, 100):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step}" / "manifest.json").touch()
    run_command._print_resume_command(tmp_path, TYPED)
    shown = capsys.readouterr().err
    assert f"the newest checkpoint is {tmp_path}/checkpoints/step-100; resume with hpcdist run -n 2 train " in shown
    assert f"'my recipe.toml' --out {tmp_path} --resume auto\n" in shown and f"hpcdist hang {tmp_path}\n" in shown


def test_resume_command_of_a_script_has_the_option_only_with_a_recipe(tmp_path, capsys):
    """Only a Training stores a recipe and reads the option."""
    typed = ["hpcdist", "run", "--out", str(tmp_path), "--", "python", "train.py"]
    run_command._print_resume_command(tmp_path, typed, script=True)
    assert f"start again with hpcdist run --out {tmp_path} -- python train.py\n" in capsys.readouterr().err
    (tmp_path / "recipe.toml").touch()
    run_command._print_resume_command(tmp_path, typed, script=True)
    assert f"hpcdist run --resume auto --out {tmp_path} -- python train.py\n" in capsys.readouterr().err


def test_changed_number_of_steps_reports_the_new_learning_rate(text):
    def resume_text(comm):
        trainer = assemble_trainer(comm, text)
        trainer = replace(trainer, first_step=10)
        shorter, same, first = (job._changed_rate_text(trainer, steps) for steps in (20, 40, None))
        constant = assemble_trainer(comm, text | {"optimizer.decay": "constant"})
        constant = replace(constant, first_step=10)
        trainer = replace(trainer, first_step=0)  # in the warm-up of two steps, which is the same
        return [shorter, job._changed_rate_text(trainer, 20), same, first, job._changed_rate_text(constant, 20)]

    (results,) = run_threads(1, resume_text)
    reshaped = "run.steps was 20 and is 40, and optimizer.decay = 'cosine' ends there: the learning rate of step "
    assert results[0] == reshaped + "11 is 0.00264 instead of 0.00165"
    assert results[1].startswith(reshaped + "3 is ") and results[2:] == ["", "", ""]


def test_changed_number_of_steps_reports_the_new_begin_of_the_decay(text):
    def resume_texts(comm):
        trainer = assemble_trainer(comm, text | {"optimizer.decay": "1-sqrt", "optimizer.decay_steps": 8})
        return [
            job._changed_rate_text(replace(trainer, first_step=first), steps)
            for first, steps in ((10, 30), (35, 30), (10, 40))
        ]

    (results,) = run_threads(1, resume_texts)
    changed = "run.steps was 30 and is 40, and optimizer.decay = '1-sqrt' ends there"
    assert results[0] == f"{changed}: its 8 steps begin after step 32 instead of step 22"
    assert results[1] == f"{changed}: the learning rate of step 36 is 0.00109 instead of 0.0003" and results[2] == ""


def test_copied_checkpoint_starts_a_cool_down_branch(shared_text, tmp_path):
    """The branch in another directory makes the steps of the run up to the checkpoint, and then its own decay."""
    keys = SMALL | {"data.path": shared_text, "run.steps": 30, "precision.mode": "float64"}
    keys |= {"optimizer.decay": "1-sqrt", "optimizer.decay_steps": 5, "optimizer.final_fraction": 0.0}
    shorter, main, branch = keys | {"run.steps": 13}, tmp_path / "main", tmp_path / "branch"

    def run_main(comm):
        run_directory.prepare_run_directory(comm, recipe_of(keys), main, "auto", None)
        trainer = trainer_of(comm, keys)
        losses(trainer, 8)
        return CheckpointSaver(trainer, main / "checkpoints").save(8)

    def run_branch(comm):
        run = run_directory.prepare_run_directory(comm, recipe_of(shorter), branch, "auto", None)
        assert run.resume_from == branch / "checkpoints" / "step-8" and run.steps_before == 30
        trainer = trainer_of(comm, shorter, run.resume_from)
        return job._changed_rate_text(trainer, run.steps_before), losses(trainer, 13)

    run_threads(2, run_main)
    (branch / "checkpoints").mkdir(parents=True)
    shutil.copy(main / "recipe.toml", branch)
    shutil.copytree(main / "checkpoints" / "step-8", branch / "checkpoints" / "step-8")
    (message, more), _ = run_threads(2, run_branch)
    assert message.startswith("run.steps was 30 and is 13") and "step 9 is 0.00166 instead of 0.003" in message
    np.testing.assert_allclose(more, run_single_process(shorter, 13).losses[8:], rtol=1e-12)


def test_changed_learning_rate_suggests_init_from():
    rate, model = "optimizer.learning_rate = 0.003 there, 0.1 now", "model.hidden = 8 there, 16 now"
    assert recipe.init_from_hint("runs/1", [rate]).endswith("its parameters: --out OTHER --init-from runs/1")
    assert recipe.init_from_hint("runs/1", [rate, model]) == ""
