"""One trial of a sweep: selected, listed, and run alone with the options of `hpcdist run`."""

import json
from pathlib import Path

import pytest

from harness.jobs import call_command, run_light_commands
from harness.marks import cases
from hpcdist.bench.sweep import definition, results, series
from hpcdist.bench.sweep.definition import SweepTrial
from hpcdist.bench.sweep.trial import FAILED, TrialOutcome
from hpcdist.cli.bench import trials as bench_trials
from hpcdist.cli.bench.trials import run_options
from hpcdist.errors import FAILURE, OK, USAGE, UsageError

NOT_FOR_A_LIST = ("mpi4py", "numba", "llvmlite", "h5py", "cupy", "matplotlib", "torch")
SWEEP = """
[sweep]
ranks = [1, 2]
repeats = 2
[[trial]]
name = "ring"
communication.algorithm = "ring"
[[trial]]
name = "two"
ranks = 2
run.seed = 2
"""


def make_trials(*names_and_ranks):
    return [SweepTrial(f"{at:012x}", name, ranks, {}, "") for at, (name, ranks) in enumerate(names_and_ranks)]


FOUR = make_trials(("a", 1), ("a", 2), ("late start", 2), ("1", 4))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("3", 3), ("+2", 2), ("late start", 2), ("00000000000" + "1", 1), ("1", 1), ("0" * 11 + "3", 3)],
)
def test_trial_is_selected_by_position_id_or_name(text, expected):
    assert definition.trial_position(FOUR, text, "s.toml") == expected


@cases(
    "text, words",
    ("4", ["4 trials", "0 to 3", "nearest is 3"]),
    ("-1", ["0 to 3", "nearest is 0"]),
    ("lat start", ["'lat start'", "s.toml", "nearest is 'late start'"]),
    ("qqq", ["'qqq'", "0 to 3", "--list"]),
    ("", ["''", "--list"]),
    ("a", ["2 trials of s.toml", "0 (1 rank), 1 (2 ranks)", "id"]),
    ("1.0", ["'1.0'"]),
)
def test_unknown_trial_is_rejected_with_the_nearest_name(text, words):
    with pytest.raises(UsageError) as error:
        definition.trial_position(FOUR, text, "s.toml")
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.fixture
def sweep_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))
    monkeypatch.delenv("HPCDIST_SITE", raising=False)
    path = tmp_path / "sweep.toml"
    path.write_text(SWEEP)
    return path


def test_list_imports_neither_mpi_nor_hdf5(sweep_file):
    (output,) = run_light_commands(NOT_FOR_A_LIST, ["bench", "sweep", str(sweep_file), "--list", "--json"])
    listed = json.loads(output)
    assert listed["sweep"] == str(sweep_file)
    assert [(row["index"], row["name"], row["ranks"], row["repeats"]) for row in listed["trials"]] == [
        (0, "ring", 1, 2),
        (1, "ring", 2, 2),
        (2, "two", 2, 2),
    ]
    assert not list(sweep_file.parent.glob("results.h5*"))


def test_list_of_a_benchmark_imports_no_numpy():
    assert len(run_light_commands(("numpy", *NOT_FOR_A_LIST), ["bench", "step", "--list"])) > 5


def test_list_as_text_of_all_trials_and_one_trial(sweep_file, capsys):
    code, out, _ = call_command(capsys, "bench", "sweep", sweep_file, "--list")
    head, *rows = (line.split() for line in out.splitlines())
    assert (code, head) == (OK, ["index", "id", "ranks", "repeats", "name"]) and len(rows) == 3
    code, out, _ = call_command(capsys, "bench", "sweep", sweep_file, "--list", "--trial", "two")
    assert code == OK and [line.split() for line in out.splitlines()] == [head, rows[2]]
    code, out, _ = call_command(capsys, "bench", "sweep", sweep_file, "--list", "--trial", rows[1][1])
    assert code == OK and out.splitlines()[1].split() == rows[1]
    code, _, output = call_command(capsys, "bench", "sweep", sweep_file, "--json")
    assert code == USAGE and "--list" in output


def test_single_trial_runs_all_repeats_and_keeps_its_position(sweep_file, capsys, monkeypatch, tmp_path):
    ran = []

    def run_failing_trial(of, folder, limit_s, line, environment):
        ran.append((of.name, of.ranks, line(of, Path("R"), Path("O"))))
        return TrialOutcome(FAILED, "2026-01-01T00:00:00+00:00", 1.0, 1, "exit code 1")

    monkeypatch.setattr("hpcdist.bench.sweep.trial.run", run_failing_trial)
    options = ("--ranks-per-node", "4", "--run-args", "--mpi-args '-x NAME'")
    local_data = tmp_path / "1.h5"
    code, _, output = call_command(capsys, "bench", "sweep", sweep_file, "-o", local_data, "--trial", "1", *options)
    assert code == FAILURE and "0 ok, 2 failed, 0 left" in output, output
    assert [(name, ranks) for name, ranks, _ in ran] == [("ring", 2)] * 2
    line = ran[0][2]
    assert line[line.index("run") :] == [
        *("run", "-n", "2", "--grace", "5", "--mpi-args", "-x NAME", "--ranks-per-node", "4"),
        *("train", "R", "--out", "O", "--json"),
    ]
    code, _, output = call_command(capsys, "bench", "sweep", sweep_file, "-o", local_data, "--trial", "1", *options)
    assert (code, len(ran)) == (FAILURE, 2), "recorded trials must not run again, and stay failed"
    assert (
        call_command(capsys, "bench", "sweep", sweep_file, "-o", local_data, "--trial", "1", "--retry-failed")[0]
        == FAILURE
    )
    assert len(ran) == 4 and "--ranks-per-node" not in ran[-1][2]
    whole = tmp_path / "whole.h5"
    call_command(capsys, "bench", "sweep", sweep_file, "-o", whole)
    alone, all_of_them = results.read(local_data).configurations, results.read(whole).configurations
    assert [each.id for each in alone] == [all_of_them[1].id]
    code, out, _ = call_command(
        capsys, "bench", "sweep", sweep_file, "-o", local_data, "--trial", "1", "--dry-run", *options
    )
    assert code == OK and out.startswith("[1/2] ") and "recorded: failed" in out and "--ranks-per-node 4 train" in out
    assert call_command(capsys, "bench", "sweep", sweep_file, "-o", local_data, "--trial", "3")[0] == USAGE


def test_plan_of_one_trial_keeps_its_position(tmp_path):
    items = series.plan(FOUR, 3, tmp_path / "r.h5", False, 2)
    assert [(item.position, item.repeat, item.trial.name) for item in items] == [
        (2, repeat, "late start") for repeat in range(3)
    ]


def test_run_args_are_split_into_words():
    assert run_options(None, "") == []
    assert run_options(2, "--restarts 1 --mpi-args '-x A -x B'") == [
        *("--restarts", "1", "--mpi-args", "-x A -x B", "--ranks-per-node", "2")
    ]


def test_trial_environment_has_no_job_end_time(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    environment = bench_trials._environment()
    assert "SLURM_JOB_END_TIME" not in environment and environment["SLURM_JOB_ID"] == "7"


def test_ranks_per_node_may_be_given_only_once():
    assert run_options(None, "--ranks-per-node 2") == ["--ranks-per-node", "2"]
    with pytest.raises(UsageError, match="keep one"):
        run_options(2, "--ranks-per-node 2")


@cases(
    "text, word",
    ("-n 4", "leave -n out"),
    ("--ranks=4", "leave -n out"),
    ("--grace 3", "--limit-s"),
    ("--dry-run", "of this command"),
    ("--nonsense", "--nonsense"),
    ("train", "'train'"),
    ("--restarts many", "many"),
    ("--mpi-args", "quote"),
    ("'x", "quotation"),
)
def test_run_args_that_fail_every_trial_are_rejected(text, word):
    with pytest.raises(UsageError, match="--run-args") as error:
        run_options(None, text)
    assert word in str(error.value), str(error.value)
