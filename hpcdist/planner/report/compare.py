"""Differences of two layouts and of their plans, in words: the terms of time that decide."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.report.quantities import figures, seconds

SMALL: Final = 0.005  # of a step: differences below are not told
# What a person changes, in the order in which layouts are told.
_AXES: Final = ("data", "pipeline", "tensor", "context", "expert", "servers")


def differences(terms: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return by how much each term of ``terms`` is larger than of ``other``, the largest difference first (local)."""
    names = [name for name in {**terms, **other} if terms.get(name) or other.get(name)]
    excess = [(name, terms.get(name, 0.0) - other.get(name, 0.0)) for name in names]
    return sorted(excess, key=lambda item: -abs(item[1]))


def slowdown_line(estimate: PlanEstimate, other: PlanEstimate) -> str:
    """Return how much longer a step of ``other`` takes, and the terms that decide it, in words (local)."""
    longer_s = other.step_s - estimate.step_s
    shown = [
        (name, more_s)
        for name, more_s in differences(estimate.timing.terms, other.timing.terms)
        if abs(more_s) > SMALL * estimate.step_s
    ]
    less = [f"{seconds(-more_s)} less of {name}" for name, more_s in shown if more_s < 0]
    more = [f"{seconds(more_s)} more of {name}" for name, more_s in shown if more_s > 0]
    if abs(longer_s) <= SMALL * SMALL * estimate.step_s:
        how = "as fast"
    else:
        how = f"{seconds(abs(longer_s))} ({figures(100 * abs(longer_s) / other.step_s)} %) a step "
        how += "faster" if longer_s > 0 else "slower"
    parts = ", ".join(less)
    if more:
        parts += f"{', though ' if less else ''}{', '.join(more)}"
    return f"{how}: {parts}" if parts else how


def changes(layout: ParallelLayout, other: ParallelLayout) -> str:
    """Return what of the layout ``layout`` is not so in ``other``, in words (local)."""
    pairs = [(name, getattr(layout, name), getattr(other, name)) for name in dict.fromkeys((*_AXES, *asdict(layout)))]
    return ", ".join(f"{name} {own} instead of {one}" for name, own, one in pairs if own != one)
