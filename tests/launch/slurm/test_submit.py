"""`hpcdist submit` and `jobs cancel` on a real Slurm: drained nodes, submission from an allocation, a clean end.

Needs Debian's slurm-wlm and munge, and root.
"""

import re
import sys

import pytest

from stubs.slurm_cluster import ENDLESS, NODES, Jobs

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def jobs(cluster, tmp_path_factory):
    return Jobs(cluster, tmp_path_factory.mktemp("submitted"))


def test_job_waits_for_drained_nodes(jobs):
    """A job that can never run is still rejected while a node is away."""
    cluster = jobs.cluster
    whole = ("--ranks-per-node=1", "--job-name=hpcdist-waits")
    refused = jobs.submit(f"--nodes={NODES}", *whole, "--cpus-per-task=5")
    assert (refused.returncode, refused.stdout) == (78, ""), refused.stderr
    assert cluster.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=test").returncode == 0
    cluster.wait(lambda: re.search("drain", cluster.run("sinfo", "-h", "-o", "%T").stdout), "a drained node")
    try:
        done = jobs.submit(f"--nodes={NODES}", *whole, "--chain=2", "--out=waits")
        assert done.returncode == 0 and re.fullmatch(r"(\d+\n){2}", done.stdout), done.stderr
        assert len(re.findall(r"warning: the job waits for nodes: now n3 is drain(ed|ing)\n", done.stderr)) == 1
        assert {cluster.job(number)["JobState"] for number in done.stdout.split()} == {"PENDING"}
        assert cluster.run("scancel", *done.stdout.split()).returncode == 0
        for options in ([f"--nodes={NODES + 1}"], [f"--nodes={NODES}", "--cpus-per-task=5"], ["--partition=nix"]):
            refused = jobs.submit("--nodes=1", *whole, *options)
            assert (refused.returncode, refused.stdout) == (78, ""), (options, refused.stderr)
            assert "Slurm refused the job" in refused.stderr
    finally:
        cluster.run("scontrol", "update", "NodeName=n3", "State=RESUME")
    cluster.wait(lambda: "drain" not in cluster.run("sinfo", "-h", "-o", "%T").stdout, "n3")
    assert "hpcdist-waits" not in cluster.run("squeue", "-h", "-o", "%j").stdout


def test_job_does_not_inherit_the_allocation_of_its_submission(jobs):
    """The allocation has memory per core, and the job memory per node. srun accepts only one of the two."""
    line = [sys.executable, "-P", "-m", "hpcdist", "submit", "recipe.toml", "--set=run.steps=2", "--out=inner"]
    line += ["--nodes=2", "--no-check", "--sbatch-arg=--mem=100"]
    done = jobs.cluster.run("salloc", "--quiet", "--nodes=1", "--mem-per-cpu=10", *line, cwd=jobs.folder)
    assert done.returncode == 0, done.stderr
    jobs.until(done.stdout.strip(), JobState="COMPLETED", ExitCode="0:0")


def test_job_asked_to_save_and_end_does_not_fail(jobs):
    number = jobs.begin("--no-check", "--out=cancelled", nodes=1, ranks=1, steps=ENDLESS)
    saved = jobs.checkpoint(jobs.folder / "cancelled")
    hpcdist = [sys.executable, "-P", "-m", "hpcdist", "jobs"]
    done = jobs.cluster.run(*hpcdist, "cancel", number, cwd=jobs.folder)
    assert done.returncode == 0, done.stderr
    jobs.until(number, JobState="COMPLETED", ExitCode="0:0")
    latest = (jobs.folder / "cancelled" / "checkpoints" / "latest").read_text()
    assert latest != saved and f"saved {latest.strip()}; not started again: the job was cancelled" in jobs.log(number)
    shown = jobs.cluster.run(*hpcdist, "status", number, "--json", cwd=jobs.folder).stdout
    assert '"reason": "saved and ended as requested"' in shown
    assert list((jobs.folder / "cancelled").glob("job-*.toml")) and not list(jobs.folder.glob("hpcdist-*.toml"))
