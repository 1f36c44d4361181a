"""What the Python layer costs: an allreduce of eight bytes by mpi4py, by this library, and with the flight recorder.

    mpirun -n 2 python benchmarks/overhead.py
    mpirun -n 2 python benchmarks/overhead.py --rounds 400 --output overhead.h5 --anonymous

In each round every contender makes the same number of calls, from a barrier on, in an order that is drawn anew. A time
is that of the slowest rank, over the calls. The difference is to `mpi4py.MPI.Comm.Allreduce(MPI.IN_PLACE, ...)` in the
same round; medians over the rounds are printed, and all times, in seconds a call, go to the HDF5 file.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpcdist import collectives
from hpcdist.bench import output_file
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.events import NULL_SINK
from hpcdist.comm.record.flight_recorder import Recorder

BASE = "mpi4py"
Call = Callable[[], object]


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="how often each contender has its turn (default 200)")
    parser.add_argument("--calls", type=int, default=200, help="calls in a turn (default 200)")
    parser.add_argument("--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args()


def contenders(comm: Communicator) -> dict[str, tuple[Call, bool]]:
    """Return by name what is called, and whether the recorder looks on."""
    from mpi4py import MPI

    buffer = np.zeros(1)
    world = MPI.COMM_WORLD

    def named(algorithm: str) -> Call:
        return lambda: collectives.allreduce(comm, buffer, algorithm)

    found: dict[str, tuple[Call, bool]] = {BASE: (lambda: world.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM), False)}
    for algorithm in ("native", "node_shared") if comm.nodes().count == 1 else ("native",):
        found |= {algorithm: (named(algorithm), False), f"{algorithm}, recorded": (named(algorithm), True)}
    return found


def measure(
    comm: Communicator, runs: dict[str, tuple[Call, bool]], recorder: Recorder, rounds: int, calls: int
) -> dict:
    """Return the seconds a call by contender, on rank 0: (rounds, ranks). Collective over ``comm``."""
    order = np.random.default_rng(1)  # the same on every rank
    own: dict[str, list[float]] = {name: [] for name in runs}
    gc.disable()
    for turn in range(-2, rounds):  # two rounds to warm up
        for name in order.permutation(list(runs)):
            call, recorded = runs[name]
            comm.events = recorder if recorded else NULL_SINK
            comm.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            if turn >= 0:
                own[name].append((time.perf_counter() - began) / calls)
    gc.enable()
    comm.events = NULL_SINK
    everybody = comm.allgather_object(own)
    return {name: np.array([times[name] for times in everybody]).T for name in runs}


def save(path: Path, times: dict[str, np.ndarray], calls: int, session: start.Session, anonymous: bool) -> None:
    """Write ``times`` and where they come from."""
    from hpcdist.hdf5 import files
    from hpcdist.telemetry.provenance import provenance

    files.write_contiguous(
        path,
        {"time_s": np.stack(list(times.values()))},
        {
            **provenance(mpi_library=session.library, hosts=[session.place.host], anonymous=anonymous),
            "contenders": ";".join(times),
            "calls": calls,
            "bytes": 8,
        },
        {"time_s": {"dims": "contenders, rounds, ranks"}},
        schema="hpcdist-benchmark-overhead",
        version=1,
    )


def main() -> None:
    """Measure, print and save."""
    options = arguments()
    session = start.start()
    output_file.exit_unless_writable(session, options.output)
    comm = session.comm
    with tempfile.TemporaryDirectory() as directory:
        recorder = Recorder(Path(directory) / f"rank-{comm.rank:05d}.rec", comm.rank, comm.size)
        times = measure(comm, contenders(comm), recorder, options.rounds, options.calls)
        recorder.close()
    if comm.rank == 0:
        print(f"{session.library}, {comm.size} ranks, 8 bytes, {options.rounds} rounds of {options.calls} calls")
        base = times[BASE].max(axis=1)
        for name, table in times.items():
            slowest = table.max(axis=1)
            median, more = statistics.median(slowest) * 1e6, statistics.median(slowest - base) * 1e6
            print(f"{name:22} {median:8.2f} us a call   {more:+8.2f} us to {BASE}")
        if options.output is not None:
            save(options.output, times, options.calls, session, options.anonymous)
    session.leave(0)


if __name__ == "__main__":
    main()
