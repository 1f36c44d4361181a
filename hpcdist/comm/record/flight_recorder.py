"""Flight recorder: the last operations of a rank in a memory-mapped file that survives SIGKILL.

    header | notes | texts | ring of records      all little-endian; clock values are monotonic nanoseconds

The texts are call sites, communicators with their ranks, operations and dtypes.
"""

import contextlib
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count as counter
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Final

from hpcdist.comm.launch.environment import process_state, start_ticks
from hpcdist.comm.transport import EventSink, attributed, members, parse_runs
from hpcdist.errors import StorageError
from hpcdist.reporting import regular


def create_mapped(path: Path, size: int, what: str, cure: str) -> mmap.mmap:
    """Create and map file ``path`` of ``size`` bytes. ``what``, ``cure``: subject and advice of the StorageError."""
    try:
        path.unlink(missing_ok=True)  # truncating would raise SIGBUS in a process that still maps the old file
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"{what} cannot reserve {size} bytes for file {path}: {error}; {cure}") from error


MAGIC: Final = b"HPCDREC\0"
MOST_BYTES: Final = 256 << 20  # largest file that is read; usual files have one or two million bytes
VERSION: Final = 2  # 1 had no ranks of communicators
# magic, version, rank, world, pid, capacity, start of the process in clock ticks, wall clock, monotonic clock, host
HEADER: Final = struct.Struct("<8sIIIIIxxxxQqq64s")
BEAT: Final = 16  # words of 8 bytes from the start of the file: time of the last heartbeat,
NEXT_BEAT: Final = 17  # interval to the next,
TEXT_USED: Final = 18  # and the bytes used in the table of texts
KINDS: Final = ("raised", "deadline", "finished", "frozen", "stage")
FINAL: Final = ("raised", "deadline", "finished")
MOST_RANKS: Final = 1 << 20
NOTES: Final = 256
NOTE: Final = struct.Struct("<qI")  # time, bytes of the text that follows
NOTE_BYTES: Final = 1024
TEXTS: Final = NOTES + len(KINDS) * NOTE_BYTES
TEXT: Final = struct.Struct("<BH")  # kind, bytes of the text that follows
SITE: Final = 1
LABEL: Final = 2
GROUP: Final = 3
RING: Final = TEXTS + 256 * 1024
# index from 1, start, end (0: running), sequence on the communicator, count, sent bytes, site, label, peer, tag
RECORD: Final = struct.Struct("<QqqQqqIIii")
END_OFFSET: Final = 16
# Point-to-point operations. All other operations are made by every member, so they can be aligned between ranks.
POINT_TO_POINT: Final = frozenset(
    {"send", "recv", "sendrecv", "isend", "irecv", "probe", "put", "get", "flush", "load"}
)

assert RECORD.size == 64 and RING % 64 == 0 and HEADER.size <= BEAT * 8


def size_bytes(capacity: int) -> int:
    """Return the size in bytes of a flight recorder file that has room for ``capacity`` operations."""
    return RING + capacity * RECORD.size


@dataclass(frozen=True, slots=True)
class CommunicatorCall:
    """A call on a communicator: operation, dtype, size, peer, tag and call site."""

    comm: str
    op: str
    dtype: str
    count: int
    sent_bytes: int
    peer: int  # the other rank, or -1
    tag: int
    sequence: int
    site: str  # line of user code that contains the call

    @property
    def collective(self) -> bool:
        """True if all ranks of the communicator execute this operation, in the same order."""
        return self.op not in POINT_TO_POINT

    def __str__(self) -> str:
        what = f"{self.op} #{self.sequence} on {self.comm}"
        if self.count:
            what += f", {self.count} x {self.dtype}"
        if self.peer >= 0:
            what += f", {'root' if self.collective else 'peer'} {self.peer}"
        return f"{what}, at {self.site}"


@dataclass(frozen=True, slots=True)
class RecordedEvent(CommunicatorCall):
    """A recorded call on a communicator, with its start and end time in wall-clock nanoseconds."""

    index: int
    started_ns: int
    ended_ns: int | None  # None: the call has not ended


@dataclass(frozen=True)
class RankNote:
    """A note about a rank's state, such as its end: its text, and its time in wall-clock nanoseconds."""

    time_ns: int
    text: str


@dataclass(frozen=True)
class RankRecord:
    """Content of the flight recorder file of one rank. Events are sorted by start time."""

    path: Path
    rank: int
    world: int
    pid: int
    host: str
    start_ticks: int
    capacity: int
    started_ns: int
    beat_ns: int
    next_beat_ns: int
    notes: dict[str, RankNote]
    events: tuple[RecordedEvent, ...]
    clock_ns: int = 0  # wall clock minus monotonic clock: subtract it to get times of the node's monotonic clock
    # Communicator -> its ranks, as ranks of the job, in the communicator's order. Unknown communicators are missing.
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def open_events(self) -> tuple[RecordedEvent, ...]:
        """Operations in flight, sorted by start time. An operation precedes the operations that it calls."""
        return tuple(event for event in self.events if event.ended_ns is None)

    @property
    def last_sign_ns(self) -> int:
        """Wall-clock time of the rank's last heartbeat, event or note, in nanoseconds."""
        ends = [event.ended_ns or event.started_ns for event in self.events]
        return max([self.started_ns, self.beat_ns, *ends, *(note.time_ns for note in self.notes.values())])

    def event(self, token: int) -> RecordedEvent | None:
        """Return the operation in flight with the number ``token`` from `Recorder.begin`, or None if it has ended."""
        return next((event for event in self.open_events if event.index % self.capacity == token), None)

    def process_state(self) -> str | None:
        """Return the kernel's state letter of the rank's process, "" if it has ended, or None if unknown."""
        if self.host != os.uname().nodename[:64] or not self.start_ticks:
            return None
        try:
            state, ticks = process_state(self.pid)
        except OSError:
            return None
        return state if ticks == self.start_ticks else ""


def read(path: Path) -> RankRecord:
    """Return the content of one rank's flight recorder file. Raises StorageError if the file is invalid."""
    return parse(read_bytes(path, "flight recorder"), path)


def read_bytes(path: Path, kind: str) -> bytes:
    """Return the content of the recorder file ``path``. ``kind``: type of the file, for the StorageError."""
    try:
        return regular.read(path, MOST_BYTES)
    except OSError as error:
        raise StorageError(f"the {kind} file {path} cannot be read: {error}; check its permissions") from error


def check_header(path: Path, versions: tuple[int, int], nbytes: int, least_bytes: int, rank: int, world: int) -> None:
    """Raise StorageError if the header of recorder file ``path`` has a wrong version, size, rank or world size.

    ``versions``: (found, supported). ``nbytes``: size of the file. ``least_bytes``: smallest valid size.
    """
    version, supported = versions
    if version != supported or nbytes < least_bytes:
        raise StorageError(
            f"{path} has version {version} and {nbytes} bytes; expected version {supported} and at least {least_bytes} "
            "bytes. Use the hpcdist version that wrote the file, or delete the file"
        )
    if not rank < world <= MOST_RANKS:
        raise StorageError(
            f"{path} is damaged: the header has rank {rank} and {world} ranks, expected rank < ranks <= {MOST_RANKS}; "
            "delete the file"
        )


def parse(data: bytes, path: Path) -> RankRecord:
    """Parse ``data``, the content of the flight recorder file ``path``. Raises StorageError for invalid content."""
    if len(data) < RING or data[: len(MAGIC)] != MAGIC:
        raise StorageError(f"{path} is not a file of the flight recorder (wrong signature or too short); delete {path}")
    _, version, rank, world, pid, capacity, ticks, wall, monotonic, host = HEADER.unpack_from(data)
    check_header(path, (VERSION if version == 1 else version, VERSION), len(data), size_bytes(capacity), rank, world)
    offset = wall - monotonic
    beat, next_beat, used = struct.unpack_from("<qqq", data, BEAT * 8)
    try:
        texts = _texts(data, used)
        notes, events = _notes(data, offset), _events(data, capacity, offset, texts)
        groups = dict(_group(text) for text in texts[GROUP])
        name = host.rstrip(b"\0").decode()
    except (ValueError, KeyError, struct.error) as error:
        raise StorageError(f"{path} is damaged: {error}; delete the file") from error
    return RankRecord(
        path, rank, world, pid, name, ticks, capacity, wall, beat + offset, next_beat, notes, events, offset, groups
    )


def _notes(data: bytes, offset: int) -> dict[str, RankNote]:
    notes = {}
    for number, kind in enumerate(KINDS):
        start = NOTES + number * NOTE_BYTES
        time_ns, length = NOTE.unpack_from(data, start)
        if time_ns:
            text = data[start + NOTE.size : start + NOTE.size + length].decode(errors="replace")
            notes[kind] = RankNote(time_ns + offset, text)
    return notes


def _texts(data: bytes, used: int) -> dict[int, list[str]]:
    texts = {SITE: ["unknown"], LABEL: ["?\t?\t?"], GROUP: []}
    at = TEXTS
    while at < TEXTS + used:
        kind, length = TEXT.unpack_from(data, at)
        at += TEXT.size
        texts[kind].append(data[at : at + length].decode(errors="replace"))
        at += length
    return texts


def _group(text: str) -> tuple[str, tuple[int, ...]]:
    comm, _, runs = text.partition("\t")
    return comm, parse_runs(runs, MOST_RANKS)


def _events(data: bytes, capacity: int, offset: int, texts: dict[int, list[str]]) -> tuple[RecordedEvent, ...]:
    events = []
    for slot in range(capacity):
        index, start, end, sequence, count, sent, site, label, peer, tag = RECORD.unpack_from(data, RING + slot * 64)
        if not index or index % capacity != slot or site >= len(texts[SITE]) or label >= len(texts[LABEL]):
            continue  # never written, or the writer was interrupted here
        comm, op, dtype = texts[LABEL][label].split("\t")
        ended = end + offset if end else None
        events.append(
            RecordedEvent(
                comm, op, dtype, count, sent, peer, tag, sequence, texts[SITE][site], index, start + offset, ended
            )
        )
    return tuple(sorted(events, key=lambda event: event.index))


def remove_others(folder: Path, ranks: int) -> None:
    """Remove the files of ranks >= ``ranks`` from ``folder``, which an earlier job with more ranks left. Local."""
    for path in [path for ending in ("rec", "spans", "stacks", "failed") for path in folder.glob(f"rank-*.{ending}")]:
        number = path.stem.removeprefix("rank-")
        if number.isdecimal() and int(number) >= ranks:
            path.unlink(missing_ok=True)


_COMM: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PACKAGE: Final = os.path.dirname(_COMM)
_RECORD_WORDS: Final = RECORD.size // 8
_now: Final = time.monotonic_ns  # bound once: saves two look-ups per event


def _sources(folder: str) -> frozenset[str]:
    return frozenset(map(str, Path(folder).rglob("*.py")))


class Recorder(EventSink):
    """Event sink that keeps this rank's last ``capacity`` operations in the file ``path``. Thread-safe."""

    def __init__(self, path: Path, rank: int, world: int, capacity: int = 8192) -> None:
        assert capacity >= 2
        self.path, self.rank, self.world, self.capacity = path, rank, world, capacity
        self._map = create_mapped(
            path, size_bytes(capacity), "the flight recorder", "free space or choose another --out"
        )
        self._words = memoryview(self._map).cast("q")
        self._ring = RING
        self._first_end = (RING + END_OFFSET) // 8
        # Records of operations in flight are not overwritten.
        self._open: dict[int, int] = {}  # record number -> start in ns
        self._advance = counter(1).__next__
        self._clocks: dict[tuple[str, bool], Callable[[], int]] = {}
        self._labels: dict[tuple[str, str, str], tuple[int, Callable[[], int]]] = {}
        self._sites: dict[tuple[int, ...], int] = {}
        self._codes: list[CodeType] = []  # kept alive: their ids are keys of _sites, and must not be reused
        self._ids = {SITE: 0, LABEL: 0, GROUP: 0}
        self._groups = set[str]()  # communicators whose ranks are in the file
        self._text_used = 0
        self._lock = threading.Lock()
        self._inside = _sources(_COMM) | {contextlib.__file__}
        self._algorithms = _sources(os.path.join(_PACKAGE, "collectives"))
        self._put = RECORD.pack_into  # bound once: saves a look-up per event
        self.wall_ns, self.monotonic_ns = time.time_ns(), time.monotonic_ns()
        HEADER.pack_into(
            self._map, 0, MAGIC, VERSION, rank, world, os.getpid(), capacity,
            start_ticks(os.getpid()), self.wall_ns, self.monotonic_ns, os.uname().nodename.encode()[:64],
        )  # fmt: skip
        self.beat(0)

    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        label = self._labels.get((comm, op, dtype))
        if label is None:
            label = self._new_label(comm, op, dtype)
        asked = attributed.get(get_ident()) if attributed else None
        inside, algorithms = self._inside, self._algorithms
        frame: FrameType | None = sys._getframe(1) if asked is None else None
        while frame is not None and frame.f_code.co_filename in inside:
            frame = frame.f_back
        # Inside collectives/, the site is the caller's line outside, and "via" adds the line inside.
        outer = frame
        while outer is not None and outer.f_code.co_filename in algorithms:
            outer = outer.f_back
        site = 0
        if asked is not None:
            call = id(asked.code), asked.instruction
            site = self._sites[call] if call in self._sites else self._new_site(call, [(asked.code, asked.line)])
        if frame is not None:
            outer = outer or frame
            # The instruction offset stands for the line, which is only computed for a new site.
            key = id(frame.f_code), frame.f_lasti, id(outer.f_code), outer.f_lasti
            site = self._sites.get(key, -1)
            if site < 0:
                frames = [outer] if outer is frame else [outer, frame]
                site = self._new_site(key, [(caller.f_code, caller.f_lineno) for caller in frames])
        # No lock: `_advance` (next of itertools.count) and operations of a dict are atomic under the GIL, so two
        # threads never get the same index. The ring skips the slots of operations in flight.
        index, in_flight = self._advance(), self._open
        slot = index % self.capacity
        while slot in in_flight:
            index, slot = self._next_free()
        now = in_flight[slot] = _now()
        self._put(
            self._words, self._ring + slot * 64, index, now, 0, label[1](), count, sent_bytes, site, label[0], peer, tag
        )
        return slot

    def end(self, token: int) -> None:
        self._words[self._first_end + token * _RECORD_WORDS] = _now()
        self._open.pop(token, None)  # only now may the slot be reused

    def _next_free(self) -> tuple[int, int]:
        if len(self._open) >= self.capacity // 2:  # requests that are never completed: drop the oldest
            with self._lock:
                self._open.pop(min(self._open, key=self._open.__getitem__), None)
        index = self._advance()
        return index, index % self.capacity

    def _new_label(self, comm: str, op: str, dtype: str) -> tuple[int, Callable[[], int]]:
        with self._lock:
            # Collectives and messages are counted separately, because only collectives are equal on all members.
            clock = self._clocks.setdefault((comm, op in POINT_TO_POINT), counter(1).__next__)
            if comm not in self._groups and comm in members:
                self._groups.add(comm)
                self._add_text(GROUP, f"{comm}\t{members[comm]}")
            if (comm, op, dtype) not in self._labels:
                self._labels[comm, op, dtype] = self._add_text(LABEL, f"{comm}\t{op}\t{dtype}"), clock
            return self._labels[comm, op, dtype]

    def _new_site(self, key: tuple[int, ...], lines: list[tuple[CodeType, int]]) -> int:
        with self._lock:
            if key not in self._sites:
                self._codes += [code for code, _ in lines]
                self._sites[key] = self._add_text(SITE, " via ".join(_describe(*line) for line in lines))
            return self._sites[key]

    def _add_text(self, kind: int, text: str) -> int:
        data = text.encode(errors="backslashreplace")[:1000]
        start = TEXTS + self._text_used
        if start + TEXT.size + len(data) > RING:
            return 0  # the table is full: the event is kept with an unknown text
        TEXT.pack_into(self._map, start, kind, len(data))
        self._map[start + TEXT.size : start + TEXT.size + len(data)] = data
        self._text_used += TEXT.size + len(data)
        self._words[TEXT_USED] = self._text_used  # last, so that a reader never sees half an entry
        self._ids[kind] += 1
        return self._ids[kind]

    def note(self, kind: str, text: str) -> None:
        """Write ``text`` as the note of type ``kind``, one of `KINDS`. Types in `FINAL` are written only once."""
        data = text.encode(errors="backslashreplace")[: NOTE_BYTES - NOTE.size]
        start = NOTES + KINDS.index(kind) * NOTE_BYTES
        with self._lock:
            if kind in FINAL and NOTE.unpack_from(self._map, start)[0]:
                return
            self._map[start + NOTE.size : start + NOTE.size + len(data)] = data
            NOTE.pack_into(self._map, start, time.monotonic_ns(), len(data))

    def beat(self, next_ns: int) -> None:
        """Write a heartbeat. ``next_ns``: time until the next heartbeat, or 0 if no heartbeat follows."""
        self._words[BEAT] = time.monotonic_ns()
        self._words[NEXT_BEAT] = next_ns

    def running(self) -> list[tuple[int, int]]:
        """Return a list of (start in monotonic ns, token), one for each operation in flight, the earliest first."""
        return sorted((start, token) for token, start in list(self._open.items()))

    def describe(self, token: int) -> str:
        """Return one line of text about the operation in flight with the number ``token``."""
        event = parse(bytes(self._map), self.path).event(token)
        return "an operation that has just ended" if event is None else str(event)

    def communicator(self, token: int) -> str:
        """Return the communicator name of the operation with the number ``token``, or "" if it has ended."""
        event = parse(bytes(self._map), self.path).event(token)
        return "" if event is None else event.comm

    def close(self) -> None:
        """Unmap the file. Do not record operations afterwards."""
        self._words.release()
        self._map.close()


def _describe(code: CodeType, line: int) -> str:
    path = code.co_filename
    if path.startswith(_PACKAGE + os.sep):
        path = os.path.relpath(path, os.path.dirname(_PACKAGE))  # independent of the place of installation
    return f"{path}:{line} ({code.co_name})"
