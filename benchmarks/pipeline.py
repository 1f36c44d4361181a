"""How long the simulator takes for a large pipeline: from the name of a schedule to its bubble, in fresh processes.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --stages 128 --microbatches 2048 --chunks 8

"cold" compiles the loop of the simulator, as the first process of a new version does; "warm" finds it in the cache. The
time does not include the start of Python and its imports, which are told apart.
"""

import argparse
import os
import subprocess
import sys
import tempfile

CHILD = """
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
found = timeline.simulate_passes(rows, placement, StepCosts.equal(len(placement.chunks), 1.0, 1.0, 1.0))
bubble = found.bubble
done = time.perf_counter()
count = sum(map(len, written.passes))
print(f"imports {imported - begin:.2f} s; {count:,} passes in {made - imported:.2f} s, their times in "
      f"{done - made:.2f} s: {done - imported:.2f} s in all; bubble {bubble:.3%}")
"""


def main() -> None:
    """Run the child with an empty cache, then with the one that it left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="interleaved")
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=1024)
    parser.add_argument("--chunks", type=int, default=4, help="of every rank, for interleaved (default 4)")
    parser.add_argument("--times", type=int, default=3, help="processes with a warm cache (default 3)")
    options = parser.parse_args()
    chunks = options.chunks if options.schedule == "interleaved" else 1
    size = (options.stages, options.microbatches, chunks)
    with tempfile.TemporaryDirectory() as cache:
        for number in range(1 + options.times):
            line = [sys.executable, "-c", CHILD, options.schedule, *map(str, size)]
            print("warm:" if number else "cold:", end=" ", flush=True)
            subprocess.run(line, env={**os.environ, "NUMBA_CACHE_DIR": cache}, check=True)


if __name__ == "__main__":
    main()
