"""The epilog of a site, which a real Slurm runs on each node after a job has ended there for any reason.


Needs Debian's slurm-wlm and munge, and root.
"""

import time

import pytest

from harness.jobs import LIMIT_S
from hpcdist.comm.launch import mpirun
from stubs.slurm_cluster import ENDLESS, Jobs

SITES = {mpirun.OPEN_MPI: "slurm-openmpi", mpirun.MPICH: "slurm-mpich"}

pytestmark = pytest.mark.full


def test_epilog_removes_leftovers_of_a_killed_job(epilog_cluster, mpi, tmp_path):
    if mpi.vendor not in SITES:
        pytest.skip("how the ranks of this MPI are started under Slurm is not known here")
    jobs = Jobs(epilog_cluster, tmp_path)
    local, textfile = epilog_cluster.folder / "local", epilog_cluster.folder / "textfile"
    (tmp_path / "site.toml").write_text(
        f"based_on = '{SITES[mpi.vendor]}'\n[storage]\nnode_local = '{local}'\n"
        f"[environment]\nvariables = {{ TMPDIR = '{local}' }}\n"
    )
    keys = ("--set=telemetry.prometheus=textfile", f"--set=telemetry.textfile_directory={textfile}")
    begun = ("--site=site.toml", "--stage-data", "--no-check", *keys)
    killed = jobs.begin("--out=killed", *begun, nodes=1, ranks=1, steps=ENDLESS)
    other = jobs.begin("--out=other", *begun, nodes=1, ranks=1, steps=ENDLESS)
    for name in ("killed", "other"):
        jobs.checkpoint(tmp_path / name)
    marks = {path.read_text().strip(): path.parent for path in local.glob("hpcdist-*/job")}
    assert marks.keys() == {killed, other}
    starts = {folder for folder in local.glob("hpcdist-run-*") if f'"{killed}"' in (folder / "owner.json").read_text()}
    others = set(local.glob("hpcdist-run-*")) - starts
    assert len(starts) == len(others) == 1

    # All its processes at once, the script among them, which cannot tidy up.
    assert epilog_cluster.run("scancel", "--full", "--signal=KILL", killed).returncode == 0
    epilog_cluster.wait(lambda: (epilog_cluster.folder / f"epilog-{killed}-n1").exists(), "end of the epilog")
    limit = time.monotonic() + LIMIT_S
    while (left := [*local.glob(".hpcdist-gone-*")]) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not left and not marks[killed].exists() and not [path for path in starts if path.exists()]
    assert not (textfile / f"hpcdist_{killed}.prom").exists()
    # The other job, of the same user on the same node, has lost nothing and goes on.
    assert marks[other].exists() and others <= set(local.iterdir()) and (textfile / f"hpcdist_{other}.prom").exists()
    jobs.checkpoint(tmp_path / "other", (tmp_path / "other" / "checkpoints" / "latest").read_text())
    assert epilog_cluster.job(other)["JobState"] == "RUNNING"
    assert "drain" not in epilog_cluster.run("sinfo", "-h", "-o", "%T").stdout
    assert epilog_cluster.run("scancel", other).returncode == 0
