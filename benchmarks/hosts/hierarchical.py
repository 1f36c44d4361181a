"""Allreduce over hosts with slow links against a raw TCP stream of the same bytes, in one run. Root only.

    python benchmarks/hosts/hierarchical.py
    python benchmarks/hosts/hierarchical.py --hosts 4 --ranks 1 --bytes 16M --output hosts.h5 --anonymous

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
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist import collectives
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.comm.launch import mpirun
from hpcdist.errors import HpcdistError
from hpcdist.hdf5 import files
from hpcdist.reporting.units import parse_bytes

RAW, MESSAGES = "raw", "messages"
ALGORITHMS = ("native", "hierarchical", "ring")
DRAIN_BYTES = 2 << 20
SEGMENT_BYTES = 256 << 10
WINDOW = 16  # messages under way; see above
LIMIT_S = 600.0
RESULT = "HPCDIST_HOSTS_RESULT"  # the file for rank 0 to write


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host (default 2)")
    parser.add_argument("--rate", default="1gbit", help="of a link, as tc writes it (default 1gbit)")
    parser.add_argument(
        "--bytes", type=parse_bytes, default=parse_bytes("16M"), metavar="SIZE", help="of float32 (default 16M)"
    )
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=sorted(collectives.ALLREDUCE))
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    options = parser.parse_args()
    if options.hosts < 2 or options.ranks < 1 or options.repetitions < 1:
        parser.error("needs at least 2 hosts, 1 rank each and 1 repetition")
    return options


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
    shown = subprocess.run(["ip", "-4", "addr", "show", "eth0"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"inet ([\d.]+)", shown)
    assert found is not None
    return found.group(1)


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


def measure(comm: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Return times in s of the slowest rank and bytes sent by the busiest host, of each contender. Collective."""
    nodes = comm.nodes()
    if (nodes.count, nodes.intra.size) != (options.hosts, options.ranks):
        raise SystemExit(f"MPI sees {nodes.count} nodes of {nodes.intra.size} ranks, not the hosts that were made")
    wire = Wire(comm)
    payload = 2 * (options.hosts - 1) * options.bytes // options.hosts
    buffer = np.empty(options.bytes // 4, np.float32)
    expected = comm.size * (comm.size + 1) // 2

    def reduce(name: str) -> Callable[[], None]:
        return lambda: collectives.allreduce(comm, buffer, name)

    runs: dict[str, Callable[[], None]] = {RAW: lambda: wire.stream(payload)}
    runs[MESSAGES] = messages(comm, payload // options.ranks)
    runs |= {name: reduce(name) for name in options.algorithms}
    names = list(runs)
    times, sent = np.zeros((len(runs), options.repetitions)), np.zeros(len(runs))
    for turn in range(-1, options.repetitions):  # the first is a warm-up
        for step in range(len(runs)):
            place = (turn + step) % len(runs)
            buffer[...] = comm.rank + 1
            wire.stream(DRAIN_BYTES)
            comm.barrier()
            before, begin = sent_on_wire(), time.perf_counter()
            runs[names[place]]()
            took = np.array([time.perf_counter() - begin, sent_on_wire() - before])
            if names[place] in options.algorithms and not (buffer == expected).all():
                raise SystemExit(f"{names[place]} gave rank {comm.rank} a wrong result")
            collectives.allreduce(comm, took, "recursive_doubling", "max")
            if turn >= 0:
                times[place, turn], sent[place] = took[0], max(sent[place], took[1])
    return {"names": names, "times": times.tolist(), "sent": sent.tolist(), "payload": payload}


def work(options: argparse.Namespace) -> None:
    """Be one of the ranks."""
    session = start.start()
    found = measure(session.comm, options)
    if session.comm.rank == 0:
        Path(os.environ[RESULT]).write_text(json.dumps(found | {"library": session.library}))
    session.leave(0)


def report(title: str, found: dict[str, Any]) -> None:
    print(f"{title}: {found['library']}")
    raw, payload = np.array(found["times"][0]), found["payload"]
    for name, row, sent in zip(found["names"], found["times"], found["sent"], strict=True):
        low, median, high = np.percentile(row, [25, 50, 75])
        print(
            f"  {name:<20} {median * 1e3:8.1f} ms ({low * 1e3:.1f} - {high * 1e3:.1f}), "
            f"{np.median(raw) / median:.3f} of raw, best {raw.min() / min(row):.3f}; "
            f"{sent / payload:.3f} of {payload} bytes a host",
            flush=True,
        )
        if sent < 0.99 * payload:
            raise SystemExit(f"{name} put fewer bytes on the wire than must cross it: this MPI found another way")


def settings_of(launcher: mpirun.Launcher) -> dict[str, list[str]]:
    """Return, by name, the launcher's options of each run."""
    if launcher.vendor == mpirun.OPEN_MPI:
        return {"tuned collectives": ["--mca", "coll", "^han"], "default collectives": []}
    return {"default collectives": []}


def main() -> None:
    options = arguments()
    if RESULT in os.environ:
        work(options)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from cluster import Hosts

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that the hosts are taken down
    try:
        if options.output is not None:
            files.check_place(options.output)
        launcher = mpirun.find()
        with Hosts(options.hosts, options.rate) as hosts, tempfile.TemporaryDirectory() as folder:
            found = {}
            for title, extra in settings_of(launcher).items():
                result = Path(folder) / "result.json"
                result.unlink(missing_ok=True)
                line = hosts.command(launcher, options.ranks, [sys.executable, *sys.argv], extra)
                done = hosts.run(line, hosts.environment(launcher) | {RESULT: str(result)}, LIMIT_S)
                if done.returncode != 0 or not result.exists():
                    raise SystemExit(f"{title}: the ranks ended with {done.returncode}\n{done.stdout}")
                found[title] = json.loads(result.read_text())
                report(title, found[title])
    except HpcdistError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    if options.output is not None:
        write(options.output, found, options)


def write(path: Path, found: dict[str, Any], options: argparse.Namespace) -> None:
    """Write `time_s` (runs, contenders, repetitions) and `sent_bytes` (runs, contenders), with the provenance."""
    from hpcdist.telemetry.provenance import provenance

    runs: Sequence[dict[str, Any]] = list(found.values())
    card = provenance(mpi_library=runs[0]["library"], anonymous=options.anonymous)
    asked = {name: getattr(options, name) for name in ("hosts", "ranks", "rate", "bytes")}
    names = {"runs": ",".join(found), "contenders": ",".join(runs[0]["names"]), "dtype": "float32"}
    files.write_contiguous(
        path,
        {"time_s": np.array([run["times"] for run in runs]), "sent_bytes": np.array([run["sent"] for run in runs])},
        {**card, **asked, **names, "payload_bytes": runs[0]["payload"]},
        {"time_s": {"dims": "runs, contenders, repetitions"}, "sent_bytes": {"dims": "runs, contenders"}},
        schema="hpcdist-benchmark-hosts",
        version=1,
    )
    print(f"raw times are in {path}")


if __name__ == "__main__":
    main()
