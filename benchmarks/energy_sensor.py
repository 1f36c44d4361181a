"""What a sensor that looks 25 ms of every 100 ms makes of loads whose energy is known: summed up, and corrected.

    python benchmarks/energy_sensor.py
    python benchmarks/energy_sensor.py --rounds 200 --output sensor.h5 --anonymous

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcdist.energy.accounts.part_time_sensor import EnergyEstimate, PowerSensor, SensorShift, estimate, naive_j
from hpcdist.errors import HpcdistError
from hpcdist.hdf5 import files

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "doubles"))

import synthetic_load
from synthetic_load import SyntheticLoad

SENSOR = PowerSensor(0.1, 0.025)
NOISE_W = 3.0
IDLE_W = 80.0
PERIODS_MS = (50, 100, 200, 300, 37, 130)
DUTIES = (0.1, 0.25, 0.5, 0.75)
MEASURED = ("naive, still", "corrected, still", "naive, shifted", "corrected, shifted")
NAMES = ("load", "steps", *MEASURED)


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
    for length_ms in PERIODS_MS:
        for duty in DUTIES:
            yield Case(f"square wave, {length_ms} ms, {duty:.0%}", length_ms, (duty, 1 - duty), (400.0, 70.0))
    for duty in DUTIES:
        yield Case(f"a few late, 100 ms, {duty:.0%}", 100, (duty, 1 - duty), (400.0, 70.0), late=True)
    shares, power_w = (0.27, 0.5, 0.18, 0.05), (380.0, 450.0, 120.0, 260.0)
    for length_ms in (100, 200, 480):
        for jitter in (0.0, 0.002, 0.05):
            yield Case(f"training, {length_ms} ms, jitter {jitter:.1%}", length_ms, shares, power_w, jitter)


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="beginnings of the sensor for each load (default 40)")
    parser.add_argument("--seed", type=int, default=1, help="of beginnings, jitter and noise (default 1)")
    parser.add_argument("--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args()


def looked_at(load: SyntheticLoad, first_ns: int, rng: np.random.Generator) -> tuple[float, EnergyEstimate]:
    """Return the error of the sum, and the estimate, of what the sensor saw of ``load``."""
    updates, power_w = synthetic_load.readings(load, SENSOR, first_ns, rng, NOISE_W)
    found = estimate(SENSOR, updates, power_w, load.work, load.begin_ns, load.end_ns)
    return naive_j(power_w, SENSOR.update_s) / load.energy_j - 1, found


def still(case: Case) -> Callable[[int], float]:
    """Return the pauses that a load makes by itself."""
    slot_s = SENSOR.window_s / 2
    every = case.steps // 40
    late = {case.steps - every * (turn + 1) for turn in range(8)} if case.late else set()
    steps = itertools.count()
    return lambda now_ns: slot_s * (next(steps) in late)


def measure(case: Case, rounds: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return relative errors (rounds, 4) in the order of `MEASURED`, NaN: refused; and standard errors (rounds, 2)."""
    errors, doubts = np.full((rounds, 4), math.nan), np.full((rounds, 2), math.nan)
    for turn in range(rounds):
        first_ns = int(rng.integers(0, 10**8))
        pauses = (still(case), SensorShift(SENSOR, case.steps).pause_s)
        for way, pause_s in enumerate(pauses):
            load = case.load(rng, pause_s)
            errors[turn, 2 * way], found = looked_at(load, first_ns, rng)
            errors[turn, 2 * way + 1] = found.energy_j / load.energy_j - 1
            doubts[turn, way] = found.error_j / load.energy_j
    return errors, doubts


def shown(errors: np.ndarray) -> str:
    """Return median and worst of the absolute errors, and how many were refused."""
    known = np.abs(errors[~np.isnan(errors)])
    refused = len(errors) - len(known)
    if not len(known):
        return f"{'refused':>19}"
    return f"{np.median(known):7.1%} {known.max():7.1%}" + (f" {refused:3d}" if refused else "    ")


def save(path: Path, found: dict[str, tuple[int, np.ndarray, np.ndarray]], options: argparse.Namespace) -> None:
    """Write all errors, and where they come from."""
    from hpcdist.telemetry.provenance import provenance

    files.write_contiguous(
        path,
        {
            "error": np.stack([errors for _, errors, _ in found.values()]),
            "standard_error": np.stack([doubts for _, _, doubts in found.values()]),
            "steps": np.array([steps for steps, _, _ in found.values()]),
        },
        {
            **provenance(anonymous=options.anonymous),
            "loads": ";".join(found),
            "measured": ";".join(MEASURED),
            "update_s": SENSOR.update_s,
            "window_s": SENSOR.window_s,
            "noise_w": NOISE_W,
            "seed": options.seed,
        },
        {
            "error": {"dims": "loads, rounds, measured", "meaning": "relative; NaN: refused"},
            "standard_error": {"dims": "loads, rounds, (corrected still, corrected shifted)", "meaning": "relative"},
            "steps": {"dims": "loads"},
        },
        schema="hpcdist-benchmark-energy-sensor",
        version=1,
    )


def main() -> None:
    """Measure, print and save."""
    options = arguments()
    if options.output is not None:
        try:
            files.check_place(options.output)
        except HpcdistError as error:
            sys.exit(str(error))
    rng = np.random.default_rng(options.seed)
    print(
        f"sensor: {SENSOR.window_s * 1e3:g} ms of every {SENSOR.update_s * 1e3:g} ms, {options.rounds} rounds; |error|:"
    )
    print(f"{NAMES[0]:28} {NAMES[1]:>5}" + "".join(f" {name:>19}" for name in MEASURED))
    print(f"{'':34}" + f" {'median':>7} {'worst':>7} ref" * len(MEASURED))
    found = {}
    for case in cases():
        errors, doubts = measure(case, options.rounds, rng)
        found[case.name] = case.steps, errors, doubts
        print(f"{case.name:28} {case.steps:5}" + "".join(f" {shown(errors[:, way])}" for way in range(len(MEASURED))))
    every = np.concatenate([errors for _, errors, _ in found.values()])
    far = np.abs(every[:, 0]) >= 0.3
    for way in (1, 3):
        known = np.abs(every[~np.isnan(every[:, way]), way])
        print(f"{MEASURED[way]}: {len(known)} of {len(every)} known, the worst {known.max():.1%}")
    for way, which in ((1, "corrected from the same readings"), (3, "corrected and shifted")):
        known = np.abs(every[far & ~np.isnan(every[:, way]), way])
        if len(known):
            print(f"of {far.sum()} sums 30 % off and more, {len(known)} {which}, the worst {known.max():.1%} off")
    if options.output is not None:
        save(options.output, found, options)


if __name__ == "__main__":
    main()
