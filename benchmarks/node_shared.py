"""Allreduce in memory that the ranks of a node share, beside copies of the same bytes: what the memory allows.

    mpirun -n 2 python benchmarks/node_shared.py
    mpirun -n 4 python benchmarks/node_shared.py --mib 64 --rounds 30 --output node_shared.h5 --anonymous

    memcpy         every rank copies its buffer to another one, all at the same time
    in place       `node_shared_allreduce` of buffers from `allocate`: reads p n bytes and writes p n
    one result     `allreduce_into` an array that all ranks have in common: reads p n bytes and writes n
    ordinary       `node_shared_allreduce` of an array that only its own rank can see
    MPI            MPI_Allreduce in place on an ordinary array

In each round all take their turn, in an order that is drawn anew. A time is that of the slowest rank from a barrier on;
results are verified in each round. Medians are printed, all times go to the HDF5 file.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpcdist import collectives
from hpcdist.bench import output_file
from hpcdist.collectives.node import shared_memory
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator

BASE = "memcpy"
FLOAT32 = np.dtype(np.float32)
WARM_UP = 2


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 16, 64], help="sizes in MiB (default 4 16 64)")
    parser.add_argument("--rounds", type=int, default=20, help="how often each has its turn (default 20)")
    parser.add_argument("--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args()


class Contenders:
    """What takes turns on buffers of ``size`` float32; `fill` before each turn, `check` after it."""

    def __init__(self, comm: Communicator, size: int) -> None:
        self.comm = comm
        self.ordinary, self.other = np.empty(size, FLOAT32), np.empty(size, FLOAT32)
        self.shared = shared_memory.allocate(comm, size, FLOAT32)
        self.result = shared_memory.allocate_common(comm, size, FLOAT32)
        self.source = (np.arange(size) % 1009 + comm.rank).astype(FLOAT32)
        self.total = (np.arange(size) % 1009 * comm.size + sum(range(comm.size))).astype(FLOAT32)
        self.runs: dict[str, tuple[Callable[[], object], np.ndarray, np.ndarray]] = {
            BASE: (lambda: np.copyto(self.other, self.ordinary), self.ordinary, self.source),
            "in place": (
                lambda: shared_memory.node_shared_allreduce(comm, self.shared),
                self.shared,
                self.total,
            ),
            "one result": (
                lambda: shared_memory.allreduce_into(comm, self.shared, self.result),
                self.result,
                self.total,
            ),
            "ordinary": (
                lambda: shared_memory.node_shared_allreduce(comm, self.ordinary),
                self.ordinary,
                self.total,
            ),
            "MPI": (lambda: collectives.native_allreduce(comm, self.ordinary), self.ordinary, self.total),
        }

    def turn(self, name: str) -> float:
        """Run one of them and return the seconds of this rank. Collective."""
        run, found, expected = self.runs[name]
        self.ordinary[...] = self.source
        self.shared[...] = self.source
        self.comm.barrier()
        began = time.perf_counter()
        run()
        elapsed = time.perf_counter() - began
        if not np.array_equal(found, expected):
            raise SystemExit(f"{name} gave rank {self.comm.rank} a wrong result")
        self.comm.barrier()  # the common result is written again in a later turn
        return elapsed


def measure(comm: Communicator, size: int, rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds by contender, (rounds, ranks). Collective."""
    contenders, order = Contenders(comm, size), np.random.default_rng(1)  # the same on every rank
    own: dict[str, list[float]] = {name: [] for name in contenders.runs}
    for turn in range(-WARM_UP, rounds):
        for name in order.permutation(list(contenders.runs)):
            elapsed = contenders.turn(name)
            if turn >= 0:
                own[name].append(elapsed)
    everybody = comm.allgather_object(own)
    collectives.release(comm)
    return {name: np.array([times[name] for times in everybody]).T for name in own}


def save(path: Path, times: dict[int, dict[str, np.ndarray]], session: start.Session, anonymous: bool) -> None:
    """Write ``times`` by size and where they come from."""
    from hpcdist.hdf5 import files
    from hpcdist.telemetry.provenance import provenance

    files.write_contiguous(
        path,
        {
            "time_s": np.stack([np.stack(list(of.values())) for of in times.values()]),
            "bytes": np.array([mib << 20 for mib in times], np.int64),
        },
        {
            **provenance(mpi_library=session.library, hosts=[session.place.host], anonymous=anonymous),
            "contenders": ";".join(next(iter(times.values()))),
            "ranks": session.comm.size,
        },
        {"time_s": {"dims": "bytes, contenders, rounds, ranks"}},
        schema="hpcdist-benchmark-node-shared",
        version=1,
    )


def main() -> None:
    """Measure, print and save."""
    options = arguments()
    session = start.start()
    output_file.exit_unless_writable(session, options.output)
    comm = session.comm
    times = {}
    for mib in options.mib:
        times[mib] = measure(comm, (mib << 20) // FLOAT32.itemsize, options.rounds)
        if comm.rank == 0:
            print(f"{mib} MiB, {comm.size} ranks, {options.rounds} rounds; {session.library}")
            base = float(np.median(times[mib][BASE].max(axis=1)))
            for name, table in times[mib].items():
                median = float(np.median(table.max(axis=1)))
                print(f"  {name:<12} {median * 1e3:9.3f} ms   {median / base:6.2f} x memcpy", flush=True)
    if comm.rank == 0 and options.output is not None:
        save(options.output, times, session, options.anonymous)
    session.leave(0)


if __name__ == "__main__":
    main()
