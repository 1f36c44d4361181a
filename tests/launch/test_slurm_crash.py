"""Nodes that crash under jobs of a real Slurm: everything on them dies at once, and Slurm has to find out.

Needs Debian's slurm-wlm and munge, for Open MPI also libpmix-dev, root, and namespaces (`unshare`). Many more crashes
are made by benchmarks/operations/node_crashes.py.
"""

import re

import pytest

from harness.jobs import SITES, begun, newest, same_bits
from hpcdist.comm.launch import mpirun
from stubs.slurm_cluster import Jobs

STEPS = 120

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def launchers(fragile, mpi):
    """The launchers that can be used here, and the text of a site for each."""
    tried = fragile.run("srun", "--mpi=pmix", "--ntasks=1", "true")
    if mpi.vendor == mpirun.OPEN_MPI and "can not load PMIx library" in tried.stderr:
        return {"mpirun": SITES[mpi.vendor]["mpirun"]}
    return SITES.get(mpi.vendor, {})


def test_jobs_go_on_when_their_nodes_crash(fragile, launchers, tmp_path):
    """One job for each launcher, on the same nodes: one in the middle crashes in a step, then the first in a start."""
    if not launchers:
        pytest.skip("how the ranks of this MPI are started under Slurm is not known here")
    jobs = Jobs(fragile, tmp_path)
    numbers, saved = {}, {}
    for name, site in launchers.items():
        (tmp_path / f"{name}.toml").write_text(site)
        keys = ("--no-check", "--set=chaos.step_s=0.1", "--set=checkpoint.every_steps=10")
        numbers[name] = jobs.begin(f"--out={name}", f"--site={name}.toml", *keys, nodes=3, ranks=1, steps=STEPS)
        assert fragile.job(numbers[name])["JobState"] in ("PENDING", "RUNNING")
    for name, number in numbers.items():
        jobs.checkpoint(tmp_path / name)
        assert fragile.job(number)["NodeList"] == "n[1-3]"
    for name in numbers:
        saved[name] = newest(tmp_path / name)
    fragile.crash("n2")
    try:
        for name, number in numbers.items():
            starts(jobs, name, number, 2)
        fragile.revive("n2")
        fragile.crash("n1")  # the first node of both
        for name, number in numbers.items():
            starts(jobs, name, number, 3)
            jobs.until(number, JobState="COMPLETED")
    finally:
        for name, number in numbers.items():
            print(f"--- {name}, job {number}: {fragile.job(number)}\n{jobs.log(number)}")

    keys = ("--set=checkpoint.every_steps=10", "--no-check")
    whole = jobs.begin("--out=whole", f"--site={next(iter(launchers))}.toml", *keys, nodes=3, ranks=1, steps=STEPS)
    jobs.until(whole, JobState="COMPLETED")
    for name, number in numbers.items():
        origins = [int(start.removeprefix("step-") or 0) for start in begun(tmp_path / name)]
        assert origins == sorted(origins) and origins[0] == 0 and saved[name] <= origins[1], (saved, origins)
        assert re.search(rf"resumed from \S+/step-{origins[-1]} after {origins[-1]} steps", jobs.log(number))
        assert same_bits(tmp_path / "whole", tmp_path / name)


def starts(jobs, name, number, count):
    """Wait for the start of a job that is so many; a job that has ended before fails at once."""

    def has_begun():
        if len(begun(jobs.folder / name)) >= count:  # that start may have ended well meanwhile
            return True
        state = jobs.cluster.job(number)["JobState"]
        assert state not in ("FAILED", "COMPLETED"), f"{name}, job {number}, is {state}"
        return False

    jobs.cluster.wait(has_begun, f"start {count} of {name}, job {number}")
