"""Seconds that the simulator takes for a large pipeline: from the name of a schedule to its bubble, in fresh processes.

    python -m benchmarks planner.simulator --stages 128 --microbatches 2048 --chunks 8

"cold" compiles the loop of the simulator, as the first process of a new version does; "warm" finds it in the cache. The
time does not include the start of Python and its imports, which are told apart.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist.comm.start import Session
from hpcdist.reporting.table import aligned

SCHEMA = "hpcdist-benchmark-simulator"

PARTS: Final = ("imports", "passes", "times")
CHILD: Final = """
import gc, sys, time
begin = time.perf_counter()
from hpcdist.strategies.schedule.simulate import passes, timeline
from hpcdist.strategies.schedule.generate.operation_list import generated
from hpcdist.strategies.schedule.simulate.program import StepCosts
name, stages, microbatches, chunks = sys.argv[1], *map(int, sys.argv[2:])
imported = time.perf_counter()
gc.disable()  # as the command does: a million tuples would be looked through again and again
written = generated(name, stages, microbatches, chunks)
placement = written.place([range(unit, unit + 1) for unit in range(stages * written.chunks)])
rows = [passes.compact(row) for row in written.passes]
made = time.perf_counter()
simulated = timeline.simulate_passes(rows, placement, StepCosts.equal(len(placement.chunks), 1.0, 1.0, 1.0))
bubble = simulated.bubble
done = time.perf_counter()
print(imported - begin, made - imported, done - made, sum(map(len, written.passes)), bubble)
"""
OPTIONS: Final = {"schedule": "interleaved", "stages": 64, "microbatches": 1024, "chunks": 4, "times": 3}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Run the child with an empty cache, then with the one that it left."""
    chunks = chosen.chunks if chosen.schedule == "interleaved" else 1
    line = [sys.executable, "-c", CHILD, chosen.schedule, *map(str, (chosen.stages, chosen.microbatches, chunks))]
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": harness.search_path()}
        for _ in range(1 + chosen.times):
            done = subprocess.run(line, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            rows.append([float(word) for word in done.stdout.split()])
    about = {
        "schedule": chosen.schedule,
        "stages": chosen.stages,
        "microbatches": chosen.microbatches,
        "chunks": chunks,
    }
    about |= {"passes": int(rows[0][3]), "bubble": rows[0][4]}
    return Results({"time_s": np.array(rows)[:, :3]}, {"time_s": f"processes, ({', '.join(PARTS)})"}, about)


def lines(results: Results) -> Sequence[str]:
    rows = [["seconds", *PARTS, "passes + times"]]
    for place, own in enumerate(results.arrays["time_s"]):
        rows.append(["warm" if place else "cold", *(f"{value:.2f}" for value in own), f"{own[1:].sum():.2f}"])
    about = results.attributes
    return [f"{about['passes']:,} passes, bubble {about['bubble']:.3%}", *aligned(rows)]
