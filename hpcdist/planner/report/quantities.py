"""Quantities of a plan as text and JSON: bytes in decimal and binary units, seconds to years, joules to GWh.

GB is 10^9 bytes and GiB 2^30. A size that is compared with that of a memory is written in both, since data sheets of
GPUs write the one and mean the other. `estimate_json` has every field of a `PlanEstimate`, and what follows from them;
numbers that are not known or not finite become null.
"""

import math
import textwrap
from dataclasses import asdict
from typing import Any, Final

from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.model.description import ModelDescription
from hpcdist.reporting.jsonable import jsonable

LINE: Final = 118  # characters of a line of a terminal
_DECIMAL: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY: Final = ((2.0**50, "Pi"), (2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"))
_LONG: Final = ((365.25 * 86400, "years"), (86400.0, "days"), (3600.0, "h"))
_WORDS: Final = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
_HOUR_J: Final = 3.6e3  # of a watt-hour


def figures(value: float, count: int = 3) -> str:
    """Return ``value`` with so many figures that count, and with commas: 0.0123, 1.23, 123, 12,300."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    value = float(f"{value:.{count - 1}e}")
    digits = count - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, digits)}f}"


def decimal(value: float, unit: str) -> str:
    """Return ``value`` in a unit with a prefix by tens: 312 TFLOP/s, 25.0 GB/s."""
    for size, prefix in _DECIMAL:
        if abs(value) >= 0.9995 * size:
            return f"{figures(value / size)} {prefix}{unit}"
    return f"{figures(value)} {unit}"


def nbytes(value: float) -> str:
    """Return bytes by tens: 85.9 GB."""
    return decimal(value, "B").replace(" kB", " KB")


def bytes_in_both(value: float) -> str:
    """Return bytes by tens, and by powers of two behind them: 85.9 GB (80.0 GiB)."""
    for size, prefix in _BINARY:
        if abs(value) >= size:
            return f"{nbytes(value)} ({figures(value / size)} {prefix}B)"
    return nbytes(value)


def between(ends: tuple[float, float] | None) -> str:
    """Return a range of times behind one: " (1.3 s to 1.9 s)"; nothing for None."""
    return "" if ends is None else f" ({seconds(ends[0])} to {seconds(ends[1])})"


def seconds(value: float) -> str:
    """Return a time: 3.20 us, 45.0 ms, 12.3 s, 4.2 min, 2.1 h, 14.3 days, 1.20 years."""
    if not math.isfinite(value):
        return "for ever"
    for size, name in _LONG:
        if value >= 2 * size or (name == "h" and value >= size):
            return f"{figures(value / size)} {name}"
    if value >= 120:
        return f"{figures(value / 60)} min"
    if value >= 1 or value == 0:
        return f"{figures(value)} s"
    return f"{figures(value * 1e3)} ms" if value >= 1e-3 else f"{figures(value * 1e6)} us"


def joules(value: float) -> str:
    """Return an energy, with watt-hours where a bill would have them: 3.60 MJ (1.00 kWh)."""
    text = decimal(value, "J")
    return f"{text} ({decimal(value / _HOUR_J, 'Wh')})" if value >= 1e5 else text


def grams(value: float) -> str:
    """Return a mass of carbon dioxide equivalents: 12.0 gCO2e, 3.40 kgCO2e, 552 tCO2e."""
    if value >= 1e6:
        return f"{figures(value / 1e6)} tCO2e"
    return f"{figures(value / 1e3)} kgCO2e" if value >= 1e3 else f"{figures(value)} gCO2e"


def large_count(value: float, count: int = 3) -> str:
    """Return a number of things: 12,345, 1.75 million, 175 billion; of large ones so many figures."""
    for size, word in _WORDS:
        if value >= 0.9995 * size:
            return f"{figures(value / size, count)} {word}"
    return f"{value:,.0f}"


def counted(number: int, what: str) -> str:
    """Return "1 device", "12,288 devices", "2 micro-batches"."""
    plural = "es" if what.endswith("h") else "s"
    return f"{number:,} {what}{'' if number == 1 else plural}"


def share(value: float) -> str:
    """Return a share in per cent: 44.1 %."""
    return f"{100 * value:.1f} %"


def wrapped(line: str, indent: str = "", width: int = LINE) -> list[str]:
    """Return ``line`` in lines of at most ``width`` characters, those after the first further to the right."""
    return textwrap.wrap(
        line,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def estimate_json(estimate: PlanEstimate, description: ModelDescription, cluster: Cluster) -> dict[str, Any]:
    """Return all of a plan; null where a number is not known, or not finite."""
    memory, timing = estimate.memory, estimate.timing
    plain = asdict(estimate)
    plain["layout"] |= {
        "devices": estimate.layout.devices,
        "microbatches": estimate.layout.microbatches(estimate.global_batch),
    }
    plain["memory"] |= {"bytes": memory.bytes, "fits": memory.fits, "breaks_first": memory.breaks_first}
    plain["timing"] |= {"step_s": timing.step_s}
    plain["energy"] |= {"joules": estimate.energy.joules}
    plain["assumptions"] = list(toml_file.assumptions(cluster))
    about = {"model": description.name, "cluster": cluster.name, "device": cluster.device.name}
    checked: dict[str, Any] = jsonable(
        {
            **about,
            **plain,
            "step_s": estimate.step_s,
            "mfu": estimate.mfu,
            "modelled_mfu": estimate.modelled_mfu,
            "is_capped": estimate.is_capped,
            "hfu": estimate.hfu,
            "exact_mfu": estimate.exact_mfu,
            "exact_hfu": estimate.exact_hfu,
        }
    )
    return checked
