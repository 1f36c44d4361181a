"""What a rank does, written down as it ends: a ring in a memory-mapped file that survives SIGKILL.

`spanfile.read` reads it, also while the run goes on. One thread writes.
"""

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from hpcdist.comm import mapped
from hpcdist.comm import spanfile as layout
from hpcdist.comm.machine import boot_id

CAPACITY: Final = 8192
now_ns: Final[Callable[[], int]] = time.monotonic_ns  # the clock of spans
_MOST: Final = 0x7FFF  # micro-batches and units beyond have no number in the file

_UNNAMED: Final = 0xFFFFFFFF


class SpanSink(Protocol):
    """Looks on: told of everything that the rank has done, when it is done."""

    def add(
        self, phase: str, name: str, step: int, begin_ns: int, end_ns: int, microbatch: int = -1, unit: int = -1
    ) -> None:
        """Note what took from ``begin_ns`` to ``end_ns`` (of `now_ns`); ``phase`` is one of `spanfile.PHASES`."""
        ...


class _Nowhere:
    def add(
        self, phase: str, name: str, step: int, begin_ns: int, end_ns: int, microbatch: int = -1, unit: int = -1
    ) -> None:
        return None


NULL_SPANS: Final[SpanSink] = _Nowhere()


class Spans:
    """Keeps the last ``capacity`` spans of this rank in the file ``path``, and all of them until the next `drain`.

    Raises StorageError when the file cannot be made.
    """

    def __init__(self, path: Path, rank: int, world: int, capacity: int = CAPACITY) -> None:
        assert capacity >= 1
        self.path, self.capacity = path, capacity
        self._map = mapped.create(
            path,
            layout.size_bytes(capacity),
            "the record of what a rank does",
            "free space, choose another --out, or set telemetry.trace = false",
        )
        self._labels: dict[tuple[str, str], tuple[int, int]] = {}
        self._text_used = 0
        self._index = 0
        self._put = layout.SPAN.pack_into  # bound once: a look-up less per span
        self._fresh: list[tuple[int, int, int]] = []
        layout.HEADER.pack_into(
            self._map, 0, layout.MAGIC, layout.VERSION, rank, world, capacity, time.time_ns(), now_ns(),
            os.uname().nodename.encode()[:64], boot_id().encode()[:64],
        )  # fmt: skip

    def add(
        self, phase: str, name: str, step: int, begin_ns: int, end_ns: int, microbatch: int = -1, unit: int = -1
    ) -> None:
        """Note what took from ``begin_ns`` to ``end_ns`` (local)."""
        label, code = self._labels.get((phase, name)) or self._new_label(phase, name)
        index = self._index = self._index + 1
        if microbatch > _MOST or unit > _MOST:
            microbatch, unit = min(microbatch, _MOST), min(unit, _MOST)
        at = layout.RING + index % self.capacity * layout.SPAN.size
        self._put(self._map, at, index, begin_ns, end_ns, step, label, microbatch, unit)
        if code != layout.STEP:
            fresh = self._fresh
            if fresh and fresh[-1][2] == begin_ns and fresh[-1][0] == code:
                fresh[-1] = code, fresh[-1][1], end_ns  # a stage has many operations of a phase in a row
                return
            fresh.append((code, begin_ns, end_ns))
            if len(fresh) > 2 * self.capacity:  # nobody drains: keep what a ring would
                del fresh[: -self.capacity]

    def drain(self) -> np.ndarray:
        """Return the spans since the last call: (spans, 3) int64 of phase, begin and end in ns (local).

        Those of one phase that follow without a gap are one. Phases count as in `spanfile.PHASES`; whole steps are left
        out, and so is what exceeds the capacity.
        """
        fresh, self._fresh = self._fresh[-self.capacity :], []
        return np.array(fresh, np.int64).reshape(-1, 3)

    def _new_label(self, phase: str, name: str) -> tuple[int, int]:
        """Enter a label into the table; where that is full, spans go by one that is never written."""
        code = layout.PHASES.index(phase)
        data = name.encode()[:255]
        start = layout.TEXTS + self._text_used
        if start + layout.TEXT.size + len(data) > layout.RING:
            return _UNNAMED, code  # a reader has no name for it, and leaves it out
        layout.TEXT.pack_into(self._map, start, code, len(data))
        self._map[start + layout.TEXT.size : start + layout.TEXT.size + len(data)] = data
        self._text_used += layout.TEXT.size + len(data)
        struct.pack_into("<q", self._map, layout.TEXT_USED * 8, self._text_used)  # last: nobody sees half an entry
        self._labels[phase, name] = len(self._labels), code
        return self._labels[phase, name]

    def close(self) -> None:
        """Unmap the file; nothing may be added afterwards. The end of the process does the same."""
        self._map.close()
