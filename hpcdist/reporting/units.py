"""Parsing and formatting of quantities: 4096, 16K, 1M; 1 rank, 2 ranks; 1.5 GiB; 3.2 ms, 5 min; 7.2 kJ; 12,000."""

import math
import re
from datetime import UTC, datetime
from typing import Final

UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LARGEST_BYTES: Final = 1 << 40
_BYTES: Final = re.compile(r"([0-9]{1,13})([KMG]?)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse a number of bytes such as 4096, 16K or 1m (binary units, either case). Raises ValueError."""
    return parse_size(text, "bytes")


def parse_size(text: str, of: str) -> int:
    """Parse a number such as 4096, 16K or 1M (binary units). ``of``: noun for the number in the ValueError."""
    match = _BYTES.fullmatch(text)
    size = int(match[1]) * UNITS[match[2].upper()] if match else 0
    if not 0 < size < LARGEST_BYTES:
        raise ValueError(f"{text!r} is not a number of {of}; expected a number such as 4096, 16K or 1M")
    return size


def counted(number: int, what: str) -> str:
    """Return ``number`` with the noun ``what`` in singular or plural: "1 rank", "2 ranks"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes in the largest binary unit that fits, such as "1.5 GiB"."""
    for name, unit in (("GiB", UNITS["G"]), ("MiB", UNITS["M"]), ("KiB", UNITS["K"])):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} bytes"


def format_seconds(value: float | None, digits: int = 3) -> str:
    """Format a time in s, ms or us with ``digits`` significant digits, or return "not known" for None."""
    if value is None:
        return "not known"
    for least, unit, factor in ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "us", 1e6)):
        if abs(value) >= least:
            return f"{value * factor:.{digits}g} {unit}"
    return f"{value:g} s"


def format_duration(seconds: float) -> str:
    """Format a duration in ms, s, min, h or d."""
    if not math.isfinite(seconds):
        return "an unknown time"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    days, hours = divmod(seconds / 3600, 24)
    return f"{int(days)} d {int(hours)} h" if days else f"{hours:.1f} h"


def format_time(seconds: float) -> str:
    """Format a time in seconds since 1970 as UTC text."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "an impossible time"


def format_joules(value: float | None) -> str:
    """Format an energy with its unit, or return "not measured" for None and non-finite values."""
    if value is None or not math.isfinite(value):
        return "not measured"
    for limit, unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ")):
        if abs(value) >= limit:
            return f"{value / limit:.4g} {unit}"
    return f"{value:.3g} J"


def short_number(value: float) -> str:
    """Format a number in few characters: 950, 12,000, 1.5 M, 0.02."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.4g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
