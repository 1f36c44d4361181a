"""Trials of a power sweep, and the Pareto front of their times and energies. Pure.

**Trials** (`expand`, `plan`) vary power limits, clocks and recipe keys: each is a recipe on a number of ranks and
threads, under limits or with the devices as found. Its energy and time (`figures`) are those of the training alone,
without checkpoints and validation, over the same window; the first step, which compiles and connects, is in both.

**Front.** A configuration was measured in some repeats; each repeat gives the seconds and the joules of a token. Its
estimate is the geometric mean over its repeats. Two configurations are compared in the repeats that both have, so that
what drifts from repeat to repeat affects both alike: the mean of the logarithms of their ratios, with Student's 95 %
interval (which takes them to be normal). One repeat has no interval, and then no difference is certain.

A configuration is on the Pareto front when no other is as good in time and in energy, and better in one of the two.
"""

import hashlib
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.sweep import series
from hpcdist.bench.sweep.definition import SweepTrial, labels
from hpcdist.bench.sweep.series import SeriesItem
from hpcdist.bench.sweep.trial import TrialOutcome
from hpcdist.errors import ConfigurationError, UsageError

AS_FOUND: Final = "as found"
GROUP: Final = "power"  # in the summary of a trial
TRAINING: Final = "training"
LIMIT: Final = "limit_w"
CLOCK: Final = "clock_mhz"
THREADS: Final = "threads"

# (settings by key, ranks) -> the recipe as TOML; raises ConfigurationError for what cannot be trained
Resolve = Callable[[Mapping[str, Any], int], str]


@dataclass(frozen=True)
class PowerAxes:
    """Axes that are varied; every combination is a configuration, and so is each without the limits and clocks.

    ``keys`` are recipe keys and their values; ``threads`` of a rank are the launcher's own where there are none.
    """

    ranks: tuple[int, ...] = (1,)
    threads: tuple[int, ...] = ()
    limits_w: tuple[float, ...] = ()
    clocks_mhz: tuple[float, ...] = ()
    keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def caps(self) -> list[tuple[float | None, float | None]]:
        """The limits and clocks of the trials, (None, None) as found first."""
        if not (self.limits_w or self.clocks_mhz):
            return [(None, None)]
        return [(None, None), *itertools.product(self.limits_w or (None,), self.clocks_mhz or (None,))]


def limits_of(trial: SweepTrial) -> tuple[float | None, float | None]:
    """Return the power limit in W and the clock in MHz of ``trial``; None where neither is changed."""
    return trial.settings.get(LIMIT), trial.settings.get(CLOCK)


def expand(axes: PowerAxes, resolve: Resolve) -> list[SweepTrial]:
    """Return the trials. Raises ConfigurationError for one that cannot be trained, and for two that are the same."""
    trials: dict[str, SweepTrial] = {}
    keys = [dict(zip(axes.keys, values, strict=True)) for values in itertools.product(*axes.keys.values())]
    for ranks, threads, settings in itertools.product(axes.ranks, axes.threads or (None,), keys):
        text = resolve(settings, ranks)
        for limit_w, clock_mhz in axes.caps:
            limits = {THREADS: threads, LIMIT: limit_w, CLOCK: clock_mhz}
            known = {name: value for name, value in limits.items() if value is not None}
            words = repr((ranks, sorted(known.items()), text))
            digest = hashlib.blake2b(words.encode(), digest_size=6).hexdigest()
            name = _name(axes, settings, threads, limit_w, clock_mhz)
            if digest in trials:
                raise ConfigurationError(
                    f"{trials[digest].name!r} and {name!r} on {ranks} ranks are the same; leave one of the values out"
                )
            trials[digest] = SweepTrial(digest, name, ranks, {**settings, **known}, text)
    return list(trials.values())


def _name(
    axes: PowerAxes, settings: Mapping[str, Any], threads: int | None, limit_w: float | None, clock_mhz: float | None
) -> str:
    words = labels(settings)
    words += [] if threads is None else [f"{THREADS}={threads}"]
    words += [] if limit_w is None else [f"{limit_w:g} W"]
    words += [] if clock_mhz is None else [f"{clock_mhz:g} MHz"]
    if (limit_w, clock_mhz) == (None, None) and (axes.limits_w or axes.clocks_mhz):
        words.append(AS_FOUND)
    return " ".join(words) or "recipe"


def plan(trials: Sequence[SweepTrial], repeats: int, path: Path, retry_failed: bool, seed: int) -> list[SeriesItem]:
    """Return all trials in the order in which they are run.

    Each repeat is a random order (of ``seed``), and every second one that of the repeat before, backwards: so a drift
    of the machine hits all configurations alike. Raises StorageError where ``path`` is there and holds no results.
    """

    def order(repeat: int) -> np.ndarray:
        drawn = np.random.Generator(np.random.Philox(key=[seed, repeat // 2])).permutation(len(trials))
        return drawn if repeat % 2 == 0 else drawn[::-1]

    return series.plan(trials, repeats, path, retry_failed, order=order)


def figures(outcome: TrialOutcome) -> dict[str, float | str | None]:
    """Return time and energy of the training of a good outcome; what is not known is None, ``energy_reason`` says why.

    ``edp_js`` is the energy-delay product in J s, of the whole training.
    """
    summary = outcome.summary
    seconds = _known(summary.get("seconds_by_phase", {}).get(TRAINING))
    joules = _known(summary.get("energy_j_by_phase", {}).get(TRAINING))
    tokens = float(np.sum(outcome.samples["tokens"].values)) if "tokens" in outcome.samples else 0.0
    reason = ""
    if joules is None:
        why = summary.get("energy_reason_by_phase", {}).get(TRAINING) or summary.get("energy_reason")
        reason = str(why or "the run did not measure it")
    kinds = summary.get("energy_j_by_kind", {})
    per_token = tokens if tokens > 0 else None
    return {
        "training_s": seconds,
        "training_j": joules,
        "tokens": tokens,
        "s_per_token": _over(seconds, per_token),
        "j_per_token": _over(joules, per_token),
        "mean_w": _over(joules, seconds),
        "edp_js": None if joules is None or seconds is None else joules * seconds,
        "total_j": _known(summary.get("energy_j")),
        **{f"{kind}_j": _known(value) for kind, value in kinds.items()},
        "kinds": " + ".join(sorted(kinds)),
        "not_included": "; ".join(map(str, summary.get("energy_not_included", ()))),
        "energy_reason": reason,
    }


def _known(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _over(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by


FRONT: Final = "front"
NEAR: Final = "within noise"  # beaten by another, but not surely: it may be on the front
BEHIND: Final = "dominated"
SAME: Final = "the same"
# Exponent of the time in energy x time^n; the last one is time alone.
OBJECTIVES: Final = ("energy", "edp", "ed2p", "time")
OBJECTIVE_NAMES: Final = {
    "energy": "energy",
    "edp": "energy-delay product",
    "ed2p": "energy x delay squared",
    "time": "time",
}
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_STUDENT: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL: Final = 1.960


@dataclass(frozen=True)
class EstimateInterval:
    """Estimate with its 95 % interval; ``low`` and ``high`` are NaN where one repeat says nothing of the next."""

    value: float
    low: float
    high: float

    @property
    def is_sure(self) -> bool:
        """Whether a ratio differs from 1 beyond the noise."""
        return self.high < 1.0 or self.low > 1.0


@dataclass(frozen=True)
class ParetoCandidate:
    """One configuration: (seconds, joules) of a token by repeat, all of them finite and above zero.

    ``capped``: its limits were changed; the others show what there is to gain.
    """

    name: str
    repeats: Mapping[int, tuple[float, float]]
    capped: bool = False

    def objective(self, name: str) -> dict[int, float]:
        """Return the logarithm of an objective, by repeat."""
        return {repeat: _log(name, *both) for repeat, both in self.repeats.items()}

    def mean(self, name: str) -> float:
        """Return the mean logarithm of an objective over the repeats."""
        return statistics.fmean(self.objective(name).values())


def _log(objective: str, seconds: float, joules: float) -> float:
    if objective == "time":
        return math.log(seconds)
    return math.log(joules) + OBJECTIVES.index(objective) * math.log(seconds)


def estimate(logarithms: Sequence[float]) -> EstimateInterval:
    """Return the geometric mean of what has these logarithms, and its interval."""
    count, mean = len(logarithms), statistics.fmean(logarithms)
    if count < 2:
        return EstimateInterval(math.exp(mean), math.nan, math.nan)
    quantile = _STUDENT[count - 2] if count - 2 < len(_STUDENT) else _NORMAL
    half = quantile * statistics.stdev(logarithms) / math.sqrt(count)
    return EstimateInterval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def ratio(candidate: ParetoCandidate, other: ParetoCandidate, objective: str) -> EstimateInterval:
    """Return an objective of ``candidate`` over that of ``other``: of the repeats that both have, else of the means."""
    first, second = candidate.objective(objective), other.objective(objective)
    both = sorted(first.keys() & second.keys())
    if not both:
        return EstimateInterval(math.exp(candidate.mean(objective) - other.mean(objective)), math.nan, math.nan)
    return estimate([first[repeat] - second[repeat] for repeat in both])


def dominates(candidate: ParetoCandidate, other: ParetoCandidate) -> bool:
    """Whether the estimates of ``candidate`` are no worse than those of ``other``, and better in time or energy."""
    pairs = [(candidate.mean(name), other.mean(name)) for name in ("time", "energy")]
    return all(mine <= theirs for mine, theirs in pairs) and any(mine < theirs for mine, theirs in pairs)


def _surely(candidate: ParetoCandidate, other: ParetoCandidate) -> bool:
    """Whether ``candidate`` is better than ``other``, which it dominates, beyond the noise of both objectives."""
    intervals = [ratio(candidate, other, name) for name in ("time", "energy")]
    return all(interval.high <= 1.0 for interval in intervals)


def verdicts(candidates: Sequence[ParetoCandidate]) -> list[str]:
    """Return `FRONT`, `NEAR` or `BEHIND` of each candidate.

    Of candidates with one repeat nobody knows the noise: those that are beaten by the estimates are `BEHIND`.
    """
    places = []
    for candidate in candidates:
        better = [other for other in candidates if dominates(other, candidate)]
        measured = [other for other in better if not math.isnan(ratio(other, candidate, "time").high)]
        if not better:
            places.append(FRONT)
        elif any(_surely(other, candidate) for other in measured) or not measured:
            places.append(BEHIND)
        else:
            places.append(NEAR)
    return places


@dataclass(frozen=True)
class PowerRecommendation:
    """The configuration that an objective chooses, None for none, and why in words.

    ``energy`` and ``time`` are its ratios to the ``reference``.
    """

    name: str | None
    reason: str
    reference: str | None = None
    energy: EstimateInterval | None = None
    time: EstimateInterval | None = None


def reference(candidates: Sequence[ParetoCandidate]) -> ParetoCandidate:
    """Return the base of comparisons: the fastest of the candidates whose limits were not changed, or of all."""
    free = [candidate for candidate in candidates if not candidate.capped] or list(candidates)
    return min(free, key=lambda candidate: candidate.mean("time"))


def recommend(
    candidates: Sequence[ParetoCandidate], objective: str, max_slowdown: float | None = None
) -> PowerRecommendation:
    """Return the candidate with the least of ``objective`` that takes at most ``max_slowdown`` times the reference.

    That is the reference itself where the gain is not sure beyond the noise of the repeats. Raises UsageError for an
    objective that is none, and for a slowdown below 1.
    """
    if objective not in OBJECTIVES:
        raise UsageError(f"objective {objective!r}: choose one of {', '.join(OBJECTIVES)}")
    if max_slowdown is not None and not (math.isfinite(max_slowdown) and max_slowdown >= 1.0):
        raise UsageError(f"--max-slowdown {max_slowdown}: give a factor of at least 1, such as 1.1")
    if not candidates:
        return PowerRecommendation(None, "no recommendation: no configuration has both time and energy")
    base = reference(candidates)
    if len(candidates) == 1:
        return PowerRecommendation(None, f"no recommendation: {base.name} has nothing to be compared with", base.name)
    bound = math.inf if max_slowdown is None else math.log(max_slowdown)
    allowed = [
        candidate
        for candidate in candidates
        if candidate is base or candidate.mean("time") - base.mean("time") <= bound
    ]
    best = min(allowed, key=lambda candidate: (candidate.mean(objective), candidate.mean("time")))
    within = "" if max_slowdown is None else f" within {max_slowdown:g} x its time"
    what = OBJECTIVE_NAMES[objective]
    if best is base:
        reason = f"{base.name}: none has less {what}{within}{_rivals(base, allowed, objective)}{_once(base)}"
        return PowerRecommendation(base.name, reason, base.name)
    gain = ratio(best, base, objective)
    energy, time = ratio(best, base, "energy"), ratio(best, base, "time")
    less, longer = change_text(energy, "energy"), change_text(time, "time")
    against = f"{less} at {longer} than {base.name}"
    if SAME in (less[: len(SAME)], longer[: len(SAME)]):
        against = f"{less}, {longer}, against {base.name}"
    if not math.isnan(gain.high) and not gain.is_sure:
        repeats = len(best.repeats.keys() & base.repeats.keys())
        return PowerRecommendation(
            base.name,
            f"{base.name}: the best{within}, {best.name}, has {change_text(gain, what)}, which is within "
            f"the noise of {repeats} repeats",
            base.name,
        )
    why = "" if objective == "energy" else f" ({change_text(gain, what)})"
    reason = f"{best.name}: {against}{why}{_rivals(best, allowed, objective)}{_once(best)}"
    return PowerRecommendation(best.name, reason, base.name, energy, time)


def _rivals(best: ParetoCandidate, allowed: Sequence[ParetoCandidate], objective: str) -> str:
    """Return the other candidates that the noise does not tell from ``best``."""
    pairs = [(candidate.name, ratio(best, candidate, objective)) for candidate in allowed if candidate is not best]
    names = [name for name, interval in pairs if not (math.isnan(interval.high) or interval.is_sure)]
    return f"; the noise does not tell it from {', '.join(names)}" if names else ""


def _once(candidate: ParetoCandidate) -> str:
    return "; of one repeat, whose noise nobody knows: --repeats 3" if len(candidate.repeats) == 1 else ""


def change_text(ratio: EstimateInterval, what: str) -> str:
    """Return a ratio in words: "18 % less energy [16, 20]"."""
    percent = abs(ratio.value - 1.0) * 100.0
    if percent < 0.05:
        return f"{SAME} {what}"
    sign = -1.0 if ratio.value < 1.0 else 1.0
    ends = sorted(sign * (end - 1.0) * 100.0 for end in (ratio.low, ratio.high))
    interval = "" if math.isnan(ratio.high) else f" [{ends[0]:.3g}, {ends[1]:.3g}]"
    return f"{percent:.3g} % {'less' if sign < 0 else 'more'} {what}{interval}"
