"""A sensor that measures 25 ms of every 100 ms, under loads of known energy: summed and corrected readings.

    python -m benchmarks energy_sensor --rounds 200 --output sensor.h5 --anonymous

Loads are square waves of 400 W and 70 W with several periods and duty cycles, and training steps with jitter. The
sensor starts at a random point of its period. "shifted" adds pauses by
`hpcdist.energy.part_time_sensor.SensorShift`, "still" does not. The table has the errors of the sum of
power x 100 ms and of the estimate (median and worst of all rounds), and the number of refused estimates, for which the
sensor never saw a part of the step.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.operations.folded_energy import EnergyEstimate, estimate, naive_j
from hpcdist.comm.start import Session
from hpcdist.energy.part_time_sensor import PowerSensor, SensorShift
from hpcdist.reporting.table import aligned

sys.path.insert(0, str(harness.ROOT / "tests"))

from stubs import synthetic_load
from stubs.synthetic_load import SyntheticLoad

SCHEMA, COMMITTED = "hpcdist-benchmark-energy-sensor", "operations/2026-11-22-energy-sensor.h5"
SMALL, WORSE = {"rounds": 5}, 1.005

SENSOR: Final = PowerSensor(0.1, 0.025)
NOISE_W: Final = 3.0
IDLE_W: Final = 80.0
PERIODS_MS: Final = (50, 100, 200, 300, 37, 130)
DUTIES: Final = (0.1, 0.25, 0.5, 0.75)
MEASURED: Final = ("naive, still", "corrected, still", "naive, shifted", "corrected, shifted")
OPTIONS: Final = {"rounds": 40, "seed": 1}


@dataclass(frozen=True)
class Case:
    """Steps of ``length_ms``, lengthened by up to ``jitter`` (relative), with ``power_w`` over ``shares`` of a step."""

    name: str
    length_ms: float
    shares: tuple[float, ...]
    power_w: tuple[float, ...]
    jitter: float = 0.0
    late: bool = False  # a few of the last steps start late

    @property
    def steps(self) -> int:
        """Number of steps: at least 64 and ten seconds."""
        return max(64, math.ceil(10_000 / self.length_ms))

    def load(self, rng: np.random.Generator, pause_s: Callable[[int], float]) -> SyntheticLoad:
        lengths = np.rint(self.length_ms * 1e6 * (1 + self.jitter * rng.random(self.steps)))
        shares, power_w = np.array(self.shares), np.array(self.power_w)
        return synthetic_load.training_load(shares, power_w, lengths, IDLE_W, pause_s=pause_s)


def cases() -> Iterator[Case]:
    for length_ms, duty in itertools.product(PERIODS_MS, DUTIES):
        yield Case(f"square wave, {length_ms} ms, {duty:.0%}", length_ms, (duty, 1 - duty), (400.0, 70.0))
    for duty in DUTIES:
        yield Case(f"a few late, 100 ms, {duty:.0%}", 100, (duty, 1 - duty), (400.0, 70.0), late=True)
    shares, power_w = (0.27, 0.5, 0.18, 0.05), (380.0, 450.0, 120.0, 260.0)
    for length_ms, jitter in itertools.product((100, 200, 480), (0.0, 0.002, 0.05)):
        yield Case(f"training, {length_ms} ms, jitter {jitter:.1%}", length_ms, shares, power_w, jitter)


def looked_at(load: SyntheticLoad, first_ns: int, rng: np.random.Generator) -> tuple[float, EnergyEstimate]:
    """Return the relative error of the sum, and the corrected estimate, from the sensor's readings of ``load``."""
    updates, power_w = synthetic_load.readings(load, SENSOR, first_ns, rng, NOISE_W)
    corrected = estimate(SENSOR, updates, power_w, load.work, load.begin_ns, load.end_ns)
    return naive_j(power_w, SENSOR.update_s) / load.energy_j - 1, corrected


def still(case: Case) -> Callable[[int], float]:
    """Return the pauses of an unshifted load, as a function of the time."""
    slot_s = SENSOR.window_s / 2
    interval = case.steps // 40
    late_steps = {case.steps - interval * (turn + 1) for turn in range(8)} if case.late else set()
    steps = itertools.count()
    return lambda now_ns: slot_s * (next(steps) in late_steps)


def of_case(case: Case, rounds: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return relative errors (rounds, 4) in the order of `MEASURED` (NaN: refused), and standard errors (rounds, 2)."""
    errors, standard = np.full((rounds, 4), math.nan), np.full((rounds, 2), math.nan)
    for turn in range(rounds):
        first_ns = int(rng.integers(0, 10**8))
        for way, pause_s in enumerate((still(case), SensorShift(SENSOR, case.steps).pause_s)):
            load = case.load(rng, pause_s)
            errors[turn, 2 * way], corrected = looked_at(load, first_ns, rng)
            errors[turn, 2 * way + 1] = corrected.energy_j / load.energy_j - 1
            standard[turn, way] = corrected.error_j / load.energy_j
    return errors, standard


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    rng, loads = np.random.default_rng(chosen.seed), list(cases())
    errors, standard = zip(*(of_case(case, chosen.rounds, rng) for case in loads), strict=True)
    arrays = {
        "error": np.stack(errors),
        "standard_error": np.stack(standard),
        "steps": np.array([case.steps for case in loads]),
    }
    dims = {
        "error": "loads, rounds, measured; relative, NaN: refused",
        "standard_error": "loads, rounds, (corrected still, corrected shifted); relative",
        "steps": "loads",
    }
    about = {"loads": ";".join(case.name for case in loads), "measured": ";".join(MEASURED), "seed": chosen.seed}
    sensor = {"update_s": SENSOR.update_s, "window_s": SENSOR.window_s, "noise_w": NOISE_W}
    return Results(arrays, dims, about | sensor)


def _shown(errors: np.ndarray) -> str:
    valid = np.abs(errors[~np.isnan(errors)])
    refused = f" ({len(errors) - len(valid)} refused)" if len(valid) < len(errors) else ""
    return f"{np.median(valid):.1%}, {valid.max():.1%}{refused}" if len(valid) else "refused"


def lines(results: Results) -> Sequence[str]:
    errors = results.arrays["error"]
    rows = [["|error|: median, worst", "steps", *MEASURED]]
    for name, steps, case_errors in zip(results.names("loads"), results.arrays["steps"].tolist(), errors, strict=True):
        rows.append([name, f"{steps}", *(_shown(case_errors[:, way]) for way in range(len(MEASURED)))])
    shown = aligned(rows)
    all_errors = errors.reshape(-1, len(MEASURED))
    far = np.abs(all_errors[:, 0]) >= 0.3
    for way in (1, 3):
        valid = np.abs(all_errors[~np.isnan(all_errors[:, way]), way])
        shown.append(f"{MEASURED[way]}: {len(valid)} of {len(all_errors)} estimated, the worst {valid.max():.1%} off")
    for way, which in ((1, "corrected from the same readings"), (3, "corrected and shifted")):
        valid = np.abs(all_errors[far & ~np.isnan(all_errors[:, way]), way])
        if len(valid):
            shown.append(f"of {far.sum()} sums at least 30 % off, {len(valid)} {which}, worst {valid.max():.1%} off")
    return shown


def ratios(results: Results) -> harness.Ratios:
    """Return 1 + the relative error of the estimate, by kind of load: 1 is exact."""
    errors = results.arrays["error"]
    kinds = [name.split(",")[0] for name in results.names("loads")]
    by_kind = {kind: errors[[other == kind for other in kinds]] for kind in dict.fromkeys(kinds)}
    return {
        f"{kind}, {MEASURED[way]}": 1 + np.abs(kind_errors[..., way][~np.isnan(kind_errors[..., way])])
        for kind, kind_errors in by_kind.items()
        for way in (1, 3)
    }
