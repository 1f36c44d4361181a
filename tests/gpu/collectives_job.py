"""A rank of a job on GPUs: reduces a buffer by one algorithm and compares with numpy; rank 0 prints a JSON line."""

import json
import sys

import numpy as np

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.collectives import nccl, peer_memory
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator

COUNTS = (1, 1000, (9 << 20) + 5)  # the last one in several segments


def main() -> None:
    session = start.start("gpu")
    comm, algorithm = session.comm, sys.argv[1]
    output: dict[str, object] = {"ranks": comm.size, "shared": peer_memory.refusal(comm)}
    assert session.device_pointers is not None
    output |= {"pointers": sorted(session.device_pointers.operations), "reason": session.device_pointers.reason}
    if algorithm == "refusal":
        output["nccl"] = nccl.refusal(comm)
    else:
        right = [_reduce(comm, algorithm, count, dtype) for count in COUNTS for dtype in ("float32", "float16")]
        output["right"] = all(comm.allgather_object(all(right)))
    if comm.rank == 0:
        print(json.dumps(output), flush=True)
    session.leave(0)


def _reduce(comm: Communicator, algorithm: str, count: int, dtype: str) -> bool:
    inputs = [(np.arange(count) % 13 + rank).astype(dtype) for rank in range(comm.size)]
    buffer = backend.place(inputs[comm.rank], "gpu")
    collectives.allreduce(comm, buffer, algorithm)
    buffer += buffer.dtype.type(1)
    return bool(np.array_equal(backend.to_host(buffer), np.sum(inputs, axis=0, dtype=np.float64) + 1))


if __name__ == "__main__":
    main()
