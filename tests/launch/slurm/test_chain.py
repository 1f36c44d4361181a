"""Runs of several jobs under a real Slurm of three virtual nodes: chains, and commands that are repeated.


Needs Debian's slurm-wlm and munge, and root.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from hpcdist.batch import ledger, site_search
from hpcdist.telemetry import report
from stubs.slurm_cluster import ENDLESS, STEPS, Jobs

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def jobs(cluster, tmp_path_factory):
    return Jobs(cluster, tmp_path_factory.mktemp("chains"))


def test_chain_that_loses_a_node_trains_the_same_bits(jobs):
    """Links 1 and 2 are asked to stop, and a node is drained. The link on this node goes on, the next link avoids it.


    At the same time, the first link of another chain completes the training: its second link has nothing to do.
    """
    first, second, third = jobs.chain("--chain=3", "--out=chained")
    _, idle = jobs.chain("--chain=2", "--out=whole", "--no-check")
    jobs.wait_for_log(first, "\nstep 1/")
    try:
        assert jobs.cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test").returncode == 0
        jobs.until(first, JobState="RUNNING", NodeList="n[1-2]")
        jobs.stop(first)
        jobs.until(first, JobState="COMPLETED", ExitCode="0:0")
        (one,) = re.findall(r"saved step-(\d+); the job resumes", jobs.log(first))
        jobs.wait_for_log(second, f"\nstep {int(one) + 1}/")
        jobs.stop(second)
        jobs.until(second, JobState="COMPLETED", NodeList="n[1,3]")
        jobs.until(third, JobState="COMPLETED", NodeList="n[1,3]")
    finally:
        assert jobs.cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME").returncode == 0
    (two,) = re.findall(r"saved step-(\d+); the job resumes", jobs.log(second))
    assert 0 < int(one) < int(two) < STEPS
    assert f"after {one} steps" in jobs.log(second) and f"after {two} steps" in jobs.log(third)
    assert "link 1 of 3 ends here; the next one goes on" in jobs.log(first)
    assert "the job is complete" in jobs.log(third)
    once, thrice = (report.report(jobs.folder / name) for name in ("whole", "chained"))
    assert (once.figures["sessions"], thrice.figures["sessions"]) == (1, 3)
    assert np.array_equal(once.run.steps["loss"], thrice.run.steps["loss"])
    assert once.figures["val_loss"] == thrice.figures["val_loss"]

    for number in (idle, jobs.begin("--out=chained", "--no-check")):
        jobs.until(number, JobState="COMPLETED", ExitCode="0:0")
        assert f"has all its {STEPS} steps" in jobs.log(number) and "\nstep " not in jobs.log(number)


def test_repeated_command_resumes_a_cancelled_chain(jobs):
    """The command submits no second job while a job of the run waits or runs."""
    command = ("--chain=2", "--set=run.seed=5", "--no-check")
    first, second = jobs.chain(*command, nodes=1, steps=ENDLESS)
    (run_dir,) = (jobs.folder / "runs").iterdir()
    jobs.checkpoint(run_dir)
    again = jobs.submit(*command, "--nodes=1", "--ranks-per-node=2", steps=ENDLESS)
    assert (again.returncode, again.stdout.split()) == (0, [first, second]), again.stderr
    assert f"{first} (RUNNING), {second} (PENDING)" in again.stderr
    saved = (run_dir / "checkpoints" / "latest").read_text().strip()
    assert jobs.cluster.run("scancel", second, first).returncode == 0
    jobs.until(first, JobState="CANCELLED")

    third, fourth = jobs.chain(*command, nodes=1, steps=ENDLESS)
    resumed = re.compile(r"resumed from \S+/step-(\d+) after \1 steps")
    jobs.cluster.wait(lambda: resumed.search(jobs.log(third)), f"resumption of {saved} in the log of job {third}")
    # Slurm calls a job cancelled while its ranks, told to end, save once more.
    assert int(resumed.search(jobs.log(third))[1]) >= int(saved.removeprefix("step-")) > 0
    assert jobs.cluster.run("scancel", fourth, third).returncode == 0
    assert list((jobs.folder / "runs").iterdir()) == [run_dir]
    assert third not in (first, second)


def test_chain_ends_after_three_failed_starts(jobs):
    """Each link ends with the exit code of its training, and the fourth link is not started."""
    chain = jobs.chain("--chain=4", "--out=vain", "--no-check", "--set=data.path=missing.txt", nodes=1, ranks=1)
    for number in chain:
        jobs.until(number, JobState="FAILED", ExitCode="78:0")
    assert all("missing.txt" in jobs.log(number) for number in chain[:3])
    refused = jobs.log(chain[3])
    assert f"the last 3 starts of {jobs.folder / 'vain'}" in refused and "missing.txt" not in refused
    began = [entry.job for entry in ledger.read(jobs.folder / "vain") if entry.event == ledger.BEGAN]
    assert began == chain[:3]


def test_job_without_progress_is_not_requeued_again(jobs):
    """A site block reports a stopped training although nothing is saved. The job is requeued once."""
    generic = site_search.load_selected(None, jobs.cluster.environment).name
    Path(jobs.folder / "liar.toml").write_text(f"based_on = '{generic}'\n[blocks]\nlaunch = 'code=75'\n")
    number = jobs.begin("--site=liar.toml", "--out=liar", "--no-check", nodes=1, ranks=1)
    jobs.release(number)
    jobs.until(number, JobState="FAILED", ExitCode="75:0", Restarts="1")
    assert "not started again: 2 consecutive starts made no new checkpoint" in jobs.log(number)
