"""Quantities of a plan as text, differences of two plans, and a whole plan as JSON.

GB is 10^9 bytes and GiB is 2^30 bytes. Sizes that are compared with a memory size are printed in both units, because
data sheets of GPUs print "GB" and mean GiB.
"""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import ModelDescription
from hpcdist.reporting.jsonable import jsonable

DEGREES: Final = ("data", "pipeline", "tensor", "context", "expert", "servers")  # fields of a layout
LINE: Final = 118  # characters of a terminal line
_DECIMAL: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY: Final = ((2.0**50, "Pi"), (2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"))
# (minimum time, seconds per unit, unit): the first row whose minimum is reached gives the printed unit
_TIMES: Final = (
    (2 * 365.25 * 86400, 365.25 * 86400, "years"),
    (2 * 86400.0, 86400.0, "days"),
    (3600.0, 3600.0, "h"),
    (120.0, 60.0, "min"),
    (1.0, 1.0, "s"),
    (1e-3, 1e-3, "ms"),
    (-math.inf, 1e-6, "us"),
)
_WORDS: Final = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
SMALL: Final = 0.005  # share of a step: smaller differences of a term are not printed
_PROPERTIES: Final = ("step_s", "mfu", "modelled_mfu", "is_capped", "hfu", "exact_mfu", "exact_hfu")


def figures(value: float, count: int = 3) -> str:
    """Return ``value`` as text with ``count`` significant digits and thousands separators, such as "12,300"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    value = float(f"{value:.{count - 1}e}")
    digits = count - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, digits)}f}"


def decimal(value: float, unit: str) -> str:
    """Return ``value`` in ``unit`` as text with an SI prefix and 3 significant digits, such as "312 TFLOP/s"."""
    for size, prefix in _DECIMAL:
        if abs(value) >= 0.9995 * size:
            return f"{figures(value / size)} {prefix}{unit}"
    return f"{figures(value)} {unit}"


def nbytes(value: float) -> str:
    """Return a number of bytes as text with a decimal prefix, such as "85.9 GB"."""
    return decimal(value, "B").replace(" kB", " KB")


def bytes_in_both(value: float) -> str:
    """Return a number of bytes as text with decimal and binary prefixes, such as "85.9 GB (80.0 GiB)"."""
    for size, prefix in _BINARY:
        if abs(value) >= size:
            return f"{nbytes(value)} ({figures(value / size)} {prefix}B)"
    return nbytes(value)


def between(seconds_range: tuple[float, float] | None) -> str:
    """Return a (minimum, maximum) pair of seconds as text such as " (1.3 s to 1.9 s)", or "" for None."""
    return "" if seconds_range is None else f" ({seconds(seconds_range[0])} to {seconds(seconds_range[1])})"


def seconds(value: float) -> str:
    """Return a number of seconds as text in a suitable unit, such as "4.20 min". Infinity gives "for ever"."""
    if not math.isfinite(value):
        return "for ever"
    if value == 0:
        return "0 s"
    return next(f"{figures(value / unit)} {name}" for least, unit, name in _TIMES if value >= least)


def joules(value: float) -> str:
    """Return an energy in joules as text, such as "3.60 MJ (1.00 kWh)". Small energies have no watt-hours."""
    text = decimal(value, "J")
    return f"{text} ({decimal(value / 3600, 'Wh')})" if value >= 1e5 else text


def grams(value: float) -> str:
    """Return a mass of CO2 equivalents in grams as text, such as "3.40 kgCO2e"."""
    if value >= 1e6:
        return f"{figures(value / 1e6)} tCO2e"
    return f"{figures(value / 1e3)} kgCO2e" if value >= 1e3 else f"{figures(value)} gCO2e"


def large_count(value: float, count: int = 3) -> str:
    """Return ``value`` as text, such as "12,345". From a million on, with ``count`` digits, such as "1.75 million"."""
    for size, word in _WORDS:
        if value >= 0.9995 * size:
            return f"{figures(value / size, count)} {word}"
    return f"{value:,.0f}"


def counted(number: int, noun: str) -> str:
    """Return a text of ``number`` and ``noun``, in the plural unless ``number`` is 1, such as "2 micro-batches"."""
    plural = "es" if noun.endswith("h") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def share(value: float) -> str:
    """Return the fraction ``value`` as text in percent, such as "44.1 %" for 0.441."""
    return f"{100 * value:.1f} %"


def wrapped(line: str, indent: str = "", width: int = LINE) -> list[str]:
    """Wrap ``line`` to lines of at most ``width`` characters, and return the lines.

    The first line starts with ``indent``. All other lines start with ``indent`` and 2 spaces.
    """
    wrapper = textwrap.TextWrapper(width, indent, f"{indent}  ", break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(line)


def estimate_json(estimate: PlanEstimate, description: ModelDescription, cluster: Cluster) -> dict[str, Any]:
    """Return the plan ``estimate`` as a dict of JSON values. Unknown and infinite numbers are None."""
    layout, memory = estimate.layout, estimate.memory
    fields = asdict(estimate)
    fields["layout"] |= {"devices": layout.devices, "microbatches": layout.microbatches(estimate.global_batch)}
    fields["memory"] |= {"bytes": memory.bytes, "fits": memory.fits, "largest_term": memory.largest_term}
    fields["timing"] |= {"step_s": estimate.timing.step_s}
    fields["energy"] |= {"joules": estimate.energy.joules}
    fields["assumptions"] = list(toml_file.assumptions(cluster))
    about = {"model": description.name, "cluster": cluster.name, "device": cluster.device.name}
    result: dict[str, Any] = jsonable(about | fields | {name: getattr(estimate, name) for name in _PROPERTIES})
    return result


def differences(terms: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return pairs (name, ``terms[name] - other[name]``), sorted by absolute difference, the largest first."""
    names = [name for name in {**terms, **other} if terms.get(name) or other.get(name)]
    excess = [(name, terms.get(name, 0.0) - other.get(name, 0.0)) for name in names]
    return sorted(excess, key=lambda item: -abs(item[1]))


def slowdown_line(estimate: PlanEstimate, other: PlanEstimate) -> str:
    """Return a line that compares the step time of ``estimate`` with ``other``, and names the terms that differ."""
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
    """Return a text of the fields in which ``layout`` differs from ``other``, such as "data 32 instead of 4"."""
    names = dict.fromkeys((*DEGREES, *asdict(layout)))
    pairs = [(name, getattr(layout, name), getattr(other, name)) for name in names]
    return ", ".join(f"{name} {value} instead of {old}" for name, value, old in pairs if value != old)
