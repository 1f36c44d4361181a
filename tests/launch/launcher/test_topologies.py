"""The options that bind ranks, interpreted by Open MPI on machines whose topology is read from a file.


Open MPI maps the ranks and starts no process.
"""

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import jobs
from harness.marks import cases
from hpcdist.comm.launch import core_binding, mpirun
from hpcdist.comm.launch.core_binding import CoreBinding, NodeCores

Mapped = Callable[[Path, CoreBinding], list[set[int]] | None]


def job(processors):
    """Return the variables of a job that has a whole node."""
    return {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_JOB_CPUS_PER_NODE": str(processors)}


@pytest.fixture
def topology(mpi, tmp_path):
    """``topology(sockets, cores, threads)`` returns a topology file, written by the hwloc of Open MPI."""
    if mpi.vendor != mpirun.OPEN_MPI or not mpi.version.startswith("5."):
        pytest.skip("the options with which it only maps are those of Open MPI 5")
    libraries = sorted((mpi.path.parents[1] / "lib").glob("**/libhwloc.so*"))
    if not libraries:
        pytest.skip("this Open MPI brings no hwloc")
    hwloc = ctypes.CDLL(str(libraries[0]))

    def write(sockets, cores, threads):
        made, path = ctypes.c_void_p(), tmp_path / "topology.xml"
        assert hwloc.hwloc_topology_init(ctypes.byref(made)) == 0
        text = f"pack:{sockets} numa:1 core:{cores} pu:{threads}"
        assert hwloc.hwloc_topology_set_synthetic(made, text.encode()) == 0
        assert hwloc.hwloc_topology_load(made) == 0
        assert hwloc.hwloc_topology_export_xml(made, os.fsencode(path), ctypes.c_ulong(0)) == 0
        hwloc.hwloc_topology_destroy(made)
        return path

    return write


@pytest.fixture
def mapped(mpi, tmp_path):
    """``mapped(topology, bound)`` returns the cores of each rank of a node, or None if mpirun ends with an error."""

    def run(topology, bound):
        each = bound.ranks_per_node
        only = ["--prtemca", "hwloc_use_topo_file", str(topology), "--rtos", "donotlaunch", "--display", "map-devel"]
        line = [str(mpi.path), *only, "--host", f"localhost:{each}", "-n", str(each)]
        line += [*mpirun.per_node(mpi, each, bound), "true"]
        added = mpirun.settings(mpi) | mpirun.session(mpi, tmp_path, line)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        done = jobs.run(line, env=environment | added)
        output = done.stdout + done.stderr
        matches = re.findall(r"Binding: package\[\d+\]\[core:L(\d+)(?:-(\d+))?\]", output)
        if not matches:
            assert "bound to CPUs in more than one" in output or "requested more processes" in output, output
            return None
        return [set(range(int(first), int(last or first) + 1)) for first, last in matches]

    return run


@cases(
    "sockets, cores, threads, each, asked, expected",
    (1, 8, 1, 2, 4, 4),
    (2, 4, 2, 4, 4, 2),  # four hardware threads are two cores
    (2, 4, 2, 2, 3, 3),  # one of each socket, though four of the first are nearer
    (2, 4, 1, 8, 1, 1),
    (2, 3, 1, 3, None, 1),
    (1, 8, 2, 3, None, 2),
)
def test_each_rank_gets_separate_cores(topology, mapped, sockets, cores, threads, each, asked, expected):
    count = sockets * cores
    here = NodeCores(tuple(tuple(range(core, count * threads, count)) for core in range(count)), (cores,) * sockets)
    bound = core_binding.bind_ranks(each, asked, here, job(count * threads))
    assert bound.cores == expected
    result = mapped(topology(sockets, cores, threads), bound)
    assert result is not None and [len(local_data) for local_data in result] == [expected] * each
    assert len(set().union(*result)) == each * expected


@pytest.mark.parametrize(
    ("sockets", "cores", "each", "asked"), [(2, 3, 3, 2), (2, 4, 1, 6), (1, 8, 2, 5), (1, 2, 4, 1)]
)
def test_bindings_that_mpirun_would_reject_are_not_requested(topology, mapped, sockets, cores, each, asked):
    count = sockets * cores
    here = NodeCores(tuple((core,) for core in range(count)), (cores,) * sockets)
    bound = core_binding.bind_ranks(each, asked, here, job(max(count, each * asked)))
    assert bound.cores is None and bound.reason
    assert mapped(topology(sockets, cores, 1), CoreBinding(each, asked)) is None
