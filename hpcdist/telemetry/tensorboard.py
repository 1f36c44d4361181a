"""TensorBoard event files in the directory ``tensorboard`` of a run: scalars, and the recipe as text.

Uses the protocol buffers of tensorboardX, but not its writer, whose thread ends on a full disk, after which the
training would block forever. CRC-32C is vectorised over the records: pure Python would take 0.15 us per byte.
"""

import math
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from hpcdist.constants import RECIPE_FILE
from hpcdist.errors import MissingCapabilityError
from hpcdist.reporting import regular
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.event_stream import AppendOnlyFile, RunInfo
from hpcdist.telemetry.metrics import quantities
from hpcdist.telemetry.metrics.observations import RunEvent

DIRECTORY: Final = "tensorboard"
CURE: Final = "free space, or set telemetry.tensorboard = false"
_VERSION: Final = "brain.Event:2"  # TensorBoard then drops steps that are repeated
POLYNOMIAL: Final = 0x82F63B78  # reflected
MASK_DELTA: Final = 0xA282EAD8  # mask of CRCs in TFRecord files, see https://github.com/google/crc32c


@cache
def _table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


def crc32c(records: Sequence[bytes]) -> np.ndarray:
    """Return the CRC-32C checksum of each byte string in ``records``, as a uint32 array."""
    table = _table()
    lengths = np.array([len(record) for record in records], np.int64)
    order = np.argsort(-lengths, kind="stable")  # longest first, so that records with a byte in a column come first
    longest = int(lengths.max(initial=0))
    matrix = np.zeros((len(records), longest), np.uint8)
    for row, index in enumerate(order):
        matrix[row, : lengths[index]] = np.frombuffer(records[index], np.uint8)
    columns = np.ascontiguousarray(matrix.T)
    going_on = np.searchsorted(-lengths[order], -np.arange(longest), side="left")
    remainder = np.full(len(records), 0xFFFFFFFF, np.uint32)
    for column, count in zip(columns, going_on, strict=True):
        remainders = remainder[:count]
        remainder[:count] = table[(remainders ^ column[:count]) & 0xFF] ^ (remainders >> np.uint32(8))
    crcs = np.empty_like(remainder)
    crcs[order] = remainder ^ np.uint32(0xFFFFFFFF)
    return crcs


def masked(crcs: np.ndarray) -> np.ndarray:
    """Return the uint32 checksums ``crcs`` in the masked form that TFRecord files store."""
    rotated = (crcs >> np.uint32(15)) | (crcs << np.uint32(17))
    return (rotated.astype(np.uint64) + MASK_DELTA).astype(np.uint32)


class TensorBoard:
    """Sink that writes one TensorBoard event file per start of a run. Raises StorageError if a write fails."""

    name = "TensorBoard"

    def __init__(self, run: RunInfo, config: TelemetryConfig) -> None:
        self._proto, self._summary = _tensorboardx()
        version_event = self._proto.Event(wall_time=run.started_ns / 1e9, file_version=_VERSION)
        self._file = AppendOnlyFile(_new_file(run), CURE, header=records([version_event.SerializeToString()]))
        first = []
        if run.resumed_step is not None:
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            first.append(
                self._proto.Event(wall_time=version_event.wall_time, step=run.resumed_step + 1, session_log=start)
            )
        recipe = run.directory / RECIPE_FILE
        if recipe.is_file():
            text = "".join(f"    {row}\n" for row in regular.text(recipe).splitlines())  # indented: code, for Markdown
            summary = self._summary.text("recipe", text)
            first.append(
                self._proto.Event(wall_time=version_event.wall_time, step=run.resumed_step or 0, summary=summary)
            )
        self._append(first)

    def write(self, events: Sequence[RunEvent]) -> None:
        self._append([record for event in events for record in self._made_of(event)])

    def _append(self, protos: Sequence[Any]) -> None:
        if protos:
            self._file.append(records([event.SerializeToString() for event in protos]))

    def _made_of(self, event: RunEvent) -> Iterator[Any]:
        wall_time = event.time_ns / 1e9
        figures = {
            tag(key): float(value)
            for key, value in event.values.items()
            if not isinstance(value, str)
            and quantities.split(key)[0] in quantities.QUANTITIES
            and not math.isnan(value)
        }
        if figures:
            summary = self._summary.Summary()
            for name, number in figures.items():
                summary.value.add(tag=name, simple_value=number)
            yield self._proto.Event(wall_time=wall_time, step=event.step, summary=summary)
        for key, value in event.values.items():
            if isinstance(value, str):
                summary = self._summary.text(f"{event.kind}/{key}", value)
                yield self._proto.Event(wall_time=wall_time, step=event.step, summary=summary)

    def close(self, normal: bool) -> None:
        self._file.close()


def tag(key: str) -> str:
    """Return the TensorBoard tag, for example "energy/joules/gpu", of the metric whose key in events is ``key``."""
    name, label = quantities.split(key)
    shown = quantities.QUANTITIES[name].tag
    return shown if label is None else f"{shown}/{label}"


def records(contents: Sequence[bytes]) -> bytes:
    """Return ``contents`` as TFRecords: length, CRC of the length, content, CRC of the content (little-endian)."""
    lengths = [struct.pack("<Q", len(content)) for content in contents]
    guards = masked(crc32c([*lengths, *contents])).astype("<u4")
    of_lengths, of_contents = np.split(guards, 2)
    parts = zip(lengths, of_lengths, contents, of_contents, strict=True)
    return b"".join(part for row in parts for part in (row[0], row[1].tobytes(), row[2], row[3].tobytes()))


def _new_file(run: RunInfo) -> Path:
    folder = run.directory / DIRECTORY
    # The new name must sort after the existing ones: TensorBoard reads the files in order.
    number = len(list(folder.glob("events.out.tfevents.*")))
    return folder / f"events.out.tfevents.{run.started_ns // 1_000_000_000:010d}.{number:04d}.hpcdist"


def _tensorboardx() -> tuple[ModuleType, ModuleType]:
    try:
        with _hidden("torch"):
            from tensorboardX import summary
            from tensorboardX.proto import event_pb2
    except ImportError as error:
        raise MissingCapabilityError(
            "telemetry.tensorboard needs the package tensorboardX: pip install 'hpcdist[tensorboard]', or set "
            f"telemetry.tensorboard = false ({error})"
        ) from error
    return event_pb2, summary


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    if module in sys.modules:
        yield
        return
    # tensorboardX works without the module.
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
