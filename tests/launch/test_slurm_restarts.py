"""Nodes that crash under `hpcdist run --restarts` in a job of a real Slurm: the training goes on in the same job.

Needs Debian's slurm-wlm and munge, for Open MPI also libpmix-dev, root, and namespaces (`unshare`).
"""

import time

import numpy as np
import pytest

from harness.jobs import LIMIT_S
from hpcdist.comm.launch import mpirun
from hpcdist.telemetry import report
from stubs.slurm_cluster import Jobs

ENDLESS = 10**6
SRUN = 'based_on = "slurm-openmpi"\n[launcher]\nkind = "srun"\npmi = "pmix"\n'

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def jobs(spared, tmp_path_factory):
    configuration = spared.folder / "slurm.conf"
    # So long an srun that has lost a node waits for the end of its step.
    configuration.write_text(configuration.read_text() + "KillWait=5\n")
    assert spared.run("scontrol", "reconfigure").returncode == 0
    return Jobs(spared, tmp_path_factory.mktemp("jobs"))


def sites(jobs, mpi):
    """The profiles that start the MPI of this environment, by mpirun and by srun as far as Slurm can, with a name."""
    if mpi.vendor == mpirun.MPICH:
        return {"slurm-mpich": "by-srun"}
    if "can not load PMIx library" in jobs.cluster.run("srun", "--mpi=pmix", "--ntasks=1", "true").stderr:
        return {"slurm-openmpi": "by-mpirun"}
    (jobs.folder / "srun.toml").write_text(SRUN)
    return {"slurm-openmpi": "by-mpirun", "srun.toml": "by-srun"}


def saved(jobs, out):
    """The step of the newest checkpoint; 0 where there is none."""
    latest = jobs.folder / out / "checkpoints" / "latest"
    return int(latest.read_text().strip().removeprefix("step-")) if latest.exists() else 0


def crash(jobs, node, submitted):
    """Crash a ``node`` on which all jobs train, and wait until each has gone on without it, and saved."""
    starts = {out: jobs.log(number).count("resumed from") for out, number in submitted.items()}
    jobs.cluster.crash(node)

    def gone_on(out, number):
        assert jobs.cluster.job(number)["JobState"] == "RUNNING"
        *_, last = jobs.log(number).split("resumed from")
        return jobs.log(number).count("resumed from") > starts[out] and f"step-{saved(jobs, out)} " not in last

    for out, number in submitted.items():
        jobs.cluster.wait(lambda out=out, number=number: gone_on(out, number), f"training in {out} without {node}")


def saves(jobs, *outs):
    """Wait until one of the runs writes a checkpoint, which lasts for milliseconds."""
    until = time.monotonic() + LIMIT_S
    while not any(path for out in outs for path in (jobs.folder / out / "checkpoints").glob("step-*.tmp")):
        assert time.monotonic() < until, "no checkpoint was written"
        time.sleep(0.0005)


def revive(cluster):
    """Start all nodes that have crashed."""
    for number in range(1, cluster.count + 1):
        if f"n{number}" not in cluster.nodes:
            cluster.revive(f"n{number}")


def test_a_middle_and_the_last_node_crash(jobs, mpi):
    options = ("--restarts=3", "--spare-nodes=2", "--no-check", "--set=chaos.step_s=0.1")
    submitted = {
        out: jobs.begin(*options, f"--site={site}", f"--out={out}", nodes=3, ranks=1, steps=ENDLESS)
        for site, out in sites(jobs, mpi).items()
    }
    try:
        for out in submitted:
            jobs.checkpoint(jobs.folder / out)
        crash(jobs, "n2", submitted)  # of n1, n2, n3
        saves(jobs, *submitted)
        crash(jobs, "n4", submitted)  # of n1, n3, n4
    finally:
        print(*map(jobs.log, submitted.values()), sep="\n---\n")
        jobs.cluster.run("scancel", *submitted.values())
    revive(jobs.cluster)
    steps = {out: saved(jobs, out) for out in submitted}
    whole = jobs.begin("--out=whole", "--no-check", nodes=3, ranks=1, steps=ENDLESS)
    jobs.cluster.wait(lambda: saved(jobs, "whole") >= max(steps.values()), "a run that nobody hurt")
    jobs.cluster.run("scancel", whole)
    for number in (whole, *submitted.values()):
        jobs.until(number, JobState="CANCELLED")
    expected = losses(jobs, "whole")
    for out, number in submitted.items():
        said = jobs.log(number)
        assert "having lost n2; start 2 follows at once" in said and "having lost n4; start 3 follows at once" in said
        assert said.count("3 ranks on 3 nodes") == 3 and "without n2, n4, which the job has lost" in said
        assert np.array_equal(losses(jobs, out)[: steps[out]], expected[: steps[out]])


def losses(jobs, out):
    """The losses of all steps that are saved, from the first one on."""
    found = report.report(jobs.folder / out).metrics.steps["loss"]
    assert len(found) >= saved(jobs, out)
    return found


def test_a_job_of_which_too_few_nodes_are_left_is_requeued(jobs):
    revive(jobs.cluster)
    options = ("--restarts=3", "--spare-nodes=1", "--no-check", "--set=chaos.step_s=0.1", "--out=few")
    number = jobs.begin(*options, nodes=3, ranks=1, steps=ENDLESS)
    jobs.checkpoint(jobs.folder / "few")
    for node in ("n2", "n3"):
        jobs.cluster.crash(node)
    try:
        jobs.cluster.wait(lambda: jobs.cluster.job(number)["Restarts"] == "1", f"requeue of job {number}")
        assert "start 2 is not made: the job has lost n2, n3, and needs 3 nodes" in jobs.log(number)
    finally:
        print(jobs.log(number))
        jobs.cluster.run("scancel", number)
