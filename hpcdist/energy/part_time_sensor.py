"""Part-time power sensors: a table of known sensors, a least squares solver, and delays of training steps.

The power sensor of an A100 or H100 measures 25 ms of every 100 ms. If steps have the same period, power x time is wrong
by more than half (Yang, Adamek and Armour, arXiv 2312.02741). Sources of `solve`: C. Lawson and R. Hanson,
Solving Least Squares Problems, 1974, chapter 23; R. Bro and S. de Jong, J. Chemometrics 11, 1997.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

MAX_ROUNDS: Final = 30  # per unknown; a problem that is not degenerate takes about one
TOLERANCE: Final = 1e-12


@dataclass(frozen=True)
class NnlsSolution:
    """Solution of a non-negative least squares problem. The covariance ignores the bound values >= 0."""

    values: np.ndarray
    covariance: np.ndarray


def solve(
    gram: np.ndarray, right: np.ndarray, square: float, rows: float, penalty: np.ndarray | None = None
) -> NnlsSolution:
    """Return the x >= 0 that minimises |A x - y|^2 + x^T P x, and the covariance of x. Local.

    ``gram``: A^T A. ``right``: A^T y. ``square``: |y|^2. ``rows``: number of rows of A. ``penalty``: P, or None for 0.
    """
    penalised = gram if penalty is None else gram + penalty
    # Scale unknowns such that the diagonal is 1, so that one tolerance suits all of them.
    scale = 1 / np.sqrt(np.maximum(np.diag(penalised), np.finfo(np.float64).tiny))
    scaled, target = penalised * np.outer(scale, scale), right * scale
    values = _active_set(scaled, target) * scale
    inverse = np.linalg.pinv(scaled, rcond=TOLERANCE, hermitian=True) * np.outer(scale, scale)
    # The residual |A x - y|^2 from the sums, and the degrees of freedom that the penalty leaves.
    left = max(0.0, square - 2 * values @ right + values @ gram @ values)
    used = min(float(np.trace(inverse @ gram)), rows - 1)
    variance = left / (rows - used) if rows > 1 else np.inf
    return NnlsSolution(values, inverse @ gram @ inverse * variance if np.isfinite(variance) else inverse * np.inf)


def _active_set(gram: np.ndarray, right: np.ndarray) -> np.ndarray:
    # Minimise x^T gram x - 2 x^T right over x >= 0, by the algorithm of Lawson and Hanson.
    free = np.linalg.lstsq(gram, right, rcond=TOLERANCE)[0]
    if free.min(initial=0.0) >= 0:
        return np.asarray(free)
    values, passive = np.zeros_like(right), np.zeros(len(right), bool)
    slack = TOLERANCE * max(1.0, float(np.abs(right).max(initial=0.0)))
    for _ in range(MAX_ROUNDS * len(right)):
        # Negative gradient: freeing an unknown at 0 with a positive entry would lower the residual.
        slope = np.where(passive, -np.inf, right - gram @ values)
        if slope.max() <= slack:
            break
        passive[slope.argmax()] = True
        while True:
            candidate = np.zeros_like(values)
            candidate[passive] = np.linalg.lstsq(gram[np.ix_(passive, passive)], right[passive], rcond=TOLERANCE)[0]
            blocked = passive & (candidate <= 0)
            if not blocked.any():
                break
            # Move towards the solution until an unknown reaches 0; unknowns at 0 are no longer free.
            fraction = np.min(values[blocked] / np.maximum(values[blocked] - candidate[blocked], TOLERANCE))
            values = values + fraction * (candidate - values)
            passive &= values > TOLERANCE * max(1.0, float(values.max()))
            values[~passive] = 0.0
        values = candidate
    return values


# Yang, Adamek and Armour, table of update periods and averaging windows. Later drivers have two fields: "average" is
# the mean of the last second on Ampere (except the A100) and later, according to NVML's documentation.
_PAPER: Final = "arXiv 2312.02741"
_KNOWN: Final = (
    (r"GH200", 0.1, 0.02, _PAPER),
    (r"H100|H800", 0.1, 0.025, _PAPER),
    (r"H200|H20", 0.1, 0.025, f"as the H100, which has the same chip: {_PAPER}"),
    (r"A100|A800", 0.1, 0.025, _PAPER),
    (r"A30", 0.1, 0.025, f"as the A100, which has the same chip: {_PAPER}"),
    (r"V100S?|TITAN V|P100|P40|P4|GTX 10[5-8]0|TITAN X[Pp]?", 0.02, 0.01, _PAPER),
    (r"T4|RTX 20[5-8]0|TITAN RTX|GTX 16[5-6]0", 0.1, 0.1, _PAPER),
    (r"RTX 30[5-9]0|RTX A\d000|A40|A16|A10G?|A2", 0.1, 0.1, _PAPER),
)
_AVERAGED: Final = re.compile(
    r"\b(GH200|H\d00|H20|L40?S?|RTX [3-6]0\d0|RTX A\d000|A40|A30|A16|A10G?|A2|[GB]B?[23]00)\b"
)
AVERAGE_S: Final = 1.0
UNKNOWN_SENSOR: Final = "not in the table of known sensors: taken to see all of the time"


@dataclass(frozen=True)
class PowerSensor:
    """Power sensor that reports the mean power of the last ``window_s`` seconds every ``update_s`` seconds."""

    update_s: float
    window_s: float
    source: str = ""  # publication of these two numbers

    @property
    def seen_share(self) -> float:
        """Fraction of the time in which the sensor measures: ``window_s / update_s``, at most 1."""
        return min(1.0, self.window_s / self.update_s)

    def paced(self, update_s: float) -> "PowerSensor":
        """Return a copy with the observed ``update_s``, or this sensor if ``update_s`` is NaN or <= 0."""
        if not update_s > 0:  # also true for NaN
            return self
        return replace(self, update_s=update_s, window_s=update_s if self.window_s == self.update_s else self.window_s)


def sensor_of(gpu_name: str, field_name: str = "") -> PowerSensor:
    """Return the `PowerSensor` of a GPU model. ``field_name``: "average" for mean power, "" for instantaneous power."""
    if field_name == "average" and _AVERAGED.search(gpu_name):
        return PowerSensor(0.1, AVERAGE_S, "NVML: POWER_AVERAGE is the mean of the last second")
    for pattern, update_s, window_s, source in _KNOWN:
        if re.search(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", gpu_name):
            return PowerSensor(update_s, window_s, source)
    return PowerSensor(0.1, 0.1, UNKNOWN_SENSOR)


class SensorShift:
    """Delays for the next ``steps`` training steps, so that ``sensor`` measures all phases of a step equally often."""

    def __init__(self, sensor: PowerSensor, steps: int) -> None:
        self.slots = 1 if sensor.seen_share >= 1 else math.ceil(2 * sensor.update_s / sensor.window_s)
        self._slot_ns = sensor.update_s * 1e9 / self.slots
        self._room = [math.ceil(steps / self.slots)] * self.slots

    def pause_s(self, now_ns: int) -> float:
        """Return the seconds by which to delay the next step. Call once per step. ``now_ns``: monotonic time. Local."""
        # The delays distribute the start times of steps evenly over the sensor's period.
        slot = int(now_ns // self._slot_ns) % self.slots
        ahead = next((ahead for ahead in range(self.slots) if self._room[(slot + ahead) % self.slots]), 0)
        at = (slot + ahead) % self.slots
        self._room[at] = max(0, self._room[at] - 1)
        return ahead * self._slot_ns / 1e9
