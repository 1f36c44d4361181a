"""Exit code of a job, written to a file by its ranks, and the signals that end it before it has begun.

Open MPI's mpirun returns 0 when it has lost a node. With user-level fault tolerance it returns 0 when all ranks were
killed, 1 when some were and the others ended well, and may wait for ever in the finalisation of the survivors. So the
ranks write the exit code they agreed on into the directory of `hpcdist run`, which believes that file.

A start may take a minute before its first step: imports, MPI, kernels to compile. A signal to stop ends the process
there and then, with the exit code for "start me again", since nothing was done that could be lost.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

from hpcdist.errors import INTERRUPTED, REQUEUE
from hpcdist.reporting import atomic, regular

LAUNCH_DIR: Final = "HPCDIST_LAUNCH_DIR"  # of this start; where each rank also writes its process id
SURVIVE: Final = "HPCDIST_SURVIVE"  # "shrink" or "replace": the ranks go on after a death
SPARES: Final = "HPCDIST_SPARES"  # how many of them wait to replace one
COMMAND: Final = "HPCDIST_COMMAND"  # the command line of `hpcdist run`, as for a shell, with `--` before a script
TERMINAL_COLUMNS: Final = "HPCDIST_TERMINAL_COLUMNS"  # the width of its terminal, where its stderr is one
SURVIVE_MODES: Final = ("shrink", "replace")
EXIT_FILE: Final = "ended"
RUN_FILE: Final = "run"
STOPPED_FILE: Final = "stopped"
NOTHING_TO_SAVE: Final = "at-once-"  # with its process id: the file of a rank that has nothing to save
SEGMENTS: Final = "segments-"  # with its process id: the shared memory that the MPI of a rank has made or mapped
_SEGMENT_NAMES: Final = ("sm_segment.", "vader_segment.", "mpich_shm_")  # of Open MPI 5 and 4, and MPICH
STOP_CODES: Final = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: REQUEUE,
    signal.SIGHUP: REQUEUE,
    signal.SIGUSR1: REQUEUE,
}
LEAVING_S: Final = 1.0  # for files that are let go, on a file system that may not answer

_starting = False  # nothing was begun: set by `leave_at_signals`, and by `stay`


def write_exit_code(code: int) -> None:
    """Tell `hpcdist run` that the job ends with ``code``; the last thing a rank does (local).

    Every rank should call: which of them lives on the host of the launcher, where the directory is, is not known. All
    say the same, unless one fails while the others leave: whoever speaks first is believed.
    """
    folder = os.environ.get(LAUNCH_DIR)
    if folder:
        path = Path(folder) / EXIT_FILE
        with suppress(OSError):  # on another host the directory does not exist
            own = atomic.temporary_path(path)
            atomic.write(own, str(code))
            with suppress(FileExistsError):
                os.link(own, path)
            own.unlink()


def read_exit_code(folder: Path) -> int | None:
    """Return the code that the ranks have said, None where they have not (yet)."""
    try:
        return int(regular.text(folder / EXIT_FILE, 64))
    except (OSError, ValueError):
        return None


def announce_segments() -> None:
    """Tell `hpcdist run` which files in /dev/shm this process's MPI has mapped (local).

    A launcher that is killed does not remove them, and nobody else knows whose they are.
    """
    folder = os.environ.get(LAUNCH_DIR)
    if folder:
        with suppress(OSError):  # on another host the directory does not exist
            lines = Path("/proc/self/maps").read_text().splitlines()
            found = {path for line in lines if is_segment(path := Path(line.rpartition(" ")[2]))}
            (Path(folder) / f"{SEGMENTS}{os.getpid()}").write_text("".join(f"{path}\n" for path in sorted(found)))


def is_segment(path: Path) -> bool:
    """Whether ``path`` is the name of shared memory that MPI libraries make."""
    return path.parent == Path("/dev/shm") and path.name.startswith(_SEGMENT_NAMES)


def leave_at_signals() -> None:
    """End this process at a signal to stop, with its code of STOP_CODES, until `stay` (main thread only).

    For the imports at the start of a program: nothing but the standard library is needed. A signal that is ignored, or
    has a handler already, keeps it.
    """
    global _starting
    _starting = True
    for number in STOP_CODES:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _starting:
        code = STOP_CODES[signal.Signals(number)]
        write_exit_code(code)
        os._exit(code)


def disable_leave_at_signals() -> None:
    """Let the handlers of `leave_at_signals` do nothing from here on: somebody else decides how this ends (local)."""
    global _starting
    _starting = False


def ignore_signals() -> None:
    """Ignore the signals to stop: the exit code is settled, and the end of Python takes a moment (main thread only)."""
    for number in STOP_CODES:
        signal.signal(number, signal.SIG_IGN)


class ImmediateExit:
    """End of this process at the first signal to stop, whatever its main thread waits in, while it is `on` (local).

    A handler in Python runs once the main thread is back from MPI or from a compiler. The interpreter's own handler
    writes a byte at once, which wakes a thread here. (Code that keeps the interpreter's lock keeps that thread waiting,
    too, as MPI_Init does; `hpcdist run` then ends the process: it knows by a file that there is nothing to save.)
    """

    def __init__(self) -> None:
        self.on = False
        self._callbacks: list[Callable[[], object]] = []
        self._pipe: tuple[int, int] | None = None
        self._before = -1

    @property
    def started(self) -> bool:
        """Whether it was on, and may be again."""
        return self._pipe is not None

    def before(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` before leaving: it lets go of files that others look at. What it raises is not told."""
        self._callbacks.append(callback)

    def switch(self, on: bool) -> None:
        """Leave at once from here on, or no longer (the first time: main thread only)."""
        if on and self._pipe is None:
            self._start()
        if on is not self.on:
            self.on = on
            self._mark(on)

    def close(self) -> None:
        """Stop looking at signals (main thread only)."""
        self.switch(False)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._before)
            os.close(self._pipe[1])  # which ends the thread
            self._thread.join(LEAVING_S)
            self._pipe = None

    def _start(self) -> None:
        self._pipe = reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # A child that is forked and told to end would otherwise speak for this process.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        self._thread = threading.Thread(target=self._watch, args=(reader,), name="hpcdist signals", daemon=True)
        self._thread.start()

    def _watch(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if self.on and number in STOP_CODES:
                    self._leave(signal.Signals(number))
        os.close(reader)

    def _leave(self, number: signal.Signals) -> None:
        code = STOP_CODES[number]
        limit = threading.Timer(LEAVING_S, os._exit, (code,))
        limit.daemon = True
        limit.start()
        write_exit_code(code)
        for action in (*self._callbacks, sys.stdout.flush, sys.stderr.flush):
            with suppress(Exception):
                action()
        with suppress(OSError):
            os.write(2, f"hpcdist: {number.name}: nothing to save, exit code {code}\n".encode())
        os._exit(code)

    def _mark(self, on: bool) -> None:
        """Let `hpcdist run` know."""
        folder = os.environ.get(LAUNCH_DIR)
        if folder:
            path = Path(folder) / f"{NOTHING_TO_SAVE}{os.getpid()}"
            with suppress(OSError):  # on another host the directory does not exist
                path.touch() if on else path.unlink(missing_ok=True)


def announce_run(run_dir: Path) -> None:
    """Tell `hpcdist run` in which directory the ranks train (local, rank 0)."""
    _write_note(RUN_FILE, str(run_dir))


def announce_completion(how_to_go_on: str) -> bool:
    """Tell `hpcdist run` that a training has ended as it should, and how it goes on where it was stopped (rank 0).

    Whether it was told: it shows that behind all that its launcher says.
    """
    return _write_note(STOPPED_FILE, how_to_go_on) and _write_note(RUN_FILE, "")


def _write_note(name: str, text: str) -> bool:
    folder = os.environ.get(LAUNCH_DIR)
    with suppress(OSError):  # on another host the directory does not exist
        if folder:
            (Path(folder) / name).write_text(text)
            return True
    return False


def read_announcements(folder: Path) -> tuple[str, str]:
    """Return the directory of a training that ended without a word, and how a stopped one goes on; "" for none."""
    found = ["", ""]
    for place, name in enumerate((RUN_FILE, STOPPED_FILE)):
        with suppress(OSError, ValueError):
            found[place] = (folder / name).read_text()
    return found[0], found[1]


def resume_command(command: Sequence[str], run_dir: Path | None = None, *, script: bool = False) -> list[str]:
    """Return the ``command``, which trains, as one that goes on, in ``run_dir`` where it names no directory.

    The options are those of `train`, behind it, or, of a ``script``, which stands behind `--`, those of `hpcdist run`.
    """
    begin = command.index("run" if script else "train") + 1
    end = command.index("--", begin) if "--" in command[begin:] else len(command)
    options = list(command[begin:end])
    places = [place for place, word in enumerate(options) if word == "--resume" or word.startswith("--resume=")]
    for place in reversed(places):
        del options[place : place + (2 if options[place] == "--resume" else 1)]
    named = any(word == "--out" or word.startswith("--out=") for word in options)
    added = [*([] if named or run_dir is None else ["--out", str(run_dir)]), "--resume", "auto"]
    return [*command[:begin], *(added + options if script else options + added), *command[end:]]
