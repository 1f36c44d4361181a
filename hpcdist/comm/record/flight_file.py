"""File format of the flight recorder: its layout, its creation by mmap, and its reader.

header | notes | texts | ring of records          all little-endian; a number of the clock is monotonic nanoseconds

Reading never writes, needs no MPI, and copes with a file whose process is still writing or was killed at any moment.
`create_mapped` makes a file of a fixed size that a process writes through memory, so that what it wrote outlives it.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcdist.errors import StorageError
from hpcdist.reporting import regular


def create_mapped(path: Path, size: int, what: str, cure: str) -> mmap.mmap:
    """Make ``path`` anew and map it (local). Raises StorageError, which names ``what`` needs it and the ``cure``.

    The whole size is allocated at once, because a write into a hole of a mapping on a full disk would be a SIGBUS.
    """
    try:
        path.unlink(missing_ok=True)  # truncating would be a SIGBUS for whoever still maps the old file
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"{what} needs {size} bytes at {path}: {error}; {cure}") from error


MAGIC: Final = b"HPCDREC\0"
MOST_BYTES: Final = 256 << 20  # that are read of a file, which has one or two million
VERSION: Final = 1
# magic, version, rank, world, pid, capacity, start of the process in clock ticks, wall clock, monotonic clock, host
HEADER: Final = struct.Struct("<8sIIIIIxxxxQqq64s")
BEAT: Final = 16  # words of 8 bytes from the start of the file: the last sign of life,
NEXT_BEAT: Final = 17  # when the next was to come,
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
RING: Final = TEXTS + 256 * 1024
# index from 1, start, end (0: running), sequence on the communicator, count, sent bytes, site, label, peer, tag
RECORD: Final = struct.Struct("<QqqQqqIIii")
END_OFFSET: Final = 16
# Operations that one member makes with another. All others are made by every member, and so can be aligned.
POINT_TO_POINT: Final = frozenset(
    {"send", "recv", "sendrecv", "isend", "irecv", "probe", "put", "get", "flush", "load"}
)

assert RECORD.size == 64 and RING % 64 == 0 and HEADER.size <= BEAT * 8


def size_bytes(capacity: int) -> int:
    """Return the size of the file of ``capacity`` records."""
    return RING + capacity * RECORD.size


@dataclass(frozen=True)
class RecordedEvent:
    """One operation. Times are wall-clock nanoseconds; ``ended_ns`` is None for an operation that did not end."""

    index: int
    comm: str
    op: str
    dtype: str
    count: int
    sent_bytes: int
    peer: int
    tag: int
    sequence: int
    site: str
    started_ns: int
    ended_ns: int | None

    @property
    def collective(self) -> bool:
        """Whether every member of the communicator makes this operation, in the same order."""
        return self.op not in POINT_TO_POINT

    def __str__(self) -> str:
        what = f"{self.op} #{self.sequence} on {self.comm}"
        if self.count:
            what += f", {self.count} x {self.dtype}"
        if self.peer >= 0:
            what += f", {'root' if self.collective else 'peer'} {self.peer}"
        return f"{what}, at {self.site}"


@dataclass(frozen=True)
class RankNote:
    """Entry of a rank about itself, and its time (wall-clock nanoseconds)."""

    time_ns: int
    text: str


@dataclass(frozen=True)
class RankRecord:
    """All that the file of one rank holds; events in the order of their starts."""

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
    clock_ns: int = 0  # wall clock minus monotonic clock: times here minus this are those of the node's clock

    @property
    def open_events(self) -> tuple[RecordedEvent, ...]:
        """Operations that have not ended, the outermost (earliest) first."""
        return tuple(event for event in self.events if event.ended_ns is None)

    @property
    def last_sign_ns(self) -> int:
        """Wall-clock time of the last thing this rank is known to have done."""
        ends = [event.ended_ns or event.started_ns for event in self.events]
        return max([self.started_ns, self.beat_ns, *ends, *(note.time_ns for note in self.notes.values())])

    def event(self, token: int) -> RecordedEvent | None:
        """Return the event that the recorder's ``token`` stands for, if it has not ended."""
        return next((event for event in self.open_events if event.index % self.capacity == token), None)

    def process_state(self) -> str | None:
        """Return the kernel's letter for the process ("S", "T" when stopped), "" when it is gone.

        None when that cannot be known: the rank ran on another host, or its process ids are not ours.
        """
        if self.host != os.uname().nodename[:64] or not self.start_ticks:
            return None
        try:
            state, ticks = _process(self.pid)
        except OSError:
            return None
        return state if ticks == self.start_ticks else ""


def read(path: Path) -> RankRecord:
    """Read the file of one rank. Raises StorageError when it is not one."""
    try:
        data = regular.read(path, MOST_BYTES)
    except OSError as error:
        raise StorageError(f"cannot read the flight recorder's file {path}: {error}") from error
    return parse(data, path)


def parse(data: bytes, path: Path) -> RankRecord:
    """Read the bytes of a file that was found at ``path``."""
    if len(data) < RING or data[: len(MAGIC)] != MAGIC:
        raise StorageError(f"{path} is not a file of the flight recorder (wrong signature or too short)")
    _, version, rank, world, pid, capacity, ticks, wall, monotonic, host = HEADER.unpack_from(data)
    if version != VERSION or len(data) < size_bytes(capacity):
        raise StorageError(f"{path}: version {version} or size {len(data)} is not what this hpcdist writes ({VERSION})")
    if not rank < world <= MOST_RANKS:
        raise StorageError(f"{path} is damaged: it is of rank {rank} of {world}")
    offset = wall - monotonic
    beat, next_beat, used = struct.unpack_from("<qqq", data, BEAT * 8)
    try:
        notes, events = _notes(data, offset), _events(data, capacity, offset, _texts(data, used))
        name = host.rstrip(b"\0").decode()
    except (ValueError, KeyError, struct.error) as error:
        raise StorageError(f"{path} is damaged: {error}") from error
    return RankRecord(
        path, rank, world, pid, name, ticks, capacity, wall, beat + offset, next_beat, notes, events, offset
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
    texts = {SITE: ["unknown"], LABEL: ["?\t?\t?"]}
    at = TEXTS
    while at < TEXTS + used:
        kind, length = TEXT.unpack_from(data, at)
        at += TEXT.size
        texts[kind].append(data[at : at + length].decode(errors="replace"))
        at += length
    return texts


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
                index, comm, op, dtype, count, sent, peer, tag, sequence, texts[SITE][site], start + offset, ended
            )
        )
    return tuple(sorted(events, key=lambda event: event.index))


def start_ticks(pid: int) -> int:
    """Return when the process started, in clock ticks since boot; with the pid it names one process (local).

    0: it is gone, or nobody can tell.
    """
    try:
        return _process(pid)[1]
    except OSError:
        return 0


def has_ended(pid: int, began: int) -> bool:
    """Whether the process ``pid`` that started at ``began`` is known to have ended (local).

    False where nobody can tell, as without a descriptor left to look with.
    """
    try:
        return _process(pid)[1] != began
    except OSError:
        return False


def _process(pid: int) -> tuple[str, int]:
    """Return state and start; ("", 0) when it is gone. Raises OSError where that cannot be known."""
    try:
        # The name of the command may contain spaces and brackets: what follows the last bracket is regular.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    return ("", 0) if fields[0] in "ZX" else (fields[0], int(fields[19]))


def remove_others(folder: Path, ranks: int) -> None:
    """Remove what ranks beyond ``ranks`` have recorded, who left a job that became smaller (local)."""
    for path in [path for ending in ("rec", "spans", "stacks", "failed") for path in folder.glob(f"rank-*.{ending}")]:
        number = path.stem.removeprefix("rank-")
        if number.isdecimal() and int(number) >= ranks:
            path.unlink(missing_ok=True)
