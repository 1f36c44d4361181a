"""Run a program with the rank pinned to a core: `mpirun ... python pin.py PROGRAM ...`.

If there are more ranks than cores, neighbouring ranks share a core. Without pinning, a kernel may leave two ranks that
wait for each other on one core for a while; measured times then show its time slice.
"""

import os
import sys
from collections.abc import Mapping
from typing import Final

RANKS: Final = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
PINNED: Final = (sys.executable, __file__, sys.executable)  # prefix of a pinned Python program


def core(cores: list[int], environment: Mapping[str, str]) -> int:
    """Return the core for the rank in ``environment``, or the first core without a launcher."""
    for rank, size in RANKS:
        if rank in environment:
            return cores[int(environment[rank]) * len(cores) // max(int(environment[size]), len(cores))]
    return cores[0]


def main() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core(sorted(os.sched_getaffinity(0)), os.environ)})
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
