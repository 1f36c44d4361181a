"""What looking on costs a training: flight recorder, spans, metrics with their sinks, and the energy sampler.

    python benchmarks/telemetry.py -o telemetry.h5 --anonymous

Every size is trained on --ranks ranks as `hpcdist train` does it, with all sinks that need no server, and the calls
that look on are timed where they are made: those of the flight recorder with the sums by operation, those that book
operations and keep spans, those that gather rows, write them and tell the sinks (waiting for the other ranks included),
and the looks at the edges of energy windows. What the timing itself takes is measured and left out. The energy sampler
tells the processor time of its own thread; it reads a powercap tree of two zones that this program makes, as fast as
the recipe's default. Told is the share of the time of all steps but the first, of the rank with most, by repetition.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.comm.launch import mpirun
from hpcdist.comm.launch.environment import python_path_variables
from hpcdist.comm.record.spans import Spans
from hpcdist.comm.record.timing import OperationTiming
from hpcdist.energy.monitor.monitor import EnergyMonitor
from hpcdist.hdf5 import files
from hpcdist.strategies.schedule.observers import PhaseTimer
from hpcdist.telemetry.provenance import provenance
from hpcdist.training.observe.event_publisher import EventPublisher
from hpcdist.training.observe.instrumentation import Instrumentation
from hpcdist.training.observe.metrics import RunMetrics
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.entry_point import train
from hpcdist.training.run.job import JobResult, TrainingJob
from hpcdist.training.run.loop import TrainingLoop

FOUND: Final = "FOUND "
LIMIT_S: Final = 900.0
SIZES: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {  # steps, and keys
    "small": (3000, {"model.layers": 2, "model.hidden": 64, "model.heads": 2, "data.context": 64}),
    "GPT 3.4 M": (200, {"model.layers": 4, "model.hidden": 256, "model.heads": 4, "data.context": 256}),
}
WATCHED: Final[Mapping[str, tuple[tuple[type, str], ...]]] = {
    "recorder": ((OperationTiming, "begin"), (OperationTiming, "end")),
    "spans": ((PhaseTimer, "done"), (Spans, "add"), (Instrumentation, "stepped")),
    "metrics": ((RunMetrics, "add"), (RunMetrics, "flush"), (RunMetrics, "note_clocks"), (EventPublisher, "stepped")),
    "windows": ((EnergyMonitor, "_look"),),
}
SAMPLER: Final = "sampler"
COMMON: Final = {
    "run.global_batch": 8,
    "telemetry.jsonl": "true",
    "telemetry.tensorboard": "true",
    "telemetry.prometheus": "textfile",
}


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file for every repetition")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    parser.add_argument("--of-rank", nargs="+", help=argparse.SUPPRESS)  # run directory, then keys of the recipe
    return parser.parse_args()


class Watch:
    """The seconds of this rank's main thread in calls of one kind, those within another of it counted once."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._depth = 0.0, 0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its time taken."""
        main, clock = threading.main_thread().ident, time.perf_counter

        @wraps(function)
        def timed(*args: Any, **keys: Any) -> Any:
            if self._depth or threading.get_ident() != main:
                return function(*args, **keys)
            self._depth, begin = 1, clock()
            try:
                return function(*args, **keys)
            finally:
                self.seconds += clock() - begin
                self.calls += 1
                self._depth = 0

        return timed


def cost_s() -> float:
    """Return what a `Watch` adds to each call, of what it then counts: the least of several measurements."""
    found = []
    for _ in range(20):
        watch = Watch()
        nothing = watch.around(lambda: None)
        for _ in range(1000):
            nothing()
        found.append(watch.seconds / watch.calls)
    return min(found)


def as_rank(out: str, *settings: str) -> None:
    """Train as one rank of a job, and print what looking on took. Collective."""
    watches = {name: Watch() for name in WATCHED}
    for name, methods in WATCHED.items():
        for kind, method in methods:
            setattr(kind, method, watches[name].around(vars(kind)[method]))
    before: dict[str, tuple[float, int]] = {}
    step, finish = TrainingLoop._step, TrainingJob.finish

    def first_left_out(loop: TrainingLoop, number: int, batches: list[Any]) -> None:
        step(loop, number, batches)
        if not before:
            before.update({name: (watch.seconds, watch.calls) for name, watch in watches.items()})

    def told(job: TrainingJob, loop: TrainingLoop, result: JobResult) -> int:
        own_s, empty = loop.outcome.steps.sums["step_s"], cost_s()
        found = {
            name: (watch.seconds - before[name][0] - empty * (watch.calls - before[name][1])) / own_s
            for name, watch in watches.items()
        }
        busy_s, lasted_s = loop.energy.monitor.sampler.overhead()
        if lasted_s:
            found[SAMPLER] = busy_s / lasted_s
        calls = {name: watch.calls / loop.outcome.steps.count for name, watch in watches.items()}
        figures = {
            "shares": found,
            "calls": calls,
            "step_s": statistics.median(step_s for step_s, _ in loop.outcome.steps.sample),
        }
        sys.stdout.write(f"\n{FOUND}{json.dumps(figures)}\n")  # one write: ranks share the stream
        sys.stdout.flush()
        return finish(job, loop, result)

    TrainingLoop._step, TrainingJob.finish = first_left_out, told  # type: ignore[method-assign]
    train(recipes.load(None, settings).recipe, Path(out), "never", as_json=False)


def feed(root: Path, ended: threading.Event) -> None:
    """Keep a powercap tree of a package of 65 W and its memory of 8 W up to date until ``ended``."""
    zones = {root / "intel-rapl:0": ("package-0", 65e6), root / "intel-rapl:0" / "intel-rapl:0:0": ("dram", 8e6)}
    for zone, (name, _) in zones.items():
        zone.mkdir(parents=True)
        (zone / "name").write_text(name)
        (zone / "max_energy_range_uj").write_text(str(1 << 38))
    while True:
        for zone, (_, uw) in zones.items():
            (zone / "new").write_text(str(int(time.monotonic() * uw) % (1 << 38)))
            os.replace(zone / "new", zone / "energy_uj")
        if ended.wait(0.05):
            return


def trained(options: argparse.Namespace, size: str, folder: Path) -> dict[str, Any]:
    """Train once; return the shares, calls a step and seconds a step of the rank with most. Raises RuntimeError."""
    steps, keys = SIZES[size]
    place = Path(tempfile.mkdtemp(dir=folder))
    ended = threading.Event()
    feeder = threading.Thread(target=feed, args=(place / "powercap", ended))
    feeder.start()
    while not (place / "powercap" / "intel-rapl:0" / "intel-rapl:0:0" / "energy_uj").exists():
        time.sleep(0.01)
    chosen = {**COMMON, **keys, "run.steps": steps, "energy.powercap": place / "powercap"}
    line = [sys.executable, str(Path(__file__).resolve()), "--of-rank", str(place / "run")]
    line += [f"{name}={value}" for name, value in chosen.items()]
    launcher = mpirun.find()
    settings = mpirun.settings(launcher)
    environment = {
        **os.environ,
        **python_path_variables(),
        **settings,
        **mpirun.session(launcher, place),
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            mpirun.command(launcher, options.ranks, line, settings),
            env=environment, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    finally:
        ended.set()
        feeder.join()
    found = [json.loads(row.removeprefix(FOUND)) for row in done.stdout.splitlines() if row.startswith(FOUND)]
    if done.returncode or len(found) != options.ranks:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    most = {name: max(rank["shares"].get(name, 0.0) for rank in found) for name in (*WATCHED, SAMPLER)}
    calls = {name: max(rank["calls"][name] for rank in found) for name in WATCHED}
    return {"shares": most, "calls": calls, "step_s": max(rank["step_s"] for rank in found)}


def main() -> None:
    """Measure, print the table, and write the file."""
    options = arguments()
    if options.of_rank:
        as_rank(*options.of_rank)
        return
    names = [*WATCHED, SAMPLER]
    shares = np.zeros((len(options.sizes), options.repeats, len(names)))
    step_s = np.zeros(shares.shape[:2])
    print(f"{'size':12} {'step':>10}" + "".join(f"{name:>20}" for name in names))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.repeats):
            for index, size in enumerate(options.sizes):
                found = trained(options, size, Path(folder))
                shares[index, number] = [found["shares"][name] for name in names]
                step_s[index, number] = found["step_s"]
                cells = [
                    f"{found['shares'][name]:.3%}" + (f" ({found['calls'][name]:.1f})" if name in WATCHED else "")
                    for name in names
                ]
                print(
                    f"{size:12} {found['step_s'] * 1e3:7.2f} ms" + "".join(f"{cell:>20}" for cell in cells), flush=True
                )
    for size, row in zip(options.sizes, np.median(shares, axis=1), strict=True):
        told = ", ".join(f"{name} {share:.3%}" for name, share in zip(names, row, strict=True))
        print(f"{size}: {told} of a step (median of {options.repeats}; in brackets: calls a step)")
    if options.output is not None:
        files.write_contiguous(
            options.output,
            {"share": shares, "step_s": step_s},
            {
                **provenance(anonymous=options.anonymous),
                "ranks": options.ranks,
                "sizes": "; ".join(options.sizes),
                "parts": "; ".join(names),
            },
            {
                "share": {"dims": "sizes, repeats, parts", "units": "1"},
                "step_s": {"dims": "sizes, repeats", "units": "s"},
            },
            schema="hpcdist-benchmark-telemetry",
            version=1,
        )


if __name__ == "__main__":
    main()
