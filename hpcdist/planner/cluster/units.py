"""Quantities with units, parsed and written: "80 GiB", "400 Gbit/s", "312 TFLOP/s", "5 us", "700 W", "3 years".

A number without a unit, a unit of something else, and one that may be read in two ways are refused: GB is 10^9 bytes
and GiB 2^30 (SI brochure, 9th edition, 3.1; IEC 80000-13, 4), bits are written out ("Gbit/s"), and the letters' case
counts, since m is a thousandth and M a million. A year is that of 365.25 days.
"""

import difflib
import math
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Final

from hpcdist.errors import ConfigurationError

_SI: Final = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}


def _prefixed(unit: str, prefixes: Mapping[str, float], times: float = 1.0) -> dict[str, float]:
    return {prefix + unit: factor * times for prefix, factor in prefixes.items()}


UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "bytes": {**_prefixed("B", {**_SI, **_BINARY}), "bytes": 1.0, "byte": 1.0},
    "bandwidth": {
        **_prefixed("B/s", {**_SI, **_BINARY}),
        **_prefixed("bit/s", _SI, 1 / 8),
    },
    "flops": _prefixed("FLOP/s", _SI),
    "time": {
        "s": 1.0,
        "ms": 1e-3,
        "us": 1e-6,
        "µs": 1e-6,  # the micro sign
        "μs": 1e-6,  # the letter mu
        "ns": 1e-9,
        "min": 60.0,
        "h": 3600.0,
        "hours": 3600.0,
        "hour": 3600.0,
        "days": 86400.0,
        "day": 86400.0,
        "years": 365.25 * 86400.0,
        "year": 365.25 * 86400.0,
    },
    "slowness": {"s/B": 1.0, "ms/B": 1e-3, "us/B": 1e-6, "ns/B": 1e-9, "ps/B": 1e-12},
    "power": {"W": 1.0, "mW": 1e-3, "kW": 1e3, "MW": 1e6, "GW": 1e9},
    "carbon": {"g/kWh": 1.0, "kg/kWh": 1e3, "g/MWh": 1e-3, "kg/MWh": 1.0},
}
EXAMPLES: Final[Mapping[str, str]] = {
    "bytes": '"80 GiB" or "512 GB"',
    "bandwidth": '"25 GB/s" or "400 Gbit/s"',
    "flops": '"312 TFLOP/s"',
    "time": '"5 us", "3 min" or "3 years"',
    "slowness": '"40 ps/B"',
    "power": '"700 W" or "10.2 kW"',
    "carbon": '"369 g/kWh"',
}
_NAMES: Final[Mapping[str, str]] = {
    "bytes": "a number of bytes",
    "bandwidth": "a bandwidth",
    "flops": "a number of operations a second",
    "time": "a time",
    "slowness": "a time for a byte",
    "power": "a power",
    "carbon": "a carbon intensity",
}
_QUANTITY: Final = re.compile(r"\s*([+-]?(?:[0-9][0-9_,]*)?\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*(.*?)\s*", re.DOTALL)
_BITS: Final = re.compile(r"([KkMmGgTtPp]?)(?:b/s|bps|Bps|b)")  # bits or bytes? Who writes so often means the other


def parse(text: str, dimension: str) -> float:
    """Return the number that ``text`` stands for in the base unit: bytes, B/s, FLOP/s, s, s/B, W or g/kWh.

    ``dimension`` is one of `UNITS`. Raises ConfigurationError: no number, no unit, an unknown one or one of something
    else, and what is not finite or negative.
    """
    known = UNITS[dimension]
    example = f"expected {_NAMES[dimension]} such as {EXAMPLES[dimension]}"
    match = _QUANTITY.fullmatch(text)
    number, unit = (match[1], match[2]) if match else ("", text)
    try:
        value = Decimal(number.replace("_", ""))
    except InvalidOperation:
        raise ConfigurationError(f"{text!r} has no number that can be read; {example}") from None
    if not unit:
        raise ConfigurationError(f"{text!r} has no unit; {example}")
    if unit not in known:
        raise ConfigurationError(f"{text!r}: {_wrong(unit, dimension)}; {example}")
    found = _times(value, known[unit])
    if not math.isfinite(found) or found < 0:
        raise ConfigurationError(f"{text!r} is no finite number of at least 0; {example}")
    return found


def text(value: float, dimension: str) -> str:
    """Return ``value`` (finite, in the base unit) in the shortest words of which `parse` makes the same number."""
    found = []
    for unit, factor in UNITS[dimension].items():
        if "bit" in unit or not unit.isascii():
            continue
        for digits in (3, 6, 9, 12, 15, 17):
            said = f"{value / factor:.{digits}g}"
            if _times(Decimal(said), factor) == value:
                found.append((len(said) + 6 * ("e" in said) + said.startswith("0."), f"{said} {unit}"))
                break
    base = next(unit for unit, factor in UNITS[dimension].items() if factor == 1.0)
    return min(found, key=lambda one: one[0])[1] if found else f"{value!r} {base}"


def rough(value: float, dimension: str) -> str:
    """Return ``value`` as people say it, with three digits, in the largest decimal unit that it reaches."""
    units = {unit: factor for unit, factor in UNITS[dimension].items() if "bit" not in unit and "i" not in unit[:2]}
    best = max(units, key=lambda unit: (units[unit] <= value, units[unit] if units[unit] <= value else -units[unit]))
    return f"{value / units[best]:.3g} {best}"


def _times(number: Decimal, factor: float) -> float:
    """Return the product, rounded once: 66.9 TFLOP/s are 66,900,000,000,000 exactly."""
    return float(number * Decimal(repr(factor)))


def _wrong(unit: str, dimension: str) -> str:
    """Return what is wrong with a unit that ``dimension`` does not have."""
    bits = _BITS.fullmatch(unit)
    if bits:
        prefix = bits[1].upper().replace("K", "k")
        if dimension == "bytes":
            return f"is {unit!r} bits or bytes? Write {prefix}B for powers of ten, {prefix.upper()}iB for those of two"
        return f"is {unit!r} bits or bytes? Write {prefix}bit/s or {prefix}B/s"
    for other, units in UNITS.items():
        if unit in units:
            return f"{unit!r} is a unit for {_NAMES[other]}"
    same = [known for known in UNITS[dimension] if known.lower() == unit.lower()]
    close = same or difflib.get_close_matches(unit, UNITS[dimension], 1)
    return f"unknown unit {unit!r}" + (f", the nearest is {close[0]!r}" if close else "")
