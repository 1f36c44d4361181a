"""How a failure is told: to people, and in one line to the record."""

import traceback
from typing import Final

from hpcdist.errors import (
    ConfigurationError,
    DataError,
    MissingCapabilityError,
    NonFiniteError,
    StorageError,
    TooFewRanksError,
    UsageError,
)

# The message says it all: where in our code it was raised would only hide it.
FOR_THE_USER: Final = (
    ConfigurationError,
    DataError,
    MissingCapabilityError,
    NonFiniteError,
    StorageError,
    TooFewRanksError,
    UsageError,
)


def lines(error: BaseException) -> list[str]:
    """Return what is shown of ``error``: its message where that says it all, else its traceback."""
    if isinstance(error, FOR_THE_USER):
        return [f"{type(error).__name__}: {error}"]
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        return [error.code, "\n", *traceback.format_exception(error)]
    return traceback.format_exception(error)


def summary(error: BaseException, thread: str | None) -> str:
    """Return the exception and its innermost line in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""
    what = " ".join("".join(traceback.format_exception_only(error)).split())
    return what.removeprefix("hpcdist.errors.") + where + (f" in thread {thread}" if thread else "")
