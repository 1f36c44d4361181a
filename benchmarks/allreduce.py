"""Every allreduce algorithm against the MPI library's own, in one run, alternating, with the result verified.

    mpirun -n 4 python benchmarks/allreduce.py
    mpirun -n 4 python benchmarks/allreduce.py --bytes 16K 1M --dtype bfloat16 --output allreduce.h5 --anonymous

A time is that of the slowest rank, from a barrier on; the median over the repetitions is printed. "x native" above 1 is
faster than native in this run. Bus bandwidth (2 (p-1)/p times bytes over time) would be the same for all p on an ideal
network. "copy" is one memcpy of the buffer on every rank at the same time: no algorithm can be faster. Raw times of all
repetitions go to the HDF5 file.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.dtypes import dtype_of, is_16bit_float
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
WARM_UP = 2
COPY = "copy"
Run = Callable[[np.ndarray], None]


def size_of(text: str) -> int:
    """Return a number of bytes written as 4096, 16K, 1M."""
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["4K", "16K", "256K", "1M", "4M", "16M"]
    parser.add_argument("--bytes", nargs="+", type=size_of, default=[size_of(text) for text in default], metavar="SIZE")
    parser.add_argument("--dtype", type=dtype_of, default=dtype_of("float32"), help="float32, bfloat16, int64, ...")
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", help="default: all that run here")
    parser.add_argument("--seconds", type=float, default=1.0, help="aim of measuring time for each size (default 1)")
    parser.add_argument("--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args()


def contenders(comm: Communicator, dtype: np.dtype, wanted: list[str] | None) -> dict[str, Run]:
    """Return what runs here, native first."""

    def named(name: str) -> Run:
        return lambda buffer: collectives.allreduce(comm, buffer, name)

    found = {name: named(name) for name in collectives.ALLREDUCE}
    if not is_16bit_float(dtype):
        found["ring both ways"] = lambda buffer: collectives.ring_allreduce(comm, buffer, bidirectional=True)
    if comm.nodes().count > 1:
        del found["node_shared"]
    unknown = set(wanted or ()) - set(found)
    if unknown:
        raise SystemExit(f"{', '.join(sorted(unknown))}: not among {', '.join(found)}")
    return {name: run for name, run in found.items() if wanted is None or name in wanted or name == "native"}


class Measurement:
    """One size: inputs whose sums are exact in every dtype and order, so that results can be compared bit by bit."""

    def __init__(self, comm: Communicator, runs: dict[str, Run], count: int, dtype: np.dtype) -> None:
        self.comm, self.runs = comm, runs
        inputs = [(np.arange(count) * (rank + 1) % 5).astype(dtype) for rank in range(comm.size)]
        self.expected = np.sum([part.astype(np.float64) for part in inputs], axis=0).astype(dtype)
        self.source, self.buffer = inputs[comm.rank], np.empty(count, dtype)

    def times(self, seconds: float) -> np.ndarray:
        """Return times in s of the slowest rank, (contenders, repetitions). Collective."""
        warm = [self.round(turn) for turn in range(WARM_UP)]
        repetitions = max(5, min(1000, int(seconds / warm[-1].sum())))
        return np.array([self.round(turn) for turn in range(repetitions)]).T

    def round(self, turn: int) -> np.ndarray:
        """Run and verify every contender once, and return the times of the slowest rank. Collective."""
        names = list(self.runs)
        row = np.zeros(len(names))
        for step in range(len(names)):
            place = (turn + step) % len(names)
            self.buffer[...] = self.source
            self.comm.barrier()
            begin = time.perf_counter()
            self.runs[names[place]](self.buffer)
            row[place] = time.perf_counter() - begin
            if names[place] != COPY and not np.array_equal(self.buffer, self.expected):
                raise SystemExit(f"{names[place]} gave rank {self.comm.rank} a wrong result")
        collectives.allreduce(self.comm, row, "recursive_doubling", "max")
        return row


def report(name: str, times: np.ndarray, native: float, nbytes: int, size: int) -> str:
    """Return one line of the table."""
    low, median, high = np.percentile(times, [25, 50, 75])
    line = f"  {name:<19} {median * 1e6:10.1f} us ({low * 1e6:.1f} - {high * 1e6:.1f})"
    if name == COPY:
        return line
    bandwidth = nbytes / median / 1e9
    bus = bandwidth * 2 * (size - 1) / size
    return f"{line:<60} {native / median:6.2f} x native {bandwidth:8.3f} GB/s, bus {bus:8.3f} GB/s"


def main() -> None:
    """Measure, print on rank 0, write. Collective over the world."""
    options = arguments()
    session = start.start()
    comm, dtype = session.comm, options.dtype
    runs = contenders(comm, dtype, options.algorithms)
    spare = np.empty(max(options.bytes) // dtype.itemsize, dtype)
    runs[COPY] = lambda buffer: np.copyto(spare[: buffer.size], buffer)
    measured = {}
    if comm.rank == 0:
        print(f"{comm.size} ranks on {comm.nodes().count} nodes, {dtype}; {session.library}", flush=True)
    for nbytes in options.bytes:
        times = measured[nbytes] = Measurement(comm, runs, nbytes // dtype.itemsize, dtype).times(options.seconds)
        if comm.rank == 0:
            native = float(np.median(times[0]))
            print(f"{nbytes} bytes, {times.shape[1]} repetitions: median (quartiles)")
            for name, row in zip(runs, times, strict=True):
                print(report(name, row, native, nbytes, comm.size), flush=True)
    if options.output is not None:
        hosts = sorted(set(comm.allgather_object(session.place.host)))
        if comm.rank == 0:
            write(options.output, list(runs), measured, session, hosts, options)
    session.leave(0)


def write(
    path: Path,
    names: list[str],
    measured: dict[int, np.ndarray],
    session: start.Session,
    hosts: list[str],
    options: argparse.Namespace,
) -> None:
    """Write `time_s` (sizes, contenders, repetitions), padded with NaN, with the names and the provenance."""
    from hpcdist.hdf5 import files
    from hpcdist.telemetry.provenance import provenance

    longest = max(times.shape[1] for times in measured.values())
    padded = np.full((len(measured), len(names), longest), np.nan)
    for index, times in enumerate(measured.values()):
        padded[index, :, : times.shape[1]] = times
    card = provenance(mpi_library=session.library, hosts=hosts, anonymous=options.anonymous)
    files.write_contiguous(
        path,
        {"time_s": padded, "bytes": np.array(list(measured), np.int64)},
        {**card, "ranks": session.comm.size, "dtype": str(options.dtype), "contenders": ",".join(names)},
        {"time_s": {"dims": "bytes, contenders, repetitions"}},
        schema="hpcdist-benchmark-allreduce",
        version=1,
    )
    print(f"raw times are in {path}")


if __name__ == "__main__":
    main()
