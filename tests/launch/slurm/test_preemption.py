"""Jobs of a real Slurm that are preempted: they save after the warning, are requeued, and resume, with any launcher.


Needs Debian's slurm-wlm and munge, for Open MPI's srun also libpmix-dev, and root.
"""

import re

import pytest

from harness.jobs import SITES, have_same_bits, newest_step, start_checkpoints
from hpcdist.comm.launch import mpirun
from stubs.slurm_cluster import SLOW, Jobs

STEPS = 100
HYDRA = "based_on = 'slurm-mpich'\n[launcher]\nkind = 'mpirun'\npmi = ''\n"

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def jobs(preemption_cluster, mpi, tmp_path_factory):
    result = Jobs(preemption_cluster, tmp_path_factory.mktemp("jobs"))
    for name, site in (SITES.get(mpi.vendor, {}) | ({"mpirun": HYDRA} if mpi.vendor == mpirun.MPICH else {})).items():
        (result.folder / f"{name}.toml").write_text(site)
    return result


@pytest.mark.parametrize(("launcher", "nodes"), [("mpirun", 2), ("mpirun", 1), ("srun", 2)])
@pytest.mark.matrix_except("srun-2")
def test_preempted_job_saves_and_resumes(jobs, mpi, launcher, nodes):
    if not (jobs.folder / f"{launcher}.toml").exists():
        pytest.skip("how the ranks of this MPI are started under Slurm is not known here")
    tried = jobs.cluster.run("srun", "--mpi=pmix", "--ntasks=1", "true")
    if mpi.vendor == mpirun.OPEN_MPI and launcher == "srun" and "can not load PMIx library" in tried.stderr:
        pytest.skip("this Slurm has no PMIx")
    name = f"{launcher}-{nodes}"
    options = (f"--site={launcher}.toml", f"--set=checkpoint.every_steps={STEPS}")
    number = jobs.begin(f"--out={name}", *options, SLOW, nodes=nodes, ranks=2 // nodes, steps=STEPS)
    jobs.wait_for_log(number, "\nstep 1/")
    urgent = jobs.cluster.preempt()
    jobs.until(number, Restarts="1", JobState="PENDING")
    jobs.until(urgent, JobState="COMPLETED")
    saved = newest_step(jobs.folder / name)
    assert 0 < saved < STEPS
    jobs.until(number, JobState="COMPLETED", ExitCode="0:0")
    output = jobs.log(number)
    assert "SIGTERM to its steps" in output and f"saved step-{saved}; the job resumes from there\n" in output
    assert re.search(rf"resumed from \S+/step-{saved} after {saved} steps", output)
    assert start_checkpoints(jobs.folder / name) == ["", f"step-{saved}"]
    whole = f"whole-{name}"
    jobs.until(
        jobs.begin(f"--out={whole}", *options, "--no-check", nodes=nodes, ranks=2 // nodes, steps=STEPS),
        JobState="COMPLETED",
    )
    assert have_same_bits(jobs.folder / whole, jobs.folder / name)


def test_job_preempted_before_training_is_requeued(jobs, mpi):
    launcher = "mpirun" if (jobs.folder / "mpirun.toml").exists() else "srun"
    local, waits = jobs.folder / "local", jobs.folder / "waits"
    site = (jobs.folder / f"{launcher}.toml").read_text() + f"[storage]\nnode_local = '{local}'\n"
    site += f"[blocks]\ncheck = 'touch {waits}; sleep 3'\n"
    (jobs.folder / "staging.toml").write_text(site)
    number = jobs.begin("--site=staging.toml", "--stage-data", "--out=early", nodes=1, ranks=2, steps=20)
    jobs.cluster.wait(waits.exists, "a job that is about to train")
    assert list(local.iterdir())
    jobs.cluster.preempt()
    jobs.until(number, Restarts="1", JobState="PENDING")
    assert "this start made no new checkpoint in the run directory; the job resumes from step 0" in jobs.log(number)
    jobs.until(number, JobState="COMPLETED", ExitCode="0:0")
    assert not list(local.iterdir())
