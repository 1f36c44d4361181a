"""Plan of a benchmark of collectives: operations, sizes, and an order that keeps drift out of the comparison.

Sizes and bandwidths are those of nccl-tests (doc/PERFORMANCE.md), so that figures can be compared. With n ranks and S
bytes, S being the whole buffer of one rank in every operation:

    operation       S is                                                            bus bandwidth = S / t times
    allreduce       what a rank contributes, and what it ends with                  2 (n-1) / n
    reduce_scatter  what a rank contributes; it ends with about S / n               (n-1) / n
    all_gather      what a rank ends with; it contributes about S / n               (n-1) / n
    broadcast       what every rank ends with                                       1
    all_to_all      what a rank sends, the part for itself included                 (n-1) / n

S / t is the algorithm bandwidth. Bus bandwidth is what an ideal network would show for every n.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.errors import UsageError
from hpcdist.reporting.units import parse_bytes

OPERATIONS: Final = ("allreduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
ORDINARY: Final = "ordinary"
SHARED: Final = "shared"
COLD: Final = "cold"
HOT: Final = "hot"

_SIZE: Final = r"\d+[KMG]?"
_TOKEN: Final = re.compile(rf"({_SIZE})(?:-({_SIZE})(?:\s*x(\d+))?)?(?:\s*,\s*|\s+|$)", re.IGNORECASE)
RANGE_FACTOR: Final = 2


@dataclass(frozen=True)
class CollectivesCell:
    """One operation on one size and dtype: its contenders take turns."""

    op: str
    dtype: str
    bytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.bytes // dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class CollectivesRequest:
    """What the caller asks for; ``algorithms`` is empty for all that run here, ``iterations`` None for ``seconds``."""

    operations: tuple[str, ...]
    algorithms: tuple[str, ...]
    bytes: tuple[int, ...]
    dtypes: tuple[str, ...]
    buffers: tuple[str, ...]
    seconds: float
    iterations: int | None
    warmup: int
    least: int
    check: bool
    hot: bool
    seed: int


def bus_factor(op: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth of ``op``; 0 on one rank, where nothing travels."""
    if ranks == 1:
        return 0.0
    if op == "broadcast":
        return 1.0
    return (2.0 if op == "allreduce" else 1.0) * (ranks - 1) / ranks


def sizes(texts: Iterable[str]) -> tuple[int, ...]:
    """Return the numbers of bytes in ``texts``, ascending: 4096, 16K, 1M, 4K-64M (each twice the last), 4K-64M x4.

    Several in one text are separated by commas or blanks. Raises UsageError.
    """
    found: set[int] = set()
    for text in texts:
        place = 0
        stripped = text.strip()
        while place < len(stripped) or not stripped:
            match = _TOKEN.match(stripped, place)
            if match is None:
                raise UsageError(
                    f"--bytes {text!r}: expected sizes such as 4096, 16K or 1M, or a range such as 4K-64M x4"
                )
            found |= set(_expanded(text, match))
            place = match.end()
    return tuple(sorted(found))


def _expanded(text: str, match: "re.Match[str]") -> list[int]:
    try:
        first, last = parse_bytes(match[1]), parse_bytes(match[2] or match[1])
    except ValueError as error:
        raise UsageError(f"--bytes {text!r}: {error}") from None
    factor = int(match[3] or RANGE_FACTOR)
    if last < first or factor < 2:
        raise UsageError(f"--bytes {text!r}: a range ascends, by a factor of at least 2")
    expanded = [first]
    while expanded[-1] * factor <= last:
        expanded.append(expanded[-1] * factor)
    return expanded


def choice(what: str, names: Sequence[str], known: Iterable[str], among: str = "") -> tuple[str, ...]:
    """Return ``names`` without doubles. Raises UsageError, which lists the valid ones, for one that is not known.

    ``among`` says of what the valid ones are.
    """
    valid = list(known)
    for name in names:
        if name not in valid:
            raise UsageError(f"{what} {name!r} is unknown{among}; choose from {', '.join(valid)}")
    return tuple(dict.fromkeys(names))


def cells(wanted: CollectivesRequest, ranks: int) -> tuple[list[CollectivesCell], list[str]]:
    """Return the cells in the order in which they are measured, the same on all ranks, and what was rounded (local).

    The parts of an all-to-all are of one size, as in nccl-tests.
    """
    found, notes = [], []
    for name in wanted.dtypes:
        for op in wanted.operations:
            parts = ranks if op == "all_to_all" else 1
            unit = dtype_of(name).itemsize * parts
            for nbytes in wanted.bytes:
                rounded = max(unit, nbytes // unit * unit)
                if rounded != nbytes:
                    what = f"{name} elements" + (f" for each of {ranks} ranks" if parts > 1 else "")
                    notes.append(f"{op}: {nbytes} bytes are no whole number of {what}; {rounded} are measured")
                found.append(CollectivesCell(op, name, rounded))
    distinct = list(dict.fromkeys(found))
    order = np.random.default_rng(wanted.seed).permutation(len(distinct))
    return [distinct[index] for index in order], notes
