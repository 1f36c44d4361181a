"""Child process of the CUDA-aware probe: passes GPU memory to MPI and checks the received data.

Run ``python -m hpcdist.comm.mpi.cuda_child OPERATION ...`` on one or two ranks. Rank 0 prints one JSON object per line:
first about the world, then for each operation.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.gpu import device

SIZES: Final = (16, 1 << 18)  # elements of float32: below and above every eager limit


def main(operations: list[str]) -> int:
    """Test ``operations`` with GPU pointers, and print the results. Runs in a child process, which may crash."""
    where = os.environ.get("HPCDIST_PROBE_DEVICE", "cpu")
    on = "cpu" if where == "cpu" else "gpu"
    if on == "gpu":
        # Before MPI starts, and with one GPU per rank if there are several, as in a job.
        local = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or os.environ.get("MPI_LOCALRANKID") or 0)
        device.choose(int(where) + local)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    notes = ["two"] if comm.Get_size() == 2 else []
    if _says_cuda():
        notes.append("cuda")
    if comm.allreduce(1) == comm.Get_size():  # the world itself works
        _say(comm, {"ready": comm.Get_size(), "notes": notes})
    for name in operations:
        try:
            results = [_try(_OPERATIONS[name], MPI, comm, size, on) for size in SIZES]  # all, so that ranks keep step
            right = all(results)
            why = "wrong data arrived"
        except MPI.Exception as error:
            right, why = False, str(error).splitlines()[0]
        if comm.allreduce(int(right)) == comm.Get_size():
            _say(comm, {"passed": name})
        else:
            _say(comm, {"failed": name, "why": why})
    return 0


def _say(comm: Any, row: dict[str, object]) -> None:
    if comm.Get_rank() == 0:
        print(json.dumps(row), flush=True)


def _try(operation: Callable[..., tuple[Any, np.ndarray]], mpi: Any, comm: Any, size: int, on: str) -> bool:
    rank, ranks = comm.Get_rank(), comm.Get_size()
    inputs = [(np.arange(size * ranks) % 251 + 1000 * (r + 1)).astype(np.float32) for r in range(ranks)]
    send = backend.place(inputs[rank].copy(), on)
    receive = backend.place(np.zeros(size * ranks, np.float32), on)
    if on == "gpu":
        device.synchronise()
    result, expected = operation(mpi, comm, send, receive, inputs)
    return bool(np.array_equal(backend.to_host(result), expected))


def _send(mpi: Any, comm: Any, send: Any, receive: Any, inputs: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    rank, ranks = comm.Get_rank(), comm.Get_size()
    comm.Sendrecv(send, (rank + 1) % ranks, 1, receive, (rank - 1) % ranks, 1)
    requests = [comm.Irecv(receive, (rank - 1) % ranks, 2), comm.Isend(send, (rank + 1) % ranks, 2)]
    mpi.Request.Waitall(requests)
    return receive, inputs[(rank - 1) % ranks]


def _broadcast(mpi: Any, comm: Any, send: Any, receive: Any, inputs: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    comm.Bcast(send, 0)
    return send, inputs[0]


def _allreduce(mpi: Any, comm: Any, send: Any, receive: Any, inputs: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    comm.Allreduce(send, receive, mpi.SUM)
    comm.Allreduce(mpi.IN_PLACE, send, mpi.SUM)
    return (receive if bool((receive == send).all()) else receive[:0]), _total(inputs)


def _total(inputs: list[np.ndarray]) -> np.ndarray:
    return np.asarray(np.sum(inputs, axis=0, dtype=np.float32))


def _reduce_scatter(mpi: Any, comm: Any, send: Any, receive: Any, inputs: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    rank, size = comm.Get_rank(), send.size // comm.Get_size()
    comm.Reduce_scatter(send, receive[:size], [size] * comm.Get_size(), mpi.SUM)
    return receive[:size], _total(inputs)[rank * size :][:size]


def _all_gather(mpi: Any, comm: Any, send: Any, receive: Any, inputs: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    rank, ranks = comm.Get_rank(), comm.Get_size()
    size = send.size // ranks
    receive[rank * size : (rank + 1) * size] = send[:size]
    if backend.is_device(receive):
        device.synchronise()
    starts = [r * size for r in range(ranks)]
    comm.Allgatherv(mpi.IN_PLACE, [receive, [size] * ranks, starts, mpi.FLOAT])
    return receive, np.concatenate([part[:size] for part in inputs])


def _all_to_all(mpi: Any, comm: Any, send: Any, receive: Any, inputs: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    rank, ranks = comm.Get_rank(), comm.Get_size()
    size = send.size // ranks
    counts, starts = [size] * ranks, [r * size for r in range(ranks)]
    comm.Alltoallv([send, counts, starts, mpi.FLOAT], [receive, counts, starts, mpi.FLOAT])
    return receive, np.concatenate([part[rank * size : (rank + 1) * size] for part in inputs])


_OPERATIONS: Final = {
    "send": _send,
    "broadcast": _broadcast,
    "allreduce": _allreduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}


def _says_cuda() -> bool:
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if "/libmpi" in line}
    for name in sorted(files):
        try:
            return bool(ctypes.CDLL(name).MPIX_Query_cuda_support())
        except (OSError, AttributeError):
            continue  # the library has no such query
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
