"""Standard output and standard error, guarded so that their failure does not end a training.

A line may be lost, a run never. A disk that is full, a reader that has left (`| head -1`) and a closed descriptor
(`>&-`) make every print raise. `protect` keeps that from standard error, and `tolerate` from standard output too.
Where standard output is the product of a command, its failure stays that of the command, and `failure` tells it from
others. A `Relay` stands between them and a program that would end.
"""

import errno
import io
import os
import sys
from contextlib import suppress
from threading import Thread
from typing import Any, Final

_NUMBERS: Final = {"stdout": 1, "stderr": 2}
_CHUNK_BYTES: Final = 1 << 16


class _Descriptor(io.FileIO):
    """The descriptor ``number``, which was ``closed_before`` or not. What a ``lossy`` one cannot write is lost."""

    def __init__(self, number: int, closed_before: bool) -> None:
        super().__init__(number, "wb", closefd=False)
        self.lossy, self.failure, self._closed_before = False, None, closed_before

    lossy: bool
    failure: OSError | None  # the last one to write

    def write(self, data: Any, /) -> int:
        """Write some of ``data`` and return how much, as files do."""
        try:
            if self._closed_before:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            written: int | None = super().write(data)
            if written is None:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            self.failure = error
            if not self.lossy:
                raise
            return len(data)
        return written


_descriptors: dict[str, _Descriptor] = {}


def protect() -> None:
    """Let standard error lose what it cannot write, and no file take the place of a closed descriptor (local).

    Nothing is done to streams that somebody has replaced.
    """
    closed = _open_closed()
    for name, number in _NUMBERS.items():
        stream = getattr(sys, name)
        if stream is None or (stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper)):
            _descriptors[name] = _Descriptor(number, number in closed)
            setattr(sys, name, _stream(_descriptors[name], stream))
    if "stderr" in _descriptors:
        _descriptors["stderr"].lossy = True


def tolerate() -> None:
    """Let both lose what they cannot write (local)."""
    protect()
    for descriptor in _descriptors.values():
        descriptor.lossy = True


def failure() -> OSError | None:
    """Return the last failure to write standard output, None where there was none (local)."""
    return _descriptors["stdout"].failure if "stdout" in _descriptors else None


def _open_closed() -> set[int]:
    """Open the null device on those of the descriptors 0, 1 and 2 that are closed, and return these."""
    closed = set()
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            closed.add(number)
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest that is free: this one
    return closed


def _stream(descriptor: _Descriptor, before: io.TextIOWrapper | None) -> io.TextIOWrapper:
    """Return a text stream on ``descriptor`` that is otherwise like the one ``before``."""
    if before is None:
        return io.TextIOWrapper(io.BufferedWriter(descriptor), "utf-8", "backslashreplace", line_buffering=True)
    with suppress(OSError, ValueError):
        before.flush()
    direct = before.write_through  # python -u
    return io.TextIOWrapper(
        descriptor if direct else io.BufferedWriter(descriptor),
        before.encoding,
        before.errors,
        line_buffering=before.line_buffering,
        write_through=direct,
    )


class Relay:
    """Passes on what a child writes to its ``stdout`` and ``stderr``, and reads and loses it where ours take no more.

    They are one pipe where ours are one file, so that lines keep their order. NUL bytes, which some help texts of Open
    MPI's prterun end with, make a log binary for grep: they are left out, but for those of a stdout of its own.
    """

    def __init__(self) -> None:
        protect()
        ours = [1] if os.path.sameopenfile(1, 2) else [1, 2]
        pipes = [os.pipe() for _ in ours]
        self.stdout, self.stderr = pipes[0][1], pipes[-1][1]
        self._threads = [
            Thread(target=_pass_on, args=(source, number, number == 2 or len(ours) == 1), daemon=True)
            for (source, _), number in zip(pipes, ours, strict=True)
        ]

    def begin(self) -> None:
        """Pass on from now on; the child has its ends of the pipes."""
        for end in {self.stdout, self.stderr}:
            os.close(end)
        for thread in self._threads:
            thread.start()

    @property
    def ended(self) -> bool:
        """Whether everything is passed on, and nobody has an end of the pipes any more."""
        return not any(thread.is_alive() for thread in self._threads)


def _pass_on(source: int, number: int, is_text: bool) -> None:
    while chunk := os.read(source, _CHUNK_BYTES):
        left = memoryview(chunk.replace(b"\0", b"") if is_text else chunk)
        with suppress(OSError):
            while left:
                left = left[os.write(number, left) :]
    os.close(source)
