"""What stragglers cost under each consistency of the parameter server, with computing emulated by sleep.

    python benchmarks/stragglers.py -o stragglers.h5 --plot stragglers.png --anonymous

Four workers and a dedicated server train a small model. Computing takes --step-s seconds a step, so what is measured is
who waits for whom, on however few cores. Scenarios: nobody is slow ("calm"); every step of every worker is slow with
probability 1/8 ("random"), the same steps for every contender; worker 0 always is ("persistent"). Slow is 3 times.

Steps per second are the mean over the workers, each over its own steps without the first ones (--transient), which SSP
needs until it has come to its bound. A step of bsp with a backup worker is one that all
but one of them made. Trainings take turns; a file that is there already is continued.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hpcdist.bench.data import report as data_report
from hpcdist.bench.data import request
from hpcdist.bench.sweep import results, series
from hpcdist.bench.sweep.definition import Sweep
from hpcdist.bench.sweep.results import SweepConfiguration
from hpcdist.bench.sweep.trial import OK
from hpcdist.cli.bench.trials import SweepRecipes, remove_leftovers, run_trials, trial_command
from hpcdist.reporting.plotting import check_plot

WORKERS: Final = 4
FACTOR: Final = 3.0
CONTENDERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "bsp": {},
    "ssp(3)": {"parameter_server.consistency": "ssp", "parameter_server.staleness": 3},
    "asp": {"parameter_server.consistency": "asp"},
    "bsp, 1 backup worker": {"parameter_server.backup_workers": 1},
}
SCENARIOS: Final[Mapping[str, Mapping[str, Any]]] = {
    request.CALM: {},
    "random": request.stragglers(range(WORKERS), FACTOR, 1 / 8),
    "persistent": request.stragglers((0,), FACTOR, 1.0),
}
COMMON: Final = {
    "parallel.strategy": "parameter_server",
    "model.layers": 1,
    "model.hidden": 32,
    "model.heads": 2,
    "data.context": 32,
    "run.global_batch": 4 * WORKERS,
    "run.validation_samples": 32,
    "run.sentinel_every_steps": 0,
    "checkpoint.every_steps": 0,
    "communication.algorithm": "native",
    "energy.sources": "none",
}
# (contender, scenario, the same of what it is compared with, least ratio of the speeds, greatest)
WANTED: Final = (
    ("ssp(3)", "random", ("bsp", "random"), 1.25, None),
    ("asp", "random", ("bsp", "random"), 1.35, None),
    ("ssp(3)", "persistent", ("bsp", "persistent"), 0.95, 1.05),
    ("asp", "persistent", ("bsp", "persistent"), 2.2, None),
    ("bsp, 1 backup worker", "persistent", ("bsp", request.CALM), 0.95, None),
)


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds that computing takes (default 0.1)")
    parser.add_argument("--steps", type=int, default=80, help="of each training (default 80)")
    parser.add_argument("--transient", type=int, default=8, help="steps that are left out (default 8)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=300.0, help="that a training may take (default 300)")
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file for every step of every rank")
    parser.add_argument("--plot", type=Path, help="draw the losses against time and steps")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args()


def speed(one: SweepConfiguration, transient: int) -> float:
    """Return the median over the good repeats of the steps per second, NaN where there are none."""
    found = []
    for repeat in one.repeats:
        if repeat.status == OK:
            who = data_report.workers(repeat.samples["compute_s"])
            found.append(data_report.steps_per_s(repeat.samples["step_s"][:, who], transient))
    return statistics.median(found) if found else float("nan")


def report(speeds: Mapping[tuple[str, str], float]) -> list[str]:
    """Return the table of speeds, and below it what was wanted and what was found."""
    width = max(map(len, CONTENDERS)) + 2
    lines = ["steps/s".ljust(width) + "".join(f"{scenario:>14}{'x bsp':>8}" for scenario in SCENARIOS)]
    for name in CONTENDERS:
        cells = [(speeds[name, scenario], speeds[name, scenario] / speeds["bsp", scenario]) for scenario in SCENARIOS]
        lines.append(name.ljust(width) + "".join(f"{found:14.3f}{ratio:8.2f}" for found, ratio in cells))
    lines.append("")
    for name, scenario, other, least, most in WANTED:
        ratio = speeds[name, scenario] / speeds[other]
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        held = ratio >= least and (most is None or ratio <= most)
        lines.append(
            f"{name}, {scenario} / {other[0]}, {other[1]}: {ratio:.3f}, wanted {wanted}{'' if held else ': MISSED'}"
        )
    return lines


def main() -> None:
    """Measure what is not there yet, and print the table."""
    options = arguments()
    if options.plot is not None:
        check_plot(options.plot)
    common = {**COMMON, "run.steps": options.steps, "chaos.step_s": options.step_s}
    sweep = Sweep(Path("stragglers"), (WORKERS + 1,), options.repeats, {}, {}, (), ())
    trials, left_out = request.expand(
        request.ExchangeRequest(WORKERS + 1, common, CONTENDERS, SCENARIOS), SweepRecipes(sweep)
    )
    if left_out:
        sys.exit("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    with tempfile.TemporaryDirectory() as folder:
        path = options.output or Path(folder) / "stragglers.h5"
        results.check_place(path)
        with results.locked(path):
            remove_leftovers(path)
            items = series.plan(trials, options.repeats, path, retry_failed=False)
            tally = run_trials(
                items, path, series.SeriesLimits(options.limit_s), options.anonymous, trial_command(None, "")
            )
        if tally.failed or tally.left:
            sys.exit(f"{tally.failed} trainings failed, {tally.left} are left")
        ids = {trial.id for trial in trials}
        found = results.read(path)
        known = results.SweepResults(found.provenance, tuple(one for one in found.configurations if one.id in ids))
    speeds = {request.parts_of(one.name): speed(one, options.transient) for one in known.configurations}
    print("\n".join(report(speeds)))
    if options.plot is not None:
        data_report.plot(known, options.plot)


if __name__ == "__main__":
    main()
