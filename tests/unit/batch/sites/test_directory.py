"""A run directory is one run; what a run is made with may change between its starts."""

import os
from dataclasses import replace

import pytest

from harness.marks import cases
from hpcdist.batch import ledger, submission
from hpcdist.batch.job import BatchJob
from hpcdist.batch.sites.profile import SiteProfile, SiteScheduler
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import ConfigurationError, StorageError, UsageError
from hpcdist.reporting import atomic
from hpcdist.training import run_directory
from hpcdist.training.recipe import recipe as recipes


def prepare(path, *overrides, resume="auto"):
    return run_directory.prepare_run_directory(solo(), recipes.load(None, overrides, {}).recipe, path, resume)


@pytest.fixture
def begun(tmp_path):
    """The directory of a run that has saved something."""
    path = tmp_path / "run"
    assert prepare(path, "run.steps=10").changed == ""
    (path / "checkpoints").mkdir()
    return path


def test_a_start_that_was_killed_before_it_kept_its_recipe(tmp_path):
    for name in ("lock", "lock.now.7.7", "recipe.toml.tmp", ".recipe.toml.0123456789abcdef.new"):
        (tmp_path / name).touch()
    assert prepare(tmp_path).resume_from is None
    (tmp_path / "recipe.toml").unlink()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigurationError, match="is not empty and holds no run"):
        prepare(tmp_path)


@pytest.mark.parametrize("kind", submission.TEMPLATES)
def test_what_a_submission_leaves_is_no_other_run(tmp_path, kind):
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


def test_the_same_recipe_goes_on(begun):
    assert prepare(begun, "run.steps=10").changed == ""
    with pytest.raises(UsageError, match="add --resume auto"):
        prepare(begun, "run.steps=10", resume="never")
    assert not list(begun.glob("recipe-*.toml"))


@cases(
    "override",
    "run.seed=5",
    "run.global_batch=32",
    "model.hidden=64",
    "optimizer.learning_rate=0.1",
    "data.context=64",
    "precision.mode=float64",
)
def test_what_makes_it_another_run_is_refused(begun, override):
    before = (begun / "recipe.toml").read_text()
    with pytest.raises(ConfigurationError, match=f"holds another run: {override.partition('=')[0]} = ") as refused:
        prepare(begun, "run.steps=10", override)
    assert (f"--init-from {begun}" in str(refused.value)) == (not override.startswith("model."))
    assert (begun / "recipe.toml").read_text() == before


def test_layout_and_length_may_change_and_every_recipe_is_kept(begun):
    first = recipes.load_stored(begun / "recipe.toml")
    found = prepare(begun, "run.steps=20", "parallel.strategy=zero3", "survival.every_steps=5")
    assert "parallel.strategy = 'allreduce' there, 'zero3' now" in found.changed and "run.steps" in found.changed
    assert recipes.load_stored(begun / "recipe-1.toml") == first
    assert recipes.load_stored(begun / "recipe.toml").parallel.strategy == "zero3"
    prepare(begun, "run.steps=20", "parallel.strategy=zero1")
    assert recipes.load_stored(begun / "recipe-2.toml").parallel.strategy == "zero3"


@cases(
    "overrides",
    ("parallel.strategy=zero2", "zero.shared_parameters=true"),
    ("parallel.strategy=zero3", "zero.persistent_below=200", "zero.gradients=2", "zero.parameters=2"),
    ("parallel.strategy=zero1", "zero.offload_optimizer=file", "zero.offload_directory=states"),
)
def test_where_states_lie_may_change_either_way(begun, overrides):
    assert "zero." in prepare(begun, "run.steps=10", *overrides).changed
    assert "zero." in prepare(begun, "run.steps=10").changed


def test_a_start_that_fails_while_it_keeps_another_recipe_loses_none(begun, monkeypatch):
    replace = os.replace

    def fail(new, target):
        if target.name == "recipe.toml":
            raise OSError(28, "No space left on device")
        replace(new, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(StorageError, match="No space left"):
            prepare(begun, "run.steps=20")
    assert prepare(begun, "run.steps=10").changed == ""


def test_the_type_of_working_copies_may_change_but_no_state_is_rounded(begun):
    for mode in ("bfloat16", "float16", "float32"):
        assert "precision.mode = " in prepare(begun, "run.steps=10", f"precision.mode={mode}").changed


def test_a_recipe_of_an_older_version_has_the_defaults_of_new_keys(begun):
    stored = begun / "recipe.toml"
    text = stored.read_text()
    start = text.index("[energy]")
    following = text.find("\n[", start + 1)
    stored.write_text(text[:start] + (text[following:] if following > 0 else ""))
    assert "[energy]" not in stored.read_text()
    assert prepare(begun, "run.steps=10").changed == ""
