"""Nodes that crash under jobs of a real Slurm: all processes of a node die at once, and Slurm must detect it.


Needs Debian's slurm-wlm and munge, root, and namespaces (`unshare`). Many more crashes are made by
benchmarks/operations/node_crashes.py.
"""

import re

import pytest

from harness.jobs import SITES, have_same_bits, newest_step, start_checkpoints
from stubs.slurm_cluster import SLOW, Jobs

STEPS = 120

pytestmark = pytest.mark.full


def test_job_continues_when_its_nodes_crash(crash_cluster, mpi, tmp_path):
    """A middle node crashes in a step, then the first node crashes during a start."""
    if mpi.vendor not in SITES:
        pytest.skip("how the ranks of this MPI are started under Slurm is not known here")
    site = next(iter(SITES[mpi.vendor].values()))  # by mpirun, where this MPI has a profile that does
    jobs = Jobs(crash_cluster, tmp_path)
    (tmp_path / "site.toml").write_text(site)
    keys = ("--site=site.toml", "--no-check", "--set=checkpoint.every_steps=10")
    number = jobs.begin("--out=hurt", SLOW, *keys, nodes=3, ranks=1, steps=STEPS)
    assert crash_cluster.job(number)["JobState"] in ("PENDING", "RUNNING")
    jobs.checkpoint(tmp_path / "hurt")
    assert crash_cluster.job(number)["NodeList"] == "n[1-3]"
    saved = newest_step(tmp_path / "hurt")
    crash_cluster.crash("n2")
    try:
        wait_for_start(jobs, number, 2)
        crash_cluster.revive("n2")
        crash_cluster.crash("n1")
        wait_for_start(jobs, number, 3)
        jobs.until(number, JobState="COMPLETED")
    finally:
        print(f"--- job {number}: {crash_cluster.job(number)}\n{jobs.log(number)}")

    whole = jobs.begin("--out=whole", *keys, nodes=3, ranks=1, steps=STEPS)
    jobs.until(whole, JobState="COMPLETED")
    origins = [int(start.removeprefix("step-") or 0) for start in start_checkpoints(tmp_path / "hurt")]
    assert origins == sorted(origins) and origins[0] == 0 and saved <= origins[1], (saved, origins)
    assert re.search(rf"resumed from \S+/step-{origins[-1]} after {origins[-1]} steps", jobs.log(number))
    assert have_same_bits(tmp_path / "whole", tmp_path / "hurt")


def wait_for_start(jobs, number, count):
    """Wait for the ``count``-th start of a job. Fail at once if the job ends before."""

    def has_begun():
        if len(start_checkpoints(jobs.folder / "hurt")) >= count:  # that start may have ended well meanwhile
            return True
        state = jobs.cluster.job(number)["JobState"]
        assert state not in ("FAILED", "COMPLETED"), f"job {number} is {state}"
        return False

    jobs.cluster.wait(has_begun, f"start {count} of job {number}")
