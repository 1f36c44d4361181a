"""Job of the study `libraries`: measure an allreduce of another library as `hpcdist bench collectives` measures ours.

    mpirun -n 4 python -m benchmarks.collectives.worker mpi --implementation "Open MPI" --algorithm "tuned 3" \
        --bytes 16384,1048576 --output one.h5

The buffers, the barrier, the check of results and the file format are the same. "mpi" is mpi4py's MPI_Allreduce, in
place and into a second buffer; "gloo" is torch.distributed.all_reduce on CPU tensors.
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
from hpcdist.bench.collectives.results import COLD, ORDINARY, CellLimits, CollectivesCell
from hpcdist.bench.collectives.run import CellSamples, CellTiming
from hpcdist.telemetry.provenance import provenance

Run = Callable[[np.ndarray, np.ndarray], None]
PLACES = {"in place": "", "to a result": ", to a result"}


class TorchGroup:
    """A torch.distributed group with the interface of `Communicator` that `CellTiming` needs."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._group = torch, torch.distributed
        self.rank, self.size = self._group.get_rank(), self._group.get_world_size()

    def barrier(self) -> None:
        self._group.barrier()

    def broadcast_object(self, value: Any) -> Any:
        box = [value]
        self._group.broadcast_object_list(box, 0)
        return box[0]

    def allgather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self._group.all_gather_object(values, value)
        return values

    def send(self, buffer: np.ndarray, peer: int, tag: int) -> None:
        self._group.send(self._torch.from_numpy(buffer), peer, tag=tag)

    def recv(self, buffer: np.ndarray, peer: int, tag: int) -> None:
        self._group.recv(self._torch.from_numpy(buffer), peer, tag=tag)

    def nodes(self) -> SimpleNamespace:
        return SimpleNamespace(count=1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["mpi", "gloo"])
    parser.add_argument("--implementation", required=True, help="library name for tables")
    parser.add_argument("--algorithm", required=True, help="algorithm name for tables")
    parser.add_argument("--bytes", required=True, help="buffer sizes, separated by commas")
    parser.add_argument("--seconds", type=float, default=0.5, help="approximate duration per size")
    parser.add_argument("--least", type=int, default=10, help="minimum number of iterations")
    parser.add_argument("--seed", type=int, default=0, help="seed for the order of sizes")
    parser.add_argument("--output", type=Path, required=True, help="new HDF5 file")
    return parser.parse_args()


def with_mpi() -> tuple[Any, dict[str, Run], str, int]:
    """Start MPI. Return the communicator, the reduce functions, the library version, and the number of nodes."""
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
    """Start gloo from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Return the same values as `with_mpi`."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")

    def in_place(buffer: np.ndarray, result: np.ndarray) -> None:
        torch.distributed.all_reduce(torch.from_numpy(buffer))

    return TorchGroup(torch), {"in place": in_place}, f"none (PyTorch {torch.__version__})", 1


def measure(
    comm: Any, runs: dict[str, Run], cell: CollectivesCell, options: argparse.Namespace, slots: int
) -> list[CellSamples]:
    dtype = dtype_of(cell.dtype)
    expected = (contenders_of.ExpectedResult(Range(0, cell.size), None, 0),)
    contenders = [
        contenders_of.CollectivesContender(name, ORDINARY, run, expected, in_result=name == "to a result")
        for name, run in runs.items()
    ]
    memory = [np.zeros(slots * -(-cell.bytes // 64) * 64, np.uint8) for _ in range(2)]
    for piece in memory:
        piece.fill(1)  # touch all pages before timing
    pool = contenders_of.BufferPool(*memory, cell.size, dtype, slots)
    timing = CellTiming(comm, contenders, {ORDINARY: pool}, contenders_of.BufferContents(comm.size, dtype), check=True)
    return timing.run(CellLimits(options.seconds, None, 2, options.least), (options.seed, cell.bytes))


def main() -> None:
    options = arguments()
    comm, runs, library, nodes = with_mpi() if options.what == "mpi" else with_gloo()
    sizes = [int(text) for text in options.bytes.split(",")]
    cache = contenders_of.last_level_cache_bytes() or contenders_of.UNKNOWN_CACHE_BYTES
    limit = comm.broadcast_object(int(contenders_of.MEMORY_SHARE * contenders_of.available_bytes()) // comm.size // 2)
    origin = provenance(mpi_library=library, anonymous=True)
    for index in np.random.default_rng(options.seed).permutation(len(sizes)):
        cell = CollectivesCell("allreduce", "float32", sizes[index])
        slots = contenders_of.slots(cell.bytes, cache, limit, hot=False)
        samples, configurations = measure(comm, runs, cell, options, slots), []
        for name, local_samples in zip(runs, samples, strict=True) if comm.rank == 0 else ():
            cell_key = (cell.op, cell.dtype, cell.bytes, comm.size, nodes, options.algorithm + PLACES[name])
            key = results.ConfigurationKey(*cell_key, ORDINARY, COLD, options.implementation, library)
            times = local_samples.time_s, local_samples.start_s, np.zeros(len(local_samples.time_s), np.int32)
            configurations.append(
                results.CollectivesConfiguration(key, False, slots, local_samples.verified, local_samples.wrong, *times)
            )
        if comm.rank == 0:
            results.append(options.output, configurations, origin)
    comm.barrier()
    if options.what == "gloo":
        os._exit(0)  # gloo threads may outlive the process group


if __name__ == "__main__":
    main()
