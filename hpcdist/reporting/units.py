"""Parsing and formatting of quantities, and of short lists: 16K, 1.5 GiB, 3.2 ms; cores 0-3,8, nodes n[001-512]."""

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
LARGEST_BYTES: Final = 1 << 60  # 1 EiB
_BYTES: Final = re.compile(r"([0-9]{1,19})([KMGTP]?)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the number of bytes that ``text`` states, such as 4096, 16K or 1m (binary units). Raises ValueError."""
    return parse_size(text, "bytes")


def parse_size(text: str, noun: str) -> int:
    """Parse a number such as 4096, 16K or 1M (binary units). ``noun``: unit in the error. Raises ValueError."""
    match = _BYTES.fullmatch(text)
    size = int(match[1]) * UNITS[match[2].upper()] if match else 0
    if match and size > LARGEST_BYTES:
        raise ValueError(f"{text} is too large; expected at most 1024P, which is 2^60 {noun}")
    if not size:
        raise ValueError(f"{text!r} is not a number of {noun}; expected a number such as 4096, 16K or 1M")
    return size


def counted(number: int, noun: str) -> str:
    """Return ``number`` followed by ``noun`` in singular or plural: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_bytes(nbytes: int) -> str:
    """Format ``nbytes`` in the largest binary unit that fits, such as "1.5 GiB"."""
    for name, unit in (("GiB", UNITS["G"]), ("MiB", UNITS["M"]), ("KiB", UNITS["K"])):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} bytes"


def format_seconds(value: float | None, digits: int = 3) -> str:
    """Format ``value`` seconds in s, ms or us with ``digits`` significant digits. None becomes "not known"."""
    if value is None:
        return "not known"
    for least, unit, factor in ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "us", 1e6)):
        if abs(value) >= least:
            return f"{value * factor:.{digits}g} {unit}"
    return f"{value:g} s"


def format_duration(seconds: float) -> str:
    """Format a duration of ``seconds`` in ms, s, min, h or d."""
    if not math.isfinite(seconds):
        return "an unknown time"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    days, hours = divmod(seconds / 3600, 24)
    return f"{int(days)} d {int(hours)} h" if days else f"{hours:.1f} h"


def format_time(seconds: float) -> str:
    """Format ``seconds`` since 1970 (Unix time) as date and time in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "an impossible time"


def format_joules(value: float | None) -> str:
    """Format the energy ``value`` (joules) with a unit. None and non-finite values become "not measured"."""
    if value is None or not math.isfinite(value):
        return "not measured"
    for limit, unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ")):
        if abs(value) >= limit:
            return f"{value / limit:.4g} {unit}"
    return f"{value:.3g} J"


def short_number(value: float) -> str:
    """Format the number ``value`` in few characters: 950, 12,000, 1.5 M, 0.02."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.4g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


MOST_GROUPS: Final = 6  # distinct texts that a report shows; the nodes with other texts are counted

_NUMBERED: Final = re.compile(r"(.*?)([0-9]+)", re.DOTALL)


def format_ranges(numbers: Sequence[int], separator: str = ",") -> str:
    """Format ascending ``numbers`` as ranges joined by ``separator``: (0, 1, 2, 5) becomes "0-2,5"."""
    return separator.join(_span(first, last) for first, last in _runs(numbers))


def parse_ranges(text: str) -> tuple[int, ...]:
    """Return the integers in ``text``, a list of ranges such as "0-2,5". Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def fold_names(names: Sequence[str]) -> str:
    """Fold host names: n1, n2, n4 become n[1-2,4], and n01, n02 become n[01-02]. Names without numbers stay."""
    plain: list[str] = []
    numbered: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        match = _NUMBERED.fullmatch(name)
        if match is None:
            plain.append(name)
        else:
            numbered.setdefault(match[1], []).append(match[2])
    return ",".join([*(part for prefix in numbered for part in _folded(prefix, numbered[prefix])), *plain])


def _folded(prefix: str, digits: list[str]) -> list[str]:
    padded = any(suffix.startswith("0") for suffix in digits if len(suffix) > 1)
    widths: dict[int, list[int]] = {}
    for suffix in digits:
        widths.setdefault(len(suffix) if padded else 0, []).append(int(suffix))
    texts = [
        ",".join(_span(first, last, width) for first, last in _runs(sorted(numbers)))
        for width, numbers in sorted(widths.items())
    ]
    return [f"{prefix}{text}" if text.isdigit() else f"{prefix}[{text}]" for text in texts]


def group_texts(labels: Sequence[str], texts: Sequence[str]) -> str:
    """Join the ``texts`` of hosts ``labels`` as "n[1-2]: 4 GPUs; n3: 2 GPUs", or return the text if all are equal."""
    groups: dict[str, list[str]] = {}
    for label, text in zip(labels, texts, strict=True):
        groups.setdefault(text, []).append(label)
    if len(groups) == 1:
        return texts[0]
    groups.pop("", None)
    # Empty texts are left out. Hosts beyond the `MOST_GROUPS` most frequent texts are only counted.
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    shown = [f"{fold_names(names)}: {text}" for text, names in ordered[:MOST_GROUPS]]
    left = sum(len(names) for _, names in ordered[MOST_GROUPS:])
    return "; ".join([*shown, *([f"and {left} more, each otherwise"] if left else [])])


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _span(first: int, last: int, width: int = 0) -> str:
    return f"{first:0{width}}" if first == last else f"{first:0{width}}-{last:0{width}}"
