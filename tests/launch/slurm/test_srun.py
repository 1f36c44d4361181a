"""`hpcdist run --launcher srun` in jobs of a real Slurm: signals, exit codes and lost nodes as with mpirun.


Needs Debian's slurm-wlm and munge, for Open MPI also libpmix-dev (whose libpmix.so the PMIx plugin of Slurm opens), and
root. Run it with the Python of each MPI: Open MPI is started through PMIx, MPICH through PMI-2.
"""

import re
import sys
from pathlib import Path

import pytest

import hpcdist
from hpcdist.comm.launch import mpirun
from stubs.slurm_cluster import ENDLESS

PMI = {mpirun.OPEN_MPI: "pmix", mpirun.MPICH: "pmi2"}

pytestmark = pytest.mark.full

# The shell is signalled by the test, and passes on what it was told: USR1 as it is, and USR2 as Ctrl-C.
SCRIPT = """#!/bin/bash
#SBATCH --ntasks-per-node=2
#SBATCH --output=job.out
set -m # a process in the background would ignore SIGINT otherwise
export PYTHONPATH={home}
export MPIR_CVAR_CH4_NETMOD=ofi # the addresses of UCX may be longer than a message of Slurm's PMI-2
trap 'kill -USR1 "$launcher"' USR1
trap 'kill -INT "$launcher"' USR2
run() {{
  {python} -P -m hpcdist run --launcher srun --pmi {pmi} "${{@:2}}" --set run.steps={steps} &
  launcher=$! code=0
  while true; do
    wait "$launcher"
    code=$?
    kill -0 "$launcher" 2>/dev/null || break
  done
  echo "$1 ended with $code"
}}
"""
# The ranks of the second start do not see the launcher's directory, like ranks on other hosts: srun must pass signals.
SIGNALS = """
run first -n 4 --ranks-per-node 2 train recipe.toml --out stopped
run second -n 4 --ranks-per-node 2 --mpi-args --export=ALL,HPCDIST_LAUNCH_DIR=/none \\
  train recipe.toml --out stopped --resume auto
two=(-n 2 --ranks-per-node 1)
run killed "${two[@]}" train recipe.toml --set "chaos.kill=['1@2']"
run nodata "${two[@]}" train recipe.toml --set data.path=missing.txt
run nokey "${two[@]}" train recipe.toml --set model.layrs=3
"""
# The first hook that Python is told of is the last to run, after the ranks have said their exit code.
HOOK = """
import atexit, os, time
def write_report():
    time.sleep(6)
    open("report-" + os.environ["SLURM_PROCID"], "w").close()
if os.environ.get("SLURM_STEP_NUM_TASKS") == "2":
    atexit.register(write_report)
"""
HOOKED = """
export PYTHONPATH=$PWD/hook:$PYTHONPATH
run hooked -n 2 --ranks-per-node 1 train recipe.toml
"""
LOST = """
run lost -n 2 --ranks-per-node 1 --restarts 2 train recipe.toml --out lost
"""


class Job:
    """A batch job with a separate folder, which runs its launchers one after the other."""

    def __init__(self, cluster, folder, pmi):
        self.cluster, self.folder, self.pmi = cluster, folder, pmi
        self.number = ""
        (folder / "text.txt").write_text("".join(f"{number} is {number * number % 97}, " for number in range(1500)))
        (folder / "recipe.toml").write_text(
            "[data]\npath = 'text.txt'\ncontext = 16\n[model]\nlayers = 1\nhidden = 32\nheads = 2\n"
            "[communication]\nalgorithm = 'hierarchical'\n[run]\nglobal_batch = 4\n[checkpoint]\nevery_steps = 20\n"
            "[chaos]\nstep_s = 0.1\n"
        )

    def submit(self, starts, *options, steps=ENDLESS):
        home = Path(hpcdist.__file__).parents[1]
        script = SCRIPT.format(home=home, python=sys.executable, pmi=self.pmi, steps=steps)
        (self.folder / "job.sh").write_text(script + starts)
        done = self.cluster.run("sbatch", "--parsable", *options, "job.sh", cwd=self.folder)
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()

    @property
    def log(self):
        path = self.folder / "job.out"
        return path.read_text() if path.exists() else ""

    def wait_for_text(self, text, times=1):
        try:
            self.cluster.wait(lambda: self.log.count(text) >= times, text)
        finally:
            print(self.log)  # shown with a failure

    def signal(self, name):
        assert self.cluster.run("scancel", f"--signal={name}", "--batch", self.number).returncode == 0

    def code(self, start):
        self.wait_for_text(f"{start} ended with ")
        match = re.search(rf"{start} ended with (\d+)\n", self.log)
        assert match
        return int(match[1])


@pytest.fixture
def job(cluster, tmp_path, mpi):
    if mpi.vendor not in PMI:
        pytest.skip(f"how {mpi.vendor} is started by srun is not known here")
    pmi = PMI[mpi.vendor]
    tried = cluster.run("srun", f"--mpi={pmi}", "--ntasks=1", "true")
    if "can not load PMIx library" in tried.stderr:
        pytest.skip("Slurm's PMIx plugin finds no libpmix.so: apt-get install libpmix-dev")
    assert tried.returncode == 0, tried.stderr
    made = Job(cluster, tmp_path, pmi)
    yield made
    if made.number:
        cluster.run("scancel", made.number)
        cluster.wait(lambda: not cluster.run("squeue", "-h", "-j", made.number).stdout.strip(), "end of the job")


def test_srun_passes_signals_and_exit_codes(job):
    job.submit(SIGNALS, "--nodes=2")
    latest = job.folder / "stopped" / "checkpoints" / "latest"
    job.wait_for_text("\nstep 1/")
    job.signal("USR1")
    assert job.code("first") == 75, job.log
    assert job.log.count("4 ranks on 2 nodes") == 1 and latest.exists(), job.log
    saved = latest.read_text()

    job.wait_for_text(f"resumed from stopped/checkpoints/{saved.strip()} ")
    job.cluster.wait(lambda: latest.read_text() != saved, "newer checkpoint")
    job.signal("USR2")
    assert job.code("second") == 130, job.log

    assert job.code("killed") not in (0, 75, 130), job.log
    for start in ("nodata", "nokey"):
        assert job.code(start) == 78, job.log
    _, killed, rest = job.log.partition("killed ended with")
    assert re.search(r"the first failure.*:\n.*\n.*exit code 78\n.*missing\.txt", rest.partition("nodata ended")[0])
    assert killed and "'model.layers'" in rest and "Traceback" not in rest


def test_exit_hooks_complete_before_the_step_ends(job):
    (job.folder / "hook").mkdir()
    (job.folder / "hook" / "sitecustomize.py").write_text(HOOK)
    job.submit(HOOKED, "--nodes=2", steps=2)
    assert job.code("hooked") == 0, job.log
    assert {path.name for path in job.folder.glob("report-*")} == {"report-0", "report-1"}, job.log
    assert "CANCELLED" not in job.log and "srun: error" not in job.log


def test_lost_node_is_excluded_from_the_next_start(job):
    cluster = job.cluster
    job.submit(LOST, "--nodes=3", "--ntasks-per-node=1", "--no-kill")
    latest = job.folder / "lost" / "checkpoints" / "latest"
    cluster.wait(latest.exists, "checkpoint")
    assert cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test").returncode == 0
    try:
        job.wait_for_text("without the lost nodes n2")
        job.wait_for_text("2 ranks on 2 nodes", times=2)
        job.wait_for_text("resumed from lost/checkpoints/step-")
    finally:
        cluster.run("scancel", job.number)
        cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
        cluster.wait(lambda: "down" not in cluster.run("sinfo", "-h", "-o", "%t").stdout, "n2")
