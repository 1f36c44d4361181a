"""Fail-fast: a rank that fails ends the job, with its exit code, and its traceback is shown first.

`comm.start` installs this. Python alone would end the failing process while the others wait in a collective for ever,
and MPI's own default prints its error over the traceback. Errors whose message is complete (`USER_ERRORS`) are shown
without a traceback. A failure that all ranks share is shown once.
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
from hpcdist.errors import (
    FAILURE,
    INTERRUPTED,
    REQUEUE,
    CommunicationError,
    DeadlineError,
)
from hpcdist.reporting import atomic

if TYPE_CHECKING:  # late at run time: --help is instant
    from hpcdist.comm.record.flight_recorder import Recorder

FAILURE_DIR: Final = "HPCDIST_FAILURE_DIR"  # set by `hpcdist run`, which shows the first failure last
PRECEDENCE_S: Final = 3.0  # head start of the rank that failed first, which asks the others whether they failed alike
GIVE_WAY_S: Final = 3.0  # head start of rank 0 before the job has begun: ranks start within seconds of each other
DRAIN_S: Final = 0.2  # launchers forward stderr through pipes, and drop their content at an abort
READ_S: Final = 5.0  # for a launcher on a busy machine to read the pipe
ABORT_S: Final = 3.0  # after this the process leaves by itself, whatever the MPI library is doing
EXIT_S: Final = 10.0  # for ranks that leave by `sys.exit` together: one may have more to do before
TITLE_BYTES: Final = 63  # of a communicator's name in Open MPI; MPICH takes twice as many
STDERR: Final = 2  # the descriptor: sys.stderr may be an object without one


@dataclass
class _Installed:
    abort: Callable[[int], None]
    rank: int
    hooks: tuple[Any, Any, Any]
    failing: threading.Lock
    title: Callable[[str], None] | None
    end_label: Callable[[], None]  # of `_label_stacks`
    all_agree: Callable[..., bool] | None = None
    withdraw: Callable[[], None] | None = None
    is_survivable: Callable[[BaseException], bool] | None = None
    limit: threading.Timer | None = None
    recorder: "Recorder | None" = None


_installed: _Installed | None = None  # one per process, as sys.excepthook is


def install(abort: Callable[[int], None], rank: int, title: Callable[[str], None] | None = None) -> None:
    """End the job through ``abort(code)`` when an exception of any thread of this process is not caught (local).

    ``title(text)`` comes before it, with at most TITLE_BYTES: what MPI is to show in its message about the abort.
    """
    global _installed
    hooks = (sys.excepthook, threading.excepthook, sys.exit) if _installed is None else _installed.hooks
    if _installed is not None:
        _installed.end_label()
    _installed = _Installed(abort, rank, hooks, threading.Lock(), title, _label_stacks(rank))
    sys.excepthook, sys.exit = _on_exception, exits.exit_function(_leave_together_or_fail)
    threading.excepthook = _on_thread_exception
    if not faulthandler.is_enabled():
        faulthandler.enable(STDERR, all_threads=True)
    answer_requests_for_stacks()


def set_rank(rank: int) -> None:
    """Report failures as ``rank`` from now on; forgets the agreement until `set_agreement` (local)."""
    assert _installed is not None, "install comes first"
    _installed.end_label()
    _installed.rank, _installed.all_agree, _installed.withdraw = rank, None, None
    _installed.end_label = _label_stacks(rank)


def is_installed() -> bool:
    """Whether `install` was called (local)."""
    return _installed is not None


def answer_requests_for_stacks() -> None:
    """Dump all stacks at a SIGUSR2, and go on (local)."""
    # C level: also answered while the main thread is inside the MPI library, where a Python handler would wait.
    faulthandler.register(signal.SIGUSR2, STDERR, all_threads=True)


def _label_stacks(rank: int) -> Callable[[], None]:
    """Name ``rank`` and host in each dump of all stacks, until the function that is returned is called (local).

    A dump is written in C, by a handler of signals that takes no text. It shows the file name of each frame: so a
    thread waits in code of that name.
    """
    end = threading.Event()
    code = compile("wait()", f"<rank {rank} on {socket.gethostname()}, process {os.getpid()}>", "exec")
    threading.Thread(target=exec, args=(code, {"wait": end.wait}), name="label of stacks", daemon=True).start()
    return end.set


def uninstall() -> None:
    """Restore the hooks that `install` replaced, and leave the signal for stacks (local)."""
    if _installed is not None:
        _installed.end_label()
        faulthandler.unregister(signal.SIGUSR2)
        _restore()


def _restore() -> None:
    """Restore the hooks of Python. A forked child does so at once, since it is not a rank (local)."""
    global _installed
    if _installed is not None:
        sys.excepthook, threading.excepthook, sys.exit = _installed.hooks
        atexit.unregister(note_end)
        _installed = None


os.register_at_fork(after_in_child=_restore)


def set_agreement(all_agree: Callable[..., bool], withdraw: Callable[[], None]) -> None:
    """Report an exception once if all ranks raise it alike; let none leave by `sys.exit` alone (local).

    ``all_agree(text)`` is collective: whether all ranks fail with ``text``, within the seconds of a second argument. If
    so, each calls ``withdraw`` and leaves.
    """
    assert _installed is not None, "install comes first"
    _installed.all_agree, _installed.withdraw = all_agree, withdraw


def set_survivable(is_survivable: Callable[[BaseException], bool]) -> None:
    """Let threads end silently by an error that ``is_survivable``, and leave without finalising MPI (local).

    For jobs with ULFM: the main thread meets the same rank failure, and recovers or fails for all threads.
    """
    assert _installed is not None, "install comes first"
    _installed.is_survivable = is_survivable


def set_recovery_limit(limit_s: float | None) -> None:
    """End the job as a failure unless this is called again within ``limit_s`` seconds; None: no limit (local).

    For recovery from a rank failure, in which no operation has a deadline: a job whose survivors do not come together
    should be started again. Does nothing without `install`.
    """
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
    fail(DeadlineError(f"a rank died, and the others did not go on within {limit_s:g} s; start the job again"))


def attach(recorder: "Recorder") -> None:
    """Write the end of this process into ``recorder``, as its note "raised" or "finished" (local)."""
    assert _installed is not None, "install comes first"
    _installed.recorder = recorder
    atexit.register(note_end)  # runs before MPI_Finalize, which may wait for the others


def is_recording() -> bool:
    """Whether the operations of this process are recorded (local)."""
    return _installed is not None and _installed.recorder is not None


def detach() -> None:
    """Undo `attach` (local)."""
    if _installed is not None:
        _installed.recorder = None
        atexit.unregister(note_end)


def note_end() -> None:
    """Note in the recorder that this process ends normally (local)."""
    if _installed is not None and _installed.recorder is not None:
        _installed.recorder.note("finished", "end of the program")


def guarded(main: Callable[[], int | None]) -> int:
    """Return the exit code of ``main()``; a non-zero code, or any exception, ends the whole job here (local).

    A SystemExit reaches no excepthook, so the entry point of a job calls its main function through this. Codes that all
    ranks agreed on pass: see `agreed_exit`. Without `install` exceptions pass to the caller.
    """
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
    """Leave together if all ranks raised the same ``error``, which rank 0 reports; return if not."""
    if state.all_agree is None or state.withdraw is None or not isinstance(error, Exception) or _is_symptom(error):
        return
    text, code = "".join(error_lines(error)), exit_code(error)
    # An agreement with a time limit: a rank that has failed cannot know whether the others will ever ask as well. The
    # timer ends this process if the messages themselves do not return.
    _leave_by(time.monotonic() + PRECEDENCE_S + GIVE_WAY_S + READ_S + DRAIN_S + ABORT_S, code)
    try:
        if not state.all_agree(text):
            return
    except Exception:  # noqa: BLE001 - messages fail as well: then this rank reports for itself
        return
    if state.recorder is not None:
        state.recorder.note("raised", error_summary(error, None))
    if state.rank == 0:
        publish(0, f"every rank failed alike: exit code {code}", text, alone=True)
    state.withdraw()
    _release_frames(error)
    agreed_exit(code)


def _release_frames(error: BaseException) -> None:
    """Release the local variables in the tracebacks of ``error`` and of its causes (local).

    The error lives until the process ends. libhdf5 crashes at its own end if a virtual dataset is still referred to.
    """
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def _leave_together_or_fail(leaving: Exit) -> None:
    """Return where all ranks end by the exit code of ``leaving``, within EXIT_S seconds; else end the job with it.

    Those that stop before their last step have agreed on that, and one may still save while the others leave.
    """
    state, code = _installed, exit_code(leaving)
    if state is None or state.all_agree is None or code in (0, REQUEUE, INTERRUPTED):
        return
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_finalized():
        return  # which all ranks have done
    with suppress(Exception):  # messages fail as well
        if state.all_agree(f"exit code {code}", EXIT_S):
            return
    fail(leaving, headline=f"rank {state.rank} ended with exit code {code} while others go on")


def _leave_by(limit: float, code: int) -> None:
    """Leave with ``code`` when the process still runs at ``limit``, in monotonic seconds."""
    # os._exit from a thread: no atexit hook, no MPI_Finalize and no lock of the main thread can delay it.
    timer = threading.Timer(max(0.0, limit - time.monotonic()), os._exit, (code,))
    timer.daemon = True
    with suppress(RuntimeError):  # no new thread can be started: that may be what failed
        timer.start()


def agreed_exit(code: int) -> NoReturn:
    """Leave with ``code`` without an abort: every rank does the same, after MPI_Finalize (see `Session.leave`).

    In a job that outlives rank failures MPI is not finalised, but the end of Python would do it, and hang: so the
    process ends here.
    """
    exit_file.write_exit_code(code)
    if _installed is not None and _installed.is_survivable is not None:
        os._exit(code)
    raise AgreedExit(code)


def fail(error: BaseException, thread: str | None = None, headline: str = "") -> NoReturn:
    """Report ``error`` for this rank and end the job with its exit code; the first failing thread wins (local)."""
    assert _installed is not None, "install comes first"
    state = _installed
    state.failing.acquire()  # never released: the process ends here
    code = exit_code(error) or FAILURE
    # A failure in the report, or an abort that waits for a lock of the failed thread, must not keep the process alive.
    _leave_by(time.monotonic() + GIVE_WAY_S + READ_S + DRAIN_S + ABORT_S, code)
    try:
        copy = _report(state, error, code, thread, headline)
        if copy and state.title is not None:
            # Launchers drop what is in their pipes at an abort, but not MPI's message about it.
            with suppress(Exception):
                state.title(f"see {copy}" if len(copy) <= TITLE_BYTES - 4 else f"see ...{copy[7 - TITLE_BYTES :]}")
        time.sleep(DRAIN_S)
        # Before the abort: after it a launcher may wait for ever, or return the code of a rank that it killed.
        exit_file.write_exit_code(code)
        _release_frames(error)  # MPICH ends an aborted job by exit(), which runs libhdf5's end
        state.abort(code)
    except BaseException:  # noqa: BLE001 - whatever it was, the job must end, with the code of the first error
        traceback.print_exc()
    os._exit(code)


def _is_symptom(error: BaseException) -> bool:
    """Return True if ``error`` is most often caused by the failure of another rank (local)."""
    return isinstance(error, CommunicationError) or type(error).__module__.startswith("mpi4py")


def _report(state: _Installed, error: BaseException, code: int, thread: str | None, headline: str) -> str:
    """Publish ``error``; return the path of its copy, as `publish` does."""
    # Before the job has begun the ranks cannot agree, and most likely all have the same error of the user.
    launched = state.all_agree is None and environment.launch_environment() is not None
    alike = launched and isinstance(error, USER_ERRORS)
    if alike and state.rank:
        time.sleep(GIVE_WAY_S)  # once rank 0 has reported it and left, the launcher ends this one
    elif _is_symptom(error):
        time.sleep(PRECEDENCE_S)  # most often caused by another rank's failure, which is to be reported first
    where = f"rank {state.rank}" + (f", thread {thread}" if thread else "")
    if state.recorder is not None:
        state.recorder.note("raised", error_summary(error, thread))
    headline = headline or f"{where} failed: exit code {code}"
    # `hpcdist run` shows each text at its end. A job that goes on without this rank shows it at once.
    return publish(state.rank, headline, "".join(error_lines(error)), alone=alike or state.is_survivable is None)


def publish(rank: int, headline: str, text: str, *, alone: bool = False) -> str:
    """Write ``text``, tagged with the rank, to a file that `hpcdist run` shows last, and in one piece to stderr.

    With ``alone`` a text left for `hpcdist run` is not written to stderr as well. Other
    launchers may drop stderr: for them the text is first kept in a file, whose path is returned (else ""), and this
    waits up to READ_S seconds until the pipe has been read.
    """
    rule = "=" * 100
    tagged = "".join(f"[rank {rank}] {line}\n" for line in [rule, headline, *text.rstrip("\n").split("\n"), rule])
    tagged = tagged.encode(errors="backslashreplace").decode()  # a file's name may be no text
    left = False
    try:
        left = write_for_launcher(rank, tagged)
        if left and alone:
            return ""
    except OSError as error:
        tagged += f"[rank {rank}] (no copy for the launcher: {error})\n"
    launched = not left and environment.launch_environment() is not None
    copy = ""
    if launched:
        try:
            copy = _keep_text(rank, tagged)
            tagged += f"[rank {rank}] (a copy is in {copy})\n"
        except OSError as error:
            tagged += f"[rank {rank}] (no copy in a file: {error})\n"
    until = time.monotonic() + READ_S
    # In a thread: nobody may read a full pipe, and the job must still end.
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
    with suppress(OSError, ValueError):  # closed, or its reader is gone
        sys.stdout.flush()
        sys.stderr.flush()
        # The excepthook of torch.distributed collects what others write in a buffer that this process never reads.
        stream = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
        assert stream is not None
        stream.write(text)
        stream.flush()


def _keep_text(rank: int, text: str) -> str:
    """Write ``text`` to a file, beside the recorder's if there is one, and return its path. Raises OSError."""
    recorder = _installed.recorder if _installed is not None else None
    if recorder is None:
        file, path = tempfile.mkstemp(prefix=f"hpcdist-rank-{rank}-failed-", suffix=".txt")
        with os.fdopen(file, "w") as copy:
            copy.write(text)
        return path
    beside = recorder.path.with_suffix(".failed")
    atomic.write(beside, text)
    return str(beside)


def _unread() -> int:
    """Return the number of unread bytes in the pipe that is this process's stderr; 0 where it is no pipe."""
    try:
        if stat.S_ISFIFO(os.fstat(STDERR).st_mode):
            unread: int = struct.unpack("i", fcntl.ioctl(STDERR, termios.FIONREAD, b"\0" * 4))[0]
            return unread
    except OSError:
        pass  # it is closed, and nobody will read it
    return 0


def write_for_launcher(rank: int, text: str) -> bool:
    """Write ``text`` for `hpcdist run` to show last; False where that is not the launcher. Raises OSError (local)."""
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
