"""End of a process: functions to call, exit codes and texts of errors, and detection of an uncaught SystemExit."""

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final, NoReturn

from hpcdist.errors import (
    FAILURE,
    INTERRUPTED,
    ConfigurationError,
    DataError,
    HpcdistError,
    MissingCapabilityError,
    NonFiniteError,
    StorageError,
    TooFewRanksError,
    UsageError,
)

# The message of these errors is complete: a traceback would only hide it.
USER_ERRORS: Final = (
    ConfigurationError,
    DataError,
    MissingCapabilityError,
    NonFiniteError,
    StorageError,
    TooFewRanksError,
    UsageError,
)
MEMORY_CURE: Final = (
    "`hpcdist plan` estimates the memory of each rank; use a smaller model, fewer ranks per node or more nodes"
)


def at_exit(function: Callable[..., object], *arguments: object) -> None:
    """Call ``function(*arguments)`` at the normal end of this process, but not of a forked child. Local."""
    atexit.register(_call_in, os.getpid(), function, *arguments)


_settles: Final[list[Callable[[], object]]] = []


def before_finalize(function: Callable[[], object]) -> None:
    """Register ``function`` to be called before MPI_Finalize, and again at the end of the process. Local."""
    _settles.append(function)
    at_exit(function)


def settle() -> None:
    """Call all functions registered by `before_finalize`. Use this before MPI_Finalize. Local."""
    for function in _settles:
        function()


def _call_in(pid: int, function: Callable[..., object], *arguments: object) -> None:
    if os.getpid() == pid:
        function(*arguments)


def error_lines(error: BaseException) -> list[str]:
    """Return a list of texts to print for ``error``: only the message of a user error, else the traceback."""
    if isinstance(error, USER_ERRORS):
        return [f"{type(error).__name__}: {error}"]
    if isinstance(error, MemoryError):
        return [f"out of memory: {error}; {MEMORY_CURE}" if str(error) else f"out of memory; {MEMORY_CURE}"]
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        return [error.code, "\n", *traceback.format_exception(error)]
    if isinstance(error, Exit) and error.__traceback__ is None:  # the interpreter has dropped the traceback
        return [f"SystemExit: {error.code}{error.site}"]
    lines = traceback.format_exception(error)
    if "ERR_TRUNCATE" in lines[-1]:
        lines.append("buffers of two ranks differ in size: HPCDIST_CHECK_COLLECTIVES=1 names the ranks and lines\n")
    return lines


def error_summary(error: BaseException, thread: str | None) -> str:
    """Return a one-line summary of ``error``: the exception, the innermost line of its traceback, and ``thread``."""
    frames = traceback.extract_tb(error.__traceback__)
    where = getattr(error, "site", "")
    if frames:
        where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})"
    what = " ".join("".join(traceback.format_exception_only(error)).split())
    return what.removeprefix("hpcdist.errors.") + where + (f" in thread {thread}" if thread else "")


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends with ``error``, or 0 for a successful SystemExit."""
    if isinstance(error, SystemExit):
        code = error.code
        return 0 if code is None else code & 0xFF if isinstance(code, int) else FAILURE
    if isinstance(error, HpcdistError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILURE


class AgreedExit(SystemExit):
    """SystemExit with a code on which all ranks agreed. Raised after MPI_Finalize, so that no rank needs to abort."""


class Exit(SystemExit):
    """SystemExit raised by the `sys.exit` of hpcdist. Before it ends the process, it calls the function ``at_end``."""

    site = ""  # call site of `sys.exit`
    at_end: Callable[["Exit"], None]

    @property
    def code(self) -> Any:
        """The argument of `sys.exit`. If the interpreter reads this property to end the process, call ``at_end``."""
        code = _code_of.__get__(self)
        try:
            sys._getframe(1)
        except ValueError:  # no Python frame above: the main thread is at its end
            self.at_end(self)
        return code

    @code.setter
    def code(self, code: Any) -> None:
        _code_of.__set__(self, code)

    def __reduce__(self) -> Any:
        return SystemExit, self.args


_code_of: Final[Any] = SystemExit.__dict__["code"]
for _name in ("__module__", "__qualname__", "__name__"):  # tracebacks print these
    setattr(Exit, _name, getattr(SystemExit, _name))


def exit_function(at_end: Callable[[Exit], None]) -> Callable[..., NoReturn]:
    """Return a function to replace `sys.exit`. It raises `Exit`, and ``at_end`` is called if no code catches `Exit`."""

    def exit(status: Any = None, /) -> NoReturn:  # noqa: A001 (as tracebacks show it)
        error = Exit(*status) if isinstance(status, tuple) else Exit() if status is None else Exit(status)
        code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
        error.at_end, error.site = at_end, f" at {code.co_filename}:{line} ({code.co_name})"
        raise error

    return exit
