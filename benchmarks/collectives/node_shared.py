"""Allreduce in memory shared by the ranks of a node, compared with copies of the same bytes.

    python -m benchmarks node_shared --ranks 4 --mib 64 --rounds 30 --output node_shared.h5 --anonymous

    memcpy         every rank copies its buffer, all at the same time
    in place       `node_shared_allreduce` of buffers from `allocate`: reads p n bytes and writes p n (p ranks, n bytes)
    one result     `allreduce_into` an array shared by all ranks: reads p n bytes and writes n

Each round verifies the results. `hpcdist bench collectives` measures ordinary arrays and MPI's own allreduce.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist import collectives
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-node-shared", 2, "collectives/2026-11-21-node-shared-2.h5"
SMALL = {"rounds": 8}

FLOAT32: Final = np.dtype(np.float32)
NAMES: Final = ("memcpy", "in place", "one result")
OPTIONS: Final = {"mib": [4, 16, 64], "rounds": 20}


def timed(comm: Communicator, size: int, rounds: int) -> np.ndarray:
    """Time buffers of ``size`` float32 in shared memory: seconds (contenders, rounds, ranks). Collective."""
    source = (np.arange(size) % 1009 + comm.rank).astype(FLOAT32)
    total = (np.arange(size) % 1009 * comm.size + sum(range(comm.size))).astype(FLOAT32)
    copy, shared = np.empty(size, FLOAT32), shared_memory.allocate(comm, size, FLOAT32)
    common = shared_memory.allocate_common(comm, size, FLOAT32)
    calls: list[tuple[Callable[[], object], np.ndarray, np.ndarray]] = [
        (lambda: np.copyto(copy, source), copy, source),
        (lambda: shared_memory.node_shared_allreduce(comm, shared), shared, total),
        (lambda: shared_memory.allreduce_into(comm, shared, common), common, total),
    ]

    def timed_call(name: str) -> float:
        call, result, expected = calls[NAMES.index(name)]
        shared[...] = source
        elapsed = harness.seconds(call, comm)
        if not np.array_equal(result, expected):
            raise SystemExit(f"{name} gave rank {comm.rank} a wrong result")
        comm.barrier()  # a later turn overwrites the common result
        return elapsed

    values = harness.alternate({name: lambda name=name: timed_call(name) for name in NAMES}, rounds)
    times = harness.of_ranks(comm, values)
    collectives.release(comm)
    return times


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    times = [timed(session.comm, (mib << 20) // FLOAT32.itemsize, chosen.rounds) for mib in chosen.mib]
    arrays = {"time_s": np.array(times), "bytes": np.array([mib << 20 for mib in chosen.mib])}
    about = {"contenders": ";".join(NAMES), "ranks": session.comm.size}
    return Results(arrays, {"time_s": "bytes, contenders, rounds, ranks", "bytes": "bytes"}, about)


def slowest(results: Results) -> dict[int, np.ndarray]:
    """Return the times (contenders, rounds) of the slowest rank, by size in MiB."""
    sizes = (results.arrays["bytes"] >> 20).tolist()
    return dict(zip(sizes, results.arrays["time_s"].max(axis=-1), strict=True))


def ratios(results: Results) -> harness.Ratios:
    return {
        f"{mib} MiB, {name}": samples
        for mib, times in slowest(results).items()
        for name, samples in harness.over_base(times, results.names()).items()
    }


def lines(results: Results) -> Sequence[str]:
    times_by_mib = slowest(results).items()
    return [line for mib, times in times_by_mib for line in (f"{mib} MiB", *harness.time_table(times, results.names()))]
