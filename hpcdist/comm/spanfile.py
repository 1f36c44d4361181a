"""The file of what a rank did, and when: its layout, and how to read it back.

    header | texts | ring of spans          all little-endian; a number of the clock is monotonic nanoseconds

It stands beside the flight recorder's: that one has the messages, this one what lies between them. Reading never
writes, needs no MPI, and copes with a file whose process is still writing or was killed at any moment.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcdist.comm.recordfile import MOST_RANKS
from hpcdist.errors import StorageError
from hpcdist.reporting import regular

MAGIC: Final = b"HPCDSPN\0"
MOST_BYTES: Final = 256 << 20  # that are read of a file, which has a few million
VERSION: Final = 1
# What the time of a rank goes into. "step" encloses a step from boundary to boundary, so it is no phase beside others.
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
    """Return the size of the file of ``capacity`` spans."""
    return RING + capacity * SPAN.size


@dataclass(frozen=True)
class Span:
    """Something that a rank did. Times are monotonic nanoseconds of its node; -1 where there is no such number."""

    phase: str
    name: str
    step: int
    microbatch: int
    unit: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class RankSpans:
    """All that the file of one rank holds; ``spans`` in the order of their ends.

    ``wall_ns`` and ``monotonic_ns`` are the two clocks at one moment. ``boot_id`` names the running kernel: ranks with
    the same one share the monotonic clock.
    """

    path: Path
    rank: int
    world: int
    host: str
    boot_id: str
    wall_ns: int
    monotonic_ns: int
    spans: tuple[Span, ...]


def read(path: Path) -> RankSpans:
    """Read the file of one rank. Raises StorageError when it is not one."""
    try:
        data = regular.read(path, MOST_BYTES)
    except OSError as error:
        raise StorageError(f"cannot read the spans of a rank in {path}: {error}") from error
    return parse(data, path)


def parse(data: bytes, path: Path) -> RankSpans:
    """Read the bytes of a file that was found at ``path``."""
    if len(data) < RING or data[: len(MAGIC)] != MAGIC:
        raise StorageError(f"{path} is not a file of spans (wrong signature or too short)")
    _, version, rank, world, capacity, wall, monotonic, host, boot = HEADER.unpack_from(data)
    if version != VERSION or len(data) < size_bytes(capacity):
        raise StorageError(f"{path}: version {version} or size {len(data)} is not what this hpcdist writes ({VERSION})")
    if not rank < world <= MOST_RANKS:
        raise StorageError(f"{path} is damaged: it is of rank {rank} of {world}")
    (used,) = struct.unpack_from("<q", data, TEXT_USED * 8)
    host_name, boot_id = (text.rstrip(b"\0").decode(errors="replace") for text in (host, boot))
    spans = _spans(data, capacity, _texts(data, used))
    return RankSpans(path, rank, world, host_name, boot_id, wall, monotonic, spans)


def _texts(data: bytes, used: int) -> list[tuple[str, str]]:
    """Return phase and name of each label; those cut off by damage are left out."""
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
    found = []
    for slot in range(capacity):
        index, begin, end, step, label, microbatch, unit = SPAN.unpack_from(data, RING + slot * SPAN.size)
        if not index or index % capacity != slot or label >= len(texts):
            continue  # never written, or the writer was interrupted here
        phase, name = texts[label]
        found.append((index, Span(phase, name, step, microbatch, unit, begin, end)))
    return tuple(span for _, span in sorted(found, key=lambda pair: pair[0]))
