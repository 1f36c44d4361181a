"""Cost of a maximum that propagates NaN: the native allreduce, compared with MPI_MAX, which may lose a NaN.

    python -m benchmarks extremes --ranks 2
    python -m benchmarks extremes --ranks 4 --kib 64 16384 --rounds 30 --output extremes.h5 --anonymous

A round measures both contenders on the same float32 data and takes the time of the slowest rank. A last call per size
checks that the result is NaN exactly if one rank has a NaN.
"""

import argparse
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist import collectives
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-extremes", 2, "collectives/2026-11-29-extremes-openmpi.h5"
SMALL = {"rounds": 15}

NAMES: Final = ("MPI_MAX", "native max")
OPTIONS: Final = {"kib": [64, 1024, 16384], "rounds": 40}


def timed(comm: Communicator, size: int, rounds: int) -> np.ndarray:
    """Time buffers of ``size`` float32: seconds (contenders, rounds, ranks). Collective."""
    from mpi4py import MPI

    source = np.random.default_rng(comm.rank).standard_normal(size, np.float32)
    buffer = np.empty_like(source)
    calls = {
        "MPI_MAX": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer, MPI.MAX),
        "native max": lambda: collectives.allreduce(comm, buffer, "native", "max"),
    }

    def timed_call(name: str) -> float:
        buffer[...] = source
        return harness.seconds(calls[name], comm)

    values = harness.alternate({name: lambda name=name: timed_call(name) for name in NAMES}, rounds)
    if comm.rank == comm.size - 1:
        source[::7] = np.nan
    timed_call("native max")
    if not np.array_equal(np.isnan(buffer), np.arange(size) % 7 == 0):
        raise SystemExit(f"rank {comm.rank}: the maximum of {size} elements lost or invented a NaN")
    return harness.of_ranks(comm, values)


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    times = [timed(session.comm, kib * 1024 // 4, chosen.rounds) for kib in chosen.kib]
    arrays = {"time_s": np.array(times), "bytes": np.array([kib * 1024 for kib in chosen.kib])}
    about = {"contenders": ";".join(NAMES), "ranks": session.comm.size}
    return Results(arrays, {"time_s": "bytes, contenders, rounds, ranks", "bytes": "bytes"}, about)


def slowest(results: Results) -> dict[int, np.ndarray]:
    """Return the times (contenders, rounds) of the slowest rank, by size in KiB."""
    return dict(zip((results.arrays["bytes"] >> 10).tolist(), results.arrays["time_s"].max(axis=-1), strict=True))


def ratios(results: Results) -> harness.Ratios:
    return {
        f"{kib} KiB, {name}": samples
        for kib, times in slowest(results).items()
        for name, samples in harness.over_base(times, results.names()).items()
    }


def lines(results: Results) -> list[str]:
    return [
        line
        for kib, times in slowest(results).items()
        for line in (f"{kib} KiB of float32", *harness.time_table(times, results.names()))
    ]
