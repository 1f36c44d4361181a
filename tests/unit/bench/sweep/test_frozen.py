"""A sweep frozen in one file expands into the same trials anywhere, in spite of later changes."""

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
def expand_trials(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))
    monkeypatch.delenv("HPCDIST_SITE", raising=False)

    def expanded(path):
        result = definition.read(path)
        return definition.expand(result, SweepRecipes(result)), result.repeats

    return expanded


def trial_identities(expand_trials):
    return [(trial.id, trial.name, trial.ranks, trial.recipe) for trial in expand_trials]


def test_frozen_sweep_expands_into_the_same_trials(expand_trials, tmp_path, monkeypatch):
    (tmp_path / "base.toml").write_text("[run]\nsteps = 7\n[model]\nlayers = 3\n")
    (tmp_path / "sweep.toml").write_text(SWEEP)
    monkeypatch.setenv("HPCDIST_SET__MODEL__HIDDEN", "64")
    result, repeats = expand_trials(tmp_path / "sweep.toml")
    assert len(result) == 2 * (2 * 3 - 1) + 4
    text = definition.freeze(result, repeats)
    monkeypatch.delenv("HPCDIST_SET__MODEL__HIDDEN")
    (tmp_path / "nothing" / "hpcdist").mkdir(parents=True)
    (tmp_path / "nothing" / "hpcdist" / "config.toml").write_text("[run]\nsteps = 9\n[model]\nhidden = 128\n")
    (tmp_path / "base.toml").unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "frozen.toml").write_text(text)
    again, same = expand_trials(elsewhere / "frozen.toml")
    assert trial_identities(again) == trial_identities(result) and same == 3
    assert definition.freeze(again, same) == text, "freezing again must change nothing"


def test_common_settings_are_written_once(expand_trials, tmp_path):
    (tmp_path / "sweep.toml").write_text("[sweep]\nranks = [2, 1]\n[axes]\nrun.seed = [1, 2, 3]\n")
    tree = tomllib.loads(definition.freeze(*expand_trials(tmp_path / "sweep.toml")))
    assert tree["trial"] == [{"name": f"seed={seed}", "ranks": [2, 1], "run": {"seed": seed}} for seed in (1, 2, 3)]
    assert "seed" not in tree["recipe"]["run"] and tree["sweep"] == {"repeats": 1}
