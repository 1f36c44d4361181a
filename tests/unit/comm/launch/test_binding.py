"""Core binding of ranks in a Slurm job, for cases of nodes, threads and tasks; the options of mpirun."""

import errno
import os
import shlex
import shutil

import pytest

from harness.jobs import call_command
from harness.marks import cases
from hpcdist.comm.launch import core_binding, launchers, mpirun
from hpcdist.comm.launch.core_binding import CoreBinding, NodeCores
from hpcdist.comm.launch.launchers import KINDS, LaunchRequest
from hpcdist.comm.launch.mpirun import INTEL_MPI, MPICH, OPEN_MPI, Launcher

PROGRAM = ["python", "-m", "hpcdist"]


def job(cpus, tasks="", **more):
    """Return the environment variables of a job on its first node."""
    results = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_NODEID": "0", "SLURM_JOB_CPUS_PER_NODE": cpus}
    return results | ({"SLURM_TASKS_PER_NODE": tasks} if tasks else {}) | more


def cores(count, threads=1, packages=(), *, confined=True, whole=True):
    """Return a node with the usual numbering of hardware threads: the second threads follow all first threads."""
    each = tuple(tuple(core + count * one for one in range(threads)) for core in range(count))
    return NodeCores(each, packages or (count,), confined, whole)


EIGHT = cores(8)
CORES = {"SLURM_THREADS_PER_CORE": "1"}


@cases(
    "node, each, asked, environment, expected",
    (cores(8), 2, 4, job("8(x2)"), 4),
    (cores(8), 8, 1, job("8(x2)"), 1),
    (cores(2), 2, 1, job("2"), 1),
    (cores(8), 1, 6, job("8,16"), 6),
    # An equal share of the job's cores if no number was requested.
    (cores(8), 2, None, job("8(x2)"), 4),
    (cores(8), 3, None, job("8(x2)"), 2),
    (cores(16), 2, None, job("16,8"), 4),
    (cores(8, 2), 2, None, job("16,8"), 2),
    # Slurm counts hardware threads: 8 of them are 4 cores ...
    (cores(8, 2), 2, 8, job("16(x2)"), 4),
    (cores(6, 2), 4, 3, job("12"), None),  # ... 3 are 2 cores, of which the job has too few
    (cores(8, 2), 4, 3, job("16"), 2),
    (cores(8, 2), 2, None, job("16"), 4),
    # ... but where cores are left over, a core for each thread.
    (cores(8, 2), 2, 4, job("16"), 4),
    # With --threads-per-core=1 it counts cores, whatever the node shows of their threads.
    (cores(8, 2), 2, 4, job("8", **CORES), 4),
    (cores(8, 1), 2, 4, job("16", SLURM_HINT="nomultithread"), 4),
    (cores(8, 2), 2, 8, job("8", **CORES), None),
    # Fewer cores than are needed, here or on another node.
    (cores(2), 2, 2, job("4(x2)"), None),
    (cores(2), 4, 1, job("4(x2)"), None),
    (cores(2), 4, None, job("4(x2)"), None),
    (cores(8), 2, 4, job("8,4"), None),
    (cores(8, 2), 2, 4, job("16,8"), None),
    (cores(8), 8, None, job("8,4"), None),
    # Open MPI gives no rank cores of two sockets.
    (cores(6, packages=(3, 3)), 2, 3, job("6(x2)"), 3),
    (cores(6, packages=(3, 3)), 3, 2, job("6(x2)"), None),
    (cores(6, packages=(3, 3)), 3, None, job("6(x2)"), 1),
    (cores(6, packages=(3, 3)), 1, 4, job("6(x2)"), None),
    (cores(8, packages=(3, 5)), 3, 2, job("8"), 2),
    (cores(8, packages=(3, 5)), 4, 2, job("8"), None),
    (cores(8, packages=(4, 4), whole=False), 2, 4, job("8"), 4),
    (cores(8, packages=(4, 4), whole=False), 2, 4, job("8(x2)"), None),
    (cores(8, packages=(4, 4), whole=False), 8, 1, job("8(x2)"), 1),
    (cores(8, whole=False), 2, 4, job("8(x2)"), 4),
)
def test_number_of_cores_per_rank(node, each, asked, environment, expected):
    result = core_binding.bind_ranks(each, asked, node, environment)
    assert result.cores == expected and bool(result.reason) is (expected is None)
    if expected is not None:
        assert result.ranks_per_node == each and each * expected <= len(node.cores), "mpirun would end with an error"


@pytest.mark.parametrize(("packages", "each"), [((3, 3), 3), ((4, 4), 1)])
def test_mpich_binds_a_rank_across_two_sockets(packages, each):
    here = cores(sum(packages), packages=packages, whole=False)
    result = core_binding.bind_ranks(each, 2 if each == 3 else 6, here, job(f"{sum(packages)}(x2)"), apart=False)
    assert result == CoreBinding(each, 2 if each == 3 else 6)


@pytest.mark.parametrize("asked", [None, 8])
def test_single_rank_per_node_keeps_all_cores_of_the_job(asked):
    assert core_binding.bind_ranks(1, asked, cores(8, packages=(4, 4)), job("8(x2)")) == CoreBinding(1, None)


@cases(
    "node, each, environment, words",
    (cores(8), 2, job("8", SLURM_HET_SIZE="2"), "heterogeneous"),
    (cores(8), 2, {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "8"}, "no node of the job"),  # salloc
    (cores(8), 2, job("?"), "no node of the job"),
    (cores(8, confined=False), 2, job("8"), "by affinity alone"),
    (NodeCores((), ()), 2, job("8"), "by affinity alone"),
    (cores(64), 2, job("8"), "8 of the 64 CPUs"),  # no control groups: other jobs are bound to the same first cores
    (cores(64, 2), 2, job("64"), "64 of the 128 CPUs"),
    (cores(64), 2, job("64,8", SLURM_NODEID="1"), "8 of the 64 CPUs"),
    (cores(8), None, job("8(x2)"), "--ranks-per-node"),
    (cores(2), 2, job("4"), "2 ranks x 2 (--cpus-per-task) do not fit on the 2 cores"),
    (cores(8), 2, job("8,2"), "2 ranks x 2 (--cpus-per-task) do not fit on a node of which the job has 2 CPUs"),
    (cores(6, packages=(3, 3)), 3, job("6"), "3 ranks x 2 cores do not fit on sockets of 3 + 3 cores"),
    (cores(8, packages=(4, 4), whole=False), 2, job("8(x2)"), "ask for whole nodes"),
)
def test_reason_for_unbound_ranks_is_reported(node, each, environment, words):
    result = core_binding.bind_ranks(each, 2, node, environment)
    assert result.cores is None and words in result.reason and "\n" not in result.reason


@cases(
    "ranks, asked, tasks, expected",
    (4, 2, "", 2),
    (4, 2, "9(x9)", 2),
    (4, None, "2(x2)", 2),
    (3, None, "2(x2)", None),
    (3, None, "2,1", None),
    (3, None, "8", 3),
    (3, None, "", None),
    (3, None, "many", None),
)
def test_number_of_ranks_per_node(ranks, asked, tasks, expected):
    assert core_binding.ranks_per_node(ranks, asked, {"SLURM_TASKS_PER_NODE": tasks}) == expected


@cases(
    "each, environment, expected",
    (2, job("8(x2)", SLURM_CPUS_PER_TASK="4"), 4),
    (2, job("8,4", SLURM_CPUS_PER_TASK="4"), None),
    (4, job("8", SLURM_CPUS_PER_TASK="4"), None),  # another number of ranks than the job has tasks
    (None, job("8", SLURM_CPUS_PER_TASK="4"), None),
    (2, job("8"), None),
    (2, {"SLURM_CPUS_PER_TASK": "4"}, None),
)
def test_cpus_per_task_are_read_from_the_job(each, environment, expected):
    assert core_binding.cpus_per_task(each, environment) == expected


def test_daemon_step_gets_all_cpus_of_the_smallest_node():
    one = {"SRUN_CPUS_PER_TASK": "2"}
    assert core_binding.whole_node_step(job("8(x2),4") | one) == {"SRUN_CPUS_PER_TASK": "4"}
    assert core_binding.whole_node_step(job("8(x2)")) == core_binding.whole_node_step(one) == {}


def write_topology(root, siblings, name="core_cpus_list"):
    (root / "online").write_text(f"0-{max(siblings)}\n")
    for one, text in siblings.items():
        (root / f"cpu{one}" / "topology").mkdir(parents=True)
        (root / f"cpu{one}" / "topology" / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_node_cores_are_read_from_sysfs(tmp_path, monkeypatch, name):
    system = write_topology(tmp_path, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, name)
    set_to = []
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, expected: set_to.append(set(expected)))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert core_binding.node_cores(system) == NodeCores(((0, 2), (1, 3)), (2,), confined=True)
    (system / "cpu1" / "topology" / "physical_package_id").write_text("1\n")
    assert core_binding.node_cores(system).packages == (1, 1)
    assert set_to == [{0, 1, 2, 3}] * 4, "the affinity is restored"
    assert core_binding.hardware_threads(system) == ((0, 2), (1, 3))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 3} if set_to[-1] == {1, 3} else {0, 1, 2, 3})
    set_to.append({1, 3})
    assert core_binding.node_cores(system) == NodeCores(((1, 3),), (1,), confined=False, whole=False) and set_to[
        -1
    ] == {1, 3}


def test_node_without_topology_counts_each_cpu_as_core(tmp_path, monkeypatch):
    def refuse(pid, expected):
        raise OSError(errno.EINVAL, "no processor is named")

    monkeypatch.setattr("os.sched_setaffinity", refuse)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 5})
    assert core_binding.node_cores(tmp_path) == NodeCores(((4,), (5,)), (2,), confined=False, whole=False)
    assert core_binding.hardware_threads(tmp_path) == ()


def test_affinity_of_the_process_is_restored():
    before = os.sched_getaffinity(0)
    here = core_binding.node_cores()
    assert os.sched_getaffinity(0) == before and here.processors == len(before)
    if len(before) > 1:
        try:
            os.sched_setaffinity(0, {min(before)})
            assert not core_binding.node_cores().confined and os.sched_getaffinity(0) == {min(before)}
        finally:
            os.sched_setaffinity(0, before)


# -- the options


@cases(
    "vendor, ranks, bound, expected",
    (OPEN_MPI, 2, CoreBinding(2, 4), "--map-by ppr:2:node:PE=4 --bind-to core"),
    (OPEN_MPI, None, CoreBinding(2, 4), "--map-by ppr:2:node:PE=4 --bind-to core"),
    (OPEN_MPI, 2, CoreBinding(2, None, "why"), "--map-by ppr:2:node --bind-to none"),
    (OPEN_MPI, None, CoreBinding(None, None, "why"), "--bind-to none"),
    (OPEN_MPI, 1, CoreBinding(1, None), "--map-by ppr:1:node --bind-to none"),
    (OPEN_MPI, None, CoreBinding(1, None), "--bind-to none"),
    (OPEN_MPI, None, None, ""),
    (MPICH, 2, CoreBinding(2, 4), "-ppn 2 -bind-to core:4"),
    (MPICH, None, CoreBinding(2, 4), "-ppn 2 -bind-to core:4"),
    (MPICH, 2, CoreBinding(2, None, "why"), "-ppn 2"),
    (MPICH, None, CoreBinding(None, None, "why"), ""),
)
def test_mpirun_binding_options(tmp_path, vendor, ranks, bound, expected):
    assert shlex.join(mpirun.per_node(Launcher(tmp_path, vendor, ""), ranks, bound)) == expected


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that gives the mpirun options in a job and the reason why ranks are not bound."""

    def line(vendor, layout, environment, options=(), here=EIGHT, survive=None):
        monkeypatch.setattr(mpirun, "find", lambda environment: Launcher(tmp_path / "mpirun", vendor, "5.0"))
        monkeypatch.setattr(mpirun, "_why_no_ulfm", lambda launcher: "")
        monkeypatch.setattr(core_binding, "node_cores", lambda: here)
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        starter = launchers.choose_starter(KINDS["mpirun"], layout, survive, environment)
        words = starter.line(PROGRAM, {}, options)[1 : -len(PROGRAM)]
        return shlex.join(words).removeprefix("--mca osc '^ucx' "), starter.unbound(options)

    return line


TWO = job("8(x2)", "2(x2)", SLURM_CPUS_PER_TASK="4")


def test_command_line_in_a_slurm_job(start):
    assert start(OPEN_MPI, LaunchRequest(4, 2), TWO) == ("-n 4 --map-by ppr:2:node:PE=4 --bind-to core", "")
    assert start(OPEN_MPI, LaunchRequest(4), TWO) == ("-n 4 --map-by ppr:2:node:PE=4 --bind-to core", "")
    assert start(OPEN_MPI, LaunchRequest(4, 2, 3), TWO) == ("-n 4 --map-by ppr:2:node:PE=3 --bind-to core", "")
    assert start(MPICH, LaunchRequest(4, 2), TWO) == ("-n 4 -ppn 2 -bind-to core:4", "")
    assert start(INTEL_MPI, LaunchRequest(4, 2), TWO) == ("-n 4 -ppn 2", ""), "Intel MPI binds by itself"
    assert start(OPEN_MPI, LaunchRequest(2, 1), TWO) == ("-n 2 --map-by ppr:1:node:PE=4 --bind-to core", "")
    line, reason = start(OPEN_MPI, LaunchRequest(4, 2), TWO, here=cores(4))
    assert line == "-n 4 --map-by ppr:2:node --bind-to none" and "do not fit on the 4 cores" in reason


def test_restart_on_remaining_nodes_keeps_cores_per_rank(start):
    """--restarts with --spare-nodes: as many ranks on fewer nodes of the job, each with the same cores."""
    three = job("8(x3)", "2(x3)", SLURM_CPUS_PER_TASK="4")
    expected = "-n 4 --map-by ppr:2:node:PE=4 --bind-to core --host n1:2,n3:2"
    assert start(OPEN_MPI, LaunchRequest(4, 2), three, ["--host", "n1:2,n3:2"]) == (expected, "")


@pytest.mark.parametrize("options", ["--bind-to none", "--bind-to=socket", "--cpu-set 0,1", "--rankfile file"])
def test_binding_options_of_the_user_are_kept(start, options):
    line, reason = start(OPEN_MPI, LaunchRequest(4, 2), TWO, shlex.split(options))
    assert "PE=" not in line and not reason and line.endswith(options)
    assert line.startswith("-n 4 --map-by ppr:2:node")


def test_hydra_binding_option_of_the_user_is_kept(start):
    assert start(MPICH, LaunchRequest(4, 2), TWO, ["-bind-to", "none"]) == ("-n 4 -ppn 2 -bind-to none", "")


def test_ranks_are_not_bound_if_replacements_may_join(start):
    line, reason = start(OPEN_MPI, LaunchRequest(4, 2), TWO, survive="replace")
    assert "--oversubscribe" in line and "PE=" not in line and "--survive" in reason


def test_number_of_threads_equals_cpus_per_task(start, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    start(OPEN_MPI, LaunchRequest(4, 2), TWO)
    for layout, threads in ((LaunchRequest(4, 2), "4"), (LaunchRequest(4, 4), "1"), (LaunchRequest(4, 4, 2), "2")):
        assert launchers.choose_starter(KINDS["mpirun"], layout, None, TWO).settings()["OMP_NUM_THREADS"] == threads


def test_binding_is_unchanged_outside_slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(mpirun, "find", lambda environment: Launcher(tmp_path / "mpirun", OPEN_MPI, "5.0"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for environment in ({}, {"PBS_JOBID": "7"}):
        starter = launchers.choose_starter(KINDS["mpirun"], LaunchRequest(4, 2, 3), None, environment)
        assert "--map-by ppr:2:node --bind-to none" in shlex.join(starter.line(PROGRAM, {}, []))
        assert starter.layout.cpus_per_task == 3 and not starter.unbound([])


def test_reason_for_unbound_ranks_is_printed_in_one_line(tmp_path, monkeypatch, capfd):
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'mpirun (Open MPI) 5.0.0'\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.setattr(mpirun, "candidates", lambda environment: [program])
    for name, value in job("4", "1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(core_binding, "node_cores", lambda: cores(8))
    true = shutil.which("true")
    code, _, output = call_command(capfd, "run", "-n", "1", "--", true)
    assert code == 0
    expected = "hpcdist run: ranks are not bound to cores: the job has 4 of the 8 CPUs that it sees on this node"
    assert output.count("\n") == 1 and output.startswith(expected)
