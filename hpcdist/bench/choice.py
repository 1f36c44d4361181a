"""One trial of a sweep: by its place in the file, its id or its name."""

import difflib
import re
from collections.abc import Sequence
from typing import Any, Final

from hpcdist.arrays.sizes import counted
from hpcdist.bench.sweep import Sweep, Trial
from hpcdist.errors import UsageError

_INTEGER: Final = re.compile(r"[+-]?\d+", re.ASCII)


def position(trials: Sequence[Trial], text: str, place: str) -> int:
    """Return where the trial that ``text`` names stands in ``trials``, counted from 0; ``place`` is their sweep file.

    A number that is such a place is one, whatever a trial is called. Raises UsageError, with the nearest, for none, and
    for the name of several.
    """
    number = int(text) if _INTEGER.fullmatch(text) else None
    if number is not None and 0 <= number < len(trials):
        return number
    found = [at for at, trial in enumerate(trials) if text in (trial.id, trial.name)]
    if len(found) == 1:
        return found[0]
    if found:
        each = ", ".join(f"{at} ({counted(trials[at].ranks, 'rank')})" for at in found)
        raise UsageError(f"--trial {text!r} of {place} is {len(found)} trials: {each}; give a number, or an id")
    last = len(trials) - 1
    if number is not None:
        raise UsageError(
            f"--trial {text}: {place} has {counted(len(trials), 'trial')}, counted from 0 to {last}; the nearest is "
            f"{0 if number < 0 else last}"
        )
    close = difflib.get_close_matches(text, [word for trial in trials for word in (trial.name, trial.id)], 1)
    cure = f"the nearest is {close[0]!r}" if close else f"give a number from 0 to {last}; --list shows them"
    raise UsageError(f"--trial {text!r}: {place} has no trial of this id or name; {cure}")


def listed(trials: Sequence[Trial], sweep: Sweep) -> list[dict[str, Any]]:
    """Return what each trial is, in the order of the file, in values that JSON has."""
    return [
        {"index": at, "id": trial.id, "name": trial.name, "ranks": trial.ranks, "repeats": sweep.repeats}
        for at, trial in enumerate(trials)
    ]


def text(rows: Sequence[dict[str, Any]]) -> str:
    """Return the trials as a table; the name, which may hold spaces, comes last."""
    titles = ("index", "id", "ranks", "repeats", "name")
    cells = [titles, *(tuple(str(row[title]) for title in titles) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(titles) - 1)]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]) for line in cells
    )
