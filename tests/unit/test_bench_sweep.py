"""Sweep files: what they expand into, and what they are refused for."""

from pathlib import Path

import pytest

from hpcdist.bench import sweep
from hpcdist.cli import bench, main
from hpcdist.errors import CONFIGURATION, ConfigurationError

ARCHITECTURES = Path(__file__).parents[2] / "benchmarks" / "architectures.toml"


@pytest.fixture(autouse=True)
def _no_settings_of_this_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))
    monkeypatch.delenv("HPCDIST_SITE", raising=False)


@pytest.fixture
def expand(tmp_path):
    """``expand(text)`` -> the trials of a sweep file with that text, by the recipes of hpcdist."""

    def expanded(text):
        path = tmp_path / "sweep.toml"
        path.write_text(text)
        found = sweep.read(path)
        return sweep.expand(found, bench._resolver(found))

    return expanded


def test_axes_multiply_with_trials_and_ranks(expand):
    trials = expand("""
        [sweep]
        ranks = [2, 4]
        [axes]
        optimizer.name = ["sgd", "adamw"]
        "run.seed" = [1, 2, 3]
        [[trial]]
        name = "ring"
        communication.algorithm = "ring"
        [[trial]]
        name = "native"
        ranks = 3
        communication.algorithm = "native"
    """)
    assert len(trials) == 2 * 3 * (2 + 1)
    assert len({trial.id for trial in trials}) == len(trials)
    assert [trial.ranks for trial in trials[:3]] == [2, 4, 2]
    assert trials[0].name == "ring name=sgd seed=1" and trials[-1].name == "native name=adamw seed=3"
    assert all('algorithm = "ring"' in trial.recipe for trial in trials[:12])
    assert 'name = "adamw"' in trials[-1].recipe and "seed = 3" in trials[-1].recipe
    assert {trial.ranks for trial in trials[12:]} == {3}


def test_equal_leaves_of_two_sections_are_told_apart(expand):
    (trial,) = expand("[sweep]\nranks=1\n[axes]\nmodel.kind=['gpt']\noptimizer.name=['sgd']\n")
    assert trial.name == "kind=gpt name=sgd"
    labels = sweep._labels({"a.x": 1, "b.x": 2, "b.y": 3})
    assert labels == ["a.x=1", "b.x=2", "y=3"]


def test_an_id_is_configuration_and_ranks_and_nothing_else(expand):
    (first,) = expand("[sweep]\nranks = 2\n[recipe.run]\nsteps = 7\n[[trial]]\nname = 'a'\nmodel.layers = 2\n")
    (same,) = expand("[sweep]\nranks = 2\nrepeats = 5\n[recipe.model]\nlayers = 2\n[axes]\nrun.steps = [7]\n")
    other_ranks, other_value = expand("[sweep]\nranks = [3, 2]\n[axes]\nrun.steps = [8]\n")
    assert first.id == same.id and first.name != same.name
    assert len({first.id, other_ranks.id, other_value.id}) == 3


def test_base_recipe_of_a_file_and_values_above_the_environment(expand, tmp_path, monkeypatch):
    (tmp_path / "base.toml").write_text("[run]\nsteps = 9\nseed = 4\n[data]\npath = 'text.txt'\n")
    monkeypatch.setenv("HPCDIST_SET__RUN__STEPS", "11")
    monkeypatch.setenv("HPCDIST_SET__RUN__SEED", "12")
    (trial,) = expand("[sweep]\nranks = 2\nrecipe = 'base.toml'\n[axes]\nrun.seed = [5]\n")
    assert "seed = 5" in trial.recipe, "what the sweep varies counts"
    assert "steps = 11" in trial.recipe, "a variable counts above the base recipe, as in any run"
    assert f'path = "{tmp_path / "text.txt"}"' in trial.recipe


def test_excludes_drop_trials_that_meet_all_conditions(expand):
    text = """
        [sweep]
        ranks = [2, 4]
        [axes]
        optimizer.name = ["sgd", "adamw", "lars"]
        [[trial]]
        name = "a"
        [[trial]]
        name = "b"
        run.seed = 3
    """
    assert len(expand(text)) == 12
    left = expand(text + "[[exclude]]\nranks = 4\noptimizer.name = ['sgd', 'lars']\n[[exclude]]\ntrial = 'b'\n")
    assert [(trial.name, trial.ranks) for trial in left] == [
        ("a name=sgd", 2),
        ("a name=adamw", 2),
        ("a name=adamw", 4),
        ("a name=lars", 2),
    ]
    assert [trial.name[0] for trial in expand(text + "[[exclude]]\nrun.seed = 0\n")] == ["b"] * 6, "defaults count"
    with pytest.raises(ConfigurationError, match="no trial left"):
        expand(text + "[[exclude]]\nranks = [2, 4]\n")
    with pytest.raises(ConfigurationError, match=r"optimizer\.name"):
        expand(text + "[[exclude]]\noptimizer.nam = 'sgd'\n")


def test_an_excluded_combination_need_not_be_valid(expand):
    axes = "[sweep]\nranks = [1]\n[axes]\nmodel.kind = ['gpt', 'mlp']\nmodel.tied = [true, false]\n"
    with pytest.raises(ConfigurationError, match=r"'kind=mlp tied=True'.*tied"):
        expand(axes)
    assert len(expand(axes + "[[exclude]]\nmodel.kind = 'mlp'\nmodel.tied = true\n")) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ranks = [2]", ["'ranks'", "sweep.toml"]),
        ("[swep]\nranks = 2", ["'swep'", "'sweep'"]),
        ("[sweep]\nrank = 2", ["'rank'", "'ranks'"]),
        ("[sweep]", ["ranks", "None", "[2, 4]"]),
        ("[sweep]\nranks = [0]", ["[0]"]),
        ("[sweep]\nranks = [true]", ["[True]"]),
        ("[sweep]\nranks = 2\nrepeats = 0", ["repeats = 0"]),
        ("[sweep]\nranks = 2\n[axes]\nrun.steps = 3", ["axes.run.steps = 3", "list"]),
        ("[sweep]\nranks = 2\n[axes]\nrun.steps = []", ["axes.run.steps = []", "list"]),
        ("[sweep]\nranks = 2\n[axes]\nrun.stepz = [3]", ["run.stepz", "'run.steps'", "sweep.toml"]),
        ("[sweep]\nranks = 2\n[axes]\nrun.steps = ['3']", ["run.steps = '3'", "a whole number"]),
        ("[sweep]\nranks = 2\n[axes]\noptimizer.name = ['adamx']", ["name=adamx", "adamw"]),
        ("[sweep]\nranks = 2\n[recipe.modell]\nlayers = 2", ["modell", "model"]),
        ("[sweep]\nranks = 2\nrecipe = 'none.toml'", ["none.toml", "no such file"]),
        ("[sweep]\nranks = 2\nrecipe = 'none.toml'\n[recipe.run]\nsteps = 2", ["one recipe file"]),
        ("[sweep]\nranks = 2\n[[trial]]\nrun.steps = 2", ["trial", "name = None"]),
        ("[sweep]\nranks = 2\n[[trial]]\nname = 'a'\n[[trial]]\nname = 'a'", ["name = 'a'"]),
        ("[sweep]\nranks = 2\n[trial]\nname = 'a'", ["[[trial]]"]),
        ("[sweep]\nranks = [2, 2]", ["same configuration", "2 ranks"]),
        ("[sweep]\nranks = 2\n[axes]\nrun.seed=[1]\n[[trial]]\nname='a'\nrun.seed = 2", ["run.seed", "axis", "'a'"]),
        ("[sweep", ["not valid TOML"]),
    ],
)
def test_what_is_wrong_is_named(expand, text, words):
    with pytest.raises(ConfigurationError) as error:
        expand(text)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_unknown_key_ends_the_command_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hpcdist.bench.trial.run", lambda *_: pytest.fail("a trial was started"))
    path, results = tmp_path / "sweep.toml", tmp_path / "results.h5"
    path.write_text("[sweep]\nranks = 2\n[axes]\nrun.seed = [1, 2]\n[[trial]]\nname = 'a'\nparallel.stratgy = 'x'\n")
    with pytest.raises(SystemExit) as leaving:
        main.main(["bench", "sweep", str(path), "-o", str(results)])
    said = capsys.readouterr().err
    assert leaving.value.code == CONFIGURATION
    assert "parallel.stratgy" in said and "'parallel.strategy'" in said and str(path) in said
    assert not results.exists()


def test_the_sweep_of_the_architectures_is_valid_on_its_ranks():
    """Every key and value is one of recipes, and the degrees divide the ranks, the batch and the layers."""
    found = sweep.read(ARCHITECTURES)
    resolve = bench._resolver(found)
    trials = sweep.expand(found, resolve)
    for trial in trials:
        values = resolve(trial.settings).values
        pipeline, microbatches = values["parallel.pipeline"], values["parallel.microbatches"]
        assert trial.ranks % pipeline == 0 and pipeline <= values["model.layers"]
        assert values["run.global_batch"] % (microbatches * (trial.ranks // pipeline)) == 0
        same = ("model.hidden", "model.layers", "data.context", "run.global_batch", "run.seed", "optimizer.name")
        assert all(values[key] == resolve({}).values[key] for key in same), "architectures are compared on one training"
    strategies = {trial.settings.get("parallel.strategy", "allreduce") for trial in trials}
    assert strategies == {"allreduce", "zero1", "zero2", "zero3", "parameter_server"}
    for ranks in (2, 4):
        assert sum(trial.ranks == ranks for trial in trials) >= 10
