"""Exit code of a job, written to a file by its ranks, and the signals that end it before its first step.

Open MPI's mpirun returns 0 when it has lost a node. With ULFM it returns 0 when all ranks were killed, 1 when some were
and the others ended well, and may hang in the finalisation of the survivors. So the ranks write the exit code that they
have agreed on into the directory of `hpcdist run`, which trusts that file.

A start may take a minute before its first step: imports, MPI, compilation of kernels. During that time a signal to stop
ends the process at once, with the exit code for a requeue, since there is nothing to save.
"""

import os
import shutil
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

LAUNCH_DIR: Final = "HPCDIST_LAUNCH_DIR"  # directory of this start; each rank also writes its process id there
SURVIVE: Final = "HPCDIST_SURVIVE"  # "shrink" or "replace": the ranks go on after a rank failure
SPARES: Final = "HPCDIST_SPARES"  # how many of them wait to replace one
COMMAND: Final = "HPCDIST_COMMAND"  # the command line of `hpcdist run`, as for a shell, with `--` before a script
TERMINAL_COLUMNS: Final = "HPCDIST_TERMINAL_COLUMNS"  # the width of its terminal, where its stderr is one
SURVIVE_MODES: Final = ("shrink", "replace")
EXIT_FILE: Final = "ended"
RUN_FILE: Final = "run"
STOPPED_FILE: Final = "stopped"
NOTHING_TO_SAVE: Final = "at-once-"  # and the process id: mark of a rank that has nothing to save
SEGMENTS: Final = "segments-"  # and the process id: names of the shared memory that the rank's MPI has mapped
SHARED_MEMORY: Final = Path("/dev/shm")
SEGMENT_DIRECTORY: Final = "hpcdist-shm-"  # how the name of a directory for the segments of one job begins
# Of Open MPI 5 and 4, and MPICH
_SEGMENT_NAMES: Final = ("sm_segment.", "vader_segment.", "mpich_shm_", SEGMENT_DIRECTORY)
STOP_CODES: Final = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: REQUEUE,
    signal.SIGHUP: REQUEUE,
    signal.SIGUSR1: REQUEUE,
}
LEAVING_S: Final = 1.0  # for closing files, on a file system that may not respond

_starting = False  # before the first step: set by `leave_at_signals`, reset by `disable_leave_at_signals`


def write_exit_code(code: int) -> None:
    """Write the exit ``code`` of the job for `hpcdist run`; the last action of a rank (local).

    Every rank should call: the directory exists only on the host of the launcher, and it is not known which ranks run
    there. All write the same, unless one fails while the others leave: then the first counts.
    """
    folder = os.environ.get(LAUNCH_DIR)
    if folder:
        path = Path(folder) / EXIT_FILE
        with suppress(OSError):  # on another host the directory does not exist
            own = atomic.temporary_path(path)  # a hard link to a complete file: appears whole, and only the first wins
            atomic.write(own, str(code))
            with suppress(FileExistsError):
                os.link(own, path)
            own.unlink()


def read_exit_code(folder: Path) -> int | None:
    """Return the exit code that the ranks have written, None where there is none (yet)."""
    try:
        return int(regular.text(folder / EXIT_FILE, 64))
    except (OSError, ValueError):
        return None


def announce_segments() -> None:
    """Write the names of files in /dev/shm that this process's MPI has mapped, for `hpcdist run` (local).

    A launcher that is killed does not remove them, and afterwards their owner is unknown.
    """
    folder = os.environ.get(LAUNCH_DIR)
    if folder:
        with suppress(OSError):  # on another host the directory does not exist
            lines = Path("/proc/self/maps").read_text().splitlines()
            segments = {path for line in lines if is_segment(path := Path(line.rpartition(" ")[2]))}
            (Path(folder) / f"{SEGMENTS}{os.getpid()}").write_text("".join(f"{path}\n" for path in sorted(segments)))


def is_segment(path: Path) -> bool:
    """Whether ``path`` has the name of shared memory of an MPI library, or of a directory of it."""
    return path.parent == SHARED_MEMORY and path.name.startswith(_SEGMENT_NAMES)


def remove_segments(launch_dir: Path) -> None:
    """Remove the MPI shared memory that ranks have named in ``launch_dir``: a killed launcher leaves it behind."""
    for path in launch_dir.glob(f"{SEGMENTS}*"):
        with suppress(OSError, ValueError):
            for segment in map(Path, path.read_text().splitlines()):
                with suppress(OSError):  # most have been removed already
                    if is_segment(segment) and segment.lstat().st_uid == os.getuid():
                        shutil.rmtree(segment) if segment.is_dir() else segment.unlink()


def leave_at_signals() -> None:
    """End this process at a signal to stop, with its code of STOP_CODES, until `disable_leave_at_signals`.

    Main thread only. For the imports at the start of a program: needs the standard library only. A signal that is
    ignored, or has a handler already, is left as it is.
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
    """Disable the handlers of `leave_at_signals`: from here on the training handles signals (local)."""
    global _starting
    _starting = False


def ignore_signals() -> None:
    """Ignore the signals to stop while Python shuts down: the exit code is decided (main thread only)."""
    for number in STOP_CODES:
        signal.signal(number, signal.SIG_IGN)


class ImmediateExit:
    """End of this process at the first signal to stop, wherever its main thread waits, while it is ``on`` (local).

    A handler in Python runs only when the main thread is back from MPI or from a compiler. The interpreter's C handler
    writes a byte to a pipe at once (set_wakeup_fd), which wakes a thread here. (C code that holds the GIL, as MPI_Init
    does, delays that thread, too; `hpcdist run` then ends the process: a mark file says that there is nothing to save.)
    """

    def __init__(self) -> None:
        self.on = False
        self._callbacks: list[Callable[[], object]] = []
        self._pipe: tuple[int, int] | None = None
        self._before = -1

    @property
    def started(self) -> bool:
        """Whether it has been switched on before."""
        return self._pipe is not None

    def before(self, callback: Callable[[], object]) -> None:
        """Register a ``callback`` to call before leaving, e.g. to close files. Its exceptions are ignored."""
        self._callbacks.append(callback)

    def switch(self, on: bool) -> None:
        """Switch on or off (the first time: main thread only)."""
        if on and self._pipe is None:
            self._start()
        if on is not self.on:
            self.on = on
            self._mark(on)

    def close(self) -> None:
        """Switch off for good and end the thread (main thread only)."""
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
        # A forked child that gets a signal would otherwise write to this pipe, and end this process.
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
        """Make or remove the mark file by which `hpcdist run` knows that there is nothing to save."""
        folder = os.environ.get(LAUNCH_DIR)
        if folder:
            path = Path(folder) / f"{NOTHING_TO_SAVE}{os.getpid()}"
            with suppress(OSError):  # on another host the directory does not exist
                path.touch() if on else path.unlink(missing_ok=True)


def announce_run(run_dir: Path) -> None:
    """Write the run directory for `hpcdist run` (local, rank 0)."""
    _write_note(RUN_FILE, str(run_dir))


def announce_completion(how_to_go_on: str) -> bool:
    """Announce to `hpcdist run` the regular end of a training, and how to resume it if it was stopped (rank 0).

    Returns whether that was written: `hpcdist run` shows it after all output of the launcher.
    """
    return _write_note(STOPPED_FILE, how_to_go_on) and _write_note(RUN_FILE, "")


def _write_note(name: str, text: str) -> bool:
    folder = os.environ.get(LAUNCH_DIR)
    with suppress(OSError):  # on another host the directory does not exist
        if folder:
            (Path(folder) / name).write_bytes(os.fsencode(text))  # a path may be no valid UTF-8
            return True
    return False


def read_announcements(folder: Path) -> tuple[str, str]:
    """Return the run directory of a training without a regular end, and how to resume a stopped one; "" for none."""
    texts = ["", ""]
    for place, name in enumerate((RUN_FILE, STOPPED_FILE)):
        with suppress(OSError, ValueError):
            texts[place] = os.fsdecode((folder / name).read_bytes())
    return texts[0], texts[1]


def resume_command(command: Sequence[str], run_dir: Path | None = None, *, script: bool = False) -> list[str]:
    """Return the training ``command`` as one that resumes, in ``run_dir`` where it names no directory.

    The options are those behind `train`, or for a ``script``, which follows `--`, those of `hpcdist run`.
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
