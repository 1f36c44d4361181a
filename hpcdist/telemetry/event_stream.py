"""Event stream of a run on rank 0, the protocol of its sinks, and the append-only file of sinks.

A failing sink is reported once and retried with the next events. It does not end the training.
"""

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from hpcdist.errors import StorageError
from hpcdist.telemetry import provenance
from hpcdist.telemetry.metrics.observations import RunEvent

PENDING_BYTES: Final = 4 << 20  # largest amount of pieces kept for a full disk
_PROBE: Final = b" " * 4096


class AppendOnlyFile:
    """File to which one thread appends records. Records that could not be written are kept for the next `append`."""

    # ``cure``: advice in the errors. ``header``: start of an empty file. At most `PENDING_BYTES` of records are kept.
    def __init__(self, path: Path, cure: str, header: bytes = b"") -> None:
        self.path, self._cure, self._header = path, cure, header
        self._pending: list[bytes] = []
        self._descriptor = -1
        try:
            self._open()
            if not header:
                self._write(_PROBE)
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - len(_PROBE))
        except OSError as error:
            self.close()
            raise self._failure(error) from error

    def _open(self) -> None:
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o644)
        if self._header and os.fstat(self._descriptor).st_size == 0:
            self._write(self._header)

    def append(self, record: bytes) -> None:
        """Append the bytes ``record`` with one write(2) call, so that readers rarely see an incomplete record."""
        self._pending.append(record)
        while len(self._pending) > 1 and sum(map(len, self._pending)) > PENDING_BYTES:
            del self._pending[0]
        try:
            if self._descriptor < 0 or os.fstat(self._descriptor).st_nlink == 0:  # the file was removed
                self._open()
            self._write(b"".join(self._pending))
        except OSError as error:
            raise self._failure(error) from error
        self._pending.clear()

    def _write(self, data: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        written = os.write(self._descriptor, data)
        if written < len(data):  # the disk or the quota is full: remove the partial piece
            os.ftruncate(self._descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _failure(self, error: OSError) -> StorageError:
        return StorageError(f"{self.path} cannot be written: {error.strerror or error}; {self._cure}")

    def close(self) -> None:
        """Close the file. A later `append` opens it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True)
class RunInfo:
    """Identity of a run. ``resumed_step``: step of the restored checkpoint, or None. ``owner``: see `job_owner`."""

    name: str
    directory: Path
    jobid: str
    world: int
    nodes: int
    strategy: str
    resumed_step: int | None = None
    started_ns: int = field(default_factory=time.time_ns)
    owner: Mapping[str, str] = field(default_factory=dict)
    is_part: bool = False  # other ranks of the job may make other runs


def run_info(
    directory: Path, world: int, nodes: int, strategy: str, resumed_step: int | None, is_part: bool = False
) -> RunInfo:
    """Return the identity of the run in ``directory``, with the number and owner of its job. Local.

    ``is_part``: True if the run has only a part of the job's ranks.
    """
    number, owner = provenance.job_number(), provenance.job_owner()
    return RunInfo(
        directory.name, directory, number, world, nodes, strategy, resumed_step, owner=owner, is_part=is_part
    )


class StreamSink(Protocol):
    """Protocol of a sink, to which a run writes events. The constructor raises an error if the sink cannot work."""

    name: str

    def write(self, events: Sequence[RunEvent]) -> None:
        """Write ``events`` to the sink. After an exception, ``events`` may be lost."""
        ...

    def close(self, normal: bool) -> None:
        """Close the sink. ``normal``: True if the run ended without an error."""
        ...


class EventStream:
    """Stream that passes events to ``sinks``, and calls ``warn`` with a text when a sink fails or works again."""

    def __init__(self, sinks: Sequence[StreamSink], warn: Callable[[str], None]) -> None:
        self.sinks = tuple(sinks)
        self._warn = warn
        self._failing: set[str] = set()

    def publish(self, events: Sequence[RunEvent]) -> None:
        """Pass ``events`` to every sink. Errors of sinks are reported to ``warn``, and not raised."""
        if not events:
            return
        for sink in self.sinks:
            self._try(sink, lambda sink=sink: sink.write(events))  # type: ignore[misc]

    def close(self, normal: bool) -> None:
        for sink in self.sinks:
            self._try(sink, lambda sink=sink: sink.close(normal))  # type: ignore[misc]

    def _try(self, sink: StreamSink, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the run continues after any error of a sink
            if sink.name not in self._failing:
                self._failing.add(sink.name)
                self._warn(f"{sink.name}: {error}; the run goes on, and it is tried again with what comes next")
            return
        if sink.name in self._failing:
            self._failing.discard(sink.name)
            self._warn(f"{sink.name}: works again")
