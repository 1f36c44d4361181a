"""Nodes that crash under `hpcdist run --restarts` in a job of a real Slurm: the training resumes in the same job.


Needs Debian's slurm-wlm and munge, for Open MPI also libpmix-dev, root, and namespaces (`unshare`).
"""

import re
import time

import numpy as np
import pytest

from harness.jobs import LIMIT_S
from hpcdist.comm.launch import mpirun
from hpcdist.telemetry import report
from stubs.slurm_cluster import ENDLESS, Jobs

SRUN = 'based_on = "slurm-openmpi"\n[launcher]\nkind = "srun"\npmi = "pmix"\n'

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def jobs(spare_node_cluster, tmp_path_factory):
    configuration = spare_node_cluster.folder / "slurm.conf"
    # So long an srun that has lost a node waits for the end of its step.
    configuration.write_text(configuration.read_text() + "KillWait=5\n")
    assert spare_node_cluster.run("scontrol", "reconfigure").returncode == 0
    return Jobs(spare_node_cluster, tmp_path_factory.mktemp("jobs"))


def site_of(jobs, mpi, launcher):
    """Return the profile with which ``launcher`` starts the ranks of this MPI; skip if it cannot."""
    if mpi.vendor == mpirun.MPICH:
        if launcher == "mpirun":
            pytest.skip("jobs of MPICH are started by srun")
        return "slurm-mpich"
    if launcher == "mpirun":
        return "slurm-openmpi"
    if "can not load PMIx library" in jobs.cluster.run("srun", "--mpi=pmix", "--ntasks=1", "true").stderr:
        pytest.skip("this Slurm has no PMIx")
    (jobs.folder / "srun.toml").write_text(SRUN)
    return "srun.toml"


def newest_step(jobs, out):
    """Return the step of the newest checkpoint, or 0 if there is no checkpoint."""
    latest = jobs.folder / out / "checkpoints" / "latest"
    return int(latest.read_text().strip().removeprefix("step-")) if latest.exists() else 0


def crash(jobs, node, out, number):
    """Crash a ``node`` of the job, and wait until the job has resumed without it and saved a checkpoint."""
    starts = jobs.log(number).count("resumed from")
    jobs.cluster.crash(node)

    def has_resumed():
        assert jobs.cluster.job(number)["JobState"] == "RUNNING"
        *_, last = jobs.log(number).split("resumed from")
        return jobs.log(number).count("resumed from") > starts and f"step-{newest_step(jobs, out)} " not in last

    jobs.cluster.wait(has_resumed, f"training in {out} without {node}")


def wait_for_save(jobs, out):
    """Wait until the run writes a checkpoint, which takes only milliseconds."""
    until = time.monotonic() + LIMIT_S
    while not any((jobs.folder / out / "checkpoints").glob("step-*.tmp")):
        assert time.monotonic() < until, "no checkpoint was written"
        time.sleep(0.0005)


def revive_all(cluster):
    """Restart all nodes that have crashed."""
    for number in range(1, cluster.count + 1):
        if f"n{number}" not in cluster.nodes:
            cluster.revive(f"n{number}")


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
@pytest.mark.matrix_except("mpirun")
def test_job_resumes_after_a_middle_and_the_last_node_crash(jobs, mpi, launcher):
    revive_all(jobs.cluster)
    site, out, whole_out = site_of(jobs, mpi, launcher), f"by-{launcher}", f"whole-{launcher}"
    options = ("--restarts=3", "--spare-nodes=2", "--no-check", f"--site={site}", f"--out={out}")
    number = jobs.begin(*options, nodes=3, ranks=1, steps=ENDLESS)
    try:
        jobs.checkpoint(jobs.folder / out)
        crash(jobs, "n2", out, number)  # of n1, n2, n3
        wait_for_save(jobs, out)
        crash(jobs, "n4", out, number)  # of n1, n3, n4
    finally:
        print(jobs.log(number))
        jobs.cluster.run("scancel", number)
    revive_all(jobs.cluster)
    steps = newest_step(jobs, out)
    options = (f"--out={whole_out}", "--no-check", f"--site={site}", "--set=chaos.step_s=0")
    whole = jobs.begin(*options, nodes=3, ranks=1, steps=ENDLESS)
    jobs.cluster.wait(lambda: newest_step(jobs, whole_out) >= steps, "a run that nobody hurt")
    jobs.cluster.run("scancel", whole)
    for each in (whole, number):
        jobs.until(each, JobState="CANCELLED")
    output = jobs.log(number)
    # By node, not by start: PRRTE's daemons may lose each other while a start begins, which costs one of the restarts.
    assert re.findall(r"having lost (\w+); start \d follows at once", output) == ["n2", "n4"]
    assert output.count("3 ranks on 3 nodes") >= 3 and "without the lost nodes n2, n4" in output
    assert np.array_equal(losses(jobs, out)[:steps], losses(jobs, whole_out)[:steps])


def losses(jobs, out):
    """Return the losses of all saved steps, in order."""
    result = report.report(jobs.folder / out).run.steps["loss"]
    assert len(result) >= newest_step(jobs, out)
    return result


def test_job_with_too_few_nodes_left_is_requeued(jobs):
    revive_all(jobs.cluster)
    options = ("--restarts=3", "--spare-nodes=1", "--no-check", "--out=few")
    number = jobs.begin(*options, nodes=3, ranks=1, steps=ENDLESS)
    jobs.checkpoint(jobs.folder / "few")
    for node in ("n2", "n3"):
        jobs.cluster.crash(node)
    try:
        jobs.cluster.wait(lambda: jobs.cluster.job(number)["Restarts"] == "1", f"requeue of job {number}")
        assert "start 2 is cancelled: the job has lost n2, n3 and needs 3 nodes" in jobs.log(number)
    finally:
        print(jobs.log(number))
        jobs.cluster.run("scancel", number)
