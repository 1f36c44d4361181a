"""Allreduce of buffers on GPUs: every available path compared with copies through pageable memory, in one run.

    python -m benchmarks gpu.collectives
    python -m benchmarks gpu.collectives --ranks 4 --bytes 64M 1M --output gpu_collectives.h5 --anonymous

Ranks take GPUs round robin and may share a GPU. The base "pageable" copies the whole buffer to new pageable memory,
calls MPI_Allreduce, and copies back. Results are compared with the exact sum. The slowest rank's time counts, from a
barrier until its GPU has the result. "x pageable" below 1 is faster. Unavailable paths are listed with the reason. Exit
code 69 without a GPU.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.gpu.card import card
from benchmarks.harness import Results
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.gpu import device, staging
from hpcdist.collectives import dispatch, nccl, peer_memory
from hpcdist.collectives.algorithms.ring import ring_allreduce
from hpcdist.collectives.node.shared_memory import node_shared_allreduce
from hpcdist.collectives.reduction import native_allreduce
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.handover import MESSAGES
from hpcdist.comm.start import Session
from hpcdist.errors import UsageError
from hpcdist.reporting.units import parse_bytes

SCHEMA, RANKS, ON = "hpcdist.benchmark.gpu_collectives", 2, "gpu"

WARM_UP: Final = 3
Way = Callable[[Array], None]
OPTIONS: Final = {"repetitions": 20}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bytes", nargs="+", type=parse_bytes, default=[64 << 20], metavar="SIZE", help="default 64M")


def ways_of(comm: Communicator) -> tuple[dict[str, Way], dict[str, str]]:
    """Return the available allreduce paths, base first, and the reasons why the others are unavailable. Collective."""

    def pageable(buffer: Array) -> None:
        host = backend.to_host(buffer)
        native_allreduce(comm, host)
        buffer[...] = backend.place(host, "gpu")

    def staged(function: Callable[..., None]) -> Way:
        return lambda buffer: dispatch.staged_allreduce(function, comm, buffer)

    ways: dict[str, Way] = {"pageable": pageable}
    ways |= {"pinned, native": staged(native_allreduce), "pinned, ring": staged(ring_allreduce)}
    if comm.nodes().count == 1:
        ways["pinned, node_shared"] = staged(node_shared_allreduce)
    reasons = {"device memory of the others": peer_memory.refusal(comm), "nccl": nccl.refusal(comm)}
    for operation, name, function in (("allreduce", "native", native_allreduce), (MESSAGES, "ring", ring_allreduce)):
        way = f"device pointers, {name}"
        reasons[way] = "" if dispatch.takes_pointers(comm, operation) else "MPI takes none (see `hpcdist doctor`)"
        ways[way] = lambda buffer, function=function: function(comm, buffer)
    ways["device memory of the others"] = lambda buffer: peer_memory.device_shared_allreduce(comm, buffer)
    ways["nccl"] = lambda buffer: nccl.nccl_allreduce(comm, buffer)
    refused = {way: reason for way, reason in reasons.items() if reason}
    return {way: call for way, call in ways.items() if way not in refused}, refused


def timed(comm: Communicator, ways: dict[str, Way], nbytes: int, repetitions: int) -> np.ndarray:
    """Time every path: seconds of the slowest rank (ways, repetitions). Collective.

    Values are integers, so every summation order gives the same bits.
    """
    count = nbytes // 4
    inputs = [(np.arange(count) * (rank + 1) % 5).astype(np.float32) for rank in range(comm.size)]
    expected = backend.place(np.sum(inputs, axis=0, dtype=np.float32), "gpu")
    source = backend.place(inputs[comm.rank], "gpu")
    buffer = backend.empty(count, np.dtype(np.float32), "gpu")

    def timed_call(way: str) -> float:
        buffer[...] = source
        device.synchronise()

        def reduce() -> None:
            ways[way](buffer)
            device.synchronise()

        elapsed_s = harness.seconds(reduce, comm)
        if not bool((buffer == expected).all()):
            raise SystemExit(f"{way} gave rank {comm.rank} a wrong result")
        return elapsed_s

    values = harness.alternate({way: lambda way=way: timed_call(way) for way in ways}, repetitions, warm_up=WARM_UP)
    return harness.of_ranks(comm, values).max(axis=2)


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    comm = session.comm
    if comm.size < 2:
        raise UsageError("an allreduce needs at least 2 ranks; choose --ranks 2")
    ways, refused = ways_of(comm)
    arrays = {f"bytes_{nbytes}": timed(comm, ways, nbytes, chosen.repetitions) for nbytes in chosen.bytes}
    about = card(comm) | {"pinned_memory": staging.refusal() or "pinned", "contenders": ";".join(ways)}
    about |= {f"refused: {way}": reason for way, reason in refused.items()}
    return Results(arrays, dict.fromkeys(arrays, "ways, repetitions; s"), about)


def ratios(results: Results) -> harness.Ratios:
    sizes = {name.removeprefix("bytes_"): times for name, times in results.arrays.items()}
    relative_times = {size: harness.over_base(times, results.names()) for size, times in sizes.items()}
    return {f"{way}, {size} bytes": samples for size, ways in relative_times.items() for way, samples in ways.items()}


def lines(results: Results) -> Sequence[str]:
    shown = []
    for name, times in results.arrays.items():
        shown += [f"{name.removeprefix('bytes_')} bytes", *harness.time_table(times, results.names())]
    for name, reason in results.attributes.items():
        if name.startswith("refused: "):
            print(f"{name.removeprefix('refused: ')}: not run, {reason}", file=sys.stderr)
    return shown
