"""A sweep in one file, as it was: it expands into the same trials wherever, and whatever has changed since."""

import tomllib

import pytest

from hpcdist.bench.sweep import definition
from hpcdist.cli.bench.trials import SweepRecipes

SWEEP = """
[sweep]
ranks = [4, 2, 1]
repeats = 3
recipe = "base.toml"
[axes]
run.seed = [1, 2]
data.path = ["a \\u2028 \\" # = [x] é", "b"]
[[trial]]
name = "ring # [recipe.run] \\n \\u2028"
communication.algorithm = "ring"
[[trial]]
name = "two"
ranks = 2
optimizer.learning_rate = 1e-5
[[exclude]]
run.seed = 2
ranks = 4
"""


@pytest.fixture
def trials(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))
    monkeypatch.delenv("HPCDIST_SITE", raising=False)

    def expanded(path):
        found = definition.read(path)
        return definition.expand(found, SweepRecipes(found)), found.repeats

    return expanded


def known(trials):
    return [(trial.id, trial.name, trial.ranks, trial.recipe) for trial in trials]


def test_it_expands_into_the_same_trials(trials, tmp_path, monkeypatch):
    (tmp_path / "base.toml").write_text("[run]\nsteps = 7\n[model]\nlayers = 3\n")
    (tmp_path / "sweep.toml").write_text(SWEEP)
    monkeypatch.setenv("HPCDIST_SET__MODEL__HIDDEN", "64")
    found, repeats = trials(tmp_path / "sweep.toml")
    assert len(found) == 2 * (2 * 3 - 1) + 4
    text = definition.freeze(found, repeats)
    monkeypatch.delenv("HPCDIST_SET__MODEL__HIDDEN")
    (tmp_path / "nothing" / "hpcdist").mkdir(parents=True)
    (tmp_path / "nothing" / "hpcdist" / "config.toml").write_text("[run]\nsteps = 9\n[model]\nhidden = 128\n")
    (tmp_path / "base.toml").unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "frozen.toml").write_text(text)
    again, same = trials(elsewhere / "frozen.toml")
    assert known(again) == known(found) and same == 3
    assert definition.freeze(again, same) == text, "frozen once is frozen for good"


def test_what_all_have_in_common_is_written_once(trials, tmp_path):
    (tmp_path / "sweep.toml").write_text("[sweep]\nranks = [2, 1]\n[axes]\nrun.seed = [1, 2, 3]\n")
    tree = tomllib.loads(definition.freeze(*trials(tmp_path / "sweep.toml")))
    assert tree["trial"] == [{"name": f"seed={seed}", "ranks": [2, 1], "run": {"seed": seed}} for seed in (1, 2, 3)]
    assert "seed" not in tree["recipe"]["run"] and tree["sweep"] == {"repeats": 1}
