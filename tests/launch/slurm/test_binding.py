"""The cores to which mpirun binds the ranks of a Slurm job: separate cores, or none with a message.


Needs Debian's slurm-wlm and munge, root, and two cores. Slurm does not confine jobs here, so a job has all cores of the
machine. The only node of the cluster is as large as the machine.
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
def job(one_node_cluster, tmp_path, mpi):
    """``job(arguments of hpcdist run)`` returns the processors and threads of each rank, and the output of the job."""
    if mpi.vendor not in (mpirun.OPEN_MPI, mpirun.MPICH):
        pytest.skip(f"{mpi.vendor} is not told how to bind")
    (tmp_path / "program.py").write_text(PROGRAM)
    home = Path(hpcdist.__file__).parents[1]

    def run(arguments):
        text = SCRIPT.format(ranks=RANKS, each=EACH, home=home, python=sys.executable, arguments=arguments)
        (tmp_path / "job.sh").write_text(text)
        done = one_node_cluster.run("sbatch", "--wait", "--parsable", "job.sh", cwd=tmp_path)
        output = (tmp_path / "job.out").read_text()
        assert done.returncode == 0, output
        result = (
            [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(RANKS)] if "program" in text else []
        )
        return [set(processors) for processors, _ in result], [threads for _, threads in result], output

    return run


@pytest.mark.parametrize("options", ["--ranks-per-node 2", f"--ranks-per-node 2 --cpus-per-task {EACH}", ""])
def test_each_rank_is_bound_to_the_cores_of_its_task(job, options):
    (first, second), threads, output = job(f"--launcher mpirun {options} -- python program.py")
    assert not first & second and len(first) == len(second) == EACH, (first, second)
    assert threads == [str(EACH)] * RANKS and "not bound" not in output


@pytest.mark.parametrize(
    ("options", "report"),
    [(f"--ranks-per-node 2 --cpus-per-task {CPUS}", True), ("--ranks-per-node 2 --mpi-args '{none}'", False)],
)
def test_unbound_ranks_are_reported_unless_requested(job, mpi, options, report):
    word = "--bind-to none" if mpi.vendor == mpirun.OPEN_MPI else "-bind-to none"
    (first, second), _, output = job(f"--launcher mpirun {options.replace('{none}', word)} -- python program.py")
    assert first == second == set(os.sched_getaffinity(0))
    reason = f"hpcdist run: ranks are not bound to cores: 2 ranks x {CPUS} (--cpus-per-task) do not fit"
    assert output.count("not bound") == output.count(reason) == int(report), output


def test_doctor_of_the_job_reports_the_cores_of_each_rank(job):
    output = job("--launcher mpirun --ranks-per-node 2 doctor --job --device cpu")[2]
    cores = len(core_binding.node_cores().cores) // RANKS
    assert re.search(rf"OK +cores +{cores} cores? each: .* \| .*; OMP_NUM_THREADS={EACH}\n", output), output
    output = job(f"--launcher mpirun --ranks-per-node 2 --cpus-per-task {CPUS} doctor --job --device cpu")[2]
    assert re.search(r"WARN +cores ", output), output


def test_daemons_of_mpirun_have_all_processors_of_the_job(cluster, tmp_path):
    """The script also contains settings for ranks that srun starts."""
    (tmp_path / "program.py").write_text(STEP)
    home = Path(hpcdist.__file__).parents[1]
    arguments = "--launcher mpirun --ranks-per-node 2 --cpus-per-task 2 -- python program.py"
    text = SCRIPT.format(ranks=4, each=2, home=home, python=sys.executable, arguments=arguments)
    text = text.replace("--nodes=1 --ntasks-per-node=4", "--nodes=2 --ntasks-per-node=2")
    (tmp_path / "job.sh").write_text(text.replace("unset", "export SRUN_CPUS_PER_TASK=2\nunset"))
    done = cluster.run("sbatch", "--wait", "--parsable", "job.sh", cwd=tmp_path)
    output = (tmp_path / "job.out").read_text()
    assert done.returncode == 0 and re.search(r"Nodes=2 CPUs=8 Tasks=2 ", output), output
