"""The memory of this process as the kernel counts it: its proportional set size."""

import math
from pathlib import Path
from typing import Final

ROLLUP: Final = Path("/proc/self/smaps_rollup")
_UNIT_BYTES: Final = 1024  # kB of /proc are KiB


def pss_bytes(rollup: Path = ROLLUP) -> float:
    """Return the proportional set size of this process, NaN where the kernel does not tell (local).

    A page that several processes map counts for each of them by its share, so the sum over the ranks of a node has
    memory that they share once. The interpreter, libraries and compiled kernels are part of it.
    """
    try:
        lines = rollup.read_text().splitlines()
    except OSError:
        return math.nan
    found = [line.split() for line in lines if line.startswith("Pss:")]
    return float(found[0][1]) * _UNIT_BYTES if found else math.nan
