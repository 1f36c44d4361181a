"""Event files for TensorBoard, in the directory ``tensorboard`` of a run: scalars, and the recipe as text.

Written from the protocol buffers of tensorboardX, but without its writer: that one hands events to a thread over a
queue of ten, and a full disk ends the thread, after which the training would wait for the queue for ever.
"""

import math
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from hpcdist.errors import MissingCapabilityError
from hpcdist.reporting import regular
from hpcdist.telemetry import catalogue, crc
from hpcdist.telemetry.appended import Appended
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.stream import Event, Run

DIRECTORY: Final = "tensorboard"
RECIPE: Final = "recipe.toml"
CURE: Final = "free space, or set telemetry.tensorboard = false"
_VERSION: Final = "brain.Event:2"  # without it, TensorBoard does not drop the steps that are made again


class TensorBoard:
    """Writes one event file for each start of a run. Raises StorageError; MissingCapabilityError without the package.

    TensorBoard hides what earlier starts wrote of steps that this one makes again.
    """

    name = "TensorBoard"

    def __init__(self, run: Run, config: TelemetryConfig) -> None:
        self._proto, self._summary = _tensorboardx()
        made = self._proto.Event(wall_time=run.started_ns / 1e9, file_version=_VERSION)
        self._file = Appended(_new_file(run), CURE, header=records([made.SerializeToString()]))
        first = []
        if run.resumed_step is not None:
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            first.append(self._proto.Event(wall_time=made.wall_time, step=run.resumed_step + 1, session_log=start))
        recipe = run.directory / RECIPE
        if recipe.is_file():
            text = "".join(f"    {row}\n" for row in regular.text(recipe).splitlines())  # indented: code, for Markdown
            summary = self._summary.text("recipe", text)
            first.append(self._proto.Event(wall_time=made.wall_time, step=run.resumed_step or 0, summary=summary))
        self._append(first)

    def write(self, events: Sequence[Event]) -> None:
        """Append a record for each event that has figures or texts: one write for all of them."""
        self._append([made for event in events for made in self._made_of(event)])

    def _append(self, made: Sequence[Any]) -> None:
        if made:
            self._file.append(records([event.SerializeToString() for event in made]))

    def _made_of(self, event: Event) -> Iterator[Any]:
        wall_time = event.time_ns / 1e9
        figures = {
            tag(key): float(value)
            for key, value in event.values.items()
            if not isinstance(value, str) and catalogue.split(key)[0] in catalogue.QUANTITIES and not math.isnan(value)
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
        """Close the file."""
        self._file.close()


def tag(key: str) -> str:
    """Return the name that TensorBoard shows for a key of an event: "energy/joules/gpu"."""
    name, label = catalogue.split(key)
    shown = catalogue.QUANTITIES[name].tag
    return shown if label is None else f"{shown}/{label}"


def records(contents: Sequence[bytes]) -> bytes:
    """Return ``contents`` as records of a TFRecord file: length, its CRC, content, its CRC; all little-endian."""
    lengths = [struct.pack("<Q", len(content)) for content in contents]
    guards = crc.masked(crc.crc32c([*lengths, *contents])).astype("<u4")
    of_lengths, of_contents = np.split(guards, 2)
    parts = zip(lengths, of_lengths, contents, of_contents, strict=True)
    return b"".join(part for row in parts for part in (row[0], row[1].tobytes(), row[2], row[3].tobytes()))


def _new_file(run: Run) -> Path:
    """Return the name of a file that is not there yet: the last one in the order in which TensorBoard reads them."""
    folder = run.directory / DIRECTORY
    number = len(list(folder.glob("events.out.tfevents.*")))
    return folder / f"events.out.tfevents.{run.started_ns // 1_000_000_000:010d}.{number:04d}.hpcdist"


def _tensorboardx() -> tuple[ModuleType, ModuleType]:
    """Return the modules with the protocol buffers, and with what makes summaries. Raises MissingCapabilityError."""
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
    """Let imports of ``module`` fail, unless it is loaded: tensorboardX would spend seconds on one that nobody uses."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
