"""A sensor that looks 25 ms of every 100 ms at loads whose energy is known: readings summed up, and corrected.

    python -m benchmarks energy_sensor --rounds 200 --output sensor.h5 --anonymous

Loads are square waves of 400 W and 70 W, of several periods and duties, and steps of a training, whose forward,
backward, waiting and update jitter. In each round the sensor begins anywhere in its period. "still" is the load as it
is, "shifted" the same load with `hpcdist.energy.accounts.part_time_sensor.SensorShift` before its steps. Of each load
the table has the error of the sum of power x 100 ms, and of the estimate that knows what the job did when: median and
worst of all rounds, and how many of the estimates were refused because the sensor never saw a part of the step.
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
from hpcdist.energy.accounts.part_time_sensor import PowerSensor, SensorShift
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
    """Steps of ``length_ms`` with ``power_w`` over ``shares`` of them; each is longer by up to ``jitter`` of it."""

    name: str
    length_ms: float
    shares: tuple[float, ...]
    power_w: tuple[float, ...]
    jitter: float = 0.0
    late: bool = False  # a few of the last steps are, by themselves

    @property
    def steps(self) -> int:
        """So many that they last for ten seconds, and 64 at the least."""
        return max(64, math.ceil(10_000 / self.length_ms))

    def load(self, rng: np.random.Generator, pause_s: Callable[[int], float]) -> SyntheticLoad:
        """Return the load, with pauses before its steps."""
        lengths = np.rint(self.length_ms * 1e6 * (1 + self.jitter * rng.random(self.steps)))
        shares, power_w = np.array(self.shares), np.array(self.power_w)
        return synthetic_load.training_load(shares, power_w, lengths, IDLE_W, pause_s=pause_s)


def cases() -> Iterator[Case]:
    """Yield the loads."""
    for length_ms, duty in itertools.product(PERIODS_MS, DUTIES):
        yield Case(f"square wave, {length_ms} ms, {duty:.0%}", length_ms, (duty, 1 - duty), (400.0, 70.0))
    for duty in DUTIES:
        yield Case(f"a few late, 100 ms, {duty:.0%}", 100, (duty, 1 - duty), (400.0, 70.0), late=True)
    shares, power_w = (0.27, 0.5, 0.18, 0.05), (380.0, 450.0, 120.0, 260.0)
    for length_ms, jitter in itertools.product((100, 200, 480), (0.0, 0.002, 0.05)):
        yield Case(f"training, {length_ms} ms, jitter {jitter:.1%}", length_ms, shares, power_w, jitter)


def looked_at(load: SyntheticLoad, first_ns: int, rng: np.random.Generator) -> tuple[float, EnergyEstimate]:
    """Return the error of the sum, and the estimate, of what the sensor saw of ``load``."""
    updates, power_w = synthetic_load.readings(load, SENSOR, first_ns, rng, NOISE_W)
    corrected = estimate(SENSOR, updates, power_w, load.work, load.begin_ns, load.end_ns)
    return naive_j(power_w, SENSOR.update_s) / load.energy_j - 1, corrected


def still(case: Case) -> Callable[[int], float]:
    """Return the pauses that a load makes by itself."""
    slot_s = SENSOR.window_s / 2
    every = case.steps // 40
    late = {case.steps - every * (turn + 1) for turn in range(8)} if case.late else set()
    steps = itertools.count()
    return lambda now_ns: slot_s * (next(steps) in late)


def of_case(case: Case, rounds: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return relative errors (rounds, 4) in the order of `MEASURED`, NaN: refused; and standard errors (rounds, 2)."""
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
    """Return all errors."""
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
    """Return median and worst of the absolute errors, and how many were refused."""
    known = np.abs(errors[~np.isnan(errors)])
    refused = f" ({len(errors) - len(known)} refused)" if len(known) < len(errors) else ""
    return f"{np.median(known):.1%}, {known.max():.1%}{refused}" if len(known) else "refused"


def lines(results: Results) -> Sequence[str]:
    """Return the table, and what it says of sums that are far off."""
    errors = results.arrays["error"]
    rows = [["|error|: median, worst", "steps", *MEASURED]]
    for name, steps, own in zip(results.names("loads"), results.arrays["steps"].tolist(), errors, strict=True):
        rows.append([name, f"{steps}", *(_shown(own[:, way]) for way in range(len(MEASURED)))])
    shown = aligned(rows)
    every = errors.reshape(-1, len(MEASURED))
    far = np.abs(every[:, 0]) >= 0.3
    for way in (1, 3):
        known = np.abs(every[~np.isnan(every[:, way]), way])
        shown.append(f"{MEASURED[way]}: {len(known)} of {len(every)} known, the worst {known.max():.1%}")
    for way, which in ((1, "corrected from the same readings"), (3, "corrected and shifted")):
        known = np.abs(every[far & ~np.isnan(every[:, way]), way])
        if len(known):
            shown.append(f"of {far.sum()} sums 30 % off and more, {len(known)} {which}, worst {known.max():.1%} off")
    return shown


def ratios(results: Results) -> harness.Ratios:
    """Return by kind of load the estimate over the true energy, or its inverse: 1 is exact."""
    errors = results.arrays["error"]
    kinds = [name.split(",")[0] for name in results.names("loads")]
    of = {kind: errors[[other == kind for other in kinds]] for kind in dict.fromkeys(kinds)}
    return {
        f"{kind}, {MEASURED[way]}": 1 + np.abs(own[..., way][~np.isnan(own[..., way])])
        for kind, own in of.items()
        for way in (1, 3)
    }
