"""Allreduce over hosts with slow links against a raw TCP stream of the same bytes, in one run. Root only.

    python -m benchmarks hosts
    python -m benchmarks hosts --hosts 4 --ranks 1 --bytes 16M --output hosts.h5 --anonymous

Hosts are network namespaces of this machine, joined by links of `--rate` in either direction, and MPI is that of this
Python. "raw" is what TCP does on the same links: each host sends the bytes that the allreduce must put on the wire, 2
(k-1)/k n for k hosts, to the next host, and receives as many at the same time, on one connection each way. "messages"
is what MPI does with them, cut into as many streams as a host has ranks: what an allreduce can hope for.
Both and all algorithms take turns in one run. Before each, 2 MiB drain the token buckets, which let the first bytes of
a pause pass at any speed. A time is that of the slowest rank, from a barrier on. "of raw" is the time of raw over this
time. The byte counters of the links show that the data took the wire; a run in which it did not is refused.

What the environment must say, here and on real Ethernet, is set by this program:

    Open MPI   --mca pml ob1 --mca btl tcp,self,sm --mca btl_tcp_if_include NETWORK; and one run with `--mca coll ^han`,
               since the native allreduce that it chooses by default varies from run to run by a factor of ten. Only
               here, where hosts share cores that each believes to be its own: --mca mpi_yield_when_idle 1
    MPICH      MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp (only here: UCX would find that the hosts share memory)

Limits of eager messages and sizes of socket buffers need no change. What matters is how many messages are under way at
once: 16 of 256 KiB each way reach 0.92 to 1.0 of raw under either MPI, all 32 of 8 MiB at once 0.62 to 0.74 under Open
MPI's TCP (0.92 to 0.99 under MPICH), on two busy cores.
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
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.comm.launch import mpirun
from hpcdist.comm.start import Session
from hpcdist.reporting.units import parse_bytes

SCHEMA, COMMITTED = "hpcdist-benchmark-hosts", "hosts/2026-11-21-hosts-2x2-openmpi.h5"
SMALL = {"repetitions": 4, "ranks": 2}

RAW, MESSAGES = "raw", "messages"
ALGORITHMS: Final = ("native", "hierarchical", "ring")
DRAIN_BYTES: Final = 2 << 20
SEGMENT_BYTES: Final = 256 << 10
WINDOW: Final = 16  # messages under way; see above
OPTIONS: Final = {"hosts": 2, "ranks": 2, "rate": "1gbit", "repetitions": 9}  # ranks: of each host


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bytes", type=parse_bytes, default=16 << 20, metavar="SIZE", help="of float32 (default 16M)")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=sorted(collectives.ALLREDUCE))


class Wire:
    """Raw TCP between hosts: one connection to the next host and one from the host before, at the first rank of each.

    Collective over ``comm``, whose nodes are the hosts.
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
        """Send ``nbytes`` to the next host while as many come from the host before. Collective."""
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
    """Return the address of this host on its link."""
    shown = subprocess.run(["ip", "-4", "addr", "show", "eth0"], capture_output=True, text=True, check=True).stdout
    address = re.search(r"inet ([\d.]+)", shown)
    assert address is not None
    return address.group(1)


def sent_on_wire() -> int:
    """Return the bytes that this host has sent through its link, headers included."""
    # /sys shows the devices of the namespace in which it was mounted; /proc/net those of this process.
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(line.split(":")[1].split()[8])


def messages(comm: Communicator, nbytes: int) -> Callable[[], None]:
    """Return what sends ``nbytes`` of each rank to its peer on the next host and receives as many from that before."""
    peers = comm.nodes().peers
    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    starts = range(0, nbytes, SEGMENT_BYTES)
    ahead, behind = (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size

    def exchange() -> None:
        under_way: deque[tuple[Request, Request]] = deque()
        for at in (*starts, *[None] * WINDOW):
            if at is not None:
                came = peers.irecv(target[at : at + SEGMENT_BYTES], behind)
                under_way.append((came, peers.isend(source[at : at + SEGMENT_BYTES], ahead)))
            if under_way and (at is None or len(under_way) > WINDOW):
                for request in under_way.popleft():
                    request.wait()

    return exchange


def timed(comm: Communicator, asked: dict[str, Any]) -> dict[str, Any]:
    """Return times in s of the slowest rank and bytes sent by the busiest host, of each contender. Collective."""
    nodes, hosts, nbytes = comm.nodes(), asked["hosts"], asked["bytes"]
    if (nodes.count, nodes.intra.size) != (hosts, asked["ranks"]):
        raise SystemExit(f"MPI sees {nodes.count} nodes of {nodes.intra.size} ranks, not the hosts that were made")
    wire, payload = Wire(comm), 2 * (hosts - 1) * nbytes // hosts
    buffer, expected = np.empty(nbytes // 4, np.float32), comm.size * (comm.size + 1) // 2

    def reduce(name: str) -> Callable[[], None]:
        return lambda: collectives.allreduce(comm, buffer, name)

    runs: dict[str, Callable[[], None]] = {RAW: lambda: wire.stream(payload)}
    runs[MESSAGES] = messages(comm, payload // asked["ranks"])
    runs |= {name: reduce(name) for name in asked["algorithms"]}

    def turn(name: str) -> list[float]:
        buffer[...] = comm.rank + 1
        wire.stream(DRAIN_BYTES)
        comm.barrier()
        before, begin = sent_on_wire(), time.perf_counter()
        runs[name]()
        took = np.array([time.perf_counter() - begin, sent_on_wire() - before])
        if name in asked["algorithms"] and not (buffer == expected).all():
            raise SystemExit(f"{name} gave rank {comm.rank} a wrong result")
        collectives.allreduce(comm, took, "recursive_doubling", "max")
        return took.tolist()

    calls = {name: lambda name=name: turn(name) for name in runs}
    values = np.array(list(harness.alternate(calls, asked["repetitions"], warm_up=1).values()))
    times, sent = values[..., 0].tolist(), values[..., 1].max(axis=1).tolist()
    return {"names": list(runs), "times": times, "sent": sent, "payload": payload}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Make the hosts, and return what their ranks measured."""
    harness.at_least(chosen, hosts=2, ranks=1, repetitions=1)
    launcher = mpirun.find()
    asked = {name: getattr(chosen, name) for name in ("hosts", "ranks", "rate", "bytes")}
    more = {name: getattr(chosen, name) for name in ("algorithms", "repetitions")}
    settings = {"tuned collectives": tuned(launcher)} if launcher.vendor == mpirun.OPEN_MPI else {}
    with Hosts(chosen.hosts, chosen.rate) as hosts:
        runs = {
            title: hosts.results(launcher, chosen.ranks, __spec__.name, asked | more, extra)
            for title, extra in (settings | {"default collectives": []}).items()
        }
    first = next(iter(runs.values()))
    about = {**asked, "runs": ",".join(runs), "contenders": ",".join(first["names"]), "dtype": "float32"}
    about |= {"payload_bytes": first["payload"], "mpi_library": first["library"]}
    arrays = {
        "time_s": np.array([run["times"] for run in runs.values()]),
        "sent_bytes": np.array([run["sent"] for run in runs.values()]),
    }
    return Results(arrays, {"time_s": "runs, contenders, repetitions", "sent_bytes": "runs, contenders"}, about)


def ratios(results: Results) -> harness.Ratios:
    """Return the times over raw's of the same turn, in each run."""
    return {
        f"{title}, {name}": samples
        for title, times in zip(results.names("runs"), results.arrays["time_s"], strict=True)
        for name, samples in harness.over_base(times, results.names()).items()
    }


def lines(results: Results) -> Sequence[str]:
    shown, payload = [str(results.attributes["mpi_library"])], int(results.attributes["payload_bytes"])
    for title, times, sent in zip(results.names("runs"), *results.arrays.values(), strict=True):
        more = {f"of {payload} bytes": [f"{own / payload:.3f}" for own in sent]}
        shown += [title, *harness.time_table(times, results.names(), more=more)]
    return shown


def failures(results: Results) -> list[str]:
    """Return the contenders whose data took another way than the wire."""
    least = 0.99 * int(results.attributes["payload_bytes"])
    names = [
        name for place, name in enumerate(results.names()) if (results.arrays["sent_bytes"][:, place] < least).any()
    ]
    return [f"{name} put fewer bytes on the wire than must cross it: this MPI found another way" for name in names]


def work(words: str, result: str) -> None:
    """Be one of the ranks."""
    session = start.start()
    figures = timed(session.comm, json.loads(words))
    if session.comm.rank == 0:
        Path(result).write_text(json.dumps(figures | {"library": session.library}))
    session.leave(0)


if __name__ == "__main__":
    work(*sys.argv[1:])
