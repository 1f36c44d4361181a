"""Copies on the nodes of a job of a real Slurm go with it, whenever and however it ends.

Needs Debian's slurm-wlm and munge, root, and namespaces (`unshare`).
"""

import pytest

from hpcdist.batch.sites import search
from stubs.slurm_cluster import ENDLESS, Jobs

LOCAL = "dev/shm/copies"  # each node has its own
NODES = ("n1", "n2")
OPTIONS = ("--site=site.toml", "--stage-data", "--no-check", "--out=run")

pytestmark = pytest.mark.full


@pytest.fixture
def jobs(fragile, tmp_path):
    base = search.load_selected(None, fragile.environment).name
    found = Jobs(fragile, tmp_path)
    (tmp_path / "site.toml").write_text(f"based_on = '{base}'\n[storage]\nnode_local = '/{LOCAL}'\n")
    return found


def copies(cluster, node):
    return list((cluster.root(node) / LOCAL).rglob("*"))


@pytest.mark.parametrize("moment", ["warm-up", "training"])
def test_a_cancelled_job_leaves_no_copies_on_any_node(fragile, jobs, moment):
    number = jobs.begin(*OPTIONS, *(["--warmup"] if moment == "warm-up" else []), nodes=2, ranks=1, steps=ENDLESS)

    def warming_up():
        return all(any("kernels/" in str(path) for path in copies(fragile, node)) for node in NODES)

    if moment == "training":
        jobs.told(number, "\nstep 1/")
    else:
        fragile.wait(warming_up, "kernels on both nodes")
    assert all(any(path.name == "text.txt" for path in copies(fragile, node)) for node in NODES)
    assert fragile.run("scancel", number).returncode == 0
    jobs.until(number, JobState="CANCELLED")
    assert ("\nstep 1/" in jobs.log(number)) is (moment == "training")
    assert [copies(fragile, node) for node in NODES] == [[], []]
    assert "could not be removed" not in jobs.log(number)


def test_a_requeued_job_leaves_no_copies_on_any_node(fragile, jobs):
    number = jobs.begin(*OPTIONS, nodes=2, ranks=1, steps=ENDLESS)
    jobs.told(number, "\nstep 1/")
    assert all(copies(fragile, node) for node in NODES)
    jobs.stop(number)
    jobs.until(number, JobState="PENDING", Restarts="1")
    assert fragile.run("scontrol", "hold", number).returncode == 0
    assert [copies(fragile, node) for node in NODES] == [[], []]
    assert "could not be removed" not in jobs.log(number)
    fragile.run("scancel", number)
