"""Text on the differences of two plans: layout values, and the step time by term."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.report.quantities import figures, seconds
from hpcdist.planner.report.text import DEGREES

SMALL: Final = 0.005  # share of a step: smaller differences of a term are not printed


def differences(terms: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return pairs (name, ``terms[name]`` - ``other[name]``), the largest absolute difference first. Local.

    A missing name counts as 0. Names with value 0 in both dicts are omitted.
    """
    names = [name for name in {**terms, **other} if terms.get(name) or other.get(name)]
    excess = [(name, terms.get(name, 0.0) - other.get(name, 0.0)) for name in names]
    return sorted(excess, key=lambda item: -abs(item[1]))


def slowdown_line(estimate: PlanEstimate, other: PlanEstimate) -> str:
    """Return a line that says how much faster a step of ``estimate`` is than a step of ``other``, and why. Local."""
    gain_s = other.step_s - estimate.step_s
    excess = differences(estimate.timing.terms, other.timing.terms)
    shown = [(name, excess_s) for name, excess_s in excess if abs(excess_s) > SMALL * estimate.step_s]
    less = ", ".join(f"{seconds(-excess_s)} less of {name}" for name, excess_s in shown if excess_s < 0)
    more = ", ".join(f"{seconds(excess_s)} more of {name}" for name, excess_s in shown if excess_s > 0)
    if abs(gain_s) <= SMALL * SMALL * estimate.step_s:
        verdict = "as fast"
    else:
        direction = "faster" if gain_s > 0 else "slower"
        verdict = f"{seconds(abs(gain_s))} ({figures(100 * abs(gain_s) / other.step_s)} %) a step {direction}"
    reasons = ", but ".join(filter(None, (less, more)))
    return f"{verdict}: {reasons}" if reasons else verdict


def changes(layout: ParallelLayout, other: ParallelLayout) -> str:
    """Return the fields of ``layout`` that differ from ``other``, e.g. "data 32 instead of 4", or "". Local."""
    names = dict.fromkeys((*DEGREES, *asdict(layout)))
    pairs = [(name, getattr(layout, name), getattr(other, name)) for name in names]
    return ", ".join(f"{name} {value} instead of {old}" for name, value, old in pairs if value != old)
