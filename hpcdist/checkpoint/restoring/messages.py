"""Move elements from arrays to arrays: within a rank, and between ranks in messages of bounded size.

What one rank sends another is a stream of messages: long runs by themselves, sent and received where they lie, and
short ones packed. Several messages of a stream are under way at a time. Arrays may be of the host, of a GPU, or the
`FileSlice` of a file: short runs of these are packed by reading, and unpacked by reading and writing, blocks that
enclose them.
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
from hpcdist.comm.communicator import Communicator, Request

TAG: Final = 7101  # of the messages of the streams
WINDOW_BYTES: Final = 16 << 20  # of a stream, under way at a time
TOTAL_WINDOW_BYTES: Final = 128 << 20  # of the streams of all ranks together, where that leaves each at least
MIN_MESSAGE_BYTES: Final = 64 << 10  # so much
MESSAGE_PART: Final = 4  # a message is at most this part of a window: one is packed while another travels
LONG_BYTES: Final = 64 << 10  # stretches that are as long on average are not packed (empirical)
SHORT: Final = 64  # elements: stretches that are shorter on average are gathered by an index (empirical)


# A message, its bytes, and what is to be done when it is complete.
_PendingMessage = tuple[Request, int, Callable[[], None]]


@dataclass(frozen=True)
class ElementRuns:
    """Runs of ``array`` from ``start`` (ascending) of ``size`` elements each: together a line of elements."""

    array: Any  # of the host or a GPU, 1-D; or a `FileSlice`
    start: np.ndarray
    size: np.ndarray

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(self.size.sum())

    @property
    def is_one(self) -> bool:
        """Whether it is one stretch of memory."""
        return self.size.size == 1 and not isinstance(self.array, FileSlice)

    def part(self, where: Range) -> "ElementRuns":
        """Return the elements ``where`` of the line, at least one."""
        ends = np.cumsum(self.size)
        first = int(np.searchsorted(ends, where.start, "right"))
        last = int(np.searchsorted(ends, where.stop, "left")) + 1
        start, size = self.start[first:last].copy(), self.size[first:last].copy()
        # The first run loses what lies before ``where``, the last one what lies behind; they may be the same.
        behind = int(ends[last - 1]) - where.stop
        before = where.start - int(ends[first] - self.size[first])
        start[0] += before
        size[0] -= before
        size[-1] -= behind
        return ElementRuns(self.array, start, size)

    def memory(self) -> Any:
        """Return the bytes of what `is_one`: a view."""
        start = int(self.start[0])
        return self.array[start : start + int(self.size[0])].view(np.uint8)

    def gather(self, out: np.ndarray) -> None:
        """Copy the elements into ``out``, of the host, one behind the other."""
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
        """Copy ``values``, of the host, to where the elements are."""
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
        """Yield neighbouring stretches and the range that encloses them, of ``longest`` elements where they allow."""
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
    """Return the index of every element of the runs."""
    # Element number k of the line, minus the number of its run's first element, plus where that run begins.
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
    """Cut a stream into messages of at most ``longest`` bytes: which elements of which lines; both sides alike."""
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
    """Return memory for ``lines`` one behind the other, and the part of each in its dtype."""
    places, start = [], 0
    memory = np.empty(sum(line.count * line.array.dtype.itemsize for line in lines), np.uint8)
    for line in lines:
        nbytes = line.count * line.array.dtype.itemsize
        places.append(memory[start : start + nbytes].view(line.array.dtype))
        start += nbytes
    return memory, places


def _sending(comm: Communicator, peer: int, lines: Sequence[ElementRuns], longest: int) -> Iterator[_PendingMessage]:
    """Yield each message as it is begun, which is when it is asked for."""
    for message in _messages(lines, longest):
        parts = [lines[number].part(where) for number, where in message]
        memory, places = (parts[0].memory(), []) if len(parts) == 1 and parts[0].is_one else _packed(parts)
        for part, place in zip(parts, places, strict=False):
            part.gather(place)
        yield comm.isend(memory, peer, TAG), memory.nbytes, _nothing


def _receiving(comm: Communicator, peer: int, lines: Sequence[ElementRuns], longest: int) -> Iterator[_PendingMessage]:
    """Yield each message as it is begun, with what puts its elements in their places when it is there."""
    for message in _messages(lines, longest):
        parts = [lines[number].part(where) for number, where in message]
        memory, places = (parts[0].memory(), []) if len(parts) == 1 and parts[0].is_one else _packed(parts)
        yield comm.irecv(memory, peer, TAG), memory.nbytes, partial(_scattered, parts, places)


def _nothing() -> None:
    return


def _scattered(parts: Sequence[ElementRuns], places: Sequence[np.ndarray]) -> None:
    for part, place in zip(parts, places, strict=False):  # no place where a part was received where it lies
        part.scatter(place)


class _Stream:
    """Messages in one direction between this rank and another, of which as many are under way as a window holds."""

    def __init__(self, messages: Iterator[_PendingMessage], window: int) -> None:
        self._messages, self._window, self._nbytes = messages, window, 0
        self.under_way: deque[_PendingMessage] = deque()
        self._fill()

    def _fill(self) -> None:
        while self._nbytes < self._window and (begun := next(self._messages, None)) is not None:
            self._nbytes += begun[1]
            self.under_way.append(begun)

    def go_on(self) -> None:
        """Finish the first message under way, which is complete, and begin others."""
        _, nbytes, finish = self.under_way.popleft()
        finish()
        self._nbytes -= nbytes
        self._fill()


def exchange(
    comm: Communicator, outgoing: Sequence[Sequence[ElementRuns]], incoming: Sequence[Sequence[ElementRuns]]
) -> int:
    """Send each rank its ``outgoing`` runs, and receive the ``incoming`` ones from it; return the bytes received.

    What one rank sends another receives, the same elements in the same order. Each rank has messages of all its streams
    under way and waits for whichever is complete next, so no ranks wait for each other in a circle. Collective.
    """
    window = min(WINDOW_BYTES, max(MIN_MESSAGE_BYTES, TOTAL_WINDOW_BYTES // comm.size))
    longest = window // MESSAGE_PART
    streams = [_Stream(_receiving(comm, peer, lines, longest), window) for peer, lines in enumerate(incoming)]
    # Should any of this raise (a rank has died), MPI may still write into the buffers of receives: they are kept alive
    # by the communicator.
    comm.settled["redistribute.streams"] = streams
    streams += [_Stream(_sending(comm, peer, lines, longest), window) for peer, lines in enumerate(outgoing)]
    while active := [stream for stream in streams if stream.under_way]:
        active[comm.wait_any([stream.under_way[0][0] for stream in active])].go_on()
    del comm.settled["redistribute.streams"]
    return sum(line.count * line.array.dtype.itemsize for lines in incoming for line in lines)


def copy(source: Any, target: Any, at: np.ndarray, to: np.ndarray, size: np.ndarray) -> None:
    """Copy stretches from ``at`` in ``source`` to ``to`` in ``target``, both of this rank (local).

    In blocks by way of the host where the arrays are not of one side, or the stretches short.
    """
    count = int(size.sum())
    memory = not isinstance(source, FileSlice) and not isinstance(target, FileSlice)
    if memory and backend.is_device(source) == backend.is_device(target) and count >= SHORT * size.size:
        for begin, place, elements in zip(at.tolist(), to.tolist(), size.tolist(), strict=True):
            target[place : place + elements] = source[begin : begin + elements]
        return
    before, after = ElementRuns(source, at, size), ElementRuns(target, to, size)
    for where in cut(Range(0, count), WINDOW_BYTES // target.dtype.itemsize):
        values = np.empty(where.size, target.dtype)
        before.part(where).gather(values)
        after.part(where).scatter(values)
