"""Standard output and standard error, guarded so that their failure does not end a training.

A full disk or a reader that has left (`| head -1`) makes every print raise.
"""

import errno
import io
import os
import re
import select
import sys
from contextlib import suppress
from threading import Thread
from typing import Any, Final

_NUMBERS: Final = {"stdout": 1, "stderr": 2}
_CHUNK_BYTES: Final = 1 << 16
_LINE: Final = rb"-{20,}\n"
# Open MPI's notices about a rank that ended with an exit code or called MPI_Abort. Group 1 or 2 is the exit code.
_NOTICE: Final = re.compile(
    _LINE + rb"(?:prterun detected that one or more processes exited with non-zero status,\n"
    rb"thus causing the job to be terminated\. The first process to do so was:\n\n"
    rb" +Process name: \[[^\n]*\]\n +Exit code: +(\d+)\n"
    rb"|MPI_ABORT was invoked on rank [^\n]*\n +Proc: [^\n]*\n +Errorcode: (\d+)\n\nNOTE: (?:[^-\n][^\n]*\n){3}"
    rb"|prterun has exited due to process rank \d+ [^\n]* calling\n\"abort\"\.(?:[^\n]+\n){2})" + _LINE
)
_BEGINNING: Final = re.compile(
    rb"(?:" + _LINE + rb"(?:pr?|prt.{0,500}|MP?|MPI.{0,700})?|-+)\Z", re.DOTALL
)  # the beginning of a notice at the end of a text
_NOTICE_BYTES: Final = 900  # at most
_REST_S: Final = 0.5  # limit for the rest of a notice to arrive


class _Descriptor(io.FileIO):
    def __init__(self, number: int, closed_before: bool) -> None:
        super().__init__(number, "wb", closefd=False)
        self.lossy, self.failure, self._closed_before = False, None, closed_before

    lossy: bool
    failure: OSError | None  # the last write error

    def write(self, data: Any, /) -> int:
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
    """Drop data that cannot be written to stderr, without an error. Open descriptors 0 to 2 if they are closed."""
    closed = _open_closed()
    for name, number in _NUMBERS.items():
        stream = getattr(sys, name)
        if stream is None or (stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper)):
            _descriptors[name] = _Descriptor(number, number in closed)
            setattr(sys, name, _stream(_descriptors[name], stream))
    if "stderr" in _descriptors:
        _descriptors["stderr"].lossy = True


def tolerate() -> None:
    """Drop data if writing to stdout or stderr fails, instead of raising an error. Local."""
    protect()
    for descriptor in _descriptors.values():
        descriptor.lossy = True


def failure() -> OSError | None:
    """Return the last error of writing to standard output, or None if all writes succeeded. Local."""
    return _descriptors["stdout"].failure if "stdout" in _descriptors else None


def _open_closed() -> set[int]:
    closed = set()
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            closed.add(number)
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest free descriptor: this one
    return closed


def _stream(descriptor: _Descriptor, before: io.TextIOWrapper | None) -> io.TextIOWrapper:
    if before is None:
        return io.TextIOWrapper(io.BufferedWriter(descriptor), "utf-8", "backslashreplace", line_buffering=True)
    with suppress(OSError, ValueError):
        before.flush()
    direct = before.write_through  # python -u
    return io.TextIOWrapper(
        descriptor if direct else io.BufferedWriter(descriptor),
        before.encoding,
        "surrogateescape" if before.errors == "strict" and before.encoding == "utf-8" else before.errors,
        line_buffering=before.line_buffering,
        write_through=direct,
    )


class Relay:
    """Forwarder of a child's stdout and stderr. It holds back notices of Open MPI about ended ranks until `release`."""

    def __init__(self) -> None:
        protect()
        ours = [1] if os.path.sameopenfile(1, 2) else [1, 2]
        pipes = [os.pipe() for _ in ours]
        self.stdout, self.stderr = pipes[0][1], pipes[-1][1]
        self._held: list[tuple[int, int | None, bytes]] = []  # descriptor, exit code if named, text of each notice
        # NUL bytes are removed from stderr, and from stdout if both streams go to one file.
        self._threads = [
            Thread(target=self._pass_on, args=(source, number, number == 2 or len(ours) == 1), daemon=True)
            for (source, _), number in zip(pipes, ours, strict=True)
        ]

    def begin(self) -> None:
        """Start forwarding. Call this after the child has inherited the write ends of the pipes."""
        for end in {self.stdout, self.stderr}:
            os.close(end)
        for thread in self._threads:
            thread.start()

    @property
    def ended(self) -> bool:
        """True if the forwarding is complete: all processes have closed the pipes, and all output is printed."""
        return not any(thread.is_alive() for thread in self._threads)

    def release(self, expected: int | None) -> None:
        """Print the notices that were held back, except notices with the exit code ``expected``. None: print all."""
        held, self._held = self._held, []
        for number, code, text in held:
            if expected is None or code not in (expected, None):
                _write(number, text)

    def _pass_on(self, source: int, number: int, is_text: bool) -> None:
        kept, ended = b"", False
        while not ended:
            late = bool(kept) and not select.select([source], [], [], _REST_S)[0]
            chunk = b"" if late else os.read(source, _CHUNK_BYTES)
            ended = not (chunk or late)
            if is_text:
                chunk = kept + chunk.replace(b"\0", b"")
                self._held += [(number, _exit_code(notice), notice[0]) for notice in _NOTICE.finditer(chunk)]
                chunk = _NOTICE.sub(b"", chunk)
                begun = None if late or ended else _BEGINNING.search(chunk, max(0, len(chunk) - _NOTICE_BYTES))
                chunk, kept = (chunk[: begun.start()], chunk[begun.start() :]) if begun else (chunk, b"")
            _write(number, chunk)
        os.close(source)


def _exit_code(notice: re.Match[bytes]) -> int | None:
    code = notice[1] or notice[2]
    return int(code) if code else None


def _write(number: int, data: bytes) -> None:
    left = memoryview(data)
    with suppress(OSError):
        while left:
            left = left[os.write(number, left) :]
