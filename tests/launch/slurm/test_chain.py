"""Runs of several jobs under a real Slurm of three virtual nodes: chains, and commands that are given again.

Needs Debian's slurm-wlm and munge, and root.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from hpcdist.batch import ledger
from hpcdist.batch.sites import search
from hpcdist.telemetry import report
from stubs.slurm_cluster import ENDLESS, STEPS, Jobs

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def jobs(cluster, tmp_path_factory):
    return Jobs(cluster, tmp_path_factory.mktemp("chains"))


def test_a_chain_of_three_that_loses_a_node_trains_the_same_bits(jobs):
    """Links 1 and 2 are told to stop, and a node is drained: the link on it goes on, the next one avoids it.

    At the same time the first link of another chain trains it all: the second finds nothing to do.
    """
    first, second, third = jobs.chain("--chain=3", "--out=chained")
    _, idle = jobs.chain("--chain=2", "--out=whole", "--no-check")
    jobs.told(first, "\nstep 1/")
    try:
        assert jobs.cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test").returncode == 0
        jobs.until(first, JobState="RUNNING", NodeList="n[1-2]")
        jobs.stop(first)
        jobs.until(first, JobState="COMPLETED", ExitCode="0:0")
        (one,) = re.findall(r"saved step-(\d+); the job goes on", jobs.log(first))
        jobs.told(second, f"\nstep {int(one) + 1}/")
        jobs.stop(second)
        jobs.until(second, JobState="COMPLETED", NodeList="n[1,3]")
        jobs.until(third, JobState="COMPLETED", NodeList="n[1,3]")
    finally:
        assert jobs.cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME").returncode == 0
    (two,) = re.findall(r"saved step-(\d+); the job goes on", jobs.log(second))
    assert 0 < int(one) < int(two) < STEPS
    assert f"after {one} steps" in jobs.log(second) and f"after {two} steps" in jobs.log(third)
    assert "link 1 of 3 ends here; the next one goes on" in jobs.log(first)
    assert "the job is complete" in jobs.log(third)
    once, thrice = (report.report(jobs.folder / name) for name in ("whole", "chained"))
    assert (once.figures["sessions"], thrice.figures["sessions"]) == (1, 3)
    assert np.array_equal(once.metrics.steps["loss"], thrice.metrics.steps["loss"])
    assert once.figures["val_loss"] == thrice.figures["val_loss"]

    for number in (idle, jobs.begin("--out=chained", "--no-check")):
        jobs.until(number, JobState="COMPLETED", ExitCode="0:0")
        assert f"has all its {STEPS} steps" in jobs.log(number) and "\nstep " not in jobs.log(number)


def test_the_same_command_goes_on_with_what_was_cancelled(jobs):
    """And it makes no second job beside one that waits or runs."""
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


def test_three_starts_in_vain_are_enough(jobs):
    """Each link ends with the exit code of its training, and the fourth is not begun."""
    chain = jobs.chain("--chain=4", "--out=vain", "--no-check", "--set=data.path=missing.txt", nodes=1, ranks=1)
    for number in chain:
        jobs.until(number, JobState="FAILED", ExitCode="78:0")
    assert all("missing.txt" in jobs.log(number) for number in chain[:3])
    refused = jobs.log(chain[3])
    assert f"the last 3 starts of {jobs.folder / 'vain'}" in refused and "missing.txt" not in refused
    began = [entry.job for entry in ledger.read(jobs.folder / "vain") if entry.event == ledger.BEGAN]
    assert began == chain[:3]


def test_saved_without_progress_is_the_end(jobs):
    """A block of the site says that the training was stopped, and nothing is saved: the job is requeued once."""
    generic = search.load_selected(None, jobs.cluster.environment).name
    Path(jobs.folder / "liar.toml").write_text(f"based_on = '{generic}'\n[blocks]\nlaunch = 'code=75'\n")
    number = jobs.begin("--site=liar.toml", "--out=liar", "--no-check", nodes=1, ranks=1)
    jobs.release(number)
    jobs.until(number, JobState="FAILED", ExitCode="75:0", Restarts="1")
    assert "not started again: 2 starts in a row made no new checkpoint" in jobs.log(number)
