"""A run directory belongs to one run; the settings that may change between the starts of a run."""

import os
from dataclasses import replace

import pytest

from harness.marks import cases
from hpcdist.batch import ledger, submission
from hpcdist.batch.job import BatchJob
from hpcdist.batch.site_profile import SiteProfile, SiteScheduler
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import ConfigurationError, StorageError, UsageError
from hpcdist.reporting import atomic
from hpcdist.training import run_directory
from hpcdist.training.recipe import recipe as recipes


def prepare(path, *overrides, resume="auto"):
    return run_directory.prepare_run_directory(solo(), recipes.load(None, overrides, {}).recipe, path, resume)


@pytest.fixture
def run_dir(tmp_path):
    """The directory of a run that has saved a checkpoint."""
    path = tmp_path / "run"
    assert prepare(path, "run.steps=10").changed == ""
    (path / "checkpoints").mkdir()
    return path


def test_start_killed_before_saving_its_recipe_can_be_repeated(tmp_path):
    for name in ("lock", "lock.now.7.7", "recipe.toml.tmp", ".recipe.toml.0123456789abcdef.new"):
        (tmp_path / name).touch()
    assert prepare(tmp_path).resume_from is None
    (tmp_path / "recipe.toml").unlink()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigurationError, match="is not empty, but holds no run"):
        prepare(tmp_path)


@pytest.mark.parametrize("kind", submission.TEMPLATES)
def test_files_of_a_submission_do_not_count_as_another_run(tmp_path, kind):
    ledger.record(tmp_path, ledger.SUBMITTED, job="1")
    (tmp_path / "stop").touch()
    job = BatchJob(nodes=1, python="python", recipe="", run_dir=tmp_path)
    for each in (job, replace(job, links=12, link=12)):
        submission.script_path(each, SiteProfile(scheduler=SiteScheduler(kind=kind))).touch()
    job.input_file.touch()
    job.input_file.with_name(f"{job.input_file.name}.7_1").touch()
    for path in (job.input_file, submission.script_path(job, SiteProfile(scheduler=SiteScheduler(kind=kind)))):
        atomic.temporary_path(path).touch()
    assert prepare(tmp_path).resume_from is None


def test_same_recipe_resumes_only_with_resume_auto(run_dir):
    assert prepare(run_dir, "run.steps=10").changed == ""
    with pytest.raises(UsageError, match="add --resume auto"):
        prepare(run_dir, "run.steps=10", resume="never")
    assert not list(run_dir.glob("recipe-*.toml"))


@cases(
    "override",
    "run.seed=5",
    "run.global_batch=32",
    "model.hidden=64",
    "optimizer.learning_rate=0.1",
    "data.context=64",
    "precision.mode=float64",
)
def test_changed_keys_of_another_run_are_rejected(run_dir, override):
    before = (run_dir / "recipe.toml").read_text()
    with pytest.raises(ConfigurationError, match=f"holds another run: {override.partition('=')[0]} = ") as refused:
        prepare(run_dir, "run.steps=10", override)
    assert (f"--init-from {run_dir}" in str(refused.value)) == (not override.startswith("model."))
    assert (run_dir / "recipe.toml").read_text() == before


def test_layout_and_steps_may_change_and_old_recipes_are_kept(run_dir):
    first = recipes.load_stored(run_dir / "recipe.toml")
    result = prepare(run_dir, "run.steps=20", "parallel.strategy=zero3", "survival.every_steps=5")
    assert "parallel.strategy = 'allreduce' there, 'zero3' now" in result.changed and "run.steps" in result.changed
    assert recipes.load_stored(run_dir / "recipe-1.toml") == first
    assert recipes.load_stored(run_dir / "recipe.toml").parallel.strategy == "zero3"
    prepare(run_dir, "run.steps=20", "parallel.strategy=zero1")
    assert recipes.load_stored(run_dir / "recipe-2.toml").parallel.strategy == "zero3"


@cases(
    "overrides",
    ("parallel.strategy=zero2", "zero.shared_parameters=true"),
    ("parallel.strategy=zero3", "zero.persistent_below=200", "zero.gradients=2", "zero.parameters=2"),
    ("parallel.strategy=zero1", "zero.offload_optimizer=file", "zero.offload_directory=states"),
)
def test_zero_state_placement_may_change_both_ways(run_dir, overrides):
    assert "zero." in prepare(run_dir, "run.steps=10", *overrides).changed
    assert "zero." in prepare(run_dir, "run.steps=10").changed


def test_failed_recipe_write_loses_no_recipe(run_dir, monkeypatch):
    replace = os.replace

    def fail(new, target):
        if target.name == "recipe.toml":
            raise OSError(28, "No space left on device")
        replace(new, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(StorageError, match="No space left"):
            prepare(run_dir, "run.steps=20")
    assert prepare(run_dir, "run.steps=10").changed == ""


def test_precision_mode_may_change_between_starts(run_dir):
    for mode in ("bfloat16", "float16", "float32"):
        assert "precision.mode = " in prepare(run_dir, "run.steps=10", f"precision.mode={mode}").changed


def test_older_recipe_gets_defaults_for_new_keys(run_dir):
    stored = run_dir / "recipe.toml"
    text = stored.read_text()
    start = text.index("[energy]")
    following = text.find("\n[", start + 1)
    stored.write_text(text[:start] + (text[following:] if following > 0 else ""))
    assert "[energy]" not in stored.read_text()
    assert prepare(run_dir, "run.steps=10").changed == ""
