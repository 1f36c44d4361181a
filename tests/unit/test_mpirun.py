"""Which launcher is found, whose it is, and the command line made for it."""

import sys

import pytest

from hpcdist.comm import mpirun
from hpcdist.comm.mpirun import INTEL_MPI, MPICH, OPEN_MPI, Launcher
from hpcdist.errors import MissingCapabilityError

SAID = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/": (OPEN_MPI, "5.0.11"),
    "mpiexec (OpenRTE) 4.1.4": (OPEN_MPI, "4.1.4"),
    "HYDRA build details:\n    Version:                                 5.0.2\n    CC: cc": (MPICH, "5.0.2"),
    "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701 (id: 179630a)": (INTEL_MPI, "2021.13"),
    "something else": ("unknown", ""),
}


@pytest.mark.parametrize("text", SAID)
def test_recognise(text):
    assert mpirun.recognise(text) == SAID[text]


def executable(path, text="echo 'mpirun (Open MPI) 5.0.0'"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_launcher_of_this_environment_comes_before_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(executable(tmp_path / "venv" / "bin" / "python")))
    other = executable(tmp_path / "other" / "mpiexec", "echo 'HYDRA build details:\n    Version:  4.2'")
    environment = {"PATH": str(other.parent)}
    assert mpirun.find(environment) == Launcher(other, MPICH, "4.2")
    own = executable(tmp_path / "venv" / "bin" / "mpirun")
    assert mpirun.find(environment) == Launcher(own, OPEN_MPI, "5.0.0")
    assert mpirun.candidates(environment) == [own, other]


def test_no_launcher_names_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(MissingCapabilityError, match=r"hpcdist\[workstation\]"):
        mpirun.find({"PATH": str(tmp_path)})


def test_a_launcher_that_does_not_run_is_named(tmp_path):
    broken = tmp_path / "mpirun"
    broken.write_text("no interpreter line and no program")
    broken.chmod(0o755)
    with pytest.raises(MissingCapabilityError, match="mpirun --version did not run"):
        mpirun.identify(broken)


def test_command_of_open_mpi(tmp_path):
    launcher = Launcher(tmp_path / "mpirun", OPEN_MPI, "5.0.11")
    line = mpirun.command(launcher, 3, ["python", "-V"], {"OMP_NUM_THREADS": "1"}, ["--tag-output"], environment={})
    assert line == [
        *(str(tmp_path / "mpirun"), "--mca", "osc", "^ucx", "--bind-to", "none", "--oversubscribe"),
        *("-x", "OMP_NUM_THREADS", "-n", "3", "--tag-output", "python", "-V"),
    ]
    batch = mpirun.command(launcher, 3, ["python"], {}, environment={"SLURM_JOB_ID": "7"})
    assert "--oversubscribe" not in batch and "--bind-to" not in batch, "the resource manager owns the cores"


def test_command_of_mpich(tmp_path):
    launcher = Launcher(tmp_path / "mpirun", MPICH, "5.0.2")
    assert mpirun.command(launcher, 2, ["python"], {"A": "1"}, environment={}) == [
        *(str(tmp_path / "mpirun"), "-n", "2", "python")
    ]


@pytest.mark.parametrize(
    ("vendor", "options"),
    [(OPEN_MPI, "--map-by ppr:2:node --bind-to none"), (MPICH, "-ppn 2"), (INTEL_MPI, "-ppn 2")],
)
def test_ranks_per_node(tmp_path, vendor, options):
    assert mpirun.per_node(Launcher(tmp_path, vendor, ""), 2) == options.split()
    assert mpirun.per_node(Launcher(tmp_path, vendor, ""), None) == []


@pytest.mark.parametrize(("vendor", "user", "root"), [(OPEN_MPI, 0, True), (OPEN_MPI, 1000, False), (MPICH, 0, False)])
def test_settings(tmp_path, monkeypatch, vendor, user, root):
    monkeypatch.setattr("os.geteuid", lambda: user)
    added = mpirun.settings(Launcher(tmp_path, vendor, ""), {"OMP_NUM_THREADS": "4"})
    assert "OMP_NUM_THREADS" not in added, "what the user has set stays"
    assert added["OPENBLAS_NUM_THREADS"] == "1"
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in added) is root
    assert ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in added) is root
