"""Exit code of a job, written to a file by its ranks, and the start of a command before the first step.

`hpcdist run` trusts the exit code in this file, because Open MPI's mpirun may return 0 after a failure. Before the
first step, a stop signal exits at once, and garbage collection is rare: imports make hardly any garbage.
"""

import gc
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

from hpcdist.constants import SHARED_MEMORY
from hpcdist.errors import INTERRUPTED, REQUEUE
from hpcdist.reporting import atomic, regular

LAUNCH_DIR: Final = "HPCDIST_LAUNCH_DIR"  # directory of this start; each rank also writes its process id there
SURVIVE: Final = "HPCDIST_SURVIVE"  # "shrink" or "replace": the ranks continue after a rank failure
SPARES: Final = "HPCDIST_SPARES"  # number of ranks that wait to replace failed ranks
COMMAND: Final = "HPCDIST_COMMAND"  # the command line of `hpcdist run`, quoted for a shell, with `--` before a script
TERMINAL_COLUMNS: Final = "HPCDIST_TERMINAL_COLUMNS"  # width of its terminal, if its stderr is a terminal
SURVIVE_MODES: Final = ("shrink", "replace")
EXIT_FILE: Final = "ended"
RUN_FILE: Final = "run"
STOPPED_FILE: Final = "stopped"
NOTHING_TO_SAVE: Final = "at-once-"  # plus the process id: mark of a rank that has nothing to save
SEGMENTS: Final = "segments-"  # plus the process id: names of the shared memory that the rank's MPI has mapped
SEGMENT_DIRECTORY: Final = "hpcdist-shm-"  # prefix of the name of a directory for the segments of one job
# Of Open MPI 5 and 4, and MPICH
_SEGMENT_NAMES: Final = ("sm_segment.", "vader_segment.", "mpich_shm_", SEGMENT_DIRECTORY)
STOP_CODES: Final = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: REQUEUE,
    signal.SIGHUP: REQUEUE,
    signal.SIGUSR1: REQUEUE,
}
LEAVING_S: Final = 1.0  # for closing files on a file system that may not respond

_starting = False  # before the first step: set by `leave_at_signals`, reset by `disable_leave_at_signals`


def write_exit_code(code: int) -> None:
    """Write the job's exit code to a file for `hpcdist run`. The first code wins. Called by every rank. Local."""
    # Ranks on other hosts than `hpcdist run` write nothing. The file keeps only the first code.
    folder = os.environ.get(LAUNCH_DIR)
    if folder:
        path = Path(folder) / EXIT_FILE
        with suppress(OSError):  # on another host the directory does not exist
            complete = atomic.temporary_path(path)  # then a hard link: it appears whole, and only the first succeeds
            atomic.write(complete, str(code))
            with suppress(FileExistsError):
                os.link(complete, path)
            complete.unlink()


def read_exit_code(folder: Path) -> int | None:
    """Return the exit code that a rank has written in ``folder``, or None if no code is written yet."""
    try:
        return int(regular.text(folder / EXIT_FILE, 64))
    except (OSError, ValueError):
        return None


def announce_segments() -> None:
    """Write a list of this process's MPI files in /dev/shm. After a kill, `hpcdist run` removes these files. Local."""
    folder = os.environ.get(LAUNCH_DIR)
    if folder:
        with suppress(OSError):  # on another host the directory does not exist
            lines = Path("/proc/self/maps").read_text().splitlines()
            segments = {path for line in lines if is_segment(path := Path(line.rpartition(" ")[2]))}
            (Path(folder) / f"{SEGMENTS}{os.getpid()}").write_text("".join(f"{path}\n" for path in sorted(segments)))


def is_segment(path: Path) -> bool:
    """Return True if ``path`` is named like an MPI library's shared-memory file or directory."""
    return path.parent == SHARED_MEMORY and path.name.startswith(_SEGMENT_NAMES)


def remove_segments(launch_dir: Path) -> None:
    """Remove the shared-memory files that ranks have listed in ``launch_dir`` and that a killed launcher left."""
    for path in launch_dir.glob(f"{SEGMENTS}*"):
        with suppress(OSError, ValueError):
            for segment in map(Path, path.read_text().splitlines()):
                with suppress(OSError):  # most have been removed already
                    if is_segment(segment) and segment.lstat().st_uid == os.getuid():
                        shutil.rmtree(segment) if segment.is_dir() else segment.unlink()


def leave_at_signals() -> None:
    """Let stop signals end the process, with the exit code that `STOP_CODES` has for the signal. Main thread only."""
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
    """Disable the handlers of `leave_at_signals`, because training handles signals itself. Local."""
    global _starting
    _starting = False


def ignore_signals() -> None:
    """Ignore stop signals, because the exit code is decided. Main thread only."""
    for number in STOP_CODES:
        signal.signal(number, signal.SIG_IGN)


class ImmediateExit:
    """Thread that ends this process at the first stop signal, even if the main thread is blocked in MPI. Local."""

    def __init__(self) -> None:
        # No thread can run inside MPI_Init: there `hpcdist run` kills the process instead.
        self.on = False  # True while the process has nothing to save
        self._callbacks: list[Callable[[], object]] = []
        self._pipe: tuple[int, int] | None = None
        self._before = -1

    @property
    def started(self) -> bool:
        """True if `switch` has been called with True at least once."""
        return self._pipe is not None

    def before(self, callback: Callable[[], object]) -> None:
        """Register ``callback`` to be called before the exit, e.g. to close files. Errors in it are ignored."""
        self._callbacks.append(callback)

    def switch(self, on: bool) -> None:
        """Let the first stop signal end the process if ``on`` is True. The first call must be in the main thread."""
        if on and self._pipe is None:
            self._start()
        if on is not self.on:
            self.on = on
            self._mark(on)

    def close(self) -> None:
        """Stop watching for signals permanently, and end the thread that watches. Main thread only."""
        self.switch(False)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._before)
            os.close(self._pipe[1])  # ends the thread
            self._thread.join(LEAVING_S)
            self._pipe = None

    def _start(self) -> None:
        self._pipe = reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # A forked child that gets a signal would otherwise write to this pipe and end this process.
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
        folder = os.environ.get(LAUNCH_DIR)
        if folder:
            path = Path(folder) / f"{NOTHING_TO_SAVE}{os.getpid()}"
            with suppress(OSError):  # on another host the directory does not exist
                path.touch() if on else path.unlink(missing_ok=True)


def announce_run(run_dir: Path) -> None:
    """Write the path of the run directory to the file that `hpcdist run` reads. Local; call on rank 0."""
    _write_note(RUN_FILE, str(run_dir))


def announce_completion(resume_instructions: str) -> bool:
    """Write a note for `hpcdist run` that training has ended, with instructions to resume. Return True on success."""
    return _write_note(STOPPED_FILE, resume_instructions) and _write_note(RUN_FILE, "")


def _write_note(name: str, text: str) -> bool:
    folder = os.environ.get(LAUNCH_DIR)
    with suppress(OSError):  # on another host the directory does not exist
        if folder:
            (Path(folder) / name).write_bytes(os.fsencode(text))  # a path may be invalid UTF-8
            return True
    return False


def read_announcements(folder: Path) -> tuple[str, str]:
    """Return (run directory, resume instructions), the notes that ranks wrote in ``folder``. A missing note is ""."""
    texts = ["", ""]
    for index, name in enumerate((RUN_FILE, STOPPED_FILE)):
        with suppress(OSError, ValueError):
            texts[index] = os.fsdecode((folder / name).read_bytes())
    return texts[0], texts[1]


def resume_command(command: Sequence[str], run_dir: Path | None = None, *, script: bool = False) -> list[str]:
    """Return the hpcdist ``command`` with `--resume auto`, and with `--out` ``run_dir`` if ``command`` has no --out."""
    # `script`: the command is `hpcdist run`, not `hpcdist train`.
    begin = command.index("run" if script else "train") + 1
    end = command.index("--", begin) if "--" in command[begin:] else len(command)
    options = list(command[begin:end])
    indices = [index for index, word in enumerate(options) if word == "--resume" or word.startswith("--resume=")]
    for index in reversed(indices):
        del options[index : index + (2 if options[index] == "--resume" else 1)]
    named = any(word == "--out" or word.startswith("--out=") for word in options)
    added = [*([] if named or run_dir is None else ["--out", str(run_dir)]), "--resume", "auto"]
    return [*command[:begin], *(added + options if script else options + added), *command[end:]]


SELDOM: Final = (100_000, 20, 20)
USUAL: Final = gc.get_threshold()


def collect_seldom() -> None:
    """Run Python's garbage collection less often, until `collect_as_usual`. Local."""
    gc.set_threshold(*SELDOM)


def collect_as_usual() -> None:
    """Undo `collect_seldom`, unless other code has changed the thresholds. Local."""
    if gc.get_threshold() == SELDOM:
        gc.set_threshold(*USUAL)
