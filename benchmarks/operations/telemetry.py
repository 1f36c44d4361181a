"""Cost of observing a training: flight recorder, spans, metrics with their sinks, and energy sampler.

    python -m benchmarks telemetry -o telemetry.h5 --anonymous

Every size trains on --ranks ranks like `hpcdist train`, with all sinks that need no server. The study times the
observing calls in place: flight recorder with sums by operation; booking of operations and spans; gathering, writing
and publishing of rows, including waits; and the reads at the edges of energy windows. The cost of the timing itself is
subtracted. The energy sampler reads a simulated powercap tree at the recipe's default rate. The results are shares of
the time of all steps except the first, for the rank with the largest share.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist.comm.record.spans import Spans
from hpcdist.comm.record.timing import OperationTiming
from hpcdist.comm.start import Session
from hpcdist.energy.monitor import EnergyMonitor
from hpcdist.reporting.table import aligned
from hpcdist.strategies.schedule.step import PhaseTimer
from hpcdist.training.observe.event_publisher import EventPublisher
from hpcdist.training.observe.instrumentation import Instrumentation
from hpcdist.training.observe.metrics import RunMetrics
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.entry_point import train
from hpcdist.training.run.job import TrainingJob
from hpcdist.training.run.loop import TrainingLoop

SCHEMA = "hpcdist-benchmark-telemetry"

FOUND: Final = "FOUND "
LIMIT_S: Final = 900.0
SIZES: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {  # number of steps, and recipe keys
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
PARTS: Final = (*WATCHED, SAMPLER)
COMMON: Final = {
    "run.global_batch": 8,
    "telemetry.jsonl": "true",
    "telemetry.tensorboard": "true",
    "telemetry.prometheus": "textfile",
}
OPTIONS: Final = {"ranks": 2, "repeats": 3, "sizes": tuple(SIZES)}


def cost_s() -> float:
    """Return the overhead per call that a stopwatch measures for an empty function: the minimum of 20 measurements."""
    costs = []
    for _ in range(20):
        watch = harness.Stopwatch()
        nothing = watch.around(lambda: None)
        for _ in range(1000):
            nothing()
        costs.append(watch.seconds / watch.calls)
    return min(costs)


def as_rank(out: str, *settings: str) -> None:
    """Train as one rank of a job, and print the cost of observing. Collective."""
    watches = {name: harness.Stopwatch() for name in WATCHED}
    for name, methods in WATCHED.items():
        for kind, method in methods:
            setattr(kind, method, watches[name].around(vars(kind)[method]))
    before: dict[str, tuple[float, int]] = {}
    step, finish = TrainingLoop._step, TrainingJob.finish

    def skip_first(loop: TrainingLoop, number: int, batches: list[Any]) -> None:
        step(loop, number, batches)
        if not before:
            before.update({name: (watch.seconds, watch.calls) for name, watch in watches.items()})

    def report_and_finish(job: TrainingJob, loop: TrainingLoop, *result: Any) -> int:
        steps_s, stopwatch_s = loop.outcome.steps.sums["step_s"], cost_s()
        shares = {
            name: (watch.seconds - before[name][0] - stopwatch_s * (watch.calls - before[name][1])) / steps_s
            for name, watch in watches.items()
        }
        busy_s, lasted_s = loop.energy.monitor.sampler.overhead()
        if lasted_s:
            shares[SAMPLER] = busy_s / lasted_s
        calls = {name: watch.calls / loop.outcome.steps.count for name, watch in watches.items()}
        figures = {
            "shares": shares,
            "calls": calls,
            "step_s": statistics.median(step_s for step_s, _ in loop.outcome.steps.sample),
        }
        sys.stdout.write(f"\n{FOUND}{json.dumps(figures)}\n")  # one write, because the ranks share the stream
        sys.stdout.flush()
        return finish(job, loop, *result)

    TrainingLoop._step, TrainingJob.finish = skip_first, report_and_finish  # type: ignore[method-assign]
    train(recipes.load(None, settings).recipe, Path(out), "never", as_json=False)


def feed(root: Path, ended: threading.Event) -> None:
    """Update a simulated powercap tree of a package (65 W) and its memory (8 W) until ``ended``."""
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


def trained(ranks: int, size: str, folder: Path) -> dict[str, Any]:
    """Train once; return shares, calls per step and step time, each the maximum of all ranks. Raises RuntimeError."""
    steps, keys = SIZES[size]
    parent = Path(tempfile.mkdtemp(dir=folder))
    ended = threading.Event()
    feeder = threading.Thread(target=feed, args=(parent / "powercap", ended))
    feeder.start()
    while not (parent / "powercap" / "intel-rapl:0" / "intel-rapl:0:0" / "energy_uj").exists():
        time.sleep(0.01)
    settings = {**COMMON, **keys, "run.steps": steps, "energy.powercap": parent / "powercap"}
    try:
        program = ["-m", __spec__.name, str(parent / "run"), *(f"{name}={value}" for name, value in settings.items())]
        done = harness.launch(ranks, program, limit_s=LIMIT_S, capture=True)
    finally:
        ended.set()
        feeder.join()
    of_ranks = [json.loads(row.removeprefix(FOUND)) for row in done.stdout.splitlines() if row.startswith(FOUND)]
    if done.returncode or len(of_ranks) != ranks:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    largest_shares = {name: max(rank["shares"].get(name, 0.0) for rank in of_ranks) for name in PARTS}
    calls = {name: max(rank["calls"][name] for rank in of_ranks) for name in WATCHED}
    return {"shares": largest_shares, "calls": calls, "step_s": max(rank["step_s"] for rank in of_ranks)}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        calls = {size: lambda size=size: trained(chosen.ranks, size, Path(folder)) for size in chosen.sizes}
        values = list(harness.alternate(calls, chosen.repeats, warm_up=0).values())
    arrays = {
        "share": np.array([[[result["shares"][name] for name in PARTS] for result in repeats] for repeats in values]),
        "step_s": np.array([[result["step_s"] for result in repeats] for repeats in values]),
        "calls": np.array([[[result["calls"][name] for name in WATCHED] for result in repeats] for repeats in values]),
    }
    about = {"ranks": chosen.ranks, "sizes": "; ".join(chosen.sizes), "parts": "; ".join(PARTS)}
    dims = {"share": "sizes, repeats, parts", "step_s": "sizes, repeats", "calls": "sizes, repeats, parts"}
    return Results(arrays, dims, about)


def lines(results: Results) -> Sequence[str]:
    rows = [["share of a step (calls a step)", "step ms", *results.names("parts")]]
    share, calls = (np.median(results.arrays[name], axis=1) for name in ("share", "calls"))
    for index, size in enumerate(results.names("sizes")):
        cells = [f"{value:.3%}" for value in share[index]]
        cells = [f"{cell} ({number:.1f})" for cell, number in zip(cells, calls[index], strict=False)] + cells[
            len(WATCHED) :
        ]
        rows.append([size, f"{1e3 * np.median(results.arrays['step_s'][index]):.2f}", *cells])
    return aligned(rows)


if __name__ == "__main__":
    as_rank(*sys.argv[1:])
