"""A run directory is one run; what a run is made with may change between its starts."""

from pathlib import Path

import pytest

from hpcdist.comm.solo import solo
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.training import directory
from hpcdist.training import recipe as recipes


def prepare(path: Path, *overrides: str, resume: str = "auto") -> directory.RunDirectory:
    return directory.prepare(solo(), recipes.load(None, overrides, {}).recipe, path, resume)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The directory of a run that has saved something."""
    path = tmp_path / "run"
    assert prepare(path, "run.steps=10").changed == ""
    (path / "checkpoints").mkdir()
    return path


def test_the_same_recipe_goes_on(begun: Path) -> None:
    assert prepare(begun, "run.steps=10").changed == ""
    with pytest.raises(UsageError, match="add --resume auto"):
        prepare(begun, "run.steps=10", resume="never")
    assert not list(begun.glob("recipe-*.toml"))


@pytest.mark.parametrize(
    "override",
    ["run.seed=5", "run.global_batch=32", "model.hidden=64", "optimizer.learning_rate=0.1", "data.context=64"],
)
def test_what_makes_it_another_run_is_refused(begun: Path, override: str) -> None:
    before = (begun / "recipe.toml").read_text()
    with pytest.raises(ConfigurationError, match=f"holds another run: {override.partition('=')[0]} = "):
        prepare(begun, "run.steps=10", override)
    assert (begun / "recipe.toml").read_text() == before


def test_layout_and_length_may_change_and_every_recipe_is_kept(begun: Path) -> None:
    first = recipes.load_stored(begun / "recipe.toml")
    found = prepare(begun, "run.steps=20", "parallel.strategy=zero3", "checkpoint.every_steps=5")
    assert "parallel.strategy = 'allreduce' there, 'zero3' now" in found.changed and "run.steps" in found.changed
    assert recipes.load_stored(begun / "recipe-1.toml") == first
    assert recipes.load_stored(begun / "recipe.toml").parallel.strategy == "zero3"
    prepare(begun, "run.steps=20", "parallel.strategy=zero1")
    assert recipes.load_stored(begun / "recipe-2.toml").parallel.strategy == "zero3"


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.strategy=zero2", "zero.shared_parameters=true"),
        ("parallel.strategy=zero3", "zero.persistent_below=200", "zero.gradients=2", "zero.parameters=2"),
        ("parallel.strategy=zero1", "zero.offload_optimizer=file", "zero.offload_directory=states"),
    ],
)
def test_where_states_lie_may_change_either_way(begun: Path, overrides: tuple[str, ...]) -> None:
    assert "zero." in prepare(begun, "run.steps=10", *overrides).changed
    assert "zero." in prepare(begun, "run.steps=10").changed


def test_a_recipe_of_an_older_version_has_the_defaults_of_new_keys(begun: Path) -> None:
    stored = begun / "recipe.toml"
    text = stored.read_text()
    start = text.index("[energy]")
    following = text.find("\n[", start + 1)
    stored.write_text(text[:start] + (text[following:] if following > 0 else ""))
    assert "[energy]" not in stored.read_text()
    assert prepare(begun, "run.steps=10").changed == ""
