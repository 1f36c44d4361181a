"""Copies on the nodes of a job of a real Slurm are removed, whenever and however the job ends.


Needs Debian's slurm-wlm and munge, root, and namespaces (`unshare`).
"""

import pytest

from hpcdist.batch import site_search
from stubs.slurm_cluster import ENDLESS, Jobs

LOCAL = "dev/shm/copies"  # each node has its own
NODES = ("n1", "n2")
OPTIONS = ("--site=site.toml", "--stage-data", "--no-check", "--out=run")

pytestmark = pytest.mark.full


@pytest.fixture
def jobs(crash_cluster, tmp_path):
    base = site_search.load_selected(None, crash_cluster.environment).name
    result = Jobs(crash_cluster, tmp_path)
    (tmp_path / "site.toml").write_text(f"based_on = '{base}'\n[storage]\nnode_local = '/{LOCAL}'\n")
    return result


def copies(cluster, node):
    return list((cluster.root(node) / LOCAL).rglob("*"))


@pytest.mark.parametrize("moment", ["warm-up", "training"])
def test_cancelled_job_leaves_no_copies_on_any_node(crash_cluster, jobs, moment):
    number = jobs.begin(*OPTIONS, *(["--warmup"] if moment == "warm-up" else []), nodes=2, ranks=1, steps=ENDLESS)

    def warming_up():
        return all(any("kernels/" in str(path) for path in copies(crash_cluster, node)) for node in NODES)

    if moment == "training":
        jobs.wait_for_log(number, "\nstep 1/")
    else:
        crash_cluster.wait(warming_up, "kernels on both nodes")
    assert all(any(path.name == "text.txt" for path in copies(crash_cluster, node)) for node in NODES)
    assert crash_cluster.run("scancel", number).returncode == 0
    jobs.until(number, JobState="CANCELLED")
    assert ("\nstep 1/" in jobs.log(number)) is (moment == "training")
    assert [copies(crash_cluster, node) for node in NODES] == [[], []]
    assert "could not be removed" not in jobs.log(number)


def test_requeued_job_leaves_no_copies_on_any_node(crash_cluster, jobs):
    number = jobs.begin(*OPTIONS, nodes=2, ranks=1, steps=ENDLESS)
    jobs.wait_for_log(number, "\nstep 1/")
    assert all(copies(crash_cluster, node) for node in NODES)
    jobs.stop(number)
    jobs.until(number, JobState="PENDING", Restarts="1")
    assert crash_cluster.run("scontrol", "hold", number).returncode == 0
    assert [copies(crash_cluster, node) for node in NODES] == [[], []]
    assert "could not be removed" not in jobs.log(number)
    crash_cluster.run("scancel", number)
