"""Sweeps as job arrays, benchmarks, and servers on separate nodes: their scripts, and the rejected options."""

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
    recorded_arguments,
    signal_when_ready,
    start_script,
    stub_python,
    wait_for_end,
    write_stub_commands,
)
from harness.jobs import call_command
from harness.marks import cases
from hpcdist.batch import site_search, submission
from hpcdist.batch.array import BenchmarkJob, MergeJob, ServersJob, SweepJob
from hpcdist.batch.job import SUITES, SWEEP
from hpcdist.comm.launch import launchers
from hpcdist.errors import CONFIGURATION, STORAGE, UsageError

TEXT = '[sweep]\nrepeats = 1\n\n[[trial]]\nname = "it\'s $one"\nranks = [2, 8]\n'
NAMES = {item.name for item in dataclasses.fields(PLAIN)} - {"recipe", "sweep"}
SHARED = {name: getattr(PLAIN, name) for name in NAMES}
ARRAY = SweepJob(**SHARED, sweep=TEXT, trial_ranks=(2, 8))
SERVERS = ServersJob(**SHARED, recipe=PLAIN.recipe, server_nodes=1, server_ranks_per_node=2)
MPICH = site_search.load("slurm-mpich")
SLURMS = ("slurm-openmpi", "slurm-mpich", "cray", "parastation", "ibrun")
# Name -> profile, job: each template at each kind of site, and options that only some jobs have.
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


def rendered_script(name):
    profile, job = JOBS[name]
    return submission.render(job, site_search.load(profile))


@pytest.mark.parametrize("name", JOBS)
def test_scripts_match_golden_files(name):
    check_golden(rendered_script(name), f"{name.partition('-')[0]}/{name}.sbatch")


@pytest.mark.full
def test_scripts_pass_bash_and_shellcheck(tmp_path):
    paths = [tmp_path / f"{name}.sh" for name in JOBS]
    for path in paths:
        path.write_text(rendered_script(path.stem))
    check_by_bash(*paths)


# ---- the behaviour of the scripts: small scripts play Slurm and hpcdist

PYTHON = stub_python(
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
def start_job(tmp_path):
    """A function that starts a job in a folder with a played python and scontrol."""
    write_stub_commands(tmp_path, python=PYTHON, scontrol=SCONTROL)
    slurm = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
    return lambda job, **environment: start_script(tmp_path, job, MPICH, slurm | environment)


def test_task_writes_its_trial_to_a_separate_file(start_job, tmp_path):
    code, errors = wait_for_end(start_job(ARRAY, CODE="0", HPCDIST_SET__RUN__STEPS="9"))
    assert code == 0, errors
    run_dir = tmp_path / "run"
    sweep = dataclasses.replace(ARRAY, run_dir=run_dir).input_file
    how = "--launcher srun --ranks-per-node 4 --cpus-per-task 8 --pmi pmi2"
    *output, run_args = recorded_arguments(tmp_path / "arguments")
    assert output == [
        *("-P", "-m", "hpcdist", "bench", "sweep", str(sweep), "-o", str(run_dir / "trial-1.h5")),
        *("--trial", "1", "--limit-s", str(86400 - 120), "--run-args"),
    ]
    assert shlex.split(run_args) == shlex.split(how)
    assert sweep.read_text() == TEXT and (tmp_path / "variables").read_text() == ""
    assert "hpcdist job 7_1: trial 1, start 1 on n[1-2], 0 repeats recorded" in errors
    assert list(run_dir.iterdir()) == [sweep], "a half-written file is left"
    assert recorded_arguments(tmp_path / "examined")[-6:-2] == ["doctor", "--job", "--out", str(run_dir)]


@pytest.mark.parametrize("code", ["0", "1", "69", "78"])
def test_task_exits_with_code_of_its_trial(start_job, tmp_path, code):
    assert wait_for_end(start_job(ARRAY, CODE=code))[0] == int(code)
    assert not (tmp_path / "requeued").exists()


@pytest.mark.full
def test_stopped_task_is_requeued_while_it_makes_progress(start_job, tmp_path):
    code, errors = wait_for_end(start_job(ARRAY, CODE="75", RECORDS=RECORDED))
    assert (code, (tmp_path / "requeued").read_text()) == (75, "requeue 9\n"), errors
    (tmp_path / "requeued").unlink()
    code, errors = wait_for_end(start_job(ARRAY, CODE="75", SLURM_RESTART_COUNT="1"))
    assert code == 75 and not (tmp_path / "requeued").exists()
    assert "start 2 on n[1-2], 1 repeats recorded" in errors
    assert "no training of trial 1 ended in this time; submit again with a longer --time" in errors


def test_only_the_first_start_retries_failed_trials(start_job, tmp_path):
    again = dataclasses.replace(ARRAY, retry_failed=True)
    assert wait_for_end(start_job(again, CODE="1"))[0] == 1
    assert recorded_arguments(tmp_path / "arguments")[-1] == "--retry-failed"
    (tmp_path / "arguments").unlink()
    wait_for_end(start_job(again, CODE="1", SLURM_RESTART_COUNT="1"))
    assert "--retry-failed" not in recorded_arguments(tmp_path / "arguments")


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_signals_reach_the_trial_and_only_walltime_requeues(start_job, tmp_path, number, requeued):
    process = start_job(ARRAY, RECORDS=RECORDED)
    signal_when_ready(process, tmp_path, number)
    code, errors = wait_for_end(process)
    assert (code, (tmp_path / "told").read_text().strip()) == (75, number.name.removeprefix("SIG")), errors
    assert (tmp_path / "requeued").exists() == requeued


@pytest.mark.full
def test_failed_node_check_starts_no_trial(start_job, tmp_path):
    code, errors = wait_for_end(start_job(ARRAY, ILL="1"))
    assert code == 1 and "not started" in errors and not (tmp_path / "arguments").exists()


def test_merge_job_reports_results_and_missing_trials(start_job, tmp_path):
    job, run_dir = MergeJob.of(ARRAY), tmp_path / "run"
    run_dir.mkdir()
    code, errors = wait_for_end(start_job(job, CODE="0"))
    assert code == 1 and "no task has recorded anything" in errors and not (tmp_path / "arguments").exists()
    for name in ("trial-0.h5", "trial-10.h5", "trial-1.h5.lock"):
        (run_dir / name).touch()
    (tmp_path / "plan").write_text(RECORDED)
    code, errors = wait_for_end(start_job(job, CODE="0"))
    assert code == 1 and errors.endswith(
        "not recorded, so submit the array again:\n[2/2] 12ab a on 2 ranks, repeat 2 (to run): \n"
    )
    results = str(run_dir / "results.h5")
    parts = [str(run_dir / name) for name in ("trial-0.h5", "trial-10.h5")]
    assert recorded_arguments(tmp_path / "arguments") == [
        "-P",
        "-m",
        "hpcdist",
        "bench",
        "merge",
        "-o",
        results,
        *parts,
    ]
    assert recorded_arguments(tmp_path / "reported")[3:] == ["report", results]
    (tmp_path / "plan").write_text(RECORDED.replace("to run", "recorded: failed"))
    code, errors = wait_for_end(start_job(job, CODE="0"))
    assert (code, errors) == (0, "")
    assert wait_for_end(start_job(job, CODE="2"))[0] == 2


@pytest.mark.parametrize("suite", SUITES)
def test_benchmark_job_starts_suite_with_its_launcher(start_job, tmp_path, suite):
    job = BenchmarkJob(**SHARED, suite=suite, arguments=("--seed", "3"), sweep=TEXT if suite == SWEEP else "")
    code, errors = wait_for_end(start_job(job, CODE="1"))
    output, results = recorded_arguments(tmp_path / "arguments")[3:], str(tmp_path / "run" / f"{suite}-9.h5")
    assert code == 1 and output[-2:] == ["--seed", "3"], errors
    if job.on_all_ranks:
        assert output[:3] == ["run", "-n", "8"] and output[-6:-2] == ["bench", suite, "--output", results]
    else:
        assert output[:5] == [
            "bench",
            suite,
            str(dataclasses.replace(job, run_dir=tmp_path / "run").input_file),
            "--output",
            results,
        ]
        assert recorded_arguments(tmp_path / "reported")[3:] == ["report", results]
    assert ("--run-args" in output) != job.on_all_ranks


def test_servers_and_workers_share_one_srun_world(start_job, tmp_path):
    code, errors = wait_for_end(start_job(dataclasses.replace(SERVERS, mpi_args="--label"), CODE="0"))
    assert code == 0, errors
    output = recorded_arguments(tmp_path / "arguments")
    assert output[3:6] == ["run", "-n", "10"] and "--ranks-per-node" not in output
    options = shlex.split(output[output.index("--mpi-args") + 1])
    assert options == ["--het-group=0,1", "--label"]
    layout = launchers.LaunchRequest(10, cpus_per_task=8, pmi="pmi2")
    line = launchers.Starter(launchers.SRUN, layout).line(["true"], {}, options)
    assert not [word for word in line if word.startswith(("--ntasks", "--nodes"))], "each component has its own number"
    assert line[-3:] == ["--het-group=0,1", "--label", "true"] and "--mpi=pmi2" in line
    assert "--ntasks=10" in launchers.Starter(launchers.SRUN, layout).line(["true"], {}, ["--label"])


def test_het_components_are_in_rank_order():
    directives = [line for line in rendered_script("servers-full").splitlines() if line.startswith("#SBATCH")]
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


def test_shell_metacharacters_are_passed_unchanged(start_job, tmp_path):
    evil = {"name": EVIL, "account": EVIL, "partition": EVIL, "python_path": EVIL, "mpi_args": shlex.quote(EVIL)}
    plain = EVIL.replace("\\", "")
    sweep = f"# {EVIL}\nEOF\n#SBATCH --nodes=7\n%s {{{{ job }}}}\n"
    array = dataclasses.replace(ARRAY, **evil, sweep=sweep, run_dir=tmp_path / plain)
    code, errors = wait_for_end(start_job(array, CODE="0"))
    assert code == 0, errors
    assert array.input_file.read_text() == sweep
    output = recorded_arguments(tmp_path / "arguments")
    run_args = shlex.split(output[output.index("--run-args") + 1])
    assert shlex.split(run_args[run_args.index("--mpi-args") + 1]) == [EVIL]
    benchmark = BenchmarkJob(
        **SHARED | evil | {"run_dir": tmp_path / EVIL}, suite="collectives", arguments=(EVIL, "-x")
    )
    code, errors = wait_for_end(start_job(benchmark, CODE="0"))
    assert code == 0 and recorded_arguments(tmp_path / "arguments")[-2:] == [EVIL, "-x"], errors
    servers = dataclasses.replace(SERVERS, **evil, server_partition=EVIL, run_dir=tmp_path / EVIL, recipe=sweep)
    code, errors = wait_for_end(start_job(servers, CODE="0"))
    assert code == 0 and str(tmp_path / EVIL) in recorded_arguments(tmp_path / "arguments"), errors
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()


# ---- rejected jobs, and the translation of options to jobs


@cases(
    "kind, changes, word",
    (ARRAY, {"nodes": 1}, "trial 1 of the sweep has 8 ranks, but 1 node x 4 ranks provide 4; use --nodes 2"),
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
def test_invalid_jobs_are_rejected(kind, changes, word):
    with pytest.raises(UsageError) as error:
        dataclasses.replace(kind, **changes)
    assert word in str(error.value), str(error.value)


def test_servers_may_have_another_qos():
    job = dataclasses.replace(SERVERS, qos="regular", server_sbatch_args=("--qos=other",))
    text = submission.render(job, MPICH)
    assert text.index("#SBATCH --qos=regular") < text.index("#SBATCH hetjob") < text.index("#SBATCH --qos=other")


@pytest.mark.parametrize("changes", [{"suite": "nix"}, {"suite": "collectives", "sweep": TEXT}, {"suite": SWEEP}])
def test_invalid_benchmark_jobs_are_rejected(changes):
    with pytest.raises(UsageError, match="--bench"):
        BenchmarkJob(**SHARED, **changes)


def test_array_chain_ends_with_merge_job_and_has_log_paths():
    array, merge = (job for job, _ in submission.chain(ARRAY, MPICH))
    assert array == ARRAY and merge == MergeJob.of(ARRAY)
    assert [submission.script_path(job, MPICH).name for job in (array, merge)] == ["job.sbatch", "job-2.sbatch"]
    assert array.log(Path("/x"), "7") == ARRAY.run_dir / "7_%a.out"
    assert merge.log(Path("/x"), "8") == ARRAY.run_dir / "merge-8.out"


@pytest.fixture
def submit(tmp_path, monkeypatch, capsys):
    """``submit(*arguments)`` returns the exit code, stdout and stderr of a dry run."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.toml").write_text("[sweep]\nranks = [1, 2]\nrepeats = 2\n[axes]\nrun.seed = [1, 2]\n")

    def submit_dry_run(*arguments, site="slurm-mpich"):
        return call_command(capsys, "submit", "--site", site, "--nodes", "1", "--dry-run", *arguments)

    return submit_dry_run


def test_submitted_sweep_is_frozen(submit, tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDIST_SET__RUN__STEPS", "7")
    options = ("--ranks-per-node", "2", "--at-most", "3", "--time", "10", "--retry-failed")
    code, out, output = submit("--array", "sweep.toml", *options)
    assert code == 0 and "4 trials x 2 repeats, each on 1 node" in output, output
    assert "#SBATCH --array=0-3%3\n" in out and "--limit-s 480 " in out and "sweep.toml'" not in out
    array, merge = (re.findall("^#: ?(.*)$", text, re.MULTILINE) for text in out.split("\n#!/bin/bash\n"))
    tree = tomllib.loads("\n".join(array))
    assert array == merge
    assert tree["recipe"]["run"]["steps"] == 7 and [each["ranks"] for each in tree["trial"]] == [[1, 2], [1, 2]]
    assert submit("--array", "sweep.toml", *options) == (code, out, output), "the same sweep needs the same directory"


def test_server_count_is_ranks_on_server_nodes(submit):
    options = ("--set", "parallel.strategy=parameter_server", "--ranks-per-node", "3")
    code, out, output = submit("--server-nodes", "2", "--server-ranks-per-node", "2", *options)
    assert code == 0 and "7 = data 3 x pipeline 1 x tensor 1 x context 1 + servers 4" in output, output
    assert "\n#: servers = 4\n" in out and "\n#SBATCH hetjob\n" in out and " -n 7 " in out
    code, _, output = submit("--server-nodes", "1", "--set", "parameter_server.servers=2", *options)
    assert code == CONFIGURATION and "parameter_server.servers = 2" in output
    assert "set parameter_server.servers to 1" in output
    code, _, output = submit("--server-nodes", "1", "--set", "parameter_server.placement=colocated", *options)
    assert code == CONFIGURATION and "'dedicated'" in output


@cases(
    "arguments, site, word",
    (("--array", "sweep.toml"), "slurm-mpich", "use --nodes 2"),
    (("--array", "none.toml"), "slurm-mpich", "none.toml"),
    (("--array", "sweep.toml", "--bench", "collectives"), "slurm-mpich", "other"),
    (("--array", "sweep.toml", "--set", "run.steps=1"), "slurm-mpich", "sweep file"),
    (("recipe.toml", "--bench", "collectives"), "slurm-mpich", "recipe.toml"),
    (("--array", "sweep.toml", "--warmup"), "slurm-mpich", "--warmup"),
    (("--array", "sweep.toml", "--stage-environment", "e.tar"), "slurm-mpich", "--stage-environment"),
    (("--array", "sweep.toml"), "workstation", "--array needs Slurm"),
    (("--array", "sweep.toml"), "pbs", "--array needs Slurm"),
    (("--at-most", "2"), "slurm-mpich", "--array"),
    (("--bench-args", "--seed 3"), "slurm-mpich", "--bench"),
    (("--server-partition", "cpu"), "slurm-mpich", "--server-nodes"),
    (("--server-nodes", "1"), "slurm-openmpi", "launcher.kind = 'srun'"),
    (("--bench", "colectives"), "slurm-mpich", "'collectives'"),
    (("--bench", "x"), "slurm-mpich", "sweep.toml"),
    (("--bench", "sweep.toml"), "slurm-mpich", "use --nodes 2"),
    (("--bench", "collectives", "--bench-args", "--nix"), "slurm-mpich", "--nix"),
    (("--bench", "collectives", "--most-fruitless", "1"), "slurm-mpich", "--most-fruitless"),
    (("--bench", "collectives", "--bench-args", "-o x.h5"), "slurm-mpich", "--output"),
    (("--bench", "collectives", "--bench-args", "--output=x"), "slurm-mpich", "--output"),
    (("--bench", "collectives", "--bench-args", "'"), "slurm-mpich", "quotation"),
)
def test_conflicting_options_are_rejected(submit, arguments, site, word):
    code, out, output = submit(*arguments, site=site)
    assert code in (2, STORAGE, CONFIGURATION) and out == "" and word in output, output
