"""Flight recorder: the last operations of a rank in a memory-mapped file that survives SIGKILL.

The file is a header, one slot per kind of note, a table of texts (call sites; communicator, operation and dtype), and
a ring of fixed records. Nothing is flushed: the pages belong to the kernel from the moment they are written, so that
they reach the file whatever becomes of the process. `flight_file.read` reads it, also while the run goes on.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import count as counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

from hpcdist.comm.record import flight_file
from hpcdist.comm.record import flight_file as layout
from hpcdist.comm.record.flight_file import POINT_TO_POINT

_COMM: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PACKAGE: Final = os.path.dirname(_COMM)
_RECORD_WORDS: Final = layout.RECORD.size // 8
_now: Final = time.monotonic_ns  # bound once: a look-up less, twice an event


def _sources(folder: str) -> frozenset[str]:
    return frozenset(
        os.path.join(root, name) for root, _, names in os.walk(folder) for name in names if name.endswith(".py")
    )


class Recorder:
    """Event sink that keeps the last ``capacity`` operations of this rank in the file ``path``.

    Any thread may report. An operation that never ends keeps its record: the ring goes round it. Raises StorageError
    when the file cannot be made.
    """

    def __init__(self, path: Path, rank: int, world: int, capacity: int = 8192) -> None:
        assert capacity >= 2
        self.path, self.rank, self.world, self.capacity = path, rank, world, capacity
        self._map = flight_file.create_mapped(
            path, layout.size_bytes(capacity), "the flight recorder", "free space or choose another --out"
        )
        self._words = memoryview(self._map).cast("q")
        self._ring = layout.RING
        self._first_end = (layout.RING + layout.END_OFFSET) // 8
        self._open: dict[int, int] = {}  # record number -> start in ns
        self._advance = counter(1).__next__
        self._clocks: dict[tuple[str, bool], Callable[[], int]] = {}
        self._labels: dict[tuple[str, str, str], tuple[int, Callable[[], int]]] = {}
        self._sites: dict[tuple[int, ...], int] = {}
        self._codes: list[CodeType] = []  # held, so that their ids, the keys of _sites, are not given to other code
        self._ids = {layout.SITE: 0, layout.LABEL: 0}
        self._text_used = 0
        self._lock = threading.Lock()
        self._inside = _sources(_COMM)
        self._algorithms = _sources(os.path.join(_PACKAGE, "collectives"))
        self._put = layout.RECORD.pack_into  # bound once: a look-up less per event
        self.wall_ns, self.monotonic_ns = time.time_ns(), time.monotonic_ns()
        layout.HEADER.pack_into(
            self._map, 0, layout.MAGIC, layout.VERSION, rank, world, os.getpid(), capacity,
            layout.start_ticks(os.getpid()), self.wall_ns, self.monotonic_ns, os.uname().nodename.encode()[:64],
        )  # fmt: skip
        self.beat(0)

    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        """Record the start of an operation; the token is the number of its record."""
        label = self._labels.get((comm, op, dtype))
        if label is None:
            label = self._new_label(comm, op, dtype)
        inside, algorithms = self._inside, self._algorithms
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename in inside:
            frame = frame.f_back
        # Inside collectives/ the site is the caller's, and how it came here.
        outer = frame
        while outer is not None and outer.f_code.co_filename in algorithms:
            outer = outer.f_back
        site = 0
        if frame is not None:
            outer = outer or frame
            # The offset of the instruction stands for the line, which is only worked out for a site not seen before.
            key = id(frame.f_code), frame.f_lasti, id(outer.f_code), outer.f_lasti
            site = self._sites.get(key, -1)
            if site < 0:
                site = self._new_site(key, [outer] if outer is frame else [outer, frame])
        index, under_way = self._advance(), self._open
        slot = index % self.capacity
        while slot in under_way:
            index, slot = self._next_free()
        now = under_way[slot] = _now()
        self._put(
            self._words, self._ring + slot * 64, index, now, 0, label[1](), count, sent_bytes, site, label[0], peer, tag
        )
        return slot

    def end(self, token: int) -> None:
        """Record the end of the operation."""
        self._words[self._first_end + token * _RECORD_WORDS] = _now()
        self._open.pop(token, None)  # only now may the record be used again

    def _next_free(self) -> tuple[int, int]:
        if len(self._open) >= self.capacity // 2:  # requests that nobody waits for: forget the oldest
            with self._lock:
                self._open.pop(min(self._open, key=self._open.__getitem__), None)
        index = self._advance()
        return index, index % self.capacity

    def _new_label(self, comm: str, op: str, dtype: str) -> tuple[int, Callable[[], int]]:
        with self._lock:
            # Collectives and messages are counted apart: only the former are the same on every member.
            clock = self._clocks.setdefault((comm, op in POINT_TO_POINT), counter(1).__next__)
            if (comm, op, dtype) not in self._labels:
                self._labels[comm, op, dtype] = self._add_text(layout.LABEL, f"{comm}\t{op}\t{dtype}"), clock
            return self._labels[comm, op, dtype]

    def _new_site(self, key: tuple[int, ...], frames: list[FrameType]) -> int:
        with self._lock:
            if key not in self._sites:
                self._codes += [each.f_code for each in frames]
                self._sites[key] = self._add_text(layout.SITE, " via ".join(map(_describe, frames)))
            return self._sites[key]

    def _add_text(self, kind: int, text: str) -> int:
        data = text.encode()[:1000]
        start = layout.TEXTS + self._text_used
        if start + layout.TEXT.size + len(data) > layout.RING:
            return 0  # the table is full: the event is kept, its text is unknown
        layout.TEXT.pack_into(self._map, start, kind, len(data))
        self._map[start + layout.TEXT.size : start + layout.TEXT.size + len(data)] = data
        self._text_used += layout.TEXT.size + len(data)
        self._words[layout.TEXT_USED] = self._text_used  # last, so that a reader never sees half an entry
        self._ids[kind] += 1
        return self._ids[kind]

    def note(self, kind: str, text: str) -> None:
        """Keep ``text``, at most 1 KiB of it, as this rank's state; kinds are `recordfile.KINDS`.

        Of the kinds that end a rank the first note stays, because what comes later follows from it; "frozen" and
        "stage" are replaced by the next.
        """
        data = text.encode()[: layout.NOTE_BYTES - layout.NOTE.size]
        start = layout.NOTES + layout.KINDS.index(kind) * layout.NOTE_BYTES
        with self._lock:
            if kind in layout.FINAL and layout.NOTE.unpack_from(self._map, start)[0]:
                return
            self._map[start + layout.NOTE.size : start + layout.NOTE.size + len(data)] = data
            layout.NOTE.pack_into(self._map, start, time.monotonic_ns(), len(data))

    def beat(self, next_ns: int) -> None:
        """Give a sign of life, and say within how many nanoseconds the next will come (0: none will)."""
        self._words[layout.BEAT] = time.monotonic_ns()
        self._words[layout.NEXT_BEAT] = next_ns

    def running(self) -> list[tuple[int, int]]:
        """Return (start in monotonic ns, token) of the operations under way, the oldest first."""
        return sorted((start, token) for token, start in list(self._open.items()))

    def describe(self, token: int) -> str:
        """Return one line about the operation behind ``token``."""
        event = layout.parse(bytes(self._map), self.path).event(token)
        return "an operation that has just ended" if event is None else str(event)

    def close(self) -> None:
        """Unmap the file; nothing may be reported afterwards. The end of the process does the same."""
        self._words.release()
        self._map.close()


def _describe(frame: FrameType) -> str:
    code = frame.f_code
    path = code.co_filename
    if path.startswith(_PACKAGE + os.sep):
        path = os.path.relpath(path, os.path.dirname(_PACKAGE))  # wherever hpcdist is installed
    return f"{path}:{frame.f_lineno} ({code.co_name})"
