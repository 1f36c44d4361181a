"""How long a job that outlives its ranks stands still when one dies, and what it costs when none does.

    python benchmarks/survival.py -o survival.h5 --anonymous

Each case is one job of four ranks (`hpcdist run --survive`), of which --kills die one after another: SIGKILL to
themselves in the middle of a step (its exchange and its update by turns). Told is the time from the first error on any
rank until all go on with the next step; how many steps were made again; whether the losses are those of the same run
without a death (to the bit where places are taken again, by the greatest relative difference where ranks are fewer);
and the memory of the largest rank after each death. Then, without deaths and in turns, the median step of the same
training with --survive and without.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.hdf5 import datasets, files
from hpcdist.telemetry.metrics import step_metrics
from hpcdist.telemetry.metrics.step_metrics import METRICS_FILE
from hpcdist.telemetry.provenance import provenance

RANKS: Final = 4
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


@dataclass(frozen=True)
class Found:
    """What a job left behind."""

    losses: np.ndarray
    step_s: float  # median over the steps but the first, of the slowest rank
    lives: dict[str, np.ndarray]


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="of each job with spares or new processes (default 3)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30, help="of the trainings without deaths (default 30)")
    parser.add_argument("--repeats", type=int, default=2, help="of these (default 2)")
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--limit-s", type=float, default=600.0, help="that a job may take (default 600)")
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file for every death")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args()


def job(options: argparse.Namespace, folder: Path, launched: list[str], keys: Mapping[str, Any]) -> Found:
    """Run a training to its end and return what it left behind."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    common = {
        "model.layers": options.layers,
        "model.hidden": options.hidden,
        "model.heads": 4,
        "data.context": options.context,
        "run.global_batch": 8,
        "run.validation_samples": 8,
        "energy.sources": "none",
        "communication.algorithm": "native",
    }
    settings = [text for key, value in {**common, **keys}.items() for text in ("--set", f"{key}={value}")]
    line = [sys.executable, "-m", "hpcdist", "run", "-n", str(RANKS), *launched, "train", "--out", str(out), *settings]
    done = subprocess.run(line, capture_output=True, text=True, timeout=options.limit_s, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(line)}\nended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    steps = step_metrics.read(out / METRICS_FILE).steps
    with files.open_read(out / METRICS_FILE, step_metrics.SCHEMA, step_metrics.VERSION) as file:
        lives = datasets.read(file, "lives") if "lives" in file else {}
    slowest = np.nanmax(steps["step_s"][1:], axis=1)
    return Found(steps["loss"], float(np.median(slowest)), lives)


def survived(options: argparse.Namespace, folder: Path, name: str, mode: str) -> dict[str, np.ndarray]:
    """Return, death by death, how a job of architecture ``name`` outlived them; print a line."""
    kills = 1 if mode == "shrink" else options.kills
    steps = EVERY * (kills + 1)
    keys = {**ARCHITECTURES[name], "run.steps": steps}
    calm = job(options, folder, [], keys)
    moments = [(EVERY * (death + 1), ("exchange", "update")[death % 2]) for death in range(kills)]
    killed = [f"{(3 * death + 1) % RANKS}@{step}:{moment}" for death, (step, moment) in enumerate(moments)]
    launched = [*MODES[mode], *([str(kills)] if mode == "spare" else [])]
    found = job(options, folder, launched, keys | {"chaos.kill": killed})
    lives = found.lives
    repeated = np.array([step - 1 for step, _ in moments]) - lives["step"]
    difference = float(np.max(np.abs(found.losses / calm.losses - 1)))
    same = "the same losses" if difference == 0 else f"losses within {difference:.1e}"
    print(
        f"{name:<20} {mode:<12} {kills} deaths: {statistics.median(lives['seconds']):.2f} s "
        f"(longest {max(lives['seconds']):.2f} s), at most {max(max(repeated), 0)} step made again, {same}, "
        f"{lives['pss_bytes'][0] / 2**20:.0f} -> {lives['pss_bytes'][-1] / 2**20:.0f} MiB",
        flush=True,
    )
    return {
        "seconds": lives["seconds"],
        "repeated": np.maximum(repeated, 0),
        "pss_bytes": lives["pss_bytes"],
        "world": lives["world"],
    }


def overhead(options: argparse.Namespace, folder: Path, name: str) -> tuple[float, float]:
    """Return the median steps of a training that would survive, and of one that would not, in turns; print a line."""
    keys = {**ARCHITECTURES[name], "run.steps": options.steps}
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(options.repeats):
        for survives in times:
            times[survives].append(job(options, folder, [*MODES["shrink"]] if survives else [], keys).step_s)
    ready, plain = (statistics.median(times[survives]) for survives in (True, False))
    print(f"{name:<20} a step ready to survive {ready * 1e3:.1f} ms, plain {plain * 1e3:.1f} ms: {ready / plain:.3f}")
    return ready, plain


def main() -> None:
    """Measure all cases, print them, and keep them."""
    options = arguments()
    if options.output is not None:
        files.check_place(options.output)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        deaths = {
            (one, mode): survived(options, folder, one, mode) for one in options.architectures for mode in options.modes
        }
        steps = {one: overhead(options, folder, one) for one in options.architectures}
    if options.output is None:
        return
    figures = np.full((len(deaths), max(len(rows["seconds"]) for rows in deaths.values()), len(FIGURES)), np.nan)
    for case, rows in enumerate(deaths.values()):
        figures[case, : len(rows["seconds"])] = np.array([rows[name] for name in FIGURES]).T
    about = {"ranks": RANKS, "layers": options.layers, "hidden": options.hidden, "context": options.context}
    cases = {"cases": "; ".join(" by ".join(case) for case in deaths), "architectures": "; ".join(steps)}
    files.write_contiguous(
        options.output,
        {"deaths": figures, "step_s": np.array([*steps.values()])},
        {**provenance(anonymous=options.anonymous), **about, **cases},
        {
            "deaths": {"dims": f"cases, deaths, ({', '.join(FIGURES)})"},
            "step_s": {"dims": "architectures, (ready, plain)"},
        },
        schema="hpcdist-benchmark-survival",
        version=1,
    )


if __name__ == "__main__":
    main()
