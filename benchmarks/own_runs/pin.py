"""Start of a program on one core that is its rank's: `python pin.py PROGRAM ...`, behind mpirun.

Ranks beyond the cores share them in order, so that those of one host have the same. Where nothing binds ranks, a kernel
may leave two that wait for each other on one core for a while, and what is measured then is its time slice.
"""

import os
import sys
from collections.abc import Mapping
from typing import Final

RANKS: Final = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
PINNED: Final = (sys.executable, __file__, sys.executable)  # what a program in Python is started by


def core(cores: list[int], environment: Mapping[str, str]) -> int:
    """Return the core of the rank that a launcher names in ``environment``; the first one without a launcher."""
    for rank, size in RANKS:
        if rank in environment:
            return cores[int(environment[rank]) * len(cores) // max(int(environment[size]), len(cores))]
    return cores[0]


def main() -> None:
    """Become the program."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core(sorted(os.sched_getaffinity(0)), os.environ)})
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
