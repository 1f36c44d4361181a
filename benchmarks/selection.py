"""What `communication.algorithm = "auto"` chooses, beside the MPI library's own and every other algorithm, in one run.

    mpirun -n 4 python benchmarks/selection.py
    mpirun -n 4 python benchmarks/selection.py --bytes 16K 4M --output selection.h5 --anonymous

First the choice is measured as a training does at its start, with a fresh cache, then taken from that cache: both times
are printed. Then all algorithms take turns, in random orders, on buffers in memory that the ranks of a node share, each
repetition from a barrier on; a time is that of the slowest rank, and medians are printed. "auto/native" below 1 is
faster than the MPI library in this run; "best" is the fastest of all. Raw times of all repetitions go to the HDF5 file.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpcdist import collectives
from hpcdist.bench import output_file
from hpcdist.collectives.node import shared_memory
from hpcdist.collectives.tuning import autotune
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator
from hpcdist.hdf5 import files
from hpcdist.reporting.units import parse_bytes
from hpcdist.telemetry.provenance import provenance

AUTO, NATIVE = "auto", "native"
FEWEST, MOST = 7, 500
FLOAT = np.dtype(np.float32)


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["64", "1K", "4K", "16K", "64K", "256K", "1M", "4M"]
    parser.add_argument(
        "--bytes", nargs="+", type=parse_bytes, default=[parse_bytes(text) for text in default], metavar="SIZE"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="aim of measuring time for each size (default 1)")
    parser.add_argument("--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args()


def select(comm: Communicator, max_bytes: int, library: str) -> tuple[autotune.Tuning, dict[str, float]]:
    """Return the choice, and the seconds of a start that measures and of one that has a cache. Collective."""
    wanted = autotune.TuningRequest(
        max_bytes=max_bytes,
        dtype=FLOAT,
        buffer="shared",
        allocate=lambda size: shared_memory.allocate(comm, size, FLOAT),
    )
    with tempfile.TemporaryDirectory() as folder:  # each rank its own; only that of rank 0 is written
        os.environ["XDG_CACHE_HOME"] = folder
        seconds, found = {}, None
        for name in ("measured", "cache"):
            comm.barrier()
            began = time.perf_counter()
            found = autotune.select(comm, comm, wanted, library)
            collectives.release(comm)
            seconds[f"start_{name}_s"] = max(comm.allgather_object(time.perf_counter() - began))
            assert found.source in (name, "default")
    assert found is not None
    return found, seconds


def contenders(comm: Communicator, choice: str) -> dict[str, str]:
    """Return names and algorithms of what runs here, auto and native first."""
    able = [name for name in collectives.ALLREDUCE if name != "node_shared" or comm.nodes().count == 1]
    return {AUTO: choice, NATIVE: NATIVE} | {name: name for name in able if name != NATIVE}


def measure(comm: Communicator, names: dict[str, str], nbytes: int, seconds: float) -> np.ndarray:
    """Return seconds of the slowest rank, (contenders, repetitions). Collective."""
    buffer = shared_memory.allocate(comm, max(1, nbytes // FLOAT.itemsize), FLOAT)
    runs: list[Callable[[], None]] = [
        lambda algorithm=algorithm: collectives.allreduce(comm, buffer, algorithm) for algorithm in names.values()
    ]

    def turn(number: int) -> np.ndarray:
        times = np.zeros(len(runs))
        for index in np.random.default_rng(number).permutation(len(runs)):  # who runs before whom must not decide
            comm.barrier()
            began = time.perf_counter()
            runs[index]()
            times[index] = time.perf_counter() - began
        comm.allreduce(times, "max")
        return times

    warm = [turn(0) for _ in range(2)]
    repetitions = max(FEWEST, min(MOST, int(seconds / warm[-1].sum())))
    found = np.array([turn(number) for number in range(repetitions)]).T
    collectives.release(comm)
    return found


def write(
    wanted: argparse.Namespace,
    names: dict[str, str],
    times: dict[int, np.ndarray],
    about: dict[str, str | float],
    session: start.Session,
) -> None:
    """Write `time_s` (sizes, contenders, repetitions), padded with NaN, and the provenance."""
    padded = np.full((len(times), len(names), max(each.shape[1] for each in times.values())), np.nan)
    for index, each in enumerate(times.values()):
        padded[index, :, : each.shape[1]] = each
    card = provenance(mpi_library=session.library, anonymous=wanted.anonymous)
    files.write_contiguous(
        wanted.output,
        {"time_s": padded, "bytes": np.array(list(times), np.int64)},
        {**card, **about, "contenders": ",".join(names)},
        {"time_s": {"dims": "bytes, contenders, repetitions"}},
        schema="hpcdist-benchmark-selection",
        version=1,
    )


def main() -> None:
    """Measure and print. Collective."""
    wanted = arguments()
    session = start.start()
    output_file.exit_unless_writable(session, wanted.output)
    comm = session.comm
    found, seconds = select(comm, max(wanted.bytes), session.library)
    names = contenders(comm, found.text)
    if comm.rank == 0:
        print(f"{comm.size} ranks on {session.place.nodes} node(s); {session.library}")
        first, second = seconds.values()
        print(f"start: {first:.2f} s measured, {second * 1e3:.1f} ms from the cache")
        print(f"auto: {found.text}")
        print(f"{'bytes':>10} {'auto':>19} {'us':>10} {'native us':>10} {'auto/native':>12} {'best':>19} {'us':>10}")
    times: dict[int, np.ndarray] = {}
    for nbytes in wanted.bytes:
        times[nbytes] = measure(comm, names, nbytes, wanted.seconds)
        median = dict(zip(names, np.median(times[nbytes], axis=1) * 1e6, strict=True))
        best = min(median, key=lambda name: median[name])
        if comm.rank == 0:
            print(
                f"{nbytes:10d} {found.choice.at(nbytes):>19} {median[AUTO]:10.1f} {median[NATIVE]:10.1f} "
                f"{median[AUTO] / median[NATIVE]:12.2f} {best:>19} {median[best]:10.1f}",
                flush=True,
            )
    if wanted.output is not None and comm.rank == 0:
        write(wanted, names, times, {"choice": found.text, "ranks": comm.size, **seconds}, session)
    session.leave(0)


if __name__ == "__main__":
    main()
