"""Spans of a rank: named intervals in a ring of a memory-mapped file, their writer and their reader.

    header | texts | ring of spans          all little-endian; clock values are monotonic nanoseconds

One thread writes each span at its end. The file is next to the flight recorder's file, and survives SIGKILL. Reading
never writes and needs no MPI.
"""

import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.comm.launch.environment import boot_id
from hpcdist.comm.record import flight_recorder
from hpcdist.errors import StorageError

MAGIC: Final = b"HPCDSPN\0"
VERSION: Final = 1
# Phases that share the time of a rank, except "step", which encloses a whole step.
PHASES: Final = ("compute", "communication", "update", "data", "checkpoint", "validation", "other", "step")
STEP: Final = PHASES.index("step")
# magic, version, rank, world, capacity, wall clock, monotonic clock, host, boot of the host
HEADER: Final = struct.Struct("<8sIIIIqq64s64s")
TEXT_USED: Final = 24  # words of 8 bytes from the start of the file: bytes used in the table of texts
TEXTS: Final = 256
TEXT: Final = struct.Struct("<BB")  # phase, bytes of the name that follows
RING: Final = 16 * 1024
# index from 1, begin, end, step, label, micro-batch, unit
SPAN: Final = struct.Struct("<QqqqIhh")

assert SPAN.size == 40 and RING % 8 == 0 and HEADER.size <= TEXT_USED * 8


def size_bytes(capacity: int) -> int:
    """Return the size in bytes of a spans file that has room for ``capacity`` spans."""
    return RING + capacity * SPAN.size


@dataclass(frozen=True)
class Span:
    """Named time interval in which a rank worked on a training step. A step, micro-batch or unit of -1 is unknown."""

    phase: str
    name: str
    step: int
    microbatch: int
    unit: int  # index of the embedding, a layer or the head in the model
    begin_ns: int  # of the node's monotonic clock
    end_ns: int


@dataclass(frozen=True)
class RankSpans:
    """Content of one rank's spans file: the spans (named time intervals), and the host and the clocks of the rank."""

    path: Path
    rank: int
    world: int
    host: str
    boot_id: str  # ranks of the same running kernel share the monotonic clock
    wall_ns: int  # the two clocks at the same moment
    monotonic_ns: int
    spans: tuple[Span, ...]  # sorted by end


def read(path: Path) -> RankSpans:
    """Return the content of one rank's spans file. Raises StorageError if the file is invalid."""
    return parse(flight_recorder.read_bytes(path, "spans"), path)


def parse(data: bytes, path: Path) -> RankSpans:
    """Parse the content ``data`` of the spans file ``path``. Raises StorageError if ``data`` is invalid."""
    if len(data) < RING or data[: len(MAGIC)] != MAGIC:
        raise StorageError(f"{path} is not a file of spans (wrong signature or too short); delete {path}")
    _, version, rank, world, capacity, wall, monotonic, host, boot = HEADER.unpack_from(data)
    flight_recorder.check_header(path, (version, VERSION), len(data), size_bytes(capacity), rank, world)
    (used,) = struct.unpack_from("<q", data, TEXT_USED * 8)
    host_name, boot_id = (text.rstrip(b"\0").decode(errors="replace") for text in (host, boot))
    spans = _spans(data, capacity, _texts(data, used))
    return RankSpans(path, rank, world, host_name, boot_id, wall, monotonic, spans)


def _texts(data: bytes, used: int) -> list[tuple[str, str]]:
    texts, at, end = [], TEXTS, min(TEXTS + max(0, used), RING)
    while at + TEXT.size <= end:
        phase, length = TEXT.unpack_from(data, at)
        at += TEXT.size
        if phase >= len(PHASES) or at + length > end:
            break
        texts.append((PHASES[phase], data[at : at + length].decode(errors="replace")))
        at += length
    return texts


def _spans(data: bytes, capacity: int, texts: list[tuple[str, str]]) -> tuple[Span, ...]:
    numbered = []
    for slot in range(capacity):
        index, begin, end, step, label, microbatch, unit = SPAN.unpack_from(data, RING + slot * SPAN.size)
        if not index or index % capacity != slot or label >= len(texts):
            continue  # never written, or the writer was interrupted here
        phase, name = texts[label]
        numbered.append((index, Span(phase, name, step, microbatch, unit, begin, end)))
    return tuple(span for _, span in sorted(numbered, key=lambda pair: pair[0]))


CAPACITY: Final = 8192
now_ns: Final[Callable[[], int]] = time.monotonic_ns  # the clock of spans
_MOST: Final = 0x7FFF  # larger numbers of micro-batches and units are stored as this number

_UNNAMED: Final = 0xFFFFFFFF


class SpanSink:
    """Observer of a rank's work. The rank calls `add` after each named interval. This base class does nothing."""

    def add(
        self, phase: str, name: str, step: int, begin_ns: int, end_ns: int, microbatch: int = -1, unit: int = -1
    ) -> None:
        """Record the time interval ``name`` of phase ``phase``, from ``begin_ns`` to ``end_ns`` on the clock `now_ns`.

        ``step``, ``microbatch``, ``unit``: index of the training step, micro-batch and model layer, or -1 if unknown.
        """


NULL_SPANS: Final = SpanSink()


class Spans(SpanSink):
    """Span sink that writes this rank's latest ``capacity`` spans to the file ``path``, and collects new spans."""

    def __init__(self, path: Path, rank: int, world: int, capacity: int = CAPACITY) -> None:
        assert capacity >= 1
        self.path, self.capacity = path, capacity
        self._map = flight_recorder.create_mapped(
            path,
            size_bytes(capacity),
            "the spans recorder",
            "free space, choose another --out, or set telemetry.trace = false",
        )
        self._labels: dict[tuple[str, str], tuple[int, int]] = {}
        self._text_used = 0
        self._index = 0
        self._put = SPAN.pack_into  # bound once: saves a look-up per span
        self._fresh: list[tuple[int, int, int]] = []
        HEADER.pack_into(
            self._map, 0, MAGIC, VERSION, rank, world, capacity, time.time_ns(), now_ns(),
            os.uname().nodename.encode()[:64], boot_id().encode()[:64],
        )  # fmt: skip

    def add(
        self, phase: str, name: str, step: int, begin_ns: int, end_ns: int, microbatch: int = -1, unit: int = -1
    ) -> None:
        label, code = self._labels.get((phase, name)) or self._new_label(phase, name)
        index = self._index = self._index + 1
        if microbatch > _MOST or unit > _MOST:
            microbatch, unit = min(microbatch, _MOST), min(unit, _MOST)
        at = RING + index % self.capacity * SPAN.size
        self._put(self._map, at, index, begin_ns, end_ns, step, label, microbatch, unit)
        if code != STEP:
            fresh = self._fresh
            if fresh and fresh[-1][2] == begin_ns and fresh[-1][0] == code:
                fresh[-1] = code, fresh[-1][1], end_ns  # a stage has many consecutive operations of one phase
                return
            fresh.append((code, begin_ns, end_ns))
            if len(fresh) > 2 * self.capacity:  # nobody drains: keep as many as the ring
                del fresh[: -self.capacity]

    def drain(self) -> np.ndarray:
        """Return the spans since the last call, except "step", as int64 rows (phase index, begin ns, end ns). Local."""
        # Adjacent spans of the same phase are merged. The oldest spans beyond the capacity are lost.
        fresh, self._fresh = self._fresh[-self.capacity :], []
        return np.array(fresh, np.int64).reshape(-1, 3)

    def _new_label(self, phase: str, name: str) -> tuple[int, int]:
        code = PHASES.index(phase)
        data = name.encode()[:255]
        start = TEXTS + self._text_used
        if start + TEXT.size + len(data) > RING:
            return _UNNAMED, code  # readers skip unnamed spans
        TEXT.pack_into(self._map, start, code, len(data))
        self._map[start + TEXT.size : start + TEXT.size + len(data)] = data
        self._text_used += TEXT.size + len(data)
        struct.pack_into("<q", self._map, TEXT_USED * 8, self._text_used)  # last: no reader sees half an entry
        self._labels[phase, name] = len(self._labels), code
        return self._labels[phase, name]

    def close(self) -> None:
        """Unmap the file. Do not add spans afterwards."""
        self._map.close()
