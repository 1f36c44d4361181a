"""Asking a scheduler by its own commands: what all of them have in common."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from hpcdist.errors import MissingCapabilityError

LIMIT_S: Final = 120.0  # a busy controller answers late


class Answer(NamedTuple):
    """What a command said: its exit code, its output as it is, and its errors for people."""

    code: int
    said: str
    complaint: str


def ask(
    line: Sequence[str],
    absent: str,
    cure: str,
    script: str = "",
    limit_s: float = LIMIT_S,
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """Run ``line`` with ``script`` as its input and return what it says, whatever its exit code (local).

    It has the variables of this process, or ``environment`` in their place.

    Raises MissingCapabilityError: ``absent`` where there is no such program on PATH; and, with ``cure``, where it does
    not run, or does not answer within ``limit_s``.
    """
    program = shutil.which(line[0])
    if program is None:
        raise MissingCapabilityError(absent)
    try:
        done = subprocess.run(
            [program, *line[1:]],
            input=os.fsencode(script),
            capture_output=True,
            env=environment,
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingCapabilityError(f"{program} did not run ({error}); {cure}") from error
    complaint = done.stderr.decode(errors="replace").strip()
    return Answer(done.returncode, done.stdout.decode(errors="replace"), complaint)
