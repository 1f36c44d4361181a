"""Checks before a collective: of the local arguments, and in checked mode of the calls of all ranks.

In checked mode (``communication.checked``, or HPCDIST_CHECK_COLLECTIVES=1) ranks compare their calls before each
collective, because different calls hang or give wrong numbers. For p ranks this costs:

    one native all-gather of 1024 p bytes per call, and per collective of the communicator that the algorithm uses
    another of 16 p bytes per rank for an all-to-all, whose parts differ by rank
"""

import contextlib
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from threading import get_ident
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import FLOATS, INTEGERS, is_16bit_float, name_of
from hpcdist.arrays.ranges import Range
from hpcdist.comm.transport import Request, attributed, call_site_outside
from hpcdist.errors import BufferHandoverError, CommunicationError, HpcdistError, UsageError
from hpcdist.reporting.units import format_ranges

REDUCTIONS: Final = ("sum", "max", "min")
_KNOWN_TO_MPI: Final = frozenset((*INTEGERS.values(), FLOATS["float32"], FLOATS["float64"]))


def is_plain(buffer: Array) -> bool:
    """Return True if ``buffer`` is a 1-D contiguous writable numpy array of a dtype that MPI supports. Local."""
    return type(buffer) is np.ndarray and buffer.ndim == 1 and buffer.flags.carray and buffer.dtype in _KNOWN_TO_MPI


def check_tiling(buffer: Array, ranges: Sequence[Range], ranks: int) -> None:
    """Raise CommunicationError unless ``ranges`` has ``ranks`` ranges that cover ``buffer`` in order without gaps."""
    ends = [0, *(part.stop for part in ranges)]
    starts = [*(part.start for part in ranges), buffer.size]
    if len(ranges) != ranks or ends != starts:
        raise CommunicationError(
            f"the {ranks} ranks' ranges must cover the buffer of {buffer.size} elements in rank order without gaps, "
            f"got {[(part.start, part.stop) for part in ranges]}"
        )


def check_reduction(buffer: Array, op: str) -> None:
    """Raise UsageError for an unknown ``op``, or BufferHandoverError for 16-bit floats. Local."""
    if op not in REDUCTIONS:
        raise UsageError(f"reduction {op!r} is unknown; choose one of {', '.join(REDUCTIONS)}")
    if is_16bit_float(np.dtype(buffer.dtype)):
        raise BufferHandoverError(
            f"the MPI library would round {name_of(buffer.dtype)} values at every partial sum; "
            "use hpcdist.collectives.allreduce, which sums in float32 and rounds once"
        )


RECORD_BYTES: Final = 1024
NATIVE_ALGORITHM: Final = "communicator's"
NO_BUFFER: Final = np.empty(0, np.uint8)  # the buffer of a barrier
_FIELD_CHARACTERS: Final = 80  # at most, per field (7 fields); the rest of the record holds the call site
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INTERNAL: Final = (*(os.path.join(_PACKAGE, name) + os.sep for name in ("collectives", "comm")), contextlib.__file__)


class ComparableCommunicator(Protocol):
    """Interface that `compare_calls` needs of a communicator."""

    name: str
    rank: int
    size: int
    checked: bool
    is_comparing: bool

    def all_gather(self, buffer: Array, ranges: Sequence[Range]) -> None: ...
    def iallreduce(self, buffer: Array, op: str = "sum") -> Request: ...


Progress: TypeAlias = Callable[[Request], None]  # progresses other operations while the request is in flight


@dataclass(frozen=True)
class CollectiveCall:
    """Operation and arguments of a rank's collective call, as texts, to be compared with the other ranks' calls."""

    operation: str
    algorithm: str
    dtype: str
    count: str  # number of elements
    reduction: str = ""
    extra: str = ""  # further arguments to compare
    refused: str = ""  # the reason why this rank refuses the call, or ""

    def __str__(self) -> str:
        if self.refused:
            return f"{self.algorithm} {self.operation} refused: {self.refused}"
        reduction = f" ({self.reduction})" if self.reduction else ""
        extra = f", {self.extra}" if self.extra else ""
        return f"{self.algorithm} {self.operation}{reduction} of {self.count} {self.dtype}{extra}"


def describe_call(
    operation: str, algorithm: str, buffer: Array, reduction: str = "", extra: str = ""
) -> CollectiveCall:
    """Return a `CollectiveCall` that describes a call on ``buffer``, to be compared between ranks. Local.

    ``reduction``: "sum", "max", "min" or "". ``extra``: text of further arguments to compare.
    """
    count, dtype = getattr(buffer, "size", "?"), getattr(buffer, "dtype", None)
    name = type(buffer).__name__ if dtype is None else name_of(dtype)
    return CollectiveCall(operation, algorithm, name, str(count), reduction, extra)


def compare_native(
    comm: ComparableCommunicator, operation: str, buffer: Array, reduction: str = "", extra: str = ""
) -> None:
    """Raise CommunicationError on all ranks if the ranks' MPI collectives or arguments differ. Collective.

    ``operation``: name of the MPI collective. ``extra``: text of further arguments to compare.
    """
    if comm.size > 1 and not comm.is_comparing:
        compare_calls(comm, describe_call(operation, NATIVE_ALGORITHM, buffer, reduction, extra))


def compare_calls(comm: ComparableCommunicator, call: CollectiveCall, progress: Progress | None = None) -> None:
    """Raise CommunicationError on all ranks if ``call`` differs between the ranks. Collective over ``comm``.

    ``progress``: function to call while waiting. It must progress this rank's operations in flight, because other ranks
    may wait for these operations.
    """
    everybody = _exchange_calls(comm, call, progress)
    if any(other != everybody[0][0] for other, _ in everybody):
        raise CommunicationError(_difference(comm.name, everybody))


def announce_refusal(
    comm: ComparableCommunicator, call: CollectiveCall, error: HpcdistError, progress: Progress | None = None
) -> None:
    """Announce that this rank raises ``error`` instead of making ``call``. Then `compare_calls` fails on other ranks.

    ``progress``: function to call while waiting, as in `compare_calls`.
    """
    if comm.checked and comm.size > 1:
        _exchange_calls(
            comm, CollectiveCall(call.operation, call.algorithm, call.dtype, call.count, refused=str(error)), progress
        )


def with_comparison(function: Callable[..., None], algorithm: str) -> Callable[..., None]:
    """Wrap ``function``, the allreduce ``algorithm``: a call first checks that all ranks make the same call. Local."""

    def compare_then_run(comm: ComparableCommunicator, buffer: Array, op: str = "sum", *, scale: float = 1.0) -> None:
        times = "" if scale == 1.0 else f"times {float(scale)!r}"
        compare_calls(comm, describe_call("allreduce", algorithm, buffer, op, times))
        if scale == 1.0:
            function(comm, buffer, op)
        else:
            function(comm, buffer, op, scale=scale)

    return compare_then_run


def ranges_fingerprint(shares: Sequence[Range]) -> str:
    """Return a checksum of the element ranges ``shares`` as text, to compare the ranges between ranks. Local."""
    return f"shares {zlib.crc32(repr([(part.start, part.stop) for part in shares]).encode()):08x}"


def call_site() -> str:
    """Return "file:line" of the code outside hpcdist/collectives and hpcdist/comm that called the collective. Local."""
    site = attributed.get(get_ident()) or call_site_outside(sys._getframe(1), _INTERNAL)
    return "an unknown place" if site is None else f"{site.code.co_filename}:{site.line}"


def _exchange_calls(
    comm: ComparableCommunicator, call: CollectiveCall, progress: Progress | None = None
) -> list[tuple[CollectiveCall, str]]:
    fields = [" ".join(field.split())[:_FIELD_CHARACTERS] for field in astuple(call)]
    text = "\t".join(fields).encode("ascii", "replace") + b"\n"
    site = call_site().encode("ascii", "replace")[len(text) - RECORD_BYTES :]  # keeps the end of a long path
    mine = (text + site).ljust(RECORD_BYTES, b"\0")
    records: Any = np.empty(RECORD_BYTES * comm.size, np.uint8)
    ranges = [Range(RECORD_BYTES * rank, RECORD_BYTES * (rank + 1)) for rank in range(comm.size)]
    records[ranges[comm.rank].slice] = np.frombuffer(mine, np.uint8)
    if progress is None:
        comm.is_comparing = True  # so that this gather is not compared itself
        try:
            comm.all_gather(records, ranges)
        finally:
            comm.is_comparing = False
    else:
        records[: ranges[comm.rank].start] = records[ranges[comm.rank].stop :] = 0
        request = comm.iallreduce(records.view(np.int64), "sum")  # a gather, because all other parts are zeros
        while not request.test():
            progress(request)
    return [_parse_call(records[part.slice].tobytes()) for part in ranges]


def _parse_call(record: bytes) -> tuple[CollectiveCall, str]:
    text, _, place = record.rstrip(b"\0").decode("ascii").partition("\n")
    return CollectiveCall(*text.split("\t")), place


def _difference(name: str, everybody: Sequence[tuple[CollectiveCall, str]]) -> str:
    groups: dict[tuple[CollectiveCall, str], list[int]] = {}
    for rank, call_and_site in enumerate(everybody):
        groups.setdefault(call_and_site, []).append(rank)
    lines = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranges(ranks, ', ')}: {call}, at {place}"
        for (call, place), ranks in groups.items()
    ]
    return (
        f"the ranks of {name} made different collective calls: {'; '.join(lines)}. Every rank must make the same "
        "calls in the same order, on buffers of equal size and dtype"
    )
