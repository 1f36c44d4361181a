"""Sweeps as job arrays, benchmarks, servers on nodes of their own: scripts, what they do, and what is refused."""

import dataclasses
import re
import shlex
import signal
import tomllib
from pathlib import Path

import pytest

from harness.job_scripts import (
    EVIL,
    PLAIN,
    check_by_bash,
    check_golden,
    ended,
    play,
    played_python,
    signal_when_ready,
    start_script,
    words,
)
from harness.jobs import called
from harness.marks import cases
from hpcdist.batch import submission
from hpcdist.batch.array import BenchmarkJob, MergeJob, ServersJob, SweepJob
from hpcdist.batch.job import SUITES, SWEEP
from hpcdist.batch.sites import search
from hpcdist.comm.launch import launchers
from hpcdist.errors import CONFIGURATION, STORAGE, UsageError

TEXT = '[sweep]\nrepeats = 1\n\n[[trial]]\nname = "it\'s $one"\nranks = [2, 8]\n'
NAMES = {item.name for item in dataclasses.fields(PLAIN)} - {"recipe", "sweep"}
SHARED = {name: getattr(PLAIN, name) for name in NAMES}
ARRAY = SweepJob(**SHARED, sweep=TEXT, trial_ranks=(2, 8))
SERVERS = ServersJob(**SHARED, recipe=PLAIN.recipe, server_nodes=1, server_ranks_per_node=2)
MPICH = search.load("slurm-mpich")
SLURMS = ("slurm-openmpi", "slurm-mpich", "cray", "parastation", "ibrun")
# Name -> profile, job: each template at each kind of site, and what only some jobs have.
JOBS = {
    **{f"sweep-{site}": (site, ARRAY) for site in SLURMS},
    "sweep-full": (
        "slurm-mpich",
        dataclasses.replace(
            ARRAY,
            at_most=3,
            retry_failed=True,
            check=False,
            walltime=None,
            run_dir=Path("/scratch/me/50% off"),
            gpus_per_node=4,
            mpi_args="--exact",
        ),
    ),
    **{f"merge-{site}": (site, MergeJob.of(ARRAY)) for site in SLURMS},
    **{f"benchmark-at-{site}": (site, BenchmarkJob(**SHARED, suite="collectives")) for site in SLURMS},
    **{
        f"benchmark-{suite}": (
            "cray" if suite == "collectives" else "slurm-mpich",
            BenchmarkJob(
                **SHARED,
                suite=suite,
                arguments=("--anonymous", "--seed", "a b") if suite == "collectives" else (),
                sweep=TEXT if suite == SWEEP else "",
            ),
        )
        for suite in SUITES
    },
    **{f"servers-{site}": (site, SERVERS) for site in ("slurm-mpich", "cray", "parastation")},
    "servers-perlmutter": ("perlmutter", dataclasses.replace(SERVERS, gpus_per_node=4, mem="200G")),
    "merge-perlmutter": ("perlmutter", MergeJob.of(dataclasses.replace(ARRAY, qos="shared", mem="200G"))),
    "servers-full": (
        "cray",
        dataclasses.replace(
            SERVERS,
            constraint="gpu",
            partition="gpu",
            server_partition="gpu-2",
            gpus_per_node=4,
            restarts=2,
            links=2,
            environment=Path("/scratch/me/env.tar"),
            local=Path("/tmp/hpcdist-1000-1a2b3c4d"),
            server_sbatch_args=("--constraint=big memory",),
            mpi_args="--label",
        ),
    ),
}


def text_of(name):
    profile, job = JOBS[name]
    return submission.render(job, search.load(profile))


@pytest.mark.parametrize("name", JOBS)
def test_golden(name):
    check_golden(text_of(name), f"{name.partition('-')[0]}/{name}.sbatch")


@pytest.mark.full
def test_bash_and_shellcheck_find_no_fault(tmp_path):
    paths = [tmp_path / f"{name}.sh" for name in JOBS]
    for path in paths:
        path.write_text(text_of(path.stem))
    check_by_bash(*paths)


# ---- what the scripts do: Slurm and hpcdist are played by small scripts

PYTHON = played_python(
    """
  *" --dry-run "*) cat plan 2>/dev/null; exit ;;
  *" doctor "*) printf '%s\\0' "$@" > examined; exit "${ILL:-0}" ;;
  *" report "*) printf '%s\\0' "$@" > reported; exit ;;
  *" jobs begin "*) echo go; exit ;;
  *" jobs "*) echo stop; exit ;;
""",
    """[[ -z ${RECORDS:-} ]] || printf '%s' "$RECORDS" > plan""",
)
SCONTROL = '#!/bin/bash\necho "$@" > requeued\n'
RECORDED = "[1/2] 12ab a on 2 ranks, repeat 1 (recorded: ok): \n[2/2] 12ab a on 2 ranks, repeat 2 (to run): \n"


@pytest.fixture
def stage(tmp_path):
    """A folder with a played python and scontrol, and a function that starts a job in it."""
    play(tmp_path, python=PYTHON, scontrol=SCONTROL)
    slurm = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
    return lambda job, **environment: start_script(tmp_path, job, MPICH, slurm | environment)


def test_a_task_runs_its_trial_into_a_file_of_its_own(stage, tmp_path):
    code, errors = ended(stage(ARRAY, CODE="0", HPCDIST_SET__RUN__STEPS="9"))
    assert code == 0, errors
    run_dir = tmp_path / "run"
    sweep = dataclasses.replace(ARRAY, run_dir=run_dir).input_file
    how = "--launcher srun --ranks-per-node 4 --cpus-per-task 8 --pmi pmi2"
    *said, run_args = words(tmp_path / "arguments")
    assert said == [
        *("-P", "-m", "hpcdist", "bench", "sweep", str(sweep), "-o", str(run_dir / "trial-1.h5")),
        *("--trial", "1", "--limit-s", str(86400 - 120), "--run-args"),
    ]
    assert shlex.split(run_args) == shlex.split(how)
    assert sweep.read_text() == TEXT and (tmp_path / "variables").read_text() == ""
    assert "hpcdist job 7_1: trial 1, start 1 on n[1-2], 0 repeats recorded" in errors
    assert list(run_dir.iterdir()) == [sweep], "no half-written file"
    assert words(tmp_path / "examined")[-6:-2] == ["doctor", "--job", "--out", str(run_dir)]


@pytest.mark.parametrize("code", ["0", "1", "69", "78"])
def test_the_code_of_a_trial_is_that_of_its_task(stage, tmp_path, code):
    assert ended(stage(ARRAY, CODE=code))[0] == int(code)
    assert not (tmp_path / "requeued").exists()


@pytest.mark.full
def test_a_task_that_was_stopped_goes_on_as_long_as_it_records_something(stage, tmp_path):
    code, errors = ended(stage(ARRAY, CODE="75", RECORDS=RECORDED))
    assert (code, (tmp_path / "requeued").read_text()) == (75, "requeue 9\n"), errors
    (tmp_path / "requeued").unlink()
    code, errors = ended(stage(ARRAY, CODE="75", SLURM_RESTART_COUNT="1"))
    assert code == 75 and not (tmp_path / "requeued").exists()
    assert "start 2 on n[1-2], 1 repeats recorded" in errors
    assert "no training of trial 1 ended in this time; submit again with a longer --time" in errors


def test_failed_trials_are_run_again_by_the_first_start_alone(stage, tmp_path):
    again = dataclasses.replace(ARRAY, retry_failed=True)
    assert ended(stage(again, CODE="1"))[0] == 1
    assert words(tmp_path / "arguments")[-1] == "--retry-failed"
    (tmp_path / "arguments").unlink()
    ended(stage(again, CODE="1", SLURM_RESTART_COUNT="1"))
    assert "--retry-failed" not in words(tmp_path / "arguments")


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_signals_reach_the_trial_and_only_the_walltime_requeues(stage, tmp_path, number, requeued):
    process = stage(ARRAY, RECORDS=RECORDED)
    signal_when_ready(process, tmp_path, number)
    code, errors = ended(process)
    assert (code, (tmp_path / "told").read_text().strip()) == (75, number.name.removeprefix("SIG")), errors
    assert (tmp_path / "requeued").exists() == requeued


@pytest.mark.full
def test_a_node_that_is_not_right_runs_no_trial(stage, tmp_path):
    code, errors = ended(stage(ARRAY, ILL="1"))
    assert code == 1 and "not started" in errors and not (tmp_path / "arguments").exists()


def test_the_results_are_merged_reported_and_what_is_missing_named(stage, tmp_path):
    job, run_dir = MergeJob.of(ARRAY), tmp_path / "run"
    run_dir.mkdir()
    code, errors = ended(stage(job, CODE="0"))
    assert code == 1 and "no task has recorded anything" in errors and not (tmp_path / "arguments").exists()
    for name in ("trial-0.h5", "trial-10.h5", "trial-1.h5.lock"):
        (run_dir / name).touch()
    (tmp_path / "plan").write_text(RECORDED)
    code, errors = ended(stage(job, CODE="0"))
    assert code == 1 and errors.endswith(
        "not recorded, so submit the array again:\n[2/2] 12ab a on 2 ranks, repeat 2 (to run): \n"
    )
    results = str(run_dir / "results.h5")
    parts = [str(run_dir / name) for name in ("trial-0.h5", "trial-10.h5")]
    assert words(tmp_path / "arguments") == ["-P", "-m", "hpcdist", "bench", "merge", "-o", results, *parts]
    assert words(tmp_path / "reported")[3:] == ["report", results]
    (tmp_path / "plan").write_text(RECORDED.replace("to run", "recorded: failed"))
    code, errors = ended(stage(job, CODE="0"))
    assert (code, errors) == (0, "")
    assert ended(stage(job, CODE="2"))[0] == 2


@pytest.mark.parametrize("suite", SUITES)
def test_a_benchmark_is_started_as_it_wants_to_be(stage, tmp_path, suite):
    job = BenchmarkJob(**SHARED, suite=suite, arguments=("--seed", "3"), sweep=TEXT if suite == SWEEP else "")
    code, errors = ended(stage(job, CODE="1"))
    said, results = words(tmp_path / "arguments")[3:], str(tmp_path / "run" / f"{suite}-9.h5")
    assert code == 1 and said[-2:] == ["--seed", "3"], errors
    if SUITES[suite]:
        assert said[:3] == ["run", "-n", "8"] and said[-6:-2] == ["bench", suite, "--output", results]
    elif suite == SWEEP:
        assert said[:5] == [
            "bench",
            suite,
            str(dataclasses.replace(job, run_dir=tmp_path / "run").input_file),
            "--output",
            results,
        ]
        assert words(tmp_path / "reported")[3:] == ["report", results]
    else:
        assert said[:6] == ["bench", suite, "-n", "8", "--output", results]
    assert ("--run-args" in said) != SUITES[suite]


def test_servers_and_workers_are_one_world_of_srun(stage, tmp_path):
    code, errors = ended(stage(dataclasses.replace(SERVERS, mpi_args="--label"), CODE="0"))
    assert code == 0, errors
    said = words(tmp_path / "arguments")
    assert said[3:6] == ["run", "-n", "10"] and "--ranks-per-node" not in said
    options = shlex.split(said[said.index("--mpi-args") + 1])
    assert options == ["--het-group=0,1", "--label"]
    layout = launchers.LaunchRequest(10, cpus_per_task=8, pmi="pmi2")
    line = launchers.Starter(launchers.SRUN, layout).line(["true"], {}, options)
    assert not [word for word in line if word.startswith(("--ntasks", "--nodes"))], "each component has its own number"
    assert line[-3:] == ["--het-group=0,1", "--label", "true"] and "--mpi=pmi2" in line
    assert "--ntasks=10" in launchers.Starter(launchers.SRUN, layout).line(["true"], {}, ["--label"])


def test_the_components_come_in_the_order_of_the_ranks():
    directives = [line for line in text_of("servers-full").splitlines() if line.startswith("#SBATCH")]
    cut = directives.index("#SBATCH hetjob")
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4", "#SBATCH --partition=gpu"} <= set(directives[:cut])
    assert directives[cut + 1 :] == [
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=2",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --partition=gpu-2",
        "#SBATCH --constraint=gpu",
        "#SBATCH --gpus-per-node=2",
        '#SBATCH "--constraint=big memory"',
    ]


def test_shell_metacharacters_arrive_as_they_are(stage, tmp_path):
    evil = {"name": EVIL, "account": EVIL, "partition": EVIL, "python_path": EVIL, "mpi_args": shlex.quote(EVIL)}
    plain = EVIL.replace("\\", "")
    sweep = f"# {EVIL}\nEOF\n#SBATCH --nodes=7\n%s {{{{ job }}}}\n"
    array = dataclasses.replace(ARRAY, **evil, sweep=sweep, run_dir=tmp_path / plain)
    code, errors = ended(stage(array, CODE="0"))
    assert code == 0, errors
    assert array.input_file.read_text() == sweep
    said = words(tmp_path / "arguments")
    run_args = shlex.split(said[said.index("--run-args") + 1])
    assert shlex.split(run_args[run_args.index("--mpi-args") + 1]) == [EVIL]
    benchmark = BenchmarkJob(**SHARED | evil | {"run_dir": tmp_path / EVIL}, suite="data", arguments=(EVIL, "-x"))
    code, errors = ended(stage(benchmark, CODE="0"))
    assert code == 0 and words(tmp_path / "arguments")[-2:] == [EVIL, "-x"], errors
    servers = dataclasses.replace(SERVERS, **evil, server_partition=EVIL, run_dir=tmp_path / EVIL, recipe=sweep)
    code, errors = ended(stage(servers, CODE="0"))
    assert code == 0 and str(tmp_path / EVIL) in words(tmp_path / "arguments"), errors
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()


# ---- what a job is refused for, and how its options become one


@cases(
    "kind, changes, word",
    (ARRAY, {"nodes": 1}, "trial 1 of the sweep has 8 ranks, and 1 node x 4 ranks hold 4; use --nodes 2"),
    (ARRAY, {"links": 2}, "--chain"),
    (ARRAY, {"restarts": 1}, "--restarts"),
    (ARRAY, {"at_most": -1}, "--at-most"),
    (ARRAY, {"run_dir": Path("/a\\b")}, "rename"),
    (SERVERS, {"server_nodes": 0}, "--server-nodes 0"),
    (SERVERS, {"server_ranks_per_node": 0}, "--server-ranks-per-node 0"),
    (SERVERS, {"server_partition": ""}, "--server-partition"),
    (SERVERS, {"survive": "shrink"}, "--survive"),
    (SERVERS, {"server_sbatch_args": ("--nodes=3",)}, "--nodes"),
    (SERVERS, {"server_sbatch_args": ("-N 3",)}, "long option"),
)
def test_jobs_that_cannot_be(kind, changes, word):
    with pytest.raises(UsageError) as error:
        dataclasses.replace(kind, **changes)
    assert word in str(error.value), str(error.value)


def test_servers_may_have_another_quality_of_service():
    job = dataclasses.replace(SERVERS, qos="regular", server_sbatch_args=("--qos=other",))
    text = submission.render(job, MPICH)
    assert text.index("#SBATCH --qos=regular") < text.index("#SBATCH hetjob") < text.index("#SBATCH --qos=other")


@pytest.mark.parametrize("changes", [{"suite": "nix"}, {"suite": "data", "sweep": TEXT}, {"suite": SWEEP}])
def test_benchmarks_that_cannot_be(changes):
    with pytest.raises(UsageError, match="--bench"):
        BenchmarkJob(**SHARED, **changes)


def test_an_array_is_followed_by_its_merge_and_says_where_logs_are():
    array, merge = (job for job, _ in submission.chain(ARRAY, MPICH))
    assert array == ARRAY and merge == MergeJob.of(ARRAY)
    assert [submission.script_path(job, MPICH).name for job in (array, merge)] == ["job.sbatch", "job-2.sbatch"]
    assert array.log(Path("/x"), "7") == ARRAY.run_dir / "7_%a.out"
    assert merge.log(Path("/x"), "8") == ARRAY.run_dir / "merge-8.out"


@pytest.fixture
def submit(tmp_path, monkeypatch, capsys):
    """``submit(*arguments)`` -> (exit code, stdout, stderr) of a dry run."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.toml").write_text("[sweep]\nranks = [1, 2]\nrepeats = 2\n[axes]\nrun.seed = [1, 2]\n")

    def submitting(*arguments, site="slurm-mpich"):
        return called(capsys, "submit", "--site", site, "--nodes", "1", "--dry-run", *arguments)

    return submitting


def test_a_sweep_is_submitted_as_it_is_now(submit, tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDIST_SET__RUN__STEPS", "7")
    options = ("--ranks-per-node", "2", "--at-most", "3", "--time", "10", "--retry-failed")
    code, out, said = submit("--array", "sweep.toml", *options)
    assert code == 0 and "4 trials x 2 repeats, each on 1 node" in said, said
    assert "#SBATCH --array=0-3%3\n" in out and "--limit-s 480 " in out and "sweep.toml'" not in out
    array, merge = (re.findall("^#: ?(.*)$", text, re.MULTILINE) for text in out.split("\n#!/bin/bash\n"))
    tree = tomllib.loads("\n".join(array))
    assert array == merge
    assert tree["recipe"]["run"]["steps"] == 7 and [each["ranks"] for each in tree["trial"]] == [[1, 2], [1, 2]]
    assert submit("--array", "sweep.toml", *options) == (code, out, said), "the same sweep has the same directory"


def test_servers_are_the_ranks_of_their_nodes(submit):
    options = ("--set", "parallel.strategy=parameter_server", "--ranks-per-node", "3")
    code, out, said = submit("--server-nodes", "2", "--server-ranks-per-node", "2", *options)
    assert code == 0 and "7 = data 3 x pipeline 1 x tensor 1 x context 1 + servers 4" in said, said
    assert "\n#: servers = 4\n" in out and "\n#SBATCH hetjob\n" in out and " -n 7 " in out
    code, _, said = submit("--server-nodes", "1", "--set", "parameter_server.servers=2", *options)
    assert code == CONFIGURATION and "parameter_server.servers = 2" in said and "set it to 1" in said
    code, _, said = submit("--server-nodes", "1", "--set", "parameter_server.placement=colocated", *options)
    assert code == CONFIGURATION and "'dedicated'" in said


@cases(
    "arguments, site, word",
    (("--array", "sweep.toml"), "slurm-mpich", "use --nodes 2"),
    (("--array", "none.toml"), "slurm-mpich", "none.toml"),
    (("--array", "sweep.toml", "--bench", "data"), "slurm-mpich", "two kinds"),
    (("--array", "sweep.toml", "--set", "run.steps=1"), "slurm-mpich", "sweep file"),
    (("recipe.toml", "--bench", "data"), "slurm-mpich", "recipe.toml"),
    (("--array", "sweep.toml", "--warmup"), "slurm-mpich", "--warmup"),
    (("--array", "sweep.toml", "--stage-environment", "e.tar"), "slurm-mpich", "--stage-environment"),
    (("--array", "sweep.toml"), "workstation", "Slurm alone"),
    (("--array", "sweep.toml"), "pbs", "Slurm alone"),
    (("--at-most", "2"), "slurm-mpich", "--array"),
    (("--bench-args", "--seed 3"), "slurm-mpich", "--bench"),
    (("--server-partition", "cpu"), "slurm-mpich", "--server-nodes"),
    (("--server-nodes", "1"), "slurm-openmpi", "launcher.kind = 'srun'"),
    (("--bench", "colectives"), "slurm-mpich", "'collectives'"),
    (("--bench", "x"), "slurm-mpich", "sweep.toml"),
    (("--bench", "sweep.toml"), "slurm-mpich", "use --nodes 2"),
    (("--bench", "data", "--bench-args", "--nix"), "slurm-mpich", "--nix"),
    (("--bench", "data", "--most-fruitless", "1"), "slurm-mpich", "--most-fruitless"),
    (("--bench", "data", "--bench-args", "-n 3"), "slurm-mpich", "--ranks"),
    (("--bench", "collectives", "--bench-args", "--output=x"), "slurm-mpich", "--output"),
    (("--bench", "data", "--bench-args", "'"), "slurm-mpich", "quotation"),
)
def test_options_that_do_not_go_together(submit, arguments, site, word):
    code, out, said = submit(*arguments, site=site)
    assert code in (2, STORAGE, CONFIGURATION) and out == "" and word in said, said
