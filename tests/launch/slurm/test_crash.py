"""Nodes that crash under jobs of a real Slurm: everything on them dies at once, and Slurm has to find out.

Needs Debian's slurm-wlm and munge, root, and namespaces (`unshare`). Many more crashes
are made by benchmarks/operations/node_crashes.py.
"""

import re

import pytest

from harness.jobs import SITES, begun, newest, same_bits
from stubs.slurm_cluster import SLOW, Jobs

STEPS = 120

pytestmark = pytest.mark.full


def test_a_job_goes_on_when_its_nodes_crash(fragile, mpi, tmp_path):
    """One in the middle crashes in a step, then the first in a start."""
    if mpi.vendor not in SITES:
        pytest.skip("how the ranks of this MPI are started under Slurm is not known here")
    site = next(iter(SITES[mpi.vendor].values()))  # by mpirun, where this MPI has a profile that does
    jobs = Jobs(fragile, tmp_path)
    (tmp_path / "site.toml").write_text(site)
    keys = ("--site=site.toml", "--no-check", "--set=checkpoint.every_steps=10")
    number = jobs.begin("--out=hurt", SLOW, *keys, nodes=3, ranks=1, steps=STEPS)
    assert fragile.job(number)["JobState"] in ("PENDING", "RUNNING")
    jobs.checkpoint(tmp_path / "hurt")
    assert fragile.job(number)["NodeList"] == "n[1-3]"
    saved = newest(tmp_path / "hurt")
    fragile.crash("n2")
    try:
        starts(jobs, number, 2)
        fragile.revive("n2")
        fragile.crash("n1")
        starts(jobs, number, 3)
        jobs.until(number, JobState="COMPLETED")
    finally:
        print(f"--- job {number}: {fragile.job(number)}\n{jobs.log(number)}")

    whole = jobs.begin("--out=whole", *keys, nodes=3, ranks=1, steps=STEPS)
    jobs.until(whole, JobState="COMPLETED")
    origins = [int(start.removeprefix("step-") or 0) for start in begun(tmp_path / "hurt")]
    assert origins == sorted(origins) and origins[0] == 0 and saved <= origins[1], (saved, origins)
    assert re.search(rf"resumed from \S+/step-{origins[-1]} after {origins[-1]} steps", jobs.log(number))
    assert same_bits(tmp_path / "whole", tmp_path / "hurt")


def starts(jobs, number, count):
    """Wait for the start of a job that is so many; a job that has ended before fails at once."""

    def has_begun():
        if len(begun(jobs.folder / "hurt")) >= count:  # that start may have ended well meanwhile
            return True
        state = jobs.cluster.job(number)["JobState"]
        assert state not in ("FAILED", "COMPLETED"), f"job {number} is {state}"
        return False

    jobs.cluster.wait(has_begun, f"start {count} of job {number}")
