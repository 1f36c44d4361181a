"""Move elements between arrays: within a rank, and between ranks in messages of bounded size.

Each pair of ranks has several messages in flight. Long runs are sent and received in place; short runs are packed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.filestore import FileSlice
from hpcdist.arrays.gpu import staging
from hpcdist.arrays.ranges import Range, cut
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.failure.family import PerCommunicator
from hpcdist.comm.transport import Request

TAG: Final = 7101  # of the messages of the streams
WINDOW_BYTES: Final = 16 << 20  # in flight per stream
TOTAL_WINDOW_BYTES: Final = 128 << 20  # in flight in all streams of a rank, but at least
MIN_MESSAGE_BYTES: Final = 64 << 10  # so much per stream
MESSAGE_PART: Final = 4  # messages per window: one is packed while another is in flight
LONG_BYTES: Final = 64 << 10  # runs of at least this mean length are not packed (empirical)
SHORT: Final = 64  # elements: runs with a smaller mean length are gathered by an index array (empirical)


# A request, its bytes, and the function to call on completion.
_PendingMessage = tuple[Request, int, Callable[[], None]]


@dataclass(frozen=True)
class ElementRuns:
    """Runs of elements of the 1-D ``array``: for each i, ``size[i]`` elements from index ``start[i]``, ascending."""

    array: Any  # on the host or a GPU, or a `FileSlice`
    start: np.ndarray
    size: np.ndarray

    @property
    def count(self) -> int:
        """Total number of elements in all runs."""
        return int(self.size.sum())

    @property
    def is_one(self) -> bool:
        """True if the elements of all runs are one contiguous block of memory."""
        return self.size.size == 1 and not isinstance(self.array, FileSlice)

    def part(self, where: Range) -> "ElementRuns":
        """Return elements ``where.start`` to ``where.stop - 1`` of the joined runs. ``where`` must not be empty."""
        ends = np.cumsum(self.size)
        first = int(np.searchsorted(ends, where.start, "right"))
        last = int(np.searchsorted(ends, where.stop, "left")) + 1
        start, size = self.start[first:last].copy(), self.size[first:last].copy()
        # Cut off what the first run has before ``where``, and the last run after it; they may be the same run.
        after = int(ends[last - 1]) - where.stop
        before = where.start - int(ends[first] - self.size[first])
        start[0] += before
        size[0] -= before
        size[-1] -= after
        return ElementRuns(self.array, start, size)

    def memory(self) -> Any:
        """Return a byte view of the only run. Requires `is_one`."""
        start = int(self.start[0])
        return self.array[start : start + int(self.size[0])].view(np.uint8)

    def gather(self, out: np.ndarray) -> None:
        """Copy the elements of all runs to the contiguous array ``out``."""
        if isinstance(self.array, np.ndarray):
            _gather(self.array, self.start, self.size, out)
            return
        done = 0
        for stretches, hull in self._hulls(out.size):
            block = np.empty(hull.size, out.dtype)
            _read(self.array, hull, block)
            count = int(self.size[stretches].sum())
            _gather(block, self.start[stretches] - hull.start, self.size[stretches], out[done : done + count])
            done += count

    def scatter(self, values: np.ndarray) -> None:
        """Copy the contiguous array ``values`` to the elements of all runs."""
        if isinstance(self.array, np.ndarray):
            _scatter(self.array, self.start, self.size, values)
            return
        done = 0
        for stretches, hull in self._hulls(values.size):
            count = int(self.size[stretches].sum())
            block = values[done : done + count]
            if count < hull.size:
                block = np.empty(hull.size, values.dtype)
                _read(self.array, hull, block)
                part = values[done : done + count]
                _scatter(block, self.start[stretches] - hull.start, self.size[stretches], part)
            _write(self.array, hull, block)
            done += count

    def _hulls(self, longest: int) -> Iterator[tuple[slice, Range]]:
        # Yields (slice of run indices, range from the first to the last run): at most ``longest`` elements, or a single
        # run.
        ends, first = self.start + self.size, 0
        while first < ends.size:
            last = max(first + 1, int(np.searchsorted(ends, self.start[first] + longest, "right")))
            yield slice(first, last), Range(int(self.start[first]), int(ends[last - 1]))
            first = last


def _gather(array: np.ndarray, start: np.ndarray, size: np.ndarray, out: np.ndarray) -> None:
    if out.size < SHORT * start.size:
        out[...] = array[_index(start, size)]
        return
    done = 0
    for begin, count in zip(start.tolist(), size.tolist(), strict=True):
        out[done : done + count] = array[begin : begin + count]
        done += count


def _scatter(array: np.ndarray, start: np.ndarray, size: np.ndarray, values: np.ndarray) -> None:
    if values.size < SHORT * start.size:
        array[_index(start, size)] = values
        return
    done = 0
    for begin, count in zip(start.tolist(), size.tolist(), strict=True):
        array[begin : begin + count] = values[done : done + count]
        done += count


def _index(start: np.ndarray, size: np.ndarray) -> np.ndarray:
    # Position in the sequence, minus the position of the first element of its run, plus the start of the run.
    return np.arange(size.sum()) + np.repeat(start - (np.cumsum(size) - size), size)


def _read(array: Any, where: Range, out: np.ndarray) -> None:
    if isinstance(array, FileSlice):
        array.read(where, out)
    else:
        staging.to_host_in_blocks(array[where.slice], lambda part, block: np.copyto(out[part.slice], block))


def _write(array: Any, where: Range, values: np.ndarray) -> None:
    if isinstance(array, FileSlice):
        array.write(where, values)
    else:
        staging.to_device_in_blocks(array[where.slice], lambda part, block: np.copyto(block, values[part.slice]))


def _messages(lines: Sequence[ElementRuns], longest: int) -> Iterator[list[tuple[int, Range]]]:
    # A message is a list of (i, range of elements of ``lines[i]``), at most ``longest`` bytes in total.
    # Sender and receiver must compute the same messages.
    message: list[tuple[int, Range]] = []
    room = longest
    for number, line in enumerate(lines):
        done, count, itemsize = 0, line.count, line.array.dtype.itemsize
        if count * itemsize >= LONG_BYTES * line.size.size:
            for size in line.size.tolist():
                yield from ([(number, part)] for part in cut(Range(done, done + size), longest // itemsize))
                done += size
        while done < count:
            if room < itemsize:
                yield message
                message, room = [], longest
            fits = min(count - done, room // itemsize)
            message.append((number, Range(done, done + fits)))
            done, room = done + fits, room - fits * itemsize
    if message:
        yield message


def _packed(lines: Sequence[ElementRuns]) -> tuple[np.ndarray, list[np.ndarray]]:
    views, start = [], 0
    memory = np.empty(sum(line.count * line.array.dtype.itemsize for line in lines), np.uint8)
    for line in lines:
        nbytes = line.count * line.array.dtype.itemsize
        views.append(memory[start : start + nbytes].view(line.array.dtype))
        start += nbytes
    return memory, views


def _sending(comm: Communicator, peer: int, lines: Sequence[ElementRuns], longest: int) -> Iterator[_PendingMessage]:
    for message in _messages(lines, longest):
        parts = [lines[number].part(where) for number, where in message]
        memory, views = (parts[0].memory(), []) if len(parts) == 1 and parts[0].is_one else _packed(parts)
        for part, view in zip(parts, views, strict=False):
            part.gather(view)
        yield comm.isend(memory, peer, TAG), memory.nbytes, lambda: None


def _receiving(comm: Communicator, peer: int, lines: Sequence[ElementRuns], longest: int) -> Iterator[_PendingMessage]:
    for message in _messages(lines, longest):
        parts = [lines[number].part(where) for number, where in message]
        memory, views = (parts[0].memory(), []) if len(parts) == 1 and parts[0].is_one else _packed(parts)
        yield comm.irecv(memory, peer, TAG), memory.nbytes, partial(_scattered, parts, views)


def _scattered(parts: Sequence[ElementRuns], views: Sequence[np.ndarray]) -> None:
    for part, view in zip(parts, views, strict=False):  # no view if the part was received in place
        part.scatter(view)


class _Stream:
    # At most about ``window`` bytes are in flight.
    def __init__(self, messages: Iterator[_PendingMessage], window: int) -> None:
        self._messages, self._window, self._nbytes = messages, window, 0
        self.under_way: deque[_PendingMessage] = deque()
        self._fill()

    def _fill(self) -> None:
        while self._nbytes < self._window and (message := next(self._messages, None)) is not None:
            self._nbytes += message[1]
            self.under_way.append(message)

    def go_on(self) -> None:
        _, nbytes, finish = self.under_way.popleft()
        finish()
        self._nbytes -= nbytes
        self._fill()


# By message tag. If a rank dies, MPI may still write into receive buffers, so the communicator keeps them alive.
_RECEIVING: Final = PerCommunicator[int, list[_Stream]]()


def exchange(
    comm: Communicator, outgoing: Sequence[Sequence[ElementRuns]], incoming: Sequence[Sequence[ElementRuns]]
) -> int:
    """Exchange elements between all ranks. Return the number of bytes received. Collective over ``comm``.

    ``outgoing[r]``: elements to send to rank r. ``incoming[r]``: elements to overwrite with data from rank r, in the
    order in which rank r sends the data.
    """
    window = min(WINDOW_BYTES, max(MIN_MESSAGE_BYTES, TOTAL_WINDOW_BYTES // comm.size))
    longest = window // MESSAGE_PART
    streams = [_Stream(_receiving(comm, peer, lines, longest), window) for peer, lines in enumerate(incoming)]
    kept = comm.caches[_RECEIVING]
    kept[TAG] = streams
    streams += [_Stream(_sending(comm, peer, lines, longest), window) for peer, lines in enumerate(outgoing)]
    while active := [stream for stream in streams if stream.under_way]:
        active[comm.wait_any([stream.under_way[0][0] for stream in active])].go_on()
    kept.clear()
    return sum(line.count * line.array.dtype.itemsize for lines in incoming for line in lines)


def copy(source: Any, target: Any, at: np.ndarray, to: np.ndarray, size: np.ndarray) -> None:
    """Copy ``source[at[i] : at[i] + size[i]]`` to ``target[to[i] : to[i] + size[i]]`` for all i. Local."""
    count = int(size.sum())
    memory = not isinstance(source, FileSlice) and not isinstance(target, FileSlice)
    if memory and backend.is_device(source) == backend.is_device(target) and count >= SHORT * size.size:
        for begin, target_start, elements in zip(at.tolist(), to.tolist(), size.tolist(), strict=True):
            target[target_start : target_start + elements] = source[begin : begin + elements]
        return
    before, after = ElementRuns(source, at, size), ElementRuns(target, to, size)
    for where in cut(Range(0, count), WINDOW_BYTES // target.dtype.itemsize):
        values = np.empty(where.size, target.dtype)
        before.part(where).gather(values)
        after.part(where).scatter(values)
