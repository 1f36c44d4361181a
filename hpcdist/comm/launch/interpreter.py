"""Spell the Python of the ranks, the launcher's further options, and the path to hpcdist.

Used by `hpcdist run`, `submit` and `bench` for the command lines of ranks. Light: no MPI.
"""

import os
import shlex
import sys
import sysconfig
from pathlib import Path

import hpcdist
from hpcdist.errors import UsageError


def launcher_options(text: str) -> list[str]:
    """Return the options in ``text``, which is quoted as for a shell. Raises UsageError."""
    return _split_words("--mpi-args", text, "-x NAME")


def _split_words(option: str, text: str, example: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {error}; quote it as for a shell, e.g. {option} '{example}'") from error


def interpreter_words(python: str | None) -> list[str]:
    """Return what runs Python on the ranks: this one, or the words of ``python``. Raises UsageError."""
    chosen = [sys.executable] if python is None else _split_words("--python", python, "apptainer exec my.sif python3")
    if not chosen:
        raise UsageError("--python is empty; name what runs Python on the ranks, e.g. --python /local/env/bin/python")
    return chosen


def source_folder() -> str | None:
    """Return the folder that holds hpcdist, be it a clone; None where this Python finds it by itself."""
    home = str(Path(hpcdist.__file__).resolve().parents[1])
    installed = {str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("purelib", "platlib")}
    return None if home in installed else home


def python_path_variables() -> dict[str, str]:
    """Return what the ranks need to import the same hpcdist as this process."""
    home, rest = source_folder(), os.environ.get("PYTHONPATH")
    if home is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join([home, rest] if rest else [home])}
