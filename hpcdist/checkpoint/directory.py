"""Directory of checkpoints: names, the atomic commit, the retention rule, and the removal of old checkpoints.

``step-N.tmp`` is being written, ``step-N`` is complete, ``step-N.replaced`` is the older of two while one takes the
other's place, ``step-N.abandoned`` lies beyond a step from which the run was continued anew.

`Retention` says which checkpoints stay: the newest, one of every so many steps, and those with the lowest validation
loss. It is a function of steps and losses alone, so that the same checkpoints stay on every call.
"""

import math
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcdist.checkpoint.format import manifest
from hpcdist.errors import StorageError
from hpcdist.reporting import atomic

VAL_LOSS: Final = "val_loss"  # among the scalars of a checkpoint
LATEST: Final = "latest"
_NAME: Final = re.compile(r"step-(\d+)(\.tmp|\.replaced)?")


@dataclass(frozen=True)
class Retention:
    """Retention rule: the ``last`` checkpoints stay, and those that ``every_steps`` and ``best`` keep (0: none).

    ``every_steps`` keeps the first checkpoint of each stretch of so many steps that begins at a multiple; where a run
    saves at the multiples, these. ``best`` keeps so many with the lowest validation loss.
    """

    last: int = 2
    every_steps: int = 0
    best: int = 0

    def __post_init__(self) -> None:
        assert self.last >= 1, f"{self.last} checkpoints are kept: one that is thrown away at once saves nothing"
        assert self.every_steps >= 0 and self.best >= 0

    @classmethod
    def of(cls, keep: "int | Retention") -> "Retention":
        """Return the rule that ``keep`` stands for: a number keeps the newest so many (local)."""
        return keep if isinstance(keep, Retention) else cls(keep)

    def kept(self, losses: Mapping[int, float]) -> set[int]:
        """Return the steps that stay of those in ``losses``, which has a NaN where no loss is known (local)."""
        steps = sorted(losses)
        stay = set(steps[-self.last :])
        if self.every_steps:
            first = {step // self.every_steps: step for step in reversed(steps)}
            stay |= {step for stretch, step in first.items() if stretch}
        known = [step for step in steps if not math.isnan(losses[step])]
        # Of equal losses the later: the earlier one is no better and has less behind it.
        return stay | set(sorted(known, key=lambda step: (losses[step], -step))[: self.best])


def loss_of(path: Path) -> float:
    """Return the validation loss that the checkpoint at ``path`` was saved with; NaN where none is known (local)."""
    try:
        loss = manifest.load(path).scalars.get(VAL_LOSS)
        return float(loss) if isinstance(loss, int | float) else math.nan
    except (StorageError, OverflowError):
        return math.nan


def candidates(directory: Path) -> list[tuple[int, Path]]:
    """Return ``(step, path)`` of everything that is or was to become a checkpoint, the most recent first."""
    if not directory.is_dir():
        return []
    preference = ["", ".replaced", ".tmp"]
    ranked = []
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            ranked.append((-int(match[1]), preference.index(match[2] or ""), path))
    return [(-step, path) for step, _, path in sorted(ranked)]


def begin(directory: Path, step: int, inside: Sequence[str] = ()) -> Path:
    """Make the empty ``step-N.tmp``, with the directories ``inside``, and return it. Raises OSError.

    What crashed saves left is removed.
    """
    if not directory.is_dir():
        directory.mkdir(parents=True)
        atomic.sync(directory.parent)
    atomic.sweep(directory, 0.0)
    for _, path in candidates(directory):
        if path.suffix == ".tmp":
            shutil.rmtree(path)
    temporary = directory / f"step-{step}.tmp"
    temporary.mkdir()
    for name in inside:
        (temporary / name).mkdir()
    return temporary


def commit(directory: Path, step: int, text: str, keep: int | Retention) -> Path:
    """Write the manifest ``text``, give ``step-N.tmp`` its name and prune. Raises OSError.

    Until the rename, the previous checkpoint is the newest; from then on, this one is.
    """
    temporary, final = directory / f"step-{step}.tmp", directory / f"step-{step}"
    for inside in temporary.iterdir():
        if inside.is_dir():
            atomic.sync(inside)
    replace(temporary / manifest.FILE_NAME, text)
    replaced = directory / f"step-{step}.replaced"
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    temporary.rename(final)
    atomic.sync(directory)
    replace(directory / LATEST, final.name + "\n")
    _prune(directory, step, Retention.of(keep))
    return final


def replace(path: Path, text: str) -> None:
    """Replace the content of ``path`` by ``text``, atomically and durably. Raises OSError."""
    atomic.write(path, text, durable=True)


def _prune(directory: Path, step: int, keep: Retention) -> None:
    """Remove what ``keep`` does not keep up to ``step``; set aside what lies beyond. Failures go to stderr."""
    directories = candidates(directory)
    complete = [(number, path) for number, path in directories if not path.suffix and number <= step]
    stay = keep.kept({number: loss_of(path) if keep.best else math.nan for number, path in complete})
    for number, path in directories:
        try:
            if not path.suffix and number > step:
                _set_aside(path)
                continue
            if path.suffix or number not in stay:
                remove(path)
        except OSError as error:
            print(f"hpcdist: {path} could not be removed: {error.strerror}", file=sys.stderr)


def _set_aside(path: Path) -> None:
    # The run was continued from an earlier step, so this one must not be taken for its newest; but it may be wanted.
    aside = path.with_name(f"{path.name.split('.')[0]}.abandoned")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    print(f"hpcdist: {path} is from before the run was continued at an earlier step; now {aside.name}", file=sys.stderr)


def remove(path: Path) -> None:
    """Remove what is at ``path``. Raises OSError."""
    # Under its final name a directory is always complete, so it loses that name first.
    doomed = path if path.suffix == ".tmp" else path.with_name(f"{path.name.split('.')[0]}.tmp")
    path.rename(doomed)
    shutil.rmtree(doomed)
