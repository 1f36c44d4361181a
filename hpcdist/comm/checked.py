"""The checked mode: before each collective the ranks compare what they are about to do, and all fail where it differs.

Ranks that bring different sizes, dtypes or algorithms to one collective hang, or go on with wrong numbers. In this mode
(``communication.checked``, or HPCDIST_CHECK_COLLECTIVES=1) each call first sends a record of fixed size to all:

    one native all-gather of 1024 p bytes for each call (where others are polled meanwhile, an allreduce of them),
        and for each collective of the communicator that the algorithm uses
    another of 16 p bytes a rank for an all-to-all, whose parts differ by rank

A rank whose own call is refused tells the others, who would wait for it otherwise. Where a call stands in the source is
shown, not compared: ranks may come to the same call by different lines.
"""

import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from types import FrameType
from typing import Any, Final, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import name_of
from hpcdist.arrays.ranges import Range
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.errors import CommunicationError, HpcdistError

RECORD_BYTES: Final = 1024
OWN: Final = "communicator's"
NOTHING: Final = np.empty(0, np.uint8)  # the buffer of a barrier
_FIELD: Final = 80  # characters of each of the 7 fields at most; at least what is left is for the place
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSIDE: Final = tuple(os.path.join(_PACKAGE, name) + os.sep for name in ("collectives", "comm"))


Move: TypeAlias = Callable[[Request], None]  # moves other things until they, or the request, got somewhere


@dataclass(frozen=True)
class Call:
    """What a rank is about to do, as far as all must agree on it; ``extra`` is what only some collectives have."""

    operation: str
    algorithm: str
    dtype: str
    count: str
    reduction: str = ""
    extra: str = ""
    refused: str = ""  # why it will not

    def __str__(self) -> str:
        if self.refused:
            return f"{self.algorithm} {self.operation} refused: {self.refused}"
        reduction = f" ({self.reduction})" if self.reduction else ""
        extra = f", {self.extra}" if self.extra else ""
        return f"{self.algorithm} {self.operation}{reduction} of {self.count} {self.dtype}{extra}"


def described(
    operation: str, algorithm: str, buffer: Array, reduction: str = "", extra: str = "", refused: str = ""
) -> Call:
    """Return the call on ``buffer``, which may be anything that a caller has passed (local)."""
    count, dtype = getattr(buffer, "size", "?"), getattr(buffer, "dtype", None)
    name = type(buffer).__name__ if dtype is None else name_of(dtype)
    return Call(operation, algorithm, name, str(count), reduction, extra, refused)


def compare_own(comm: Communicator, operation: str, buffer: Array, reduction: str = "", extra: str = "") -> None:
    """Compare a collective of the communicator itself, by whatever algorithm its transport has. Collective.

    What the algorithms of `hpcdist.collectives` do within theirs is compared as well.
    """
    if comm.size > 1 and not comm.is_comparing:
        compare(comm, described(operation, OWN, buffer, reduction, extra))


def compare(comm: Communicator, call: Call) -> None:
    """Raise CommunicationError on every rank unless all are about to make the same ``call``. Collective."""
    _check_alike(comm, _exchange(comm, call))


def compare_while(comm: Communicator, call: Call, move: Move) -> None:
    """Compare as `compare` does, and let ``move`` move what else is under way until all have come. Collective.

    A rank that still waits for an operation before this one would otherwise never come.
    """
    _check_alike(comm, _exchange(comm, call, move))


def _check_alike(comm: Communicator, everybody: Sequence[tuple[Call, str]]) -> None:
    if any(other != everybody[0][0] for other, _ in everybody):
        raise CommunicationError(_difference(comm.name, everybody))


def refuse(comm: Communicator, call: Call, error: HpcdistError, move: Move | None = None) -> None:
    """Tell the other ranks, in checked mode, that this one raises ``error`` instead of joining in ``call``.

    Collective over ``comm`` there: the others compare their own calls meanwhile, by `compare_while` where there is
    something to ``move``.
    """
    if comm.checked and comm.size > 1:
        _exchange(comm, Call(call.operation, call.algorithm, call.dtype, call.count, refused=str(error)), move)


def watched(function: Callable[..., None], algorithm: str) -> Callable[..., None]:
    """Return the allreduce ``function`` with the comparison before it (local)."""

    def compare_then_run(comm: Communicator, buffer: Array, op: str = "sum", *, scale: float = 1.0) -> None:
        times = "" if scale == 1.0 else f"times {float(scale)!r}"
        compare(comm, described("allreduce", algorithm, buffer, op, times))
        if scale == 1.0:
            function(comm, buffer, op)
        else:
            function(comm, buffer, op, scale=scale)

    return compare_then_run


def fingerprint(shares: Sequence[Range]) -> str:
    """Return a few characters that stand for ``shares``, the same for the same ones (local)."""
    return f"shares {zlib.crc32(repr([(part.start, part.stop) for part in shares]).encode()):08x}"


def call_site() -> str:
    """Return the file and line of the innermost caller outside of collectives/ and comm/ (local)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _exchange(comm: Communicator, call: Call, move: Move | None = None) -> list[tuple[Call, str]]:
    """Return what each rank is about to do, and where, in rank order; ``move`` something while that is waited for."""
    fields = [" ".join(field.split())[:_FIELD] for field in astuple(call)]
    text = "\t".join(fields).encode("ascii", "replace") + b"\n"
    place = call_site().encode("ascii", "replace")[len(text) - RECORD_BYTES :]  # of a long path the end
    mine = (text + place).ljust(RECORD_BYTES, b"\0")
    records: Any = np.empty(RECORD_BYTES * comm.size, np.uint8)
    ranges = [Range(RECORD_BYTES * rank, RECORD_BYTES * (rank + 1)) for rank in range(comm.size)]
    records[ranges[comm.rank].slice] = np.frombuffer(mine, np.uint8)
    if move is None:
        comm.is_comparing = True  # this gather is not to be compared in turn
        try:
            comm.all_gather(records, ranges)
        finally:
            comm.is_comparing = False
    else:
        records[: ranges[comm.rank].start] = records[ranges[comm.rank].stop :] = 0
        request = comm.iallreduce(records.view(np.int64), "sum")  # a gather, for all others bring zeros
        while not request.test():
            move(request)
    return [_parse(records[part.slice].tobytes()) for part in ranges]


def _parse(record: bytes) -> tuple[Call, str]:
    text, _, place = record.rstrip(b"\0").decode("ascii").partition("\n")
    return Call(*text.split("\t")), place


def _difference(name: str, everybody: Sequence[tuple[Call, str]]) -> str:
    """Say who brought what, ranks that brought the same together."""
    groups: dict[tuple[Call, str], list[int]] = {}
    for rank, brought in enumerate(everybody):
        groups.setdefault(brought, []).append(rank)
    lines = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {_list(ranks)}: {call}, at {place}"
        for (call, place), ranks in groups.items()
    ]
    return (
        f"the ranks of {name} came to one collective with different calls: {'; '.join(lines)}. Every rank must make "
        "the same calls in the same order, on buffers of one size and dtype"
    )


def _list(ranks: Sequence[int]) -> str:
    """Write ascending numbers with runs as first-last: 0, 2-5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
