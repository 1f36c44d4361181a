"""JSON lines sink: the events of a run in ``events.jsonl``, for ``tail -f | jq`` and readers of logs.

    {"time":"2026-02-03T04:05:06.789012Z","time_ns":1770091506789012345,"kind":"step","step":7,
     "values":{"training_loss_nats":5.1,...},"ranks":{"compute_seconds":[0.1,0.2]}}

Figures are named in `hpcdist.telemetry.metrics.quantities`. Unknown, NaN and infinite values are null.
"""

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from hpcdist.errors import StorageError
from hpcdist.reporting import atomic, regular
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.event_stream import AppendOnlyFile, RunInfo
from hpcdist.telemetry.metrics.observations import RunEvent

FILE: Final = "events.jsonl"
# With more ranks, lines have no lists, which would dominate the file and are in metrics.h5 anyway.
MOST_RANKS: Final = 512
CURE: Final = "free space, or set telemetry.jsonl = false"
MOST_LINE_BYTES: Final = 16 << 20
# Prefix of every line; a resumed run reads nothing else.
_HEAD: Final = re.compile(rb'\{"time":"[^"]*","time_ns":\d+,"kind":"[a-z_]+","step":(-?\d+),"')


class JsonLines:
    """Sink that writes each event as a line of JSON. A resumed run first removes the lines of steps to be repeated."""

    name = FILE

    def __init__(self, run: RunInfo, config: TelemetryConfig) -> None:
        path = run.directory / FILE
        if path.is_fifo() or path.is_dir():
            _set_aside(path, "not a regular file")
        if path.is_file():
            drop_after(path, run.resumed_step or 0)
        self._file = AppendOnlyFile(path, CURE)

    def write(self, events: Sequence[RunEvent]) -> None:
        self._file.append(b"".join(map(line, events)))

    def close(self, normal: bool) -> None:
        self._file.close()


def line(event: RunEvent) -> bytes:
    """Return ``event`` as a line of JSON in bytes, including the newline."""
    seconds, ns = divmod(event.time_ns, 1_000_000_000)
    time = datetime.fromtimestamp(seconds, UTC).replace(microsecond=ns // 1000)
    content: dict[str, Any] = {
        "time": time.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "time_ns": event.time_ns,
        "kind": event.kind,
        "step": event.step,
        "values": {key: _plain(value) for key, value in event.values.items()},
    }
    row = json.dumps(content, separators=(",", ":"), allow_nan=False)
    lists = [f"{json.dumps(key)}:{_list(values)}" for key, values in event.ranks.items() if len(values) <= MOST_RANKS]
    if lists:
        row = f'{row[:-1]},"ranks":{{{",".join(lists)}}}}}'
    return row.encode() + b"\n"


def _plain(value: Any) -> float | int | str | None:
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _list(values: np.ndarray) -> str:
    if np.isfinite(values).all():
        return f"[{','.join(['%.9g'] * len(values))}]" % tuple(values.tolist())
    return json.dumps([_plain(float(f"{value:.9g}")) for value in values.tolist()], separators=(",", ":"))


def drop_after(path: Path, last_step: int) -> None:
    """Remove incomplete lines and lines of steps after ``last_step`` from ``path``. Atomic. Raises StorageError."""
    try:
        with open(regular.open_regular(path), "rb") as file:
            if all(_stays(row, last_step) for row in _rows(file)):
                return
            file.seek(0)
            with atomic.replacing(path, mode=0o644) as shortened:
                shortened.writelines(row for row in _rows(file) if _stays(row, last_step))
    except ValueError as error:
        _set_aside(path, str(error))
    except OSError as error:
        raise StorageError(
            f"lines of steps after {last_step} cannot be removed from {path}: {error.strerror or error}; {CURE}"
        ) from error


def _set_aside(path: Path, reason: str) -> None:
    aside = atomic.set_aside(path)
    now = "" if aside is None else f"; the file is now {aside.name}"
    print(f"hpcdist: {path} cannot be read ({reason}){now}", file=sys.stderr, flush=True)


def _rows(file: BinaryIO) -> Iterator[bytes]:
    while row := file.readline(MOST_LINE_BYTES):
        if len(row) == MOST_LINE_BYTES:
            raise ValueError(f"a line has at least {MOST_LINE_BYTES} bytes; lines must be shorter than this limit")
        yield row


def _stays(row: bytes, step: int) -> bool:
    head = _HEAD.match(row)
    return head is not None and row.endswith(b"}\n") and int(head[1]) <= step
