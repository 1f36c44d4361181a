"""A sweep as a job array, a benchmark, and servers on a node of their own, under a real Slurm of three virtual nodes.

Needs Debian's slurm-wlm and munge, for Open MPI also libpmix-dev (whose libpmix.so the PMIx plugin of Slurm opens), and
root.
"""

import json
import re
import sys

import pytest

from hpcdist.bench.collectives import results as collectives_results
from hpcdist.bench.sweep import results
from hpcdist.comm.launch import mpirun
from hpcdist.telemetry import report

LAUNCHED = {mpirun.OPEN_MPI: ("openmpi", "pmix"), mpirun.MPICH: ("mpich", "pmi2")}
# UCX has addresses that are longer than a message of Slurm's PMI-2.
SITE = """
based_on = "slurm-mpich"
[launcher]
mpi = "{}"
pmi = "{}"
[environment]
variables = {{MPIR_CVAR_CH4_NETMOD = "ofi"}}
"""
RECIPE = """
data = {path = "text.txt", context = 16}
model = {layers = 1, hidden = 32, heads = 2}
run = {steps = 6, global_batch = 6, validation_samples = 8}
"""
SWEPT = "50% swept"  # Slurm puts numbers in the place of %
# The fifth cannot find its data, on whichever rank.
SWEEP = f"""
[sweep]
ranks = 1
[recipe]
{RECIPE}
[[trial]]
name = "two"
ranks = 2
[[trial]]
name = "a"
run.seed = 1
[[trial]]
name = "b"
run.seed = 2
[[trial]]
name = "c"
run.seed = 3
[[trial]]
name = "lost"
data.path = "lost.txt"
[[trial]]
name = "d"
run.seed = 4
"""

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cluster, mpi):
    if mpi.vendor not in LAUNCHED:
        pytest.skip(f"how {mpi.vendor} is started by srun is not known here")
    pmi = LAUNCHED[mpi.vendor][1]
    tried = cluster.run("srun", f"--mpi={pmi}", "--ntasks=1", "true")
    if "can not load PMIx library" in tried.stderr:
        pytest.skip("Slurm's PMIx plugin finds no libpmix.so: apt-get install libpmix-dev")
    assert tried.returncode == 0, tried.stderr
    place = tmp_path_factory.mktemp("arrays")
    (place / "text.txt").write_text("".join(f"{number} is {number * number % 97}, " for number in range(1500)))
    (place / "site.toml").write_text(SITE.format(*LAUNCHED[mpi.vendor]))
    (place / "sweep.toml").write_text(SWEEP)
    (place / "recipe.toml").write_text(RECIPE + 'parallel = {strategy = "parameter_server"}\n')
    return place


def submit(cluster, folder, *arguments):
    options = ["--site", "site.toml", "--nodes=1", "--ranks-per-node=2", "--no-check", "--time=10"]
    line = [sys.executable, "-P", "-m", "hpcdist", "submit", *arguments, *options]
    done = cluster.run(*line, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


def states(cluster, number):
    """Return the states of a job and of all of its tasks or components."""
    return re.findall(r"JobState=(\S+)", cluster.run("scontrol", "show", "job", number).stdout)


def wait_for_end(cluster, number, *logs):
    """Wait until a job and all of its tasks or components ended. Print the ``logs`` for a failure message."""
    going = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}
    try:
        cluster.wait(lambda: not going & set(states(cluster, number)), f"end of job {number}")
    finally:
        print(*(f"--- {path}\n{path.read_text()}" for path in logs if path.exists()), sep="\n")


@pytest.fixture(scope="module")
def job_ids(cluster, folder):
    """Submit all jobs at once, and return the ids of each."""
    arguments = {
        "servers": ("recipe.toml", "--server-nodes=1", "--out=served"),
        "array": ("--array=sweep.toml", f"--out={SWEPT}", "--at-most=2"),
        "bench": ("--bench=collectives", "--bench-args=--bytes 4K --iterations 2 --algorithm ring", "--out=measured"),
    }
    return {name: submit(cluster, folder, *words).stdout.split() for name, words in arguments.items()}


def test_failed_trial_does_not_stop_the_array_and_all_results_merge(cluster, folder, job_ids):
    array, merge = job_ids["array"]
    again = submit(cluster, folder, "--array=sweep.toml", f"--out={SWEPT}")
    assert again.stdout.split()[0] == array and "nothing submitted" in again.stderr, "it waits or runs already"
    logs = folder / SWEPT
    wait_for_end(cluster, merge, *(logs / f"{array}_{task}.out" for task in range(6)), logs / f"merge-{merge}.out")
    assert sorted(states(cluster, array)) == ["COMPLETED"] * 5 + ["FAILED"]
    failed = cluster.run("scontrol", "--oneliner", "show", "job", f"{array}_4").stdout
    assert "JobState=FAILED" in failed and "ExitCode=1:0" in failed
    assert "lost.txt" in (logs / f"{array}_4.out").read_text()

    result = results.read(logs / "results.h5").configurations
    assert [(each.name, each.ranks) for each in result] == [
        *((name, 1) for name in ["a", "b", "c", "lost", "d"]),
        ("two", 2),
    ]
    assert {each.name for each in result if each.repeats[0].status == "failed"} == {"lost"}
    reported = cluster.run(sys.executable, "-m", "hpcdist", "report", str(logs / "results.h5"), "--json", cwd=folder)
    assert sum(row["status"] == "1 ok" for row in json.loads(reported.stdout)["configurations"]) == 5
    # The one that failed is not recorded as left, so the merge is well.
    assert states(cluster, merge) == ["COMPLETED"]
    assert "5 ok, 1 failed" in (logs / f"merge-{merge}.out").read_text()


def test_benchmark_job_has_an_exclusive_node(cluster, folder, job_ids):
    (number,) = job_ids["bench"]
    path = folder / f"hpcdist-{number}.out"
    wait_for_end(cluster, number, path)
    log = path.read_text()
    assert states(cluster, number) == ["COMPLETED"], log
    shown = cluster.job(number)
    assert (shown["OverSubscribe"], shown["Requeue"], shown["NumCPUs"]) == ("NO", "0", "4"), "two ranks, all cores"
    result = collectives_results.read(folder / "measured" / f"collectives-{number}.h5")
    assert {one.key.ranks for one in result.configurations} == {2}


def test_workers_and_servers_share_one_world(cluster, folder, job_ids):
    (number,) = job_ids["servers"]
    path = folder / f"hpcdist-{number}.out"
    wait_for_end(cluster, number, path)
    log = path.read_text()
    assert states(cluster, number) == ["COMPLETED"] * 2, log
    nodes = re.findall(r"\n\s+NodeList=(\S+)", cluster.run("scontrol", "show", "job", number).stdout)
    assert len(set(nodes)) == 2, "a node of each kind"
    assert "3 ranks on 2 nodes" in log and "1 dedicated server" in log
    assert report.report(folder / "served").figures["steps"] == 6
