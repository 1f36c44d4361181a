"""The nodes that a job of Slurm has lost, by what its commands say and which of them answer: played by scripts."""

import os
from pathlib import Path

import pytest

from hpcdist.batch.schedulers.slurm import allocation as slurm_allocation
from hpcdist.cli import run
from hpcdist.comm.launch import launchers
from hpcdist.comm.launch.mpirun import OPEN_MPI, Launcher
from hpcdist.comm.launch.supervisor import LaunchOutcome
from hpcdist.errors import MissingCapabilityError

SQUEUE = """#!/bin/sh
case "$*" in
  "-h -j 7 -o %i %N") sed "s/^/7 /" HERE/held ;;
  "-h -j 7_2 -o %i %N") sed "s/^/7_2 /" HERE/held ;;
  "-h -j 9 -o %i %N") sed "s/^/9+0 /" HERE/held && echo "9+1 n[4-5]" ;;
  *) exit 1 ;;
esac
"""
SCONTROL = """#!/bin/sh
case "$*" in
  "show hostnames n[1-3]") printf 'n1\\nn2\\nn3\\n' ;;
  "show hostnames n[1,3]") printf 'n1\\nn3\\n' ;;
  "show config") echo "SlurmdTimeout           = 40 sec" ;;
  *) exit 1 ;;
esac
"""
SINFO = """#!/bin/sh
cat HERE/states
"""
# Nodes that do not answer make it fail; those that do have answered.
SRUN = """#!/bin/sh
echo "$* NTASKS=$SLURM_NTASKS" >>HERE/asked
cat HERE/answers
exit 1
"""


class Job:
    """A job of three nodes whose commands are played; it has those in ``held``, and those in ``answers`` live."""

    def __init__(self, folder):
        self.folder = folder
        for name, text in (("squeue", SQUEUE), ("scontrol", SCONTROL), ("sinfo", SINFO), ("srun", SRUN)):
            (folder / name).write_text(text.replace("HERE", str(folder)))
            (folder / name).chmod(0o755)
        path = f"{folder}:{os.environ['PATH']}"
        self.environment = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NTASKS": "6"}
        self.say()

    def say(self, held="n[1-3]", answers="n1 n2 n3", states=""):
        for name, text in (("held", held), ("answers", answers), ("states", states)):
            (self.folder / name).write_text(text and f"{text}\n")

    @property
    def asked(self):
        path = self.folder / "asked"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def job(tmp_path, monkeypatch):
    job = Job(tmp_path)
    monkeypatch.setenv("PATH", job.environment["PATH"])
    return job


def test_a_node_that_slurm_has_taken_is_lost_and_not_asked(job):
    job.say(held="n[1,3]", answers="n1 n3")
    assert slurm_allocation.lost_nodes(job.environment) == (["n2"], ["n1", "n3"])
    assert "--nodes=2 --ntasks=2" in job.asked and "--nodelist=n1,n3 " in job.asked and "--overlap" in job.asked
    assert "NTASKS=\n" in job.asked  # what the job wants for its steps is not for this one


def test_a_node_that_does_not_answer_is_lost_whatever_slurm_says(job):
    job.say(answers="n1\nn3", states="n1 mixed\nn2 mixed\nn3 mixed")
    assert slurm_allocation.lost_nodes(job.environment) == (["n2"], ["n1", "n3"])


@pytest.mark.parametrize("state", ["down", "down*", "mixed*", "allocated*"])
def test_a_node_that_is_down_or_does_not_respond_is_lost_and_not_asked(job, state):
    job.say(answers="n1\nn3", states=f"n1 mixed\nn2 {state}\nn3 draining")
    assert slurm_allocation.lost_nodes(job.environment) == (["n2"], ["n1", "n3"])
    assert "--nodelist=n1,n3 " in job.asked


def test_where_no_node_can_be_asked_slurm_is_believed(job):
    job.say(answers="", states="n1 mixed\nn2 down*\nn3 mixed")
    assert slurm_allocation.lost_nodes(job.environment) == (["n2"], ["n1", "n3"])
    (job.folder / "srun").unlink()
    job.environment["PATH"] = str(job.folder)
    assert slurm_allocation.lost_nodes(job.environment)[0] in ([], ["n2"])  # `cat` is not there either
    job.say()


def test_a_srun_that_hangs_has_heard_of_those_that_answered(job, monkeypatch):
    monkeypatch.setattr(slurm_allocation, "PROBE_S", 1.0)
    monkeypatch.setattr(slurm_allocation, "_MESSAGE_TIMEOUT_S", 0.1)
    (job.folder / "srun").write_text("#!/bin/sh\necho n1; echo n3; exec sleep 60\n")
    assert slurm_allocation.lost_nodes(job.environment) == (["n2"], ["n1", "n3"])


@pytest.mark.parametrize("own", [{"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, {"SLURM_JOB_ID": "9"}])
def test_a_task_and_a_component_have_their_own_nodes(job, own):
    """The number of an array is that of one of its tasks, too; squeue tells of all, and of all components."""
    job.say(held="n[1,3]", answers="n1\nn3")
    assert slurm_allocation.lost_nodes(job.environment | own) == (["n2"], ["n1", "n3"])


@pytest.mark.parametrize("changes", [{"SLURM_JOB_ID": ""}, {"SLURM_JOB_ID": "8"}, {"SLURM_JOB_NODELIST": ""}])
def test_where_slurm_does_not_say_nothing_is_lost(job, changes):
    assert slurm_allocation.lost_nodes(job.environment | changes) == ([], [])


@pytest.mark.parametrize("held", ["", "n9"])
def test_nothing_is_lost_where_the_nodes_of_the_job_are_not_known(job, held):
    job.say(held=held)
    assert slurm_allocation.lost_nodes(job.environment) == ([], [])


def test_outside_of_a_job_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(slurm_allocation.subprocess, "run", lambda *_, **__: pytest.fail("it was asked"))
    assert slurm_allocation.lost_nodes({}) == ([], [])
    allocation = slurm_allocation.SlurmAllocation(3, environment={})
    assert allocation.died() == [] and allocation.shortage() == ""
    assert allocation.wait(lambda _: pytest.fail("it waits"), print) is None


def test_a_node_dies_once_and_may_come_back(job):
    allocation = slurm_allocation.SlurmAllocation(3, environment=job.environment)
    assert allocation.died() == []
    job.say(answers="n1\nn3")
    assert (allocation.died(), allocation.died(), allocation.lost) == (["n2"], [], ["n2"])
    assert "the job has lost n2, and needs 3 nodes, of which n1, n3 are left" in allocation.shortage()
    job.say()
    assert (allocation.died(), allocation.lost, allocation.shortage()) == ([], [], "")


@pytest.mark.parametrize(("whole", "short"), [(False, False), (True, True)])
def test_a_launcher_that_takes_all_nodes_cannot_go_on_without_one(job, whole, short):
    environment = job.environment | {"SLURM_JOB_NUM_NODES": "3"}
    allocation = slurm_allocation.SlurmAllocation(2, whole=whole, environment=environment)
    job.say(answers="n1\nn3")
    allocation.died()
    assert bool(allocation.shortage()) is short


def test_it_waits_for_nodes_until_slurm_has_taken_them(job):
    said, pauses = [], []
    allocation = slurm_allocation.SlurmAllocation(3, environment=job.environment)
    job.say(answers="n1\nn3")
    allocation.died()

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            job.say(held="n[1,3]", answers="n1\nn3")

    assert allocation.wait(pause, said.append) is None
    assert len(pauses) == 2 and allocation.shortage()
    assert said == ["waiting up to 70 s for n2: until Slurm has declared them down"]
    job.say(answers="n1\nn3")
    assert allocation.wait(lambda _: 15, said.append) == 15
    assert allocation.wait(lambda _: job.say(), said.append) is None
    assert allocation.shortage() == ""


def test_it_waits_no_longer_than_slurm_may(job, monkeypatch):
    monkeypatch.setattr(slurm_allocation, "MARGIN_S", -40.0)
    allocation = slurm_allocation.SlurmAllocation(3, environment=job.environment)
    job.say(answers="n1\nn3")
    allocation.died()
    assert allocation.wait(lambda _: pytest.fail("it waits"), print) is None and allocation.shortage()


def test_the_next_start_is_without_them(job, monkeypatch, capsys):
    found = Launcher(Path("mpirun"), OPEN_MPI, "5.0.11")
    tried = []
    monkeypatch.setattr(
        run._Launch, "start", lambda self, *words, repeated: tried.append(words) or LaunchOutcome(0, None, False)
    )

    def start_again(starter):
        run._Launch(starter, [], [], {}, 1.0, False, False, []).start_again(allocation, ["train"], set())
        return tried.pop()[2]

    allocation = slurm_allocation.SlurmAllocation(2, environment=job.environment)
    allocation.died()
    starter = launchers.MpirunStarter(launchers.MPIRUN, launchers.LaunchRequest(4, 2), found)
    assert start_again(starter) == []
    job.say(answers="n1\nn3")
    allocation.died()
    assert start_again(starter) == ["--host", "n1:2,n3:2"]
    assert "without n2" in capsys.readouterr().err
    with pytest.raises(MissingCapabilityError, match="cannot leave nodes out"):
        start_again(launchers.Starter(launchers.FLUX, launchers.LaunchRequest(4, 2)))
