"""Downtime when a rank dies in a job that survives deaths, and the cost of this feature without deaths.

    python -m benchmarks survival -o survival.h5 --anonymous

A case is a job of four ranks (`hpcdist run --survive`), of which --kills die one after another by SIGKILL during a step
(alternately in its exchange and its update). The output has the time from the first error until all ranks continue with
the next step, the number of repeated steps, the relative difference of the losses from a run without deaths, and the
memory of the largest rank. Then the median step is compared with and without --survive, without deaths.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.training.turns import texts
from hpcdist.comm.start import Session
from hpcdist.constants import METRICS_FILE
from hpcdist.hdf5 import datasets, files
from hpcdist.reporting.table import aligned
from hpcdist.telemetry.metrics import step_metrics

SCHEMA, COMMITTED = "hpcdist-benchmark-survival", "operations/2026-11-21-survival.h5"
SMALL = {"modes": [], "architectures": ["allreduce"], "repeats": 2}

WORLD: Final = 4
EVERY: Final = 6  # steps between two deaths
ARCHITECTURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "allreduce": {},
    "zero1": {"parallel.strategy": "zero1"},
    "zero3": {"parallel.strategy": "zero3"},
    "colocated servers": {"parallel.strategy": "parameter_server", "parameter_server.placement": "colocated"},
    "pipeline 2 x data 2": {"parallel.pipeline": 2, "parallel.microbatches": 2},
}
MODES: Final[Mapping[str, tuple[str, ...]]] = {
    "shrink": ("--survive", "shrink"),
    "spare": ("--survive", "replace", "--spares"),
    "new process": ("--survive", "replace"),
}
FIGURES: Final = ("seconds", "repeated", "pss_bytes", "world")
OPTIONS: Final = {"kills": 3, "layers": 4, "hidden": 256, "context": 128, "steps": 30, "repeats": 2, "limit_s": 600.0}
OPTIONS |= {"architectures": tuple(ARCHITECTURES), "modes": tuple(MODES)}


@dataclass(frozen=True)
class Job:
    """Results of an ended job; ``deaths`` has the columns of its table of deaths."""

    losses: np.ndarray
    step_s: float  # of the slowest rank, median over all steps except the first
    deaths: dict[str, np.ndarray]


def run_job(chosen: argparse.Namespace, folder: Path, options: Sequence[str], keys: Mapping[str, Any]) -> Job:
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    common = {
        "model.layers": chosen.layers,
        "model.hidden": chosen.hidden,
        "model.heads": 4,
        "data.context": chosen.context,
        "run.global_batch": 8,
        "run.validation_samples": 8,
        "energy.sources": "none",
        "communication.algorithm": "native",
    }
    settings = [f"--set={text}" for text in texts({**common, **keys})]
    line = [sys.executable, "-m", "hpcdist", "run", "-n", str(WORLD), *options, "train", "--out", str(out), *settings]
    environment = {**os.environ, "PYTHONPATH": harness.search_path()}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=chosen.limit_s, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(line)}\nexited with code {done.returncode}:\n{done.stderr[-3000:]}")
    steps = step_metrics.read(out / METRICS_FILE).steps
    with files.open_read(out / METRICS_FILE, step_metrics.SCHEMA, step_metrics.VERSION) as file:
        deaths = datasets.read(file, "lives") if "lives" in file else {}
    slowest = np.nanmax(steps["step_s"][1:], axis=1)
    return Job(steps["loss"], float(np.median(slowest)), deaths)


def survived(chosen: argparse.Namespace, folder: Path, name: str, mode: str) -> np.ndarray:
    """Run a job of architecture ``name`` with deaths, print a line, and return `FIGURES` (deaths, figures)."""
    kills = 1 if mode == "shrink" else chosen.kills
    keys = {**ARCHITECTURES[name], "run.steps": EVERY * (kills + 1)}
    undisturbed = run_job(chosen, folder, [], keys)
    moments = [(EVERY * (death + 1), ("exchange", "update")[death % 2]) for death in range(kills)]
    killed = [f"{(3 * death + 1) % WORLD}@{step}:{moment}" for death, (step, moment) in enumerate(moments)]
    run_options = [*MODES[mode], *([str(kills)] if mode == "spare" else [])]
    job = run_job(chosen, folder, run_options, keys | {"chaos.kill": killed})
    deaths = job.deaths
    repeated = np.maximum(np.array([step - 1 for step, _ in moments]) - deaths["step"], 0)
    difference = float(np.max(np.abs(job.losses / undisturbed.losses - 1)))
    losses = "the same losses" if difference == 0 else f"losses within {difference:.1e}"
    first, last = deaths["pss_bytes"][[0, -1]] / 2**20
    print(
        f"{name:<20} {mode:<12} {kills} deaths: {statistics.median(deaths['seconds']):.2f} s (longest "
        f"{max(deaths['seconds']):.2f} s), at most {max(repeated)} step repeated, {losses}, "
        f"{first:.0f} -> {last:.0f} MiB",
        flush=True,
    )
    return np.array([deaths["seconds"], repeated, deaths["pss_bytes"], deaths["world"]]).T


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    deaths, steps = {}, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for architecture in chosen.architectures:
            for mode in chosen.modes:
                deaths[architecture, mode] = survived(chosen, folder, architecture, mode)
            keys = {**ARCHITECTURES[architecture], "run.steps": chosen.steps}
            calls = {
                kind: lambda words=words, keys=keys: run_job(chosen, folder, words, keys).step_s
                for kind, words in (("ready", MODES["shrink"]), ("plain", ()))
            }
            values = harness.alternate(calls, chosen.repeats, warm_up=0)
            steps[architecture] = [statistics.median(values[kind]) for kind in ("ready", "plain")]
    most = max((len(rows) for rows in deaths.values()), default=0)
    figures = np.full((len(deaths), most, len(FIGURES)), np.nan)
    for case, rows in enumerate(deaths.values()):
        figures[case, : len(rows)] = rows
    about = {
        "ranks": WORLD,
        "cases": "; ".join(" by ".join(case) for case in deaths),
        "architectures": "; ".join(steps),
    }
    dims = {"deaths": f"cases, deaths, ({', '.join(FIGURES)})", "step_s": "architectures, (ready, plain)"}
    return Results({"deaths": figures, "step_s": np.array(list(steps.values()))}, dims, about)


def ratios(results: Results) -> harness.Ratios:
    names = str(results.attributes["architectures"]).split("; ")
    return {name: pair[:1] / pair[1] for name, pair in zip(names, results.arrays["step_s"], strict=True)}


def lines(results: Results) -> Sequence[str]:
    rows = [["a step, ms", "ready to survive", "plain", "x plain"]]
    for (name, ratio), pair_ms in zip(ratios(results).items(), 1e3 * results.arrays["step_s"], strict=True):
        rows.append([name, f"{pair_ms[0]:.1f}", f"{pair_ms[1]:.1f}", f"{ratio[0]:.3f}"])
    return aligned(rows)
