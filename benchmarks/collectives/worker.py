"""Measurement of an allreduce that is not ours, as `hpcdist bench collectives` measures ours; started by `libraries`.

    mpirun -n 4 python -m benchmarks.collectives.worker mpi --implementation "Open MPI" --algorithm "tuned 3" \
        --bytes 16384,1048576 --output one.h5

The same buffers in turn, the same barrier, the same check of every result and the same file. "mpi" is MPI_Allreduce of
mpi4py by itself, in place and into a second buffer; "gloo" is torch.distributed.all_reduce on CPU tensors.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.ranges import Range
from hpcdist.bench.collectives import contenders as contenders_of
from hpcdist.bench.collectives import results
from hpcdist.bench.collectives.results import COLD, ORDINARY, CollectivesCell
from hpcdist.bench.collectives.run import CellLimits, CellSamples, CellTiming
from hpcdist.telemetry.provenance import provenance

Run = Callable[[np.ndarray, np.ndarray], None]
PLACES = {"in place": "", "to a result": ", to a result"}


class TorchGroup:
    """Communicator of a `CellTiming`, over torch.distributed."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._group = torch, torch.distributed
        self.rank, self.size = self._group.get_rank(), self._group.get_world_size()

    def barrier(self) -> None:
        """Wait for all."""
        self._group.barrier()

    def broadcast_object(self, value: Any) -> Any:
        """Return the value of rank 0."""
        box = [value]
        self._group.broadcast_object_list(box, 0)
        return box[0]

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the values of all."""
        values: list[Any] = [None] * self.size
        self._group.all_gather_object(values, value)
        return values

    def send(self, buffer: np.ndarray, peer: int, tag: int) -> None:
        """Send to ``peer``."""
        self._group.send(self._torch.from_numpy(buffer), peer, tag=tag)

    def recv(self, buffer: np.ndarray, peer: int, tag: int) -> None:
        """Receive from ``peer``."""
        self._group.recv(self._torch.from_numpy(buffer), peer, tag=tag)

    def nodes(self) -> SimpleNamespace:
        """Return one node: gloo is started on this machine only."""
        return SimpleNamespace(count=1)


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["mpi", "gloo"])
    parser.add_argument("--implementation", required=True, help="whose code it is, for tables")
    parser.add_argument("--algorithm", required=True, help="which of its algorithms, for tables")
    parser.add_argument("--bytes", required=True, help="sizes, separated by commas")
    parser.add_argument("--seconds", type=float, default=0.5, help="about how long each size is measured")
    parser.add_argument("--least", type=int, default=10, help="iterations, however long they take")
    parser.add_argument("--seed", type=int, default=0, help="of the order of sizes")
    parser.add_argument("--output", type=Path, required=True, help="new HDF5 file")
    return parser.parse_args()


def with_mpi() -> tuple[Any, dict[str, Run], str, int]:
    """Return a communicator, the ways to reduce, the library's name of itself, and the number of nodes. Collective."""
    from hpcdist.comm import start

    session = start.start()
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()

    def in_place(buffer: np.ndarray, result: np.ndarray) -> None:
        world.Allreduce(MPI.IN_PLACE, buffer)

    def to_a_result(buffer: np.ndarray, result: np.ndarray) -> None:
        world.Allreduce(buffer, result)

    return session.comm, {"in place": in_place, "to a result": to_a_result}, session.library, session.place.nodes


def with_gloo() -> tuple[Any, dict[str, Run], str, int]:
    """Return the same for gloo, as the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say. Collective."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")

    def in_place(buffer: np.ndarray, result: np.ndarray) -> None:
        torch.distributed.all_reduce(torch.from_numpy(buffer))

    return TorchGroup(torch), {"in place": in_place}, f"none (PyTorch {torch.__version__})", 1


def measure(
    comm: Any, runs: dict[str, Run], cell: CollectivesCell, options: argparse.Namespace, slots: int
) -> list[CellSamples]:
    """Return the samples of each of ``runs``. Collective."""
    dtype = dtype_of(cell.dtype)
    expected = (contenders_of.ExpectedResult(Range(0, cell.size), None, 0),)
    contenders = [
        contenders_of.CollectivesContender(name, ORDINARY, run, expected, in_result=name == "to a result")
        for name, run in runs.items()
    ]
    memory = [np.zeros(slots * -(-cell.bytes // 64) * 64, np.uint8) for _ in range(2)]
    for piece in memory:
        piece.fill(1)  # pages of their own, before anything is timed
    pool = contenders_of.BufferPool(*memory, cell.size, dtype, slots)
    timing = CellTiming(comm, contenders, {ORDINARY: pool}, contenders_of.BufferContents(comm.size, dtype), check=True)
    return timing.run(CellLimits(options.seconds, None, 2, options.least), (options.seed, cell.bytes))


def main() -> None:
    """Measure every size, in an order of its own, and write. Collective."""
    options = arguments()
    comm, runs, library, nodes = with_mpi() if options.what == "mpi" else with_gloo()
    sizes = [int(text) for text in options.bytes.split(",")]
    cache = contenders_of.last_level_cache_bytes() or contenders_of.UNKNOWN_CACHE_BYTES
    limit = comm.broadcast_object(int(contenders_of.MEMORY_SHARE * contenders_of.available_bytes()) // comm.size // 2)
    card = provenance(mpi_library=library, anonymous=True)
    for index in np.random.default_rng(options.seed).permutation(len(sizes)):
        cell = CollectivesCell("allreduce", "float32", sizes[index])
        slots = contenders_of.slots(cell.bytes, cache, limit, hot=False)
        samples, made = measure(comm, runs, cell, options, slots), []
        for name, own in zip(runs, samples, strict=True) if comm.rank == 0 else ():
            what = (cell.op, cell.dtype, cell.bytes, comm.size, nodes, options.algorithm + PLACES[name])
            key = results.ConfigurationKey(*what, ORDINARY, COLD, options.implementation, library)
            times = own.time_s, own.start_s, np.zeros(len(own.time_s), np.int32)
            made.append(results.CollectivesConfiguration(key, False, slots, own.verified, own.wrong, *times))
        if comm.rank == 0:
            results.append(options.output, made, card)
    comm.barrier()
    if options.what == "gloo":
        os._exit(0)  # its threads may outlive the group


if __name__ == "__main__":
    main()
