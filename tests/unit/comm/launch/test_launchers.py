"""The command line of every kind of launcher, and the options that a kind rejects."""

import os
import shlex
import sys

import pytest

from harness.jobs import call_command
from harness.marks import cases
from hpcdist.comm.launch import environment as launch_environment
from hpcdist.comm.launch import launchers, mpirun
from hpcdist.comm.launch.launchers import KINDS, LaunchRequest, Starter
from hpcdist.errors import CONFIGURATION, MISSING_CAPABILITY, USAGE, ConfigurationError, MissingCapabilityError

PROGRAM = ["python", "-m", "hpcdist"]
SRUN = "srun --ntasks=4 --kill-on-bad-exit=1 --wait=600 --export=ALL --gpu-bind=none --disable-status"
FLUX = "flux run -n 4 -o exit-on-error -o exit-timeout=600s -o gpu-affinity=off"


@pytest.fixture(autouse=True)
def outside_slurm_job(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", launchers.VARIABLE):
        monkeypatch.delenv(name, raising=False)


def line(kind, layout, options=(), environment=None):
    starter = launchers.choose_starter(KINDS[kind], layout, None, {} if environment is None else environment)
    return shlex.join(starter.line(PROGRAM, {"OMP_NUM_THREADS": "1"}, options))


@cases(
    "kind, layout, expected",
    ("srun", LaunchRequest(4), SRUN),
    ("srun", LaunchRequest(4, 2, 3, "pmix"), f"{SRUN} --nodes=2 --ntasks-per-node=2 --cpus-per-task=3 --mpi=pmix"),
    ("srun", LaunchRequest(4, 3), f"{SRUN} --nodes=2 --ntasks-per-node=3"),
    ("mpiexec", LaunchRequest(4), "mpiexec -n 4 --genvall"),
    ("mpiexec", LaunchRequest(4, 2, 3, "pmix"), "mpiexec -n 4 --genvall --ppn 2 --depth 3 --cpu-bind depth --pmi=pmix"),
    ("ibrun", LaunchRequest(4), "ibrun -n 4"),
    ("ibrun", LaunchRequest(4, None, 3), "ibrun -n 4"),
    ("flux", LaunchRequest(4), FLUX),
    ("flux", LaunchRequest(4, 2, 3, "pmix"), f"{FLUX} -N 2 -c 3 -o pmi=pmix"),
)
def test_command_line_of_each_launcher(kind, layout, expected):
    assert line(kind, layout) == f"{expected} python -m hpcdist"
    assert line(kind, layout, ["-v"]) == f"{expected} -v python -m hpcdist", "the user's options come last and win"


def test_command_line_of_mpirun(tmp_path, monkeypatch):
    result = mpirun.Launcher(tmp_path / "mpirun", mpirun.MPICH, "5.0.2")
    monkeypatch.setattr(mpirun, "find", lambda environment: result)
    starter = launchers.choose_starter(KINDS["mpirun"], LaunchRequest(4, 2, 3), None, {})
    assert shlex.join(starter.line(PROGRAM, {}, ["-v"])) == f"{result.path} -n 4 -ppn 2 -v python -m hpcdist"
    assert starter.without(["n2"], ["n1", "n3"]) == ["-hosts", "n1,n3"]


def test_srun_step_gets_cpus_per_task_of_its_job(monkeypatch):
    """Since Slurm 22.05, srun does not inherit --cpus-per-task from the job."""
    job = {"SLURM_CPUS_PER_TASK": "8"}
    assert "--cpus-per-task=8" in line("srun", LaunchRequest(4), environment=job)
    assert "--cpus-per-task=2" in line("srun", LaunchRequest(4, cpus_per_task=2), environment=job)
    assert "8" not in line("flux", LaunchRequest(4), environment=job)


def test_srun_step_in_a_job_waits_at_most_300_seconds(monkeypatch):
    assert "--immediate" not in line("srun", LaunchRequest(4)), "outside of a job it waits in the queue"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "--immediate=300" in line("srun", LaunchRequest(4)) and "--immediate" not in line("flux", LaunchRequest(4))


def test_one_thread_per_core_unless_user_sets_threads(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert set(Starter(KINDS["srun"], LaunchRequest(4, cpus_per_task=3)).settings().values()) == {"3"}
    assert set(Starter(KINDS["srun"], LaunchRequest(4)).settings().values()) == {"1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in Starter(KINDS["srun"], LaunchRequest(4, cpus_per_task=3)).settings(), (
        "the user's setting is kept"
    )


def test_restart_overlaps_with_a_hanging_step():
    for name in ("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE"):  # srun takes one of them, not two
        job = {"SLURM_JOB_ID": "7", name: "100"}
        shared = {"SLURM_JOB_ID": "7", "SLURM_OVERLAP": "1", "SLURM_MEM_PER_NODE": "0"}
        assert launchers.restart_environment(job) == shared


def test_lost_nodes_are_excluded():
    assert Starter(KINDS["srun"], LaunchRequest(4, 2)).without(["n2"], ["n1", "n3", "n4"]) == [
        "--exclude=n2",
        "--nodes=2",
    ]
    assert Starter(KINDS["srun"], LaunchRequest(4)).without(["n2", "n4"], ["n1", "n3"]) == [
        "--exclude=n2,n4",
        "--nodes=2",
    ]
    with pytest.raises(MissingCapabilityError, match="nodes n2 of the job have failed, and the launcher ibrun cannot"):
        Starter(KINDS["ibrun"], LaunchRequest(4)).without(["n2"], ["n1"])


def test_auto_launcher_follows_site_setting():
    assert launchers.kind_named("auto", {}).name == "mpirun"
    assert launchers.kind_named("auto", {launchers.VARIABLE: "flux"}).name == "flux"
    assert launchers.kind_named("srun", {launchers.VARIABLE: "flux"}).name == "srun"
    with pytest.raises(ConfigurationError, match="HPCDIST_LAUNCHER='srn'.*did you mean 'srun'"):
        launchers.kind_named("auto", {launchers.VARIABLE: "srn"})


def run_rejected(capsys, *words):
    code, out, err = call_command(capsys, "run", "-n", "4", *words)
    assert out == "" and "Traceback" not in err
    return code, err


@cases(
    "words, output",
    ("--launcher srn", "did you mean 'srun'"),
    ("--launcher jsrun-like", "choose one of auto, mpirun, srun"),
    ("--launcher srun --survive shrink", "--launcher mpirun with Open MPI 5, or --restarts"),
    ("--launcher flux --survive replace --spares 1", "--launcher mpirun with Open MPI 5, or --restarts"),
    ("--launcher ibrun --ranks-per-node 2", "--ntasks-per-node=2"),
    ("--launcher ibrun --pmi pmix", "srun, mpiexec, flux"),
    ("--launcher mpirun --pmi pmix", "srun, mpiexec, flux"),
    ("--python ''", "--python is empty"),
    ("--python 'a", '--python "\'a" cannot be split into words: No closing quotation'),
    ("--cpus-per-task 0", "--cpus-per-task"),
)
def test_unsupported_launcher_options_are_rejected(words, output, capsys):
    given = words.split() if "'a" in words else shlex.split(words)
    code, error = run_rejected(capsys, *given, "--dry-run", "train")
    assert code == USAGE and output in error


def test_invalid_site_launcher_is_configuration_error(capsys, monkeypatch):
    monkeypatch.setenv(launchers.VARIABLE, "srn")
    assert run_rejected(capsys, "--dry-run", "train")[0] == CONFIGURATION


def test_launcher_missing_on_path_is_rejected(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, error = run_rejected(capsys, "--launcher", "flux", "train")
    assert code == MISSING_CAPABILITY and "flux is not on PATH" in error


def test_mpiexec_of_an_mpi_library_is_rejected(capsys, monkeypatch, tmp_path):
    path = tmp_path / "mpiexec"
    path.write_text("#!/bin/sh\necho 'mpiexec (OpenRTE) 4.1.4'\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, error = run_rejected(capsys, "--launcher", "mpiexec", "train")
    assert code == MISSING_CAPABILITY and "--launcher mpirun" in error
    path.write_text("#!/bin/sh\necho 'mpiexec version 1.2.12 revision a3b1c2d'\n")
    Starter(KINDS["mpiexec"], LaunchRequest(4)).check()


def print_dry_run(capsys, *words):
    code, out, _ = call_command(
        capsys, "run", "-n", "4", "--launcher", "srun", *words, "--dry-run", "train", "a b.toml"
    )
    assert code == 0
    return shlex.split(out)


def test_dry_run_needs_no_launcher(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    shown = print_dry_run(capsys, "--mpi-args", "--label --time=10")
    program = [sys.executable, "-P", "-m", "hpcdist", "train", "a b.toml"]
    assert shown[-len(program) - 2 :] == ["--label", "--time=10", *program]


def test_other_python_gets_no_pythonpath(capsys, monkeypatch):
    """The folder of a clone would hide the hpcdist of a container, or be missing there."""
    monkeypatch.setattr(launch_environment, "source_folder", lambda: "/home/me/clone")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert f"PYTHONPATH=/home/me/clone{os.pathsep}/mine" in print_dry_run(capsys)
    shown = print_dry_run(capsys, "--python", "apptainer exec --nv 'my img.sif' python3")
    assert not [word for word in shown if "PYTHONPATH" in word]
    assert shown[-10:] == [
        *("apptainer", "exec", "--nv", "my img.sif", "python3", "-P", "-m", "hpcdist", "train", "a b.toml")
    ]
