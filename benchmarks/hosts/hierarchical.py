"""Allreduce over hosts with slow links, compared with a raw TCP stream of the same bytes, in one run. Root only.

    python -m benchmarks hosts
    python -m benchmarks hosts --hosts 4 --ranks 1 --bytes 16M --output hosts.h5 --anonymous

Hosts are network namespaces of this machine with links of `--rate` per direction. "raw" is TCP on the same links: each
host sends the bytes that the allreduce must send, 2 (k-1)/k n for k hosts and n bytes, to the next host while it
receives as many. "messages" sends these bytes by MPI, in a stream per rank: the best that an allreduce can reach.
Before each turn, 2 MiB drain the token buckets, which pass the first bytes after a pause at any speed. "of raw" is the
time of raw divided by the time. The run fails if the byte counters show that the data did not cross the wire.

The program sets these options and variables, which real Ethernet needs too unless noted:

    Open MPI   --mca pml ob1 --mca btl tcp,self,sm --mca btl_tcp_if_include NETWORK. One run adds `--mca coll ^han`,
               since the default native allreduce varies by a factor of ten. Only here: --mca mpi_yield_when_idle 1,
               because the hosts share cores
    MPICH      MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp (only here: UCX would detect the shared memory)

Eager limits and socket buffers need no change. On two busy cores, 16 messages of 256 KiB in flight per direction reach
0.92 to 1.0 of raw; 32 messages of 8 MiB reach 0.62 to 0.74 with Open MPI's TCP and 0.92 to 0.99 with MPICH.
"""

import argparse
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.hosts.cluster import Hosts, tuned
from hpcdist import collectives
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch import mpirun
from hpcdist.comm.start import Session
from hpcdist.comm.transport import Request
from hpcdist.reporting.units import parse_bytes

SCHEMA, COMMITTED = "hpcdist-benchmark-hosts", "hosts/2026-11-21-hosts-2x2-openmpi.h5"
SMALL = {"repetitions": 4, "ranks": 2}

RAW, MESSAGES = "raw", "messages"
ALGORITHMS: Final = ("native", "hierarchical", "ring")
DRAIN_BYTES: Final = 2 << 20
SEGMENT_BYTES: Final = 256 << 10
WINDOW: Final = 16  # messages in flight
OPTIONS: Final = {"hosts": 2, "ranks": 2, "rate": "1gbit", "repetitions": 9}  # ranks: per host


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bytes", type=parse_bytes, default=16 << 20, metavar="SIZE", help="of float32 (default 16M)")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=sorted(collectives.ALLREDUCE))


class Wire:
    """Raw TCP ring between hosts: the first rank of each host connects to the next host. Collective over ``comm``.

    The nodes of ``comm`` are the hosts.
    """

    def __init__(self, comm: Communicator) -> None:
        nodes = comm.nodes()
        self.leads = nodes.intra.rank == 0
        listener = socket.create_server((own_address(), 0)) if self.leads else None
        addresses = comm.allgather_object((nodes.index, listener.getsockname() if listener else None))
        of_host = {host: address for host, address in addresses if address is not None}
        if listener is not None:
            self.ahead = socket.create_connection(of_host[(nodes.index + 1) % nodes.count])
            self.behind, _ = listener.accept()
            listener.close()
        self._source, self._target = bytes(8 << 20), bytearray(8 << 20)

    def stream(self, nbytes: int) -> None:
        """Send ``nbytes`` to the next host while receiving as many from the previous host. Collective."""
        if self.leads:
            sender = threading.Thread(target=self._send, args=(nbytes,))
            sender.start()
            view = memoryview(self._target)
            while nbytes > 0:
                nbytes -= self.behind.recv_into(view[: min(nbytes, len(view))])
            sender.join()

    def _send(self, nbytes: int) -> None:
        view = memoryview(self._source)
        while nbytes > 0:
            self.ahead.sendall(view[: min(nbytes, len(view))])
            nbytes -= min(nbytes, len(view))


def own_address() -> str:
    shown = subprocess.run(["ip", "-4", "addr", "show", "eth0"], capture_output=True, text=True, check=True).stdout
    address = re.search(r"inet ([\d.]+)", shown)
    assert address is not None
    return address.group(1)


def sent_on_wire() -> int:
    """Return the bytes that this host has sent on its link, including headers."""
    # /proc/net shows the devices of this process; /sys shows the devices of the namespace that mounted it.
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(line.split(":")[1].split()[8])


def messages(comm: Communicator, nbytes: int) -> Callable[[], None]:
    """Return a function that exchanges ``nbytes`` with the peers on the next and the previous host."""
    peers = comm.nodes().peers
    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    starts = range(0, nbytes, SEGMENT_BYTES)
    following, previous = (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size

    def exchange() -> None:
        in_flight: deque[tuple[Request, Request]] = deque()
        for offset in (*starts, *[None] * WINDOW):
            if offset is not None:
                receive = peers.irecv(target[offset : offset + SEGMENT_BYTES], previous)
                in_flight.append((receive, peers.isend(source[offset : offset + SEGMENT_BYTES], following)))
            if in_flight and (offset is None or len(in_flight) > WINDOW):
                for request in in_flight.popleft():
                    request.wait()

    return exchange


def timed(comm: Communicator, request: dict[str, Any]) -> dict[str, Any]:
    """Time each contender (slowest rank, seconds) and count its sent bytes (busiest host). Collective."""
    nodes, hosts, nbytes = comm.nodes(), request["hosts"], request["bytes"]
    if (nodes.count, nodes.intra.size) != (hosts, request["ranks"]):
        raise SystemExit(f"MPI sees {nodes.count} nodes of {nodes.intra.size} ranks, not the created hosts")
    wire, payload = Wire(comm), 2 * (hosts - 1) * nbytes // hosts
    buffer, expected = np.empty(nbytes // 4, np.float32), comm.size * (comm.size + 1) // 2

    def reduce(name: str) -> Callable[[], None]:
        return lambda: collectives.allreduce(comm, buffer, name)

    runs: dict[str, Callable[[], None]] = {RAW: lambda: wire.stream(payload)}
    runs[MESSAGES] = messages(comm, payload // request["ranks"])
    runs |= {name: reduce(name) for name in request["algorithms"]}

    def timed_call(name: str) -> list[float]:
        buffer[...] = comm.rank + 1
        wire.stream(DRAIN_BYTES)
        comm.barrier()
        before, begin = sent_on_wire(), time.perf_counter()
        runs[name]()
        figures = np.array([time.perf_counter() - begin, sent_on_wire() - before])
        if name in request["algorithms"] and not (buffer == expected).all():
            raise SystemExit(f"{name} gave rank {comm.rank} a wrong result")
        collectives.allreduce(comm, figures, "recursive_doubling", "max")
        return figures.tolist()

    calls = {name: lambda name=name: timed_call(name) for name in runs}
    values = np.array(list(harness.alternate(calls, request["repetitions"], warm_up=1).values()))
    times, sent = values[..., 0].tolist(), values[..., 1].max(axis=1).tolist()
    return {"names": list(runs), "times": times, "sent": sent, "payload": payload}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    harness.at_least(chosen, hosts=2, ranks=1, repetitions=1)
    launcher = mpirun.find()
    request = {name: getattr(chosen, name) for name in ("hosts", "ranks", "rate", "bytes")}
    more = {name: getattr(chosen, name) for name in ("algorithms", "repetitions")}
    settings = {"tuned collectives": tuned(launcher)} if launcher.vendor == mpirun.OPEN_MPI else {}
    with Hosts(chosen.hosts, chosen.rate) as hosts:
        runs = {
            title: hosts.results(launcher, chosen.ranks, __spec__.name, request | more, extra)
            for title, extra in (settings | {"default collectives": []}).items()
        }
    first = next(iter(runs.values()))
    about = {**request, "runs": ",".join(runs), "contenders": ",".join(first["names"]), "dtype": "float32"}
    about |= {"payload_bytes": first["payload"], "mpi_library": first["library"]}
    arrays = {
        "time_s": np.array([run["times"] for run in runs.values()]),
        "sent_bytes": np.array([run["sent"] for run in runs.values()]),
    }
    return Results(arrays, {"time_s": "runs, contenders, repetitions", "sent_bytes": "runs, contenders"}, about)


def ratios(results: Results) -> harness.Ratios:
    return {
        f"{title}, {name}": samples
        for title, times in zip(results.names("runs"), results.arrays["time_s"], strict=True)
        for name, samples in harness.over_base(times, results.names()).items()
    }


def lines(results: Results) -> Sequence[str]:
    output, payload = [str(results.attributes["mpi_library"])], int(results.attributes["payload_bytes"])
    for title, times, sent in zip(results.names("runs"), *results.arrays.values(), strict=True):
        more = {f"of {payload} bytes": [f"{nbytes / payload:.3f}" for nbytes in sent]}
        output += [title, *harness.time_table(times, results.names(), more=more)]
    return output


def failures(results: Results) -> list[str]:
    least = 0.99 * int(results.attributes["payload_bytes"])
    names = [
        name for index, name in enumerate(results.names()) if (results.arrays["sent_bytes"][:, index] < least).any()
    ]
    return [f"{name} sent fewer bytes on the wire than necessary: this MPI used another path" for name in names]


def work(words: str, result: str) -> None:
    session = start.start()
    figures = timed(session.comm, json.loads(words))
    if session.comm.rank == 0:
        Path(result).write_text(json.dumps(figures | {"library": session.library}))
    session.leave(0)


if __name__ == "__main__":
    work(*sys.argv[1:])
