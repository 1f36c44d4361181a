"""The lost nodes of a Slurm job, from the output of Slurm's commands and the answers of nodes. Scripts play Slurm."""

import os
from pathlib import Path

import pytest

from hpcdist.batch.schedulers import slurm_allocation
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
# Fails if a node does not answer, but prints the nodes that have answered.
SRUN = """#!/bin/sh
echo "$* NTASKS=$SLURM_NTASKS" >>HERE/asked
cat HERE/answers
exit 1
"""


class Job:
    """A job of three nodes with played Slurm commands: it holds the nodes ``held``; the nodes ``answers`` are alive."""

    def __init__(self, folder):
        self.folder = folder
        for name, text in (("squeue", SQUEUE), ("scontrol", SCONTROL), ("sinfo", SINFO), ("srun", SRUN)):
            (folder / name).write_text(text.replace("HERE", str(folder)))
            (folder / name).chmod(0o755)
        path = f"{folder}:{os.environ['PATH']}"
        self.environment = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NTASKS": "6"}
        self.set_state()

    def set_state(self, held="n[1-3]", answers="n1 n2 n3", states=""):
        for name, text in (("held", held), ("answers", answers), ("states", states)):
            (self.folder / name).write_text(text and f"{text}\n")

    @property
    def probe_arguments(self):
        path = self.folder / "asked"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def job(tmp_path, monkeypatch):
    job = Job(tmp_path)
    monkeypatch.setenv("PATH", job.environment["PATH"])
    return job


def test_node_removed_by_slurm_is_lost_without_probe(job):
    job.set_state(held="n[1,3]", answers="n1 n3")
    assert slurm_allocation.lost_nodes(job.environment) == (["n2"], ["n1", "n3"])
    assert (
        "--nodes=2 --ntasks=2" in job.probe_arguments
        and "--nodelist=n1,n3 " in job.probe_arguments
        and "--overlap" in job.probe_arguments
    )
    assert "NTASKS=\n" in job.probe_arguments  # the job's settings for its own steps do not apply to the probe


def test_unresponsive_node_is_lost_even_if_slurm_lists_it(job):
    job.set_state(answers="n1\nn3", states="n1 mixed\nn2 mixed\nn3 mixed")
    assert slurm_allocation.lost_nodes(job.environment) == (["n2"], ["n1", "n3"])


@pytest.mark.parametrize("state", ["down", "down*", "mixed*", "allocated*"])
def test_node_marked_down_is_lost_without_probe(job, state):
    job.set_state(answers="n1\nn3", states=f"n1 mixed\nn2 {state}\nn3 draining")
    assert slurm_allocation.lost_nodes(job.environment) == (["n2"], ["n1", "n3"])
    assert "--nodelist=n1,n3 " in job.probe_arguments


def test_slurm_states_are_used_if_no_node_can_be_probed(job):
    job.set_state(answers="", states="n1 mixed\nn2 down*\nn3 mixed")
    assert slurm_allocation.lost_nodes(job.environment) == (["n2"], ["n1", "n3"])
    (job.folder / "srun").unlink()
    job.environment["PATH"] = str(job.folder)
    assert slurm_allocation.lost_nodes(job.environment)[0] in ([], ["n2"])  # `cat` is not on PATH either
    job.set_state()


def test_hanging_srun_still_gives_nodes_that_answered(job, monkeypatch):
    monkeypatch.setattr(slurm_allocation, "PROBE_S", 1.0)
    monkeypatch.setattr(slurm_allocation, "_MESSAGE_TIMEOUT_S", 0.1)
    (job.folder / "srun").write_text("#!/bin/sh\necho n1; echo n3; exec sleep 60\n")
    assert slurm_allocation.lost_nodes(job.environment) == (["n2"], ["n1", "n3"])


@pytest.mark.parametrize("local_data", [{"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, {"SLURM_JOB_ID": "9"}])
def test_array_task_and_het_component_use_only_their_nodes(job, local_data):
    """An array's job number is also the number of one task. squeue reports all tasks, and all components."""
    job.set_state(held="n[1,3]", answers="n1\nn3")
    assert slurm_allocation.lost_nodes(job.environment | local_data) == (["n2"], ["n1", "n3"])


@pytest.mark.parametrize("changes", [{"SLURM_JOB_ID": ""}, {"SLURM_JOB_ID": "8"}, {"SLURM_JOB_NODELIST": ""}])
def test_no_node_is_lost_if_slurm_does_not_answer(job, changes):
    assert slurm_allocation.lost_nodes(job.environment | changes) == ([], [])


@pytest.mark.parametrize("held", ["", "n9"])
def test_no_node_is_lost_if_job_nodes_are_unknown(job, held):
    job.set_state(held=held)
    assert slurm_allocation.lost_nodes(job.environment) == ([], [])


def test_no_command_runs_outside_a_job(monkeypatch):
    monkeypatch.setattr(slurm_allocation.subprocess, "run", lambda *_, **__: pytest.fail("a command was run"))
    assert slurm_allocation.lost_nodes({}) == ([], [])
    allocation = slurm_allocation.SlurmAllocation(3, environment={})
    assert allocation.died() == [] and allocation.shortage() == ""
    assert allocation.wait(lambda _: pytest.fail("it waits"), print) is None


def test_node_is_reported_dead_once_and_may_return(job):
    allocation = slurm_allocation.SlurmAllocation(3, environment=job.environment)
    assert allocation.died() == []
    job.set_state(answers="n1\nn3")
    assert (allocation.died(), allocation.died(), allocation.lost) == (["n2"], [], ["n2"])
    assert "the job has lost n2 and needs 3 nodes, but only n1, n3 remain" in allocation.shortage()
    job.set_state()
    assert (allocation.died(), allocation.lost, allocation.shortage()) == ([], [], "")


@pytest.mark.parametrize(("whole", "short"), [(False, False), (True, True)])
def test_launcher_that_needs_all_nodes_reports_shortage(job, whole, short):
    environment = job.environment | {"SLURM_JOB_NUM_NODES": "3"}
    allocation = slurm_allocation.SlurmAllocation(2, whole=whole, environment=environment)
    job.set_state(answers="n1\nn3")
    allocation.died()
    assert bool(allocation.shortage()) is short


def test_wait_ends_when_slurm_removes_lost_nodes(job):
    output, pauses = [], []
    allocation = slurm_allocation.SlurmAllocation(3, environment=job.environment)
    job.set_state(answers="n1\nn3")
    allocation.died()

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            job.set_state(held="n[1,3]", answers="n1\nn3")

    assert allocation.wait(pause, output.append) is None
    assert len(pauses) == 2 and allocation.shortage()
    assert output == ["waiting up to 70 s for n2, until Slurm declares them down"]
    job.set_state(answers="n1\nn3")
    assert allocation.wait(lambda _: 15, output.append) == 15
    assert allocation.wait(lambda _: job.set_state(), output.append) is None
    assert allocation.shortage() == ""


def test_wait_is_limited_by_slurm_timeout(job, monkeypatch):
    monkeypatch.setattr(slurm_allocation, "MARGIN_S", -40.0)
    allocation = slurm_allocation.SlurmAllocation(3, environment=job.environment)
    job.set_state(answers="n1\nn3")
    allocation.died()
    assert allocation.wait(lambda _: pytest.fail("it waits"), print) is None and allocation.shortage()


def test_next_start_excludes_lost_nodes(job, monkeypatch, capsys):
    result = Launcher(Path("mpirun"), OPEN_MPI, "5.0.11")
    tried = []
    monkeypatch.setattr(
        run._Launch, "start", lambda self, *words, repeated: tried.append(words) or LaunchOutcome(0, None, False)
    )

    def options_of_next_start(starter):
        run._Launch(starter, [], [], {}, 1.0, False, False, []).start_again(allocation, ["train"], set())
        return tried.pop()[2]

    allocation = slurm_allocation.SlurmAllocation(2, environment=job.environment)
    allocation.died()
    starter = launchers.MpirunStarter(launchers.MPIRUN, launchers.LaunchRequest(4, 2), result)
    assert options_of_next_start(starter) == []
    job.set_state(answers="n1\nn3")
    allocation.died()
    assert options_of_next_start(starter) == ["--host", "n1:2,n3:2"]
    assert "without the lost nodes n2" in capsys.readouterr().err
    with pytest.raises(MissingCapabilityError, match="cannot exclude nodes"):
        options_of_next_start(launchers.Starter(launchers.FLUX, launchers.LaunchRequest(4, 2)))
