"""Allreduce of buffers on GPUs: every way there is, beside copies through pageable memory, in one run.

    mpirun -n 2 python benchmarks/gpu_collectives.py
    mpirun -n 4 python benchmarks/gpu_collectives.py --bytes 64M 1M --output gpu_collectives.h5 --anonymous

Ranks take GPUs round robin, so on one GPU they share it. The measure is "pageable": the whole buffer to new pageable
memory, MPI_Allreduce there, and back. All ways alternate in every repetition, each result is compared with the exact
sum, and a time is that of the slowest rank from a barrier until its GPU has the result. "x pageable" above 1 is faster.
Ways that cannot run here are named with the reason. Raw times of all repetitions go to the HDF5 file. Exit code 69
without a GPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.gpu import device, staging
from hpcdist.bench import output_file
from hpcdist.collectives.algorithms.ring import ring_allreduce
from hpcdist.collectives.gpu import nccl, peer_memory
from hpcdist.collectives.gpu import staging as gpu_staging
from hpcdist.collectives.node.shared_memory import node_shared_allreduce
from hpcdist.collectives.reduction import native_allreduce
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.handover import MESSAGES
from hpcdist.errors import HpcdistError, MissingCapabilityError
from hpcdist.hdf5 import files
from hpcdist.reporting.units import parse_bytes
from hpcdist.telemetry.provenance import provenance

SCHEMA, VERSION = "hpcdist.benchmark.gpu_collectives", 1
PAGEABLE = "pageable"
WARM_UP = 3
Way = Callable[[Array], None]


def ways_of(comm: Communicator) -> tuple[dict[str, Way], dict[str, str]]:
    """Return the ways that run here, the measure first, and why the others do not. Collective."""

    def pageable(buffer: Array) -> None:
        host = backend.to_host(buffer)
        native_allreduce(comm, host)
        buffer[...] = backend.place(host, "gpu")

    ways: dict[str, Way] = {PAGEABLE: pageable}
    for name, function in (
        ("native", native_allreduce),
        ("ring", ring_allreduce),
        ("node_shared", node_shared_allreduce),
    ):
        if name != "node_shared" or comm.nodes().count == 1:
            ways[f"pinned, {name}"] = lambda buffer, function=function: gpu_staging.staged_allreduce(
                function, comm, buffer
            )
    reasons = {"device memory of the others": peer_memory.refusal(comm), "nccl": nccl.refusal(comm)}
    for operation, name, function in (("allreduce", "native", native_allreduce), (MESSAGES, "ring", ring_allreduce)):
        way = f"device pointers, {name}"
        reasons[way] = "" if gpu_staging.takes_pointers(comm, operation) else "MPI takes none (see `hpcdist doctor`)"
        ways[way] = lambda buffer, function=function: function(comm, buffer)
    ways["device memory of the others"] = lambda buffer: peer_memory.device_shared_allreduce(comm, buffer)
    ways["nccl"] = lambda buffer: nccl.nccl_allreduce(comm, buffer)
    refused = {way: reason for way, reason in reasons.items() if reason}
    return {way: run for way, run in ways.items() if way not in refused}, refused


class Measurement:
    """One size; whole numbers, so that every order of summation gives the same bits."""

    def __init__(self, comm: Communicator, ways: dict[str, Way], nbytes: int) -> None:
        self.comm, self.ways = comm, ways
        count = nbytes // 4
        inputs = [(np.arange(count) * (rank + 1) % 5).astype(np.float32) for rank in range(comm.size)]
        self.expected = backend.place(np.sum(inputs, axis=0, dtype=np.float32), "gpu")
        self.source = backend.place(inputs[comm.rank], "gpu")
        self.buffer = backend.empty(count, np.dtype(np.float32), "gpu")

    def times(self, repetitions: int) -> np.ndarray:
        """Return times in s of the slowest rank, (ways, repetitions). Collective."""
        rows = [self.round(turn) for turn in range(WARM_UP + repetitions)]
        return np.array(rows[WARM_UP:]).T

    def round(self, turn: int) -> np.ndarray:
        """Run and verify every way once, and return the times of the slowest rank. Collective."""
        names = list(self.ways)
        row = np.zeros(len(names))
        for step in range(len(names)):
            place = (turn + step) % len(names)
            self.buffer[...] = self.source
            device.synchronise()
            self.comm.barrier()
            begin = time.perf_counter()
            self.ways[names[place]](self.buffer)
            device.synchronise()
            row[place] = time.perf_counter() - begin
            if not bool((self.buffer == self.expected).all()):
                raise SystemExit(f"{names[place]} gave rank {self.comm.rank} a wrong result")
        collectives.allreduce(self.comm, row, "recursive_doubling", "max")
        return row


def card(comm: Communicator) -> dict[str, Any]:
    """Return which GPUs, which CUDA and how memory was pinned. Collective."""
    runtime = device.cupy().cuda.runtime
    name = runtime.getDeviceProperties(runtime.getDevice())["name"]
    places = comm.allgather_object((comm.nodes().index, device.bus_id()))
    return {
        "gpu": name.decode() if isinstance(name, bytes) else str(name),
        "gpus": len(set(places)),
        "ranks": comm.size,
        "cupy_version": getattr(device.cupy(), "__version__", "unknown"),
        "cuda_driver": runtime.driverGetVersion(),
        "pinned_memory": staging.refusal() or "pinned",
    }


def write(path: Path, names: list[str], measured: dict[int, np.ndarray], attributes: dict[str, Any]) -> None:
    """Write the times of every repetition, by size."""
    with files.edit(path, SCHEMA, VERSION) as file:
        for nbytes, times in measured.items():
            dataset = file.create_dataset(f"bytes_{nbytes}", data=times)
            dataset.attrs.update({"units": "s", "dims": "ways, repetitions", "ways": ", ".join(names)})
        file.attrs.update(attributes)
    print(f"raw times are in {path}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print on rank 0, write. Collective over the world."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", nargs="+", type=parse_bytes, default=[64 << 20], metavar="SIZE", help="default 64M")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file for the raw figures; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    options = parser.parse_args(arguments)
    try:
        device.count()  # on every rank alike, before MPI starts
        session = start.start("gpu")
    except MissingCapabilityError as error:
        print(f"gpu_collectives: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    output_file.exit_unless_writable(session, options.output)
    measure(session, options)
    session.leave(0)


def measure(session: start.Session, options: argparse.Namespace) -> None:
    """Measure all sizes and report. Collective over the world."""
    comm = session.comm
    if comm.size < 2:
        raise HpcdistError("one rank has nobody to reduce with; start it with mpirun -n 2")
    ways, refused = ways_of(comm)
    measured = {nbytes: Measurement(comm, ways, nbytes).times(options.repetitions) for nbytes in options.bytes}
    described = card(comm)
    if comm.rank != 0:
        return
    for nbytes, times in measured.items():
        medians = dict(zip(ways, np.median(times, axis=1).tolist(), strict=True))
        ratios = {way: round(medians[PAGEABLE] / value, 3) for way, value in medians.items()}
        spread = {way: np.percentile(row, [25, 75]).tolist() for way, row in zip(ways, times, strict=True)}
        print(
            json.dumps({"bytes": nbytes, **described, "median_s": medians, "quartiles_s": spread, "x_pageable": ratios})
        )
    for way, reason in refused.items():
        print(f"{way}: not run, {reason}", file=sys.stderr)
    if options.output is not None:
        attributes = provenance(mpi_library=session.library, anonymous=options.anonymous) | described
        attributes |= {f"refused: {way}": reason for way, reason in refused.items()}
        write(options.output, list(ways), measured, attributes)


if __name__ == "__main__":
    main()
