"""Sweep files: the trials they expand into, and invalid files."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from harness.jobs import LIMIT_S
from harness.marks import cases
from hpcdist.bench.sweep import definition, results
from hpcdist.cli import main
from hpcdist.cli.bench import group
from hpcdist.errors import CONFIGURATION, FAILURE, OK, REQUEUE, STORAGE, ConfigurationError, StorageError

ARCHITECTURES = Path(__file__).parents[4] / "benchmarks" / "architectures" / "sweep.toml"


@pytest.fixture(autouse=True)
def _no_settings_of_this_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))
    monkeypatch.delenv("HPCDIST_SITE", raising=False)


@pytest.fixture
def expand(tmp_path):
    """``expand(text)`` returns the trials of a sweep file with that text."""

    def expand_text(text):
        path = tmp_path / "sweep.toml"
        path.write_text(text)
        result = definition.read(path)
        return definition.expand(result, group.SweepRecipes(result))

    return expand_text


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


def test_labels_distinguish_equal_keys_of_two_sections(expand):
    (trial,) = expand("[sweep]\nranks=1\n[axes]\nmodel.kind=['gpt']\noptimizer.name=['sgd']\n")
    assert trial.name == "kind=gpt name=sgd"
    assert definition.labels({"a.x": 1, "b.x": 2, "b.y": 3}) == ["a.x=1", "b.x=2", "y=3"]


def test_trial_id_depends_only_on_configuration_and_ranks(expand):
    (first,) = expand("[sweep]\nranks = 2\n[recipe.run]\nsteps = 7\n[[trial]]\nname = 'a'\nmodel.layers = 2\n")
    (same,) = expand("[sweep]\nranks = 2\nrepeats = 5\n[recipe.model]\nlayers = 2\n[axes]\nrun.steps = [7]\n")
    other_ranks, other_value = expand("[sweep]\nranks = [3, 2]\n[axes]\nrun.steps = [8]\n")
    assert first.id == same.id and first.name != same.name
    assert len({first.id, other_ranks.id, other_value.id}) == 3


def test_sweep_values_override_environment_and_base_recipe(expand, tmp_path, monkeypatch):
    (tmp_path / "base.toml").write_text("[run]\nsteps = 9\nseed = 4\n[data]\npath = 'text.txt'\n")
    monkeypatch.setenv("HPCDIST_SET__RUN__STEPS", "11")
    monkeypatch.setenv("HPCDIST_SET__RUN__SEED", "12")
    (trial,) = expand("[sweep]\nranks = 2\nrecipe = 'base.toml'\n[axes]\nrun.seed = [5]\n")
    assert "seed = 5" in trial.recipe, "values of the sweep must win"
    assert "steps = 11" in trial.recipe, "a variable must override the base recipe, as in any run"
    assert f'path = "{tmp_path / "text.txt"}"' in trial.recipe


def test_exclude_drops_trials_that_match_all_conditions(expand):
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


def test_exclude_conditions_have_recipe_types(expand, tmp_path):
    text = "[sweep]\nranks = 1\n[axes]\noptimizer.learning_rate = [1, 0.5]\ndata.path = ['a.txt', 'b.txt']\n"
    left = expand(text + "[[exclude]]\noptimizer.learning_rate = 1.0\ndata.path = './a.txt'\n")
    assert [trial.name for trial in left] == [
        "learning_rate=1 path=b.txt",
        "learning_rate=0.5 path=a.txt",
        "learning_rate=0.5 path=b.txt",
    ]


TWO = """
    [sweep]
    ranks = [1, 2]
    [axes]
    optimizer.name = ["sgd", "adamw"]
    [[trial]]
    name = "a"
    [[trial]]
    name = "b"
    ranks = 2
"""


@cases(
    "conditions, words",
    ("ranks = '2'", ["ranks", "'2'", "[[exclude]] 1"]),
    ("ranks = [2, 3]", ["ranks = 3", "matches no trial", "[1, 2]"]),
    ("ranks = []", ["ranks = []"]),
    ("trial = 'c'", ["trial = 'c'", "matches no trial", "['a', 'b']"]),
    ("optimizer.name = 'lars'", ["optimizer.name = 'lars'", "matches no trial", "['sgd', 'adamw']"]),
    ("optimizer.name = 3", ["optimizer.name = 3", "wrong type", "a text", "[[exclude]] 1"]),
    ("run.seed = 1", ["run.seed = 1", "matches no trial", "[0]"]),
    ("run.seed = [[0]]", ["run.seed = [0]", "a whole number"]),
    ("run.sed = 0", ["'run.sed'", "'run.seed'", "[[exclude]] 1"]),
    ("trial = 'b'\nranks = 1", ["no trial matches all", "'trial': 'b'"]),
)
def test_meaningless_exclude_is_rejected(expand, conditions, words):
    with pytest.raises(ConfigurationError) as error:
        expand(f"{TWO}\n[[exclude]]\n{conditions}\n")
    assert all(word in str(error.value) for word in words), str(error.value)


@cases(
    "text, words",
    ("[[trial]]\nname = 'p'\nparallel.pipeline = 4", ["'p' on 2 ranks", "parallel.pipeline 4", "= 4, but", "2 ranks"]),
    ("[recipe.run]\nglobal_batch = 1", ["'base' on 2 ranks", "run.global_batch = 1", "2 data ranks"]),
    ("[recipe.parallel]\nstrategy = 'parameter_server'\n[recipe.parameter_server]\nservers = 2", ["leave no worker"]),
)
def test_degrees_that_do_not_fit_the_ranks_are_rejected(expand, text, words):
    with pytest.raises(ConfigurationError) as error:
        expand(f"[sweep]\nranks = 2\n{text}\n")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_excluded_trial_need_not_fit_its_ranks(expand):
    text = "[sweep]\nranks = [2, 4]\n[axes]\nparallel.pipeline = [1, 4]\n[recipe.parallel]\nmicrobatches = 4\n"
    text += "[recipe.model]\nlayers = 4\n"
    left = expand(text + "[[exclude]]\nranks = 2\nparallel.pipeline = 4\n")
    assert [(trial.name, trial.ranks) for trial in left] == [("pipeline=1", 2), ("pipeline=1", 4), ("pipeline=4", 4)]


def test_excluded_combination_need_not_be_valid(expand):
    axes = "[sweep]\nranks = [1]\n[axes]\nmodel.kind = ['gpt', 'mlp']\nmodel.tied = [true, false]\n"
    with pytest.raises(ConfigurationError, match=r"'kind=mlp tied=True'.*tied"):
        expand(axes)
    assert len(expand(axes + "[[exclude]]\nmodel.kind = 'mlp'\nmodel.tied = true\n")) == 3


@cases(
    "text, words",
    ("ranks = [2]", [": ranks;", "sweep.toml"]),
    ("[swep]\nranks = 2", [": swep;", "'sweep'"]),
    ("[sweep]\nrank = 2", ["sweep.rank;", "'ranks'"]),
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
    ("[sweep]\nranks = 2\nrecipe = 'none.toml'\n[recipe.run]\nsteps = 2", ["cannot be combined"]),
    ("[sweep]\nranks = 2\n[[trial]]\nrun.steps = 2", ["trial", "name = None"]),
    ("[sweep]\nranks = 2\n[[trial]]\nname = 'a'\n[[trial]]\nname = 'a'", ["name = 'a'"]),
    ("[sweep]\nranks = 2\n[trial]\nname = 'a'", ["[[trial]]"]),
    ("[sweep]\nranks = [2, 2]", ["same configuration", "2 ranks"]),
    ("[sweep]\nranks = 2\n[axes]\nrun.seed=[1]\n[[trial]]\nname='a'\nrun.seed = 2", ["run.seed", "axis", "'a'"]),
    ("[sweep", ["not valid TOML"]),
)
def test_invalid_sweep_files_are_rejected(expand, text, words):
    with pytest.raises((ConfigurationError, StorageError)) as error:
        expand(text)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_unknown_key_is_rejected_before_any_trial(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hpcdist.bench.sweep.trial.run", lambda *_: pytest.fail("a trial was started"))
    path, results = tmp_path / "sweep.toml", tmp_path / "results.h5"
    path.write_text("[sweep]\nranks = 2\n[axes]\nrun.seed = [1, 2]\n[[trial]]\nname = 'a'\nparallel.stratgy = 'x'\n")
    with pytest.raises(SystemExit) as leaving:
        main.main(["bench", "sweep", str(path), "-o", str(results)])
    stderr = capsys.readouterr().err
    assert leaving.value.code == CONFIGURATION
    assert "parallel.stratgy" in stderr and "'parallel.strategy'" in stderr and str(path) in stderr
    assert not results.exists()


def test_architectures_sweep_is_valid_on_its_ranks():
    """All keys and values are valid, and the degrees divide ranks, batch and layers."""
    result = definition.read(ARCHITECTURES)
    resolve = group.SweepRecipes(result).resolve
    trials = definition.expand(result, group.SweepRecipes(result))
    for trial in trials:
        values = resolve(trial.settings).values
        pipeline, microbatches = values["parallel.pipeline"], values["parallel.microbatches"]
        assert pipeline <= values["model.layers"]
        assert values["run.global_batch"] % (microbatches * (trial.ranks // pipeline)) == 0
        same = ("model.hidden", "model.layers", "data.context", "run.global_batch", "run.seed", "optimizer.name")
        assert all(values[key] == resolve({}).values[key] for key in same), "architectures are compared on one training"
    strategies = {trial.settings.get("parallel.strategy", "allreduce") for trial in trials}
    assert strategies == {"allreduce", "zero1", "zero2", "zero3", "parameter_server"}
    for ranks in (2, 4):
        assert sum(trial.ranks == ranks for trial in trials) >= 10


# ---- the command, with trials that run no training

SLEEPS = "import time; Path('began').touch(); time.sleep(600)"
SAYS = "import os, sys; sys.exit('Error: ' + ' '.join(sorted(name for name in os.environ if name[:7] == 'HPCDIST')))"
COMMAND = """
    import signal, sys
    from pathlib import Path
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored, as it should be
    from hpcdist.bench.sweep import trial
    from hpcdist.cli import main
    trial.command = lambda of, recipe, out, options: [sys.executable, "-c", "from pathlib import Path; " + sys.argv[1]]
    main.main(["bench", "sweep", "sweep.toml", *sys.argv[2:]])
"""


@pytest.fixture
def start(tmp_path):
    """``start(program, *arguments)`` starts `hpcdist bench sweep` with one trial, the Python ``program``."""
    (tmp_path / "sweep.toml").write_text("[sweep]\nranks = 2\n")
    processes = []

    def start_process(program, *arguments):
        line = [sys.executable, "-P", "-c", textwrap.dedent(COMMAND), program, *arguments]
        processes.append(
            subprocess.Popen(line, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        return processes[-1]

    yield start_process
    for process in processes:
        process.kill()
        process.communicate()


def wait_for_trial(process, folder):
    """Wait until the trial of ``process`` runs."""
    limit = time.monotonic() + LIMIT_S
    while not (folder / "began").exists():
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.02)


def test_recipe_variables_do_not_reach_a_trial(start, tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDIST_SET__RUN__STEPS", "11")
    monkeypatch.setenv("HPCDIST_OTHER", "kept")
    process = start(SAYS, "-o", "r.h5")
    assert process.wait(LIMIT_S) == FAILURE, process.stderr.read()
    (result,) = results.read(tmp_path / "r.h5").configurations
    assert "steps = 11" in result.recipe
    assert "HPCDIST_OTHER" in result.repeats[0].reason and "HPCDIST_SET__" not in result.repeats[0].reason


@pytest.mark.full
def test_two_sweeps_cannot_write_one_file(start, tmp_path):
    first = start(SLEEPS, "-o", "r.h5")
    wait_for_trial(first, tmp_path)
    second = start("pass", "-o", "r.h5")
    output = second.communicate(timeout=LIMIT_S)[1]
    assert (second.returncode, output.count("another sweep writes r.h5")) == (STORAGE, 1), output
    assert "Traceback" not in output and results.statuses(tmp_path / "r.h5") == {}
    assert start("pass", "-o", "r.h5", "--dry-run").wait(LIMIT_S) == OK, "a dry run needs no lock"
    assert start("pass", "-o", "other.h5").wait(LIMIT_S) == FAILURE, "another file has another lock"
    first.kill()
    first.wait()
    assert start(SAYS, "-o", "r.h5").wait(LIMIT_S) == FAILURE, "a lock ends with its process"
    assert list(results.statuses(tmp_path / "r.h5").values()) == ["failed"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1], ids=["TERM", "HUP", "USR1"])
@pytest.mark.full
def test_signal_ends_a_sweep_and_leaves_no_files(start, tmp_path, number):
    process = start(SLEEPS, "-o", "r.h5")
    wait_for_trial(process, tmp_path)
    assert list(tmp_path.glob("r.h5.trial-*")) and (tmp_path / "r.h5.lock").exists()
    process.send_signal(number)
    output = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == REQUEUE and "0 ok, 0 failed, 1 left" in output, output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["began", "r.h5", "sweep.toml"]


def test_only_files_of_a_killed_sweep_are_removed(start, tmp_path):
    process = start(SLEEPS, "-o", "r.h5")
    wait_for_trial(process, tmp_path)
    process.kill()
    process.wait()
    (left,) = tmp_path.glob("r.h5.trial-*")
    kept = {tmp_path / name for name in ("r.h5.trial-notes", "r.h5.trial-12345678", "other.h5.trial-12345678")}
    for path in kept - {tmp_path / "r.h5.trial-12345678"}:
        path.mkdir()
    (tmp_path / "r.h5.trial-12345678").write_text("a file")
    again = start(SAYS, "-o", "r.h5")
    output = again.communicate(timeout=LIMIT_S)[1]
    assert again.returncode == FAILURE and "--retry-failed runs failed trials again" in output, output
    assert not left.exists() and set(tmp_path.glob("*.trial-*")) == kept


@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_unwritable_results_end_the_command_first(start, tmp_path, options):
    process = start("Path('began').touch()", "-o", "missing/r.h5", *options)
    output = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == STORAGE and "missing is not a directory" in output, output
    assert not (tmp_path / "began").exists()


def test_dry_run_rejects_invalid_sweeps(start, tmp_path):
    (tmp_path / "sweep.toml").write_text("[sweep]\nranks = [4, 2]\n[[trial]]\nname = 'four'\nparallel.pipeline = 4\n")
    process = start("pass", "-o", "r.h5", "--dry-run")
    out, output = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (CONFIGURATION, "")
    assert "trial 'four' on 2 ranks" in output and "parallel.pipeline 4" in output and "has 2 ranks" in output
