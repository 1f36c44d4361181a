"""Fail-fast: a failed rank prints its traceback and ends the job with its exit code.

`comm.start` installs it. Without it, the other ranks would wait in a collective for ever.
"""

import atexit
import faulthandler
import fcntl
import io
import math
import os
import signal
import socket
import stat
import struct
import sys
import tempfile
import termios
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from hpcdist.comm.failure import exits
from hpcdist.comm.failure.exits import USER_ERRORS, AgreedExit, Exit, error_lines, error_summary, exit_code
from hpcdist.comm.launch import environment, exit_file
from hpcdist.errors import FAILURE, INTERRUPTED, REQUEUE, CommunicationError, DeadlineError
from hpcdist.reporting import atomic

if TYPE_CHECKING:  # late at run time: --help is instant
    from hpcdist.comm.record.flight_recorder import Recorder

FAILURE_DIR: Final = "HPCDIST_FAILURE_DIR"  # set by `hpcdist run`, which prints the first failure last
PRECEDENCE_S: Final = 3.0  # head start of the first failed rank, which asks the others whether they failed alike
GIVE_WAY_S: Final = 3.0  # head start of rank 0 before the job has begun: ranks start within seconds of each other
DRAIN_S: Final = 0.2  # launchers forward stderr through pipes, and drop the content of the pipes at an abort
READ_S: Final = 5.0  # for a launcher on a busy machine to read the pipe
ABORT_S: Final = 3.0  # afterwards the process exits, even if the MPI library hangs
EXIT_S: Final = 10.0  # for ranks that exit by `sys.exit` together: a rank may have more to do first
TITLE_BYTES: Final = 63  # maximum length of a communicator's name in Open MPI; MPICH allows twice as many
STDERR: Final = 2  # the file descriptor, because sys.stderr may be an object without a descriptor


@dataclass
class _Installed:
    abort: Callable[[int], None]
    rank: int
    hooks: tuple[Any, Any, Any]
    failing: threading.Lock
    set_title: Callable[[str], None] | None  # sets the abort message of MPI
    end_label: Callable[[], None]  # of `_label_stacks`
    all_agree: Callable[..., bool] | None = None
    withdraw: Callable[[], None] | None = None
    is_first: bool = True  # of the ranks that agree
    is_survivable: Callable[[BaseException], bool] | None = None
    limit: threading.Timer | None = None
    recorder: "Recorder | None" = None


_installed: _Installed | None = None  # one per process, as sys.excepthook is


def install(abort: Callable[[int], None], rank: int, set_title: Callable[[str], None] | None = None) -> None:
    """Make uncaught exceptions print a report of rank ``rank``, and end the job by ``abort(exit code)``. Local.

    ``set_title``: function that sets the title of MPI's abort message, or None.
    """
    global _installed
    hooks = (sys.excepthook, threading.excepthook, sys.exit) if _installed is None else _installed.hooks
    if _installed is not None:
        _installed.end_label()
    _installed = _Installed(abort, rank, hooks, threading.Lock(), set_title, _label_stacks(rank))
    sys.excepthook, sys.exit = _on_exception, exits.exit_function(_leave_together_or_fail)
    threading.excepthook = _on_thread_exception
    if not faulthandler.is_enabled():
        faulthandler.enable(STDERR, all_threads=True)
    answer_requests_for_stacks()


def set_rank(rank: int) -> None:
    """Use ``rank`` in later failure reports, and undo `set_agreement`. Local."""
    assert _installed is not None, "install comes first"
    _installed.end_label()
    _installed.rank, _installed.all_agree, _installed.withdraw = rank, None, None
    _installed.end_label = _label_stacks(rank)


def reported_rank(default: int) -> int:
    """Return this process's rank in failure reports, or ``default`` before `install`. Local."""
    return default if _installed is None else _installed.rank


def is_installed() -> bool:
    """Return True if `install` was called. Local."""
    return _installed is not None


def answer_requests_for_stacks() -> None:
    """Install a handler that prints the stacks of all threads at SIGUSR2. The process continues. Local."""
    # In C, so that it also works while the main thread is inside the MPI library, where a Python handler would wait.
    faulthandler.register(signal.SIGUSR2, STDERR, all_threads=True)


def _label_stacks(rank: int) -> Callable[[], None]:
    # Stack dumps show the threads' file names. This thread's file name is the label.
    end = threading.Event()
    code = compile("wait()", f"<rank {rank} on {socket.gethostname()}, process {os.getpid()}>", "exec")
    threading.Thread(target=exec, args=(code, {"wait": end.wait}), name="label of stacks", daemon=True).start()
    return end.set


def uninstall() -> None:
    """Restore the hooks that `install` replaced, and remove the SIGUSR2 handler. Local."""
    if _installed is not None:
        _installed.end_label()
        faulthandler.unregister(signal.SIGUSR2)
        _restore()


def _restore() -> None:
    global _installed
    if _installed is not None:
        sys.excepthook, threading.excepthook, sys.exit = _installed.hooks
        atexit.unregister(note_end)
        _installed = None


os.register_at_fork(after_in_child=_restore)


def set_agreement(
    all_agree: Callable[..., bool], withdraw: Callable[[], None] | None, is_first: bool | None = None
) -> None:
    """Let failing ranks compare their errors by ``all_agree(text)``. If all are equal, ``withdraw()`` leaves MPI.

    ``withdraw`` is None if other ranks of the job do not compare: then the error aborts MPI. ``is_first``: True on the
    rank that prints an error of all ranks; None means rank 0.
    """
    assert _installed is not None, "install comes first"
    # `all_agree` is collective. If all ranks agree, only the first rank prints the error.
    _installed.all_agree, _installed.withdraw = all_agree, withdraw
    _installed.is_first = _installed.rank == 0 if is_first is None else is_first


def set_survivable(is_survivable: Callable[[BaseException], bool]) -> None:
    """Let errors for which ``is_survivable(error)`` is True end only their thread, without output. Local."""
    assert _installed is not None, "install comes first"
    _installed.is_survivable = is_survivable


def set_recovery_limit(limit_s: float | None) -> None:
    """Start a timer that ends the job after ``limit_s`` seconds. Cancel the previous timer. None: start no timer."""
    if _installed is None:
        return
    if _installed.limit is not None:
        _installed.limit.cancel()
    _installed.limit = None
    if limit_s is not None and math.isfinite(limit_s):
        _installed.limit = threading.Timer(limit_s, _recovery_timed_out, (limit_s,))
        _installed.limit.daemon = True
        _installed.limit.start()


def _recovery_timed_out(limit_s: float) -> None:
    faulthandler.dump_traceback(STDERR, all_threads=True)
    fail(DeadlineError(f"a rank died, and the others did not continue within {limit_s:g} s; start the job again"))


def attach(recorder: "Recorder") -> None:
    """Record the end of this process in ``recorder``, as a note of type "raised" or "finished". Local."""
    assert _installed is not None, "install comes first"
    _installed.recorder = recorder
    atexit.register(note_end)  # runs before MPI_Finalize, which may wait for other ranks


def is_recording() -> bool:
    """Return True if the operations of this process are recorded. Local."""
    return _installed is not None and _installed.recorder is not None


def detach() -> None:
    """Stop recording the end of this process in the flight recorder: undo `attach`. Local."""
    if _installed is not None:
        _installed.recorder = None
        atexit.unregister(note_end)


def note_end() -> None:
    """Record in the flight recorder that this process ends normally. Local."""
    if _installed is not None and _installed.recorder is not None:
        _installed.recorder.note("finished", "end of the program")


def guarded(main: Callable[[], int | None]) -> int:
    """Call ``main()`` and return its exit code. After `install`, an uncaught error in ``main`` ends the job. Local."""
    try:
        code = main() or 0
        if code and _installed is not None:
            raise SystemExit(code)
        return code
    except AgreedExit:
        raise
    except SystemExit as leaving:
        if _installed is None or exit_code(leaving) == 0:
            raise
        fail(leaving)
    except BaseException as error:
        if _installed is None:
            raise
        _fail_together(_installed, error)
        fail(error)


def _fail_together(state: _Installed, error: BaseException) -> None:
    if state.all_agree is None or not isinstance(error, Exception) or _is_symptom(error):
        return
    text, code = "".join(error_lines(error)), exit_code(error)
    # An agreement with a time limit, because a failed rank cannot know whether the others will ask as well. The timer
    # ends this process if the messages themselves do not return.
    _leave_by(time.monotonic() + PRECEDENCE_S + GIVE_WAY_S + READ_S + DRAIN_S + ABORT_S, code)
    try:
        if not state.all_agree(text):
            return
    except Exception:  # noqa: BLE001 - messages fail as well: this rank reports alone
        return
    if state.withdraw is None:
        if not state.is_first:
            time.sleep(GIVE_WAY_S)  # meanwhile the first rank reports the error and aborts the job
        return
    if state.recorder is not None:
        state.recorder.note("raised", error_summary(error, None))
    # All ranks raised an equal error: rank 0 prints the error, and every rank ends here.
    if state.is_first:
        publish(0, f"every rank failed alike: exit code {code}", text, alone=True)
    state.withdraw()
    _release_frames(error)
    agreed_exit(code)


def _release_frames(error: BaseException) -> None:
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)  # local variables may crash libhdf5 at exit
        link = link.__cause__ or link.__context__


def _leave_together_or_fail(leaving: Exit) -> None:
    state, code = _installed, exit_code(leaving)
    if state is None or state.all_agree is None or code in (0, REQUEUE, INTERRUPTED):
        return
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_finalized():
        return  # all ranks have finalized MPI
    with suppress(Exception):  # messages fail as well
        if state.all_agree(f"exit code {code}", EXIT_S):
            return
    fail(leaving, headline=f"rank {state.rank} ended with exit code {code} while others go on")


def _leave_by(limit: float, code: int) -> None:
    # os._exit from a thread cannot be delayed by atexit hooks, MPI_Finalize or locks of the main thread.
    timer = threading.Timer(max(0.0, limit - time.monotonic()), os._exit, (code,))
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started, which may be the cause of the failure
        timer.start()


def agreed_exit(code: int) -> NoReturn:
    """Exit with ``code`` without aborting MPI. Every rank must call this. Skips MPI_Finalize after `set_survivable`."""
    exit_file.write_exit_code(code)
    if _installed is not None and _installed.is_survivable is not None:
        os._exit(code)
    raise AgreedExit(code)


def fail(error: BaseException, thread: str | None = None, headline: str = "") -> NoReturn:
    """Report ``error``, and end the job with the exit code of ``error``. Local.

    ``thread``: failed thread, or None for the main thread. ``headline``: first line of the report, or "" for a default.
    """
    assert _installed is not None, "install comes first"
    state = _installed
    # If several threads fail, only the first reports its error.
    state.failing.acquire()  # never released: the process ends here
    code = exit_code(error) or FAILURE
    # A failed report, or an abort that waits for a lock of the failed thread, must not keep the process alive.
    _leave_by(time.monotonic() + GIVE_WAY_S + READ_S + DRAIN_S + ABORT_S, code)
    try:
        copy = _report(state, error, code, thread, headline)
        if copy and state.set_title is not None:
            # At an abort, launchers drop the content of their pipes, but not MPI's abort message.
            with suppress(Exception):
                state.set_title(f"see {copy}" if len(copy) <= TITLE_BYTES - 4 else f"see ...{copy[7 - TITLE_BYTES :]}")
        time.sleep(DRAIN_S)
        # Before the abort: afterwards a launcher may wait for ever, or return the code of a rank that it killed.
        exit_file.write_exit_code(code)
        _release_frames(error)  # MPICH ends an aborted job by exit(), which runs the end of libhdf5
        state.abort(code)
    except BaseException:  # noqa: BLE001 - the job must end with the code of the first error
        traceback.print_exc()
    os._exit(code)


def _is_symptom(error: BaseException) -> bool:
    # Such an error usually results from the failure of another rank.
    return isinstance(error, CommunicationError) or type(error).__module__.startswith("mpi4py")


def _report(state: _Installed, error: BaseException, code: int, thread: str | None, headline: str) -> str:
    # Before the job has begun, the ranks cannot agree. Most likely all ranks have the same user error.
    launched = state.all_agree is None and environment.launch_environment() is not None
    alike = launched and isinstance(error, USER_ERRORS)
    if alike and state.rank:
        time.sleep(GIVE_WAY_S)  # meanwhile rank 0 reports the error and exits, and the launcher ends this rank
    elif _is_symptom(error):
        time.sleep(PRECEDENCE_S)  # usually another rank's failure is the cause, and must be reported first
    where = f"rank {state.rank}" + (f", thread {thread}" if thread else "")
    if state.recorder is not None:
        state.recorder.note("raised", error_summary(error, thread))
    headline = headline or f"{where} failed: exit code {code}"
    # `hpcdist run` prints each text at its end. A job that continues without this rank prints the text at once.
    return publish(state.rank, headline, "".join(error_lines(error)), alone=alike or state.is_survivable is None)


def publish(rank: int, headline: str, text: str, *, alone: bool = False) -> str:
    """Print a report of rank ``rank`` to stderr: ``headline``, then ``text``. Local.

    Return the path of a copy of the report, or "".
    """
    rule = "=" * 100
    tagged = "".join(f"[rank {rank}] {line}\n" for line in [rule, headline, *text.rstrip("\n").split("\n"), rule])
    tagged = tagged.encode(errors="backslashreplace").decode()  # a file name may be invalid text
    left = False
    try:
        # Under `hpcdist run`: a file that is printed at the end, and, unless `alone`, stderr.
        left = write_for_launcher(rank, tagged)
        if left and alone:
            return ""
    except OSError as error:
        tagged += f"[rank {rank}] (no copy for the launcher: {error})\n"
    # Under another launcher: stderr and a copy in a file, and a few seconds for the launcher to read.
    launched = not left and environment.launch_environment() is not None
    copy = ""
    if launched:
        try:
            copy = _keep_text(rank, tagged)
            tagged += f"[rank {rank}] (a copy is in {copy})\n"
        except OSError as error:
            tagged += f"[rank {rank}] (no copy in a file: {error})\n"
    until = time.monotonic() + READ_S
    # In a thread: a full pipe may have no reader, and the job must still end.
    writer = threading.Thread(target=_write_streams, args=(tagged,), daemon=True)
    try:
        writer.start()
        writer.join(READ_S)
    except RuntimeError:  # no new thread can be started
        _write_streams(tagged)
    while launched and _unread() and time.monotonic() < until:
        time.sleep(0.02)
    return copy


def _write_streams(text: str) -> None:
    with suppress(OSError, ValueError):  # stderr is closed, or has no reader
        sys.stdout.flush()
        sys.stderr.flush()
        # The excepthook of torch.distributed redirects stderr to a buffer that this process never reads.
        stream = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
        assert stream is not None
        stream.write(text)
        stream.flush()


def _keep_text(rank: int, text: str) -> str:
    recorder = _installed.recorder if _installed is not None else None
    if recorder is None:
        file, path = tempfile.mkstemp(prefix=f"hpcdist-rank-{rank}-failed-", suffix=".txt")
        with os.fdopen(file, "w") as copy:
            copy.write(text)
        return path
    failed_path = recorder.path.with_suffix(".failed")
    atomic.write(failed_path, text)
    return str(failed_path)


def _unread() -> int:
    try:
        if stat.S_ISFIFO(os.fstat(STDERR).st_mode):
            unread: int = struct.unpack("i", fcntl.ioctl(STDERR, termios.FIONREAD, b"\0" * 4))[0]
            return unread
    except OSError:
        pass  # stderr is closed, and nobody will read it
    return 0


def write_for_launcher(rank: int, text: str) -> bool:
    """Save the report ``text`` of failed rank ``rank`` in a file that `hpcdist run` prints. Return True on success."""
    folder = os.environ.get(FAILURE_DIR)
    if not folder:
        return False
    atomic.write(Path(folder) / f"rank-{rank}.txt", text)
    return True


def _on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    error = error.with_traceback(trace)
    if _installed is not None:
        _fail_together(_installed, error)  # its AgreedExit ends Python as if the program had raised it
    fail(error)


def _on_thread_exception(arguments: threading.ExceptHookArgs) -> None:
    error = arguments.exc_value if arguments.exc_value is not None else arguments.exc_type()
    if isinstance(error, SystemExit) and exit_code(error) == 0:
        return  # the usual way to end a thread early
    if _installed is not None and _installed.is_survivable is not None and _installed.is_survivable(error):
        return
    fail(error, arguments.thread.name if arguments.thread is not None else "(gone)")
