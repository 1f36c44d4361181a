"""Which nodes a job of Slurm has lost, by what its commands say: played by small scripts."""

import os
from pathlib import Path

import pytest

from hpcdist.batch import nodes
from hpcdist.cli import run
from hpcdist.comm import launchers
from hpcdist.comm.mpirun import OPEN_MPI, Launcher
from hpcdist.errors import MissingCapabilityError

SQUEUE = """#!/bin/sh
[ "$*" = "-h -j 7 -o %N" ] && echo "$LEFT"
"""
SCONTROL = """#!/bin/sh
case "$*" in
  "show hostnames n[1-3]") printf 'n1\\nn2\\nn3\\n' ;;
  "show hostnames n[1,3]") printf 'n1\\nn3\\n' ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture
def job(tmp_path):
    """The environment of a job whose commands are played; LEFT says which nodes it has."""
    for name, text in (("squeue", SQUEUE), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "LEFT": "n[1,3]"}


def test_what_is_lost_and_left(job, monkeypatch):
    monkeypatch.setenv("PATH", job["PATH"])
    assert nodes.lost(job) == (["n2"], ["n1", "n3"])
    assert nodes.lost(job | {"LEFT": "n[1-3]"})[0] == []


@pytest.mark.parametrize("changes", [{"LEFT": ""}, {"LEFT": "n9"}, {"SLURM_JOB_ID": ""}, {"SLURM_JOB_ID": "8"}])
def test_where_slurm_does_not_say_nothing_is_lost(job, monkeypatch, changes):
    monkeypatch.setenv("PATH", job["PATH"])
    assert nodes.lost(job | changes) == ([], [])


def test_outside_of_a_job_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(nodes.subprocess, "run", lambda *_, **__: pytest.fail("it was asked"))
    assert nodes.lost({}) == ([], [])


def test_the_next_start_is_without_them(job, monkeypatch, capsys):
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    found = Launcher(Path("mpirun"), OPEN_MPI, "5.0.11")
    fits, fits_not = (launchers.Mpirun(found, launchers.Layout(ranks, 2)) for ranks in (4, 5))
    assert run._where(fits) == ["--host", "n1:2,n3:2"]
    assert "without n2" in capsys.readouterr().err
    with pytest.raises(MissingCapabilityError, match=r"lost n2.* n1, n3.*--spare-nodes"):
        run._where(fits_not)
    monkeypatch.setenv("LEFT", "n[1-3]")
    assert run._where(fits_not) == []
