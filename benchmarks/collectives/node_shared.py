"""Allreduce in memory that the ranks of a node share, beside copies of the same bytes: what the memory allows.

    python -m benchmarks node_shared --ranks 4 --mib 64 --rounds 30 --output node_shared.h5 --anonymous

    memcpy         every rank copies its buffer to another one, all at the same time
    in place       `node_shared_allreduce` of buffers from `allocate`: reads p n bytes and writes p n
    one result     `allreduce_into` an array that all ranks have in common: reads p n bytes and writes n

Results are verified in each round. What ordinary arrays and MPI's own cost, `hpcdist bench collectives` measures.
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
    """Return seconds (contenders, rounds, ranks) of buffers of ``size`` float32. Collective."""
    source = (np.arange(size) % 1009 + comm.rank).astype(FLOAT32)
    total = (np.arange(size) % 1009 * comm.size + sum(range(comm.size))).astype(FLOAT32)
    copy, shared = np.empty(size, FLOAT32), shared_memory.allocate(comm, size, FLOAT32)
    common = shared_memory.allocate_common(comm, size, FLOAT32)
    calls: list[tuple[Callable[[], object], np.ndarray, np.ndarray]] = [
        (lambda: np.copyto(copy, source), copy, source),
        (lambda: shared_memory.node_shared_allreduce(comm, shared), shared, total),
        (lambda: shared_memory.allreduce_into(comm, shared, common), common, total),
    ]

    def turn(name: str) -> float:
        call, result, expected = calls[NAMES.index(name)]
        shared[...] = source
        elapsed = harness.seconds(call, comm)
        if not np.array_equal(result, expected):
            raise SystemExit(f"{name} gave rank {comm.rank} a wrong result")
        comm.barrier()  # the common result is written again in a later turn
        return elapsed

    values = harness.alternate({name: lambda name=name: turn(name) for name in NAMES}, rounds)
    times = harness.of_ranks(comm, values)
    collectives.release(comm)
    return times


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Return the times of all sizes. Collective."""
    times = [timed(session.comm, (mib << 20) // FLOAT32.itemsize, chosen.rounds) for mib in chosen.mib]
    arrays = {"time_s": np.array(times), "bytes": np.array([mib << 20 for mib in chosen.mib])}
    about = {"contenders": ";".join(NAMES), "ranks": session.comm.size}
    return Results(arrays, {"time_s": "bytes, contenders, rounds, ranks", "bytes": "bytes"}, about)


def slowest(results: Results) -> dict[int, np.ndarray]:
    """Return the times (contenders, rounds) of the slowest rank, by MiB."""
    sizes = (results.arrays["bytes"] >> 20).tolist()
    return dict(zip(sizes, results.arrays["time_s"].max(axis=-1), strict=True))


def ratios(results: Results) -> harness.Ratios:
    """Return times over the memcpy's."""
    return {
        f"{mib} MiB, {name}": samples
        for mib, times in slowest(results).items()
        for name, samples in harness.over_base(times, results.names()).items()
    }


def lines(results: Results) -> Sequence[str]:
    of = slowest(results).items()
    return [line for mib, times in of for line in (f"{mib} MiB", *harness.time_table(times, results.names()))]
