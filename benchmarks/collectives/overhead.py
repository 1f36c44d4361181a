"""Cost of the Python layer: an 8-byte allreduce by mpi4py, by hpcdist, and by hpcdist with the flight recorder.

    python -m benchmarks overhead
    python -m benchmarks overhead --rounds 400 --output overhead.h5 --anonymous

In each round every contender makes the same number of calls after a barrier; the slowest rank's time counts. "more us"
is the extra time over `mpi4py.MPI.Comm.Allreduce(MPI.IN_PLACE, ...)` in the same round. "begin + end" is the recorder
alone, including the call site.
"""

import argparse
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist import collectives
from hpcdist.collectives.algorithms import ring
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.record.flight_recorder import Recorder
from hpcdist.comm.start import Session
from hpcdist.comm.transport import NULL_SINK, EventSink

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-overhead", 2, "collectives/2026-11-21-overhead-openmpi.h5"
SMALL, WORSE = {"rounds": 40}, 1.5

BASE: Final = "mpi4py"
EVENT: Final = ("world", "allreduce", "float32", 1024, -1, -1, 0)
OPTIONS: Final = {"rounds": 200, "calls": 200}  # calls: per contender and round
lines = harness.overhead_table


def contenders(comm: Communicator, recorder: Recorder, calls: int) -> dict[str, Callable[[], float]]:
    from mpi4py import MPI

    buffer, world = np.zeros(1), MPI.COMM_WORLD

    def timed_calls(call: Callable[[], object], sink: EventSink) -> Callable[[], float]:
        return harness.repeated(call, calls, comm, lambda: setattr(comm, "events", sink))

    source = "def record(sink):\n    sink.end(sink.begin('world', 'sendrecv', 'float32', 1024, 4096, 1, 0))\n"
    module: dict[str, Any] = {}
    # Compiled as code of collectives/: its recorded call site has two lines, the algorithm and its caller.
    exec(compile(source, ring.__file__, "exec"), module)
    timed_contenders = {BASE: timed_calls(lambda: world.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM), NULL_SINK)}
    for algorithm in ("native", "node_shared") if comm.nodes().count == 1 else ("native",):

        def reduce(algorithm: str = algorithm) -> None:
            collectives.allreduce(comm, buffer, algorithm)

        timed_contenders |= {
            algorithm: timed_calls(reduce, NULL_SINK),
            f"{algorithm}, recorded": timed_calls(reduce, recorder),
        }
    timed_contenders["begin + end"] = timed_calls(lambda: recorder.end(recorder.begin(*EVENT)), NULL_SINK)
    timed_contenders["begin + end within collectives/"] = timed_calls(lambda: module["record"](recorder), NULL_SINK)
    return timed_contenders


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    comm = session.comm
    with tempfile.TemporaryDirectory() as directory:
        recorder = Recorder(Path(directory) / f"rank-{comm.rank:05d}.rec", comm.rank, comm.size)
        gc.disable()
        values = harness.alternate(contenders(comm, recorder, chosen.calls), chosen.rounds)
        gc.enable()
        comm.events = NULL_SINK
        recorder.close()
    about = {"contenders": ";".join(values), "calls": chosen.calls, "bytes": 8}
    return Results({"time_s": harness.of_ranks(comm, values)}, {"time_s": "contenders, rounds, ranks"}, about)
