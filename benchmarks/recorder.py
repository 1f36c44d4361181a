"""Cost of the flight recorder: microseconds per begin and end, call site included, bare and below an operation.

Run as ``python benchmarks/recorder.py [events] [directory]``; nothing else should run on the core.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hpcdist.collectives.algorithms import ring
from hpcdist.comm.events import NULL_SINK, EventSink
from hpcdist.comm.record.flight_recorder import Recorder
from hpcdist.comm.threads.communicator import solo

REPETITIONS = 7


def bare(sink: EventSink, events: int) -> float:
    """Return us per event of the sink alone."""
    start = time.perf_counter()
    for _ in range(events):
        sink.end(sink.begin("world", "allreduce", "float32", 1024, -1, -1, 0))
    return (time.perf_counter() - start) / events * 1e6


def barriers(sink: EventSink, events: int) -> float:
    """Return us per event of a barrier in a world of one, which walks over the frames of comm/ for its call site."""
    comm = solo()
    comm.events = sink
    start = time.perf_counter()
    for _ in range(events):
        comm.barrier()
    return (time.perf_counter() - start) / events * 1e6


def within_collectives(sink: EventSink, events: int) -> float:
    """Return us per event of code in collectives/, whose call site has two lines: the algorithm's and its caller's."""
    source = "def pass_on(sink, events):\n    for _ in range(events):\n        sink.end(sink.begin(*EVENT))\n"
    module: dict[str, Any] = {"EVENT": ("world", "sendrecv", "float32", 1024, 4096, 1, 0)}
    exec(compile(source, ring.__file__, "exec"), module)
    start = time.perf_counter()
    module["pass_on"](sink, events)
    return (time.perf_counter() - start) / events * 1e6


def main() -> None:
    """Print the medians."""
    events = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as directory:
        recorder = Recorder(Path(directory) / "rank-00000.rec", 0, 1)
        cases = {
            "begin + end": bare,
            "begin + end within collectives/": within_collectives,
            "barrier in a world of one": barriers,
        }
        for name, measure in cases.items():
            on = [measure(recorder, events) for _ in range(REPETITIONS)]
            off = [measure(NULL_SINK, events) for _ in range(REPETITIONS)]
            print(
                f"{name}: {statistics.median(on):.2f} us an event (fastest {min(on):.2f}, slowest {max(on):.2f}), "
                f"null sink {statistics.median(off):.2f} us"
            )
        recorder.close()


if __name__ == "__main__":
    main()
