"""The hierarchical allreduce over several hosts: network namespaces joined by links, which this file creates.


Needs root and the right to create network namespaces.
"""

import json
import os
import sys
from pathlib import Path

import pytest

import hpcdist
from benchmarks.hosts import cluster
from harness import jobs
from harness.jobs import LIMIT_S
from hpcdist.errors import MissingCapabilityError

pytestmark = pytest.mark.full

PROGRAM = """
import json, pathlib, socket
import numpy as np
from hpcdist import collectives
from hpcdist.comm import start

def counters():
    line = next(line for line in pathlib.Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line)
    return np.array(line.split(":")[1].split()).astype(np.int64)[[0, 8]]

session = start.start()
comm = session.comm
count = 1 << 20
inputs = np.arange(comm.size * count, dtype=np.float32).reshape(comm.size, count) % 17
results = []
for _ in range(2):  # the first opens connections
    buffer = inputs[comm.rank].copy()
    comm.barrier()
    before = counters()
    comm.barrier()  # nobody sends before all have looked
    collectives.allreduce(comm, buffer, "hierarchical")
    comm.barrier()
    results.append(buffer)
crossed = (counters() - before).tolist()
assert all(np.array_equal(result, inputs.sum(axis=0)) for result in results)
nodes = comm.nodes()
seen = comm.allgather_object((socket.gethostname(), nodes.count, nodes.intra.size, crossed))
if comm.rank == 0:
    print("SEEN", json.dumps(seen), buffer.nbytes, flush=True)
session.leave(0)
"""


def namespaces(prefix):
    listed = jobs.run(["ip", "netns", "list"], check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(prefix)]


@pytest.fixture
def hosts():
    """Two hosts with one link each. They are removed at the end, whatever happens."""
    made = cluster.Hosts(2)
    try:
        with made:
            assert sorted(namespaces(made.prefix)) == sorted(made.prefix + end for end in ("1", "2", "sw"))
            yield made
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    assert namespaces(made.prefix) == []


def test_hierarchical_allreduce_over_two_hosts(hosts, mpi, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = hosts.environment(mpi)
    root = str(Path(hpcdist.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment["PYTHONPATH"]]))
    done = hosts.run(hosts.command(mpi, 2, [sys.executable, str(program)]), environment, LIMIT_S)
    assert done.returncode == 0, done.stdout
    line = next(line for line in done.stdout.splitlines() if "SEEN " in line)
    seen, nbytes = json.JSONDecoder().raw_decode(line[line.index("SEEN ") + 5 :])[0], int(line.split()[-1])
    first, second = hosts.prefix + "1", hosts.prefix + "2"
    assert [host for host, *_ in seen] == [first, first, second, second]
    for _, count, local_size, crossed in seen:
        assert (count, local_size) == (2, 2)
        for counted in crossed:  # received, sent: n/2 of each of the two ranks, and headers
            assert nbytes <= counted <= 1.1 * nbytes


def test_hosts_are_removed_after_an_error():
    made = cluster.Hosts(1)
    try:
        with pytest.raises(ZeroDivisionError), made:
            raise ZeroDivisionError
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    assert namespaces(made.prefix) == []


def test_hosts_without_permission_are_rejected_with_the_reason(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingCapabilityError, match="needs root|not found"), cluster.Hosts(1):
        pytest.fail("hosts were made without root")
