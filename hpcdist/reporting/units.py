"""Parsing and formatting of byte sizes and counts: 4096, 16K, 1M, 2G; 1 rank, 2 ranks; 1.5 GiB."""

import re
from typing import Final

UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LARGEST_BYTES: Final = 1 << 40
_BYTES: Final = re.compile(r"([0-9]{1,13})([KMG]?)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the number of bytes that ``text`` means; the unit in either case (local). Raises ValueError."""
    match = _BYTES.fullmatch(text)
    nbytes = int(match[1]) * UNITS[match[2].upper()] if match else 0
    if not 0 < nbytes < LARGEST_BYTES:
        raise ValueError(f"{text!r} is no number of bytes such as 4096, 16K or 1M")
    return nbytes


def counted(number: int, what: str) -> str:
    """Return ``number`` with the noun ``what``, in the plural but for 1: "1 rank", "2 ranks"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def format_bytes(nbytes: int) -> str:
    """Return ``nbytes`` as text in the largest binary unit that it reaches (local)."""
    for name, unit in (("GiB", UNITS["G"]), ("MiB", UNITS["M"]), ("KiB", UNITS["K"])):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} bytes"
