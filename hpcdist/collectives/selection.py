"""Which allreduce for which size: a table whose text is itself the name of an algorithm.

    recursive_doubling<=4096,native<=262144,node_shared

reads: recursive doubling up to 4096 bytes, the MPI library's up to 256 KiB, shared memory beyond. A single name is a
table of one row. The text is what checkpoints and summaries keep, and `hpcdist.collectives.allreduce` takes it. The
size of a buffer is the same on all ranks, so all take the same row.
"""

import functools
from bisect import bisect_left
from dataclasses import dataclass

from hpcdist.comm.config import fault_in_table
from hpcdist.errors import UsageError


@dataclass(frozen=True, slots=True)
class Choice:
    """Algorithms by size: ``names[i]`` for buffers up to ``limits[i]`` bytes, ascending, the last name beyond."""

    names: tuple[str, ...]
    limits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.limits) + 1 or list(self.limits) != sorted(set(self.limits)):
            raise UsageError(
                f"a choice of allreduce has limits that ascend and one name more than limits, got {self.names} and "
                f"{self.limits}"
            )

    def at(self, nbytes: int) -> str:
        """Return the algorithm for a buffer of ``nbytes`` bytes (local)."""
        return self.names[bisect_left(self.limits, nbytes)]

    def __str__(self) -> str:
        rows = [f"{name}<={limit}" for name, limit in zip(self.names, self.limits, strict=False)]
        return ",".join([*rows, self.names[-1]])

    @classmethod
    def of(cls, rows: list[tuple[int, str]]) -> "Choice":
        """Return the table in which ``rows`` are (largest size in bytes, name), ascending; the last has no end."""
        kept = [row for row, after in zip(rows, rows[1:], strict=False) if row[1] != after[1]]
        return cls((*(name for _, name in kept), rows[-1][1]), tuple(limit for limit, _ in kept))


@functools.lru_cache(maxsize=64)
def parse(text: "str | Choice") -> Choice:
    """Return the choice that ``text`` stands for, of algorithms that exist (local). Raises UsageError."""
    from hpcdist.collectives import ALLREDUCE, ON_GPUS  # late: they are made of modules beside this one

    known = [*ALLREDUCE, *ON_GPUS]
    fault = fault_in_table(str(text), known)
    if fault:
        raise UsageError(
            f"allreduce algorithm{',' * fault.startswith('row')} {fault}; choose one of {', '.join(known)}, or a table "
            "NAME<=BYTES,...,NAME of them, for example recursive_doubling<=4096,ring"
        )
    return text if isinstance(text, Choice) else _rows(text)


def _rows(text: str) -> Choice:
    rows = [row.partition("<=") for row in text.split(",")]
    return Choice(tuple(name for name, _, _ in rows), tuple(int(limit) for _, _, limit in rows[:-1]))
