"""`hpcdist config show`: the resolved recipe, and the origin of each value."""

import json
import tomllib

import pytest
from click.testing import CliRunner

from hpcdist.cli.train import config as command
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.recipe import Recipe


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("HPCDIST_SITE", raising=False)

    def run(*arguments):
        done = CliRunner().invoke(command, ["show", *arguments], catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    return run


def test_show_prints_the_recipe(invoke):
    assert invoke() == recipes.dump(Recipe())


def test_show_with_origins_is_valid_toml(invoke, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('[run]\nsteps = 5\n[data]\npath = "a = b"\n')
    shown = invoke(str(path), "--set", "run.seed=4", "--origin")
    resolved = recipes.load(path, ["run.seed=4"])
    assert tomllib.loads(shown) == tomllib.loads(recipes.dump(resolved.recipe))
    run = shown[shown.index("[run]") : shown.index("[checkpoint]")] + shown[: shown.index("[optimizer]")]
    places = {line.split(" = ")[0]: line.rpartition("  # ")[2] for line in run.splitlines() if " = " in line}
    assert places["steps"] == f"recipe {path}"
    assert places["seed"] == "--set"
    assert places["device"] == "default"
    assert places["path"] == f"recipe {path}"


def test_show_as_json_has_values_and_origins(invoke):
    shown = json.loads(invoke("--json", "--set", "run.seed=4"))
    assert shown["recipe"]["run.seed"] == 4
    assert shown["origin"]["run.seed"] == "--set"
    assert shown["recipe"].keys() == shown["origin"].keys() == recipes.defaults().keys()
