"""Cost of the Python layer: an allreduce of eight bytes by mpi4py, by this library, and with the flight recorder.

    python -m benchmarks overhead
    python -m benchmarks overhead --rounds 400 --output overhead.h5 --anonymous

In each round every contender makes the same number of calls, from a barrier on; a time is that of the slowest rank over
the calls. "more us" is the difference to `mpi4py.MPI.Comm.Allreduce(MPI.IN_PLACE, ...)` in the same round.
"begin + end" is the recorder by itself, call site included.
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
from hpcdist.comm.events import NULL_SINK, EventSink
from hpcdist.comm.record.flight_recorder import Recorder
from hpcdist.comm.start import Session

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-overhead", 2, "collectives/2026-11-21-overhead-openmpi.h5"
SMALL, WORSE = {"rounds": 40}, 1.5

BASE: Final = "mpi4py"
EVENT: Final = ("world", "allreduce", "float32", 1024, -1, -1, 0)
OPTIONS: Final = {"rounds": 200, "calls": 200}  # calls of a turn
lines = harness.overhead_table


def contenders(comm: Communicator, recorder: Recorder, calls: int) -> dict[str, Callable[[], float]]:
    """Return what makes ``calls`` calls and returns the seconds of one, by name."""
    from mpi4py import MPI

    buffer, world = np.zeros(1), MPI.COMM_WORLD

    def turn(call: Callable[[], object], sink: EventSink) -> Callable[[], float]:
        return harness.repeated(call, calls, comm, lambda: setattr(comm, "events", sink))

    source = "def record(sink):\n    sink.end(sink.begin('world', 'sendrecv', 'float32', 1024, 4096, 1, 0))\n"
    module: dict[str, Any] = {}
    # As from code in collectives/, whose call site has two lines: the algorithm's and its caller's.
    exec(compile(source, ring.__file__, "exec"), module)
    made = {BASE: turn(lambda: world.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM), NULL_SINK)}
    for algorithm in ("native", "node_shared") if comm.nodes().count == 1 else ("native",):

        def reduce(algorithm: str = algorithm) -> None:
            collectives.allreduce(comm, buffer, algorithm)

        made |= {algorithm: turn(reduce, NULL_SINK), f"{algorithm}, recorded": turn(reduce, recorder)}
    made["begin + end"] = turn(lambda: recorder.end(recorder.begin(*EVENT)), NULL_SINK)
    made["begin + end within collectives/"] = turn(lambda: module["record"](recorder), NULL_SINK)
    return made


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Return the times of all contenders. Collective."""
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
