"""Pareto front of time and energy with 95 % intervals, and the recommended configuration.

Each repeat of a configuration gives the seconds and the joules per token. The estimate of a configuration is the
geometric mean over its repeats. Two configurations are compared in their common repeats, so that a drift of the machine
affects both alike: the mean logarithm of the ratios, with Student's 95 % interval. One repeat gives no interval.

A configuration is on the front if no other configuration is at least as good in time and energy, and better in one.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

FRONT: Final = "front"
NEAR: Final = "within noise"  # another configuration has better estimates, but the noise may explain the difference
BEHIND: Final = "dominated"
# name -> (exponent of the time, exponent of the energy, text); the first objective is the default
OBJECTIVES: Final = {
    "edp": (1, 1, "energy-delay product"),
    "energy": (0, 1, "energy"),
    "ed2p": (2, 1, "energy-delay-squared product"),
    "time": (1, 0, "time"),
}
# Two-sided 95 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom.
STUDENT: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
NORMAL: Final = 1.960


@dataclass(frozen=True)
class Interval:
    """Estimate with its 95 % interval. ``low`` and ``high`` are NaN if there is only one repeat."""

    value: float
    low: float
    high: float

    @property
    def is_within_noise(self) -> bool:
        """True if the interval of a ratio contains 1. False without an interval."""
        return self.low <= 1.0 <= self.high


@dataclass(frozen=True)
class Candidate:
    """Configuration with (seconds, joules) per token by repeat. ``limited``: its trials ran under changed limits."""

    name: str
    repeats: Mapping[int, tuple[float, float]]
    limited: bool = False

    def logarithms(self, objective: str) -> dict[int, float]:
        """Return the logarithm of ``objective`` by repeat."""
        time, energy, _ = OBJECTIVES[objective]
        return {
            repeat: time * math.log(seconds) + energy * math.log(joules)
            for repeat, (seconds, joules) in self.repeats.items()
        }

    def mean(self, objective: str) -> float:
        """Return the mean logarithm of ``objective`` over the repeats."""
        return statistics.fmean(self.logarithms(objective).values())


def estimate(logarithms: Sequence[float]) -> Interval:
    """Return the geometric mean of the values with these ``logarithms``, and its 95 % interval."""
    count, mean = len(logarithms), statistics.fmean(logarithms)
    if count < 2:
        return Interval(math.exp(mean), math.nan, math.nan)
    quantile = STUDENT[count - 2] if count - 2 < len(STUDENT) else NORMAL
    half = quantile * statistics.stdev(logarithms) / math.sqrt(count)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def ratio(candidate: Candidate, other: Candidate, objective: str) -> Interval:
    """Return ``objective`` of ``candidate`` divided by the same objective of ``other``, over their common repeats.

    Without a common repeat it is the ratio of the means, without an interval.
    """
    first, second = candidate.logarithms(objective), other.logarithms(objective)
    common = sorted(first.keys() & second.keys())
    if not common:
        return estimate([candidate.mean(objective) - other.mean(objective)])
    return estimate([first[repeat] - second[repeat] for repeat in common])


def dominates(candidate: Candidate, other: Candidate) -> bool:
    """Return True if the estimates of ``candidate`` are at least as good as those for ``other``, and one is better."""
    pairs = [(candidate.mean(name), other.mean(name)) for name in ("time", "energy")]
    return all(first <= second for first, second in pairs) and any(first < second for first, second in pairs)


def verdicts(candidates: Sequence[Candidate]) -> list[str]:
    """Return FRONT, NEAR or BEHIND for each candidate. Candidates with a single repeat are never NEAR."""
    result = []
    for candidate in candidates:
        better = [other for other in candidates if dominates(other, candidate)]
        upper_ends = [[ratio(other, candidate, name).high for name in ("time", "energy")] for other in better]
        measured = [ends for ends in upper_ends if not math.isnan(ends[0])]
        if not better:
            result.append(FRONT)
        elif not measured or any(max(ends) <= 1.0 for ends in measured):
            result.append(BEHIND)
        else:
            result.append(NEAR)
    return result


@dataclass(frozen=True)
class Recommendation:
    """The name of the recommended configuration, or None, and the reason."""

    name: str | None
    reason: str


def reference(candidates: Sequence[Candidate]) -> Candidate:
    """Return the base of comparisons: the fastest candidate without changed limits, or the fastest of all."""
    unlimited = [candidate for candidate in candidates if not candidate.limited] or list(candidates)
    return min(unlimited, key=lambda candidate: candidate.mean("time"))


def recommend(candidates: Sequence[Candidate], objective: str, max_slowdown: float | None = None) -> Recommendation:
    """Recommend the candidate with the lowest ``objective`` whose time is at most ``max_slowdown`` x the reference.

    Recommend the reference if the gain is within the noise of the repeats.
    """
    if not candidates:
        return Recommendation(None, "no recommendation: no configuration has both time and energy")
    base = reference(candidates)
    if len(candidates) == 1:
        return Recommendation(None, f"no recommendation: {base.name} is the only configuration")
    most = math.inf if max_slowdown is None else base.mean("time") + math.log(max_slowdown)
    allowed = [candidate for candidate in candidates if candidate is base or candidate.mean("time") <= most]
    best = min(allowed, key=lambda candidate: (candidate.mean(objective), candidate.mean("time")))
    within = "" if max_slowdown is None else f" within {max_slowdown:g}x of its time"
    text, caveats = OBJECTIVES[objective][2], _caveats(best, allowed, objective)
    if best is base:
        return Recommendation(base.name, f"{base.name}: no configuration{within} has a lower {text}{caveats}")
    gain = ratio(best, base, objective)
    if gain.is_within_noise:
        repeats = len(best.repeats.keys() & base.repeats.keys())
        return Recommendation(
            base.name,
            f"{base.name}: the best configuration{within}, {best.name}, has {change_text(gain, text)}, which is within "
            f"the noise of {repeats} repeats",
        )
    texts = {name: OBJECTIVES[name][2] for name in ("energy", "time", objective)}
    changes = [change_text(ratio(best, base, name), quantity) for name, quantity in texts.items()]
    return Recommendation(best.name, f"{best.name}: {', '.join(changes)}, relative to {base.name}{caveats}")


def _caveats(best: Candidate, allowed: Sequence[Candidate], objective: str) -> str:
    if len(best.repeats) == 1:
        return "; there is only one repeat, so the noise is unknown: use --repeats 3"
    others = [candidate for candidate in allowed if candidate is not best]
    similar = [other.name for other in others if ratio(best, other, objective).is_within_noise]
    return f"; the noise is too large to distinguish it from {', '.join(similar)}" if similar else ""


def change_text(ratio: Interval, quantity: str) -> str:
    """Return a ratio as text, such as "18 % less energy [16, 20]"."""
    percent = abs(ratio.value - 1.0) * 100.0
    if percent < 0.05:
        return f"equal {quantity}"
    sign = -1.0 if ratio.value < 1.0 else 1.0
    ends = sorted(sign * (end - 1.0) * 100.0 for end in (ratio.low, ratio.high))
    interval = "" if math.isnan(ratio.high) else f" [{ends[0]:.3g}, {ends[1]:.3g}]"
    return f"{percent:.3g} % {'less' if sign < 0 else 'more'} {quantity}{interval}"
