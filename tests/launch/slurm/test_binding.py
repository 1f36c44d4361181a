"""To which cores the ranks of a real Slurm's job are bound by mpirun: their own, or none, which is said.

Needs Debian's slurm-wlm and munge, root, and two cores. Slurm confines no job here, so the job has all cores of the
machine, which the only node of the cluster is as large as.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest

import hpcdist
from hpcdist.comm.launch import core_binding, mpirun

RANKS = 2
CPUS = len(os.sched_getaffinity(0)) // RANKS * RANKS
EACH = CPUS // RANKS

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(EACH == 0 or os.sysconf("SC_NPROCESSORS_ONLN") > CPUS, reason="needs all cores of two or more"),
]

PROGRAM = """
import json, os, sys
with open(f"rank-{os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']}", "w") as file:
    json.dump([sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"]], file)
"""
STEP = """
import os, subprocess
if (os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]) == "3":
    subprocess.run(["scontrol", "show", "step", os.environ["SLURM_JOB_ID"]])
"""
SCRIPT = """#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node={ranks} --cpus-per-task={each}
#SBATCH --output=job.out
unset OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS
export PYTHONPATH={home}
{python} -P -m hpcdist run -n {ranks} {arguments}
"""


@pytest.fixture
def job(roomy, tmp_path, mpi):
    """``job(arguments of hpcdist run)`` -> processors and threads of each rank, and what the job has said."""
    if mpi.vendor not in (mpirun.OPEN_MPI, mpirun.MPICH):
        pytest.skip(f"{mpi.vendor} is not told how to bind")
    (tmp_path / "program.py").write_text(PROGRAM)
    home = Path(hpcdist.__file__).parents[1]

    def run(arguments):
        text = SCRIPT.format(ranks=RANKS, each=EACH, home=home, python=sys.executable, arguments=arguments)
        (tmp_path / "job.sh").write_text(text)
        done = roomy.run("sbatch", "--wait", "--parsable", "job.sh", cwd=tmp_path)
        said = (tmp_path / "job.out").read_text()
        assert done.returncode == 0, said
        found = (
            [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(RANKS)] if "program" in text else []
        )
        return [set(processors) for processors, _ in found], [threads for _, threads in found], said

    return run


@pytest.mark.parametrize("options", ["--ranks-per-node 2", f"--ranks-per-node 2 --cpus-per-task {EACH}", ""])
def test_each_rank_has_the_cores_of_its_task(job, options):
    (first, second), threads, said = job(f"--launcher mpirun {options} -- python program.py")
    assert not first & second and len(first) == len(second) == EACH, (first, second)
    assert threads == [str(EACH)] * RANKS and "not bound" not in said


@pytest.mark.parametrize(
    ("options", "told"),
    [(f"--ranks-per-node 2 --cpus-per-task {CPUS}", True), ("--ranks-per-node 2 --mpi-args '{none}'", False)],
)
def test_ranks_that_are_not_bound(job, mpi, options, told):
    word = "--bind-to none" if mpi.vendor == mpirun.OPEN_MPI else "-bind-to none"
    (first, second), _, said = job(f"--launcher mpirun {options.replace('{none}', word)} -- python program.py")
    assert first == second == set(os.sched_getaffinity(0))
    reason = f"hpcdist run: ranks are not bound to cores: 2 ranks x {CPUS} (--cpus-per-task) do not fit"
    assert said.count("not bound") == said.count(reason) == int(told), said


def test_the_doctor_of_the_job_says_so(job):
    said = job("--launcher mpirun --ranks-per-node 2 doctor --job --device cpu")[2]
    cores = len(core_binding.node_cores().cores) // RANKS
    assert re.search(rf"OK +cores +{cores} cores? each: .* \| .*; OMP_NUM_THREADS={EACH}\n", said), said
    said = job(f"--launcher mpirun --ranks-per-node 2 --cpus-per-task {CPUS} doctor --job --device cpu")[2]
    assert re.search(r"WARN +cores ", said), said


def test_the_daemons_of_mpirun_have_all_processors_of_the_job(cluster, tmp_path):
    """Where the script is one that starts ranks by srun as well."""
    (tmp_path / "program.py").write_text(STEP)
    home = Path(hpcdist.__file__).parents[1]
    arguments = "--launcher mpirun --ranks-per-node 2 --cpus-per-task 2 -- python program.py"
    text = SCRIPT.format(ranks=4, each=2, home=home, python=sys.executable, arguments=arguments)
    text = text.replace("--nodes=1 --ntasks-per-node=4", "--nodes=2 --ntasks-per-node=2")
    (tmp_path / "job.sh").write_text(text.replace("unset", "export SRUN_CPUS_PER_TASK=2\nunset"))
    done = cluster.run("sbatch", "--wait", "--parsable", "job.sh", cwd=tmp_path)
    said = (tmp_path / "job.out").read_text()
    assert done.returncode == 0 and re.search(r"Nodes=2 CPUs=8 Tasks=2 ", said), said
