"""Directory of checkpoints: names, atomic commit, retention, and removal of old checkpoints.

``step-N.tmp`` is being written. ``step-N`` is complete. ``step-N.replaced`` is an old ``step-N`` while a new
checkpoint replaces it. ``step-N.abandoned`` is later than the step from which the run was resumed.
"""

import math
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcdist.checkpoint import manifest
from hpcdist.errors import StorageError
from hpcdist.reporting import atomic

VAL_LOSS: Final = "val_loss"  # among the scalars of a checkpoint
LATEST: Final = "latest"
_NAME: Final = re.compile(r"step-(\d+)(\.tmp|\.replaced)?")


@dataclass(frozen=True)
class Retention:
    """Rule for the checkpoints to keep: the newest, some at regular steps, and some with the lowest losses."""

    last: int = 2  # number of newest checkpoints to keep
    every_steps: int = 0  # also keep the first checkpoint at or after each multiple of this number of steps (0: none)
    best: int = 0  # also keep this number of checkpoints with the lowest validation loss

    def __post_init__(self) -> None:
        assert self.last >= 1, f"Retention.last must be at least 1, got {self.last}"
        assert self.every_steps >= 0 and self.best >= 0

    def kept(self, losses: Mapping[int, float]) -> set[int]:
        """Return the set of steps to keep. ``losses``: {saved step: validation loss, or NaN if unknown}."""
        steps = sorted(losses)
        stay = set(steps[-self.last :])
        if self.every_steps:
            first = {step // self.every_steps: step for step in reversed(steps)}
            stay |= {step for stretch, step in first.items() if stretch}
        with_loss = [step for step in steps if not math.isnan(losses[step])]
        # Of equal losses the later checkpoint wins: it has more training.
        return stay | set(sorted(with_loss, key=lambda step: (losses[step], -step))[: self.best])


def loss_of(path: Path) -> float:
    """Return the validation loss stored in the checkpoint at ``path``, or NaN if the loss cannot be read. Local."""
    try:
        loss = manifest.load(path).scalars.get(VAL_LOSS)
        return float(loss) if isinstance(loss, int | float) else math.nan
    except (StorageError, OverflowError):
        return math.nan


def candidates(directory: Path) -> list[tuple[int, Path]]:
    """Return a list of (step, path) of all ``step-N``, ``step-N.replaced`` and ``step-N.tmp``, highest step first."""
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
    """Remove old ``.tmp`` directories. Create ``step-N.tmp`` with subdirectories ``inside``. Raises OSError."""
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
    """Write the manifest ``text`` and rename ``step-N.tmp`` to ``step-N``. Return the new path. Raises OSError.

    ``keep``: number of newest checkpoints to keep, or a `Retention`. Other checkpoints are removed.
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
    _prune(directory, step, keep if isinstance(keep, Retention) else Retention(keep))
    return final


def replace(path: Path, text: str) -> None:
    """Atomically replace the content of the file ``path`` by ``text``, and sync the file to disk. Raises OSError."""
    atomic.write(path, text, durable=True)


def _prune(directory: Path, step: int, keep: Retention) -> None:
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
    # The run was resumed from an earlier step, so this checkpoint must not count as its newest. The user may want it.
    aside = path.with_name(f"{path.name.split('.')[0]}.abandoned")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    print(f"hpcdist: the run was resumed from a step before {path}; renamed it to {aside.name}", file=sys.stderr)


def remove(path: Path) -> None:
    """Remove the checkpoint directory ``path``. Raises OSError."""
    # A directory with a final name must always be complete, so rename it first.
    doomed = path if path.suffix == ".tmp" else path.with_name(f"{path.name.split('.')[0]}.tmp")
    path.rename(doomed)
    shutil.rmtree(doomed)
