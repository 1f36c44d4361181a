"""Run directory: one directory, one recipe, one run.

Rank 0 creates or reopens it, refuses the recipe of another run, takes the lock, keeps earlier recipes under names of
their own (recipe-1.toml, ...), and names the checkpoint that the run goes on from. All ranks raise the same error.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hpcdist.batch.ledger import FILE_NAME as JOBS_FILE
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint.lock import LOCK_FILE, RunLock
from hpcdist.checkpoint.restoring.restore import newest_complete, on_first_rank
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError, StorageError, UsageError
from hpcdist.reporting import atomic, regular
from hpcdist.telemetry.metrics.step_metrics import METRICS_FILE
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.recipe import Recipe
from hpcdist.training.run.stop_requests import STOP_FILE

RECIPE_FILE = "recipe.toml"

# Scripts of jobs and their recipes, also one that is half written (of `batch.submission`).
_JOB_FILE: Final = re.compile(r"\.?job(?:(?:-\d+)?\.(?:sbatch|pbs|sh)|-[0-9a-f]{8}\.toml)(?:\..+)?", re.ASCII)


@dataclass(frozen=True)
class RunDirectory:
    """Directory of a run, and the checkpoint it goes on from (None: it starts).

    ``changed`` lists the operational keys in which the recipe differs from that of the last start, and ``steps_before``
    is the run.steps of that start (None: there was none).
    """

    path: Path
    resume_from: Path | None
    changed: str = ""
    steps_before: int | None = None


def prepare_run_directory(
    comm: Communicator, recipe: Recipe, out: Path | None, resume: str, lock: RunLock | None = None
) -> RunDirectory:
    """Create or reopen the run directory. Collective; rank 0 decides, and all raise the same error.

    ``resume`` is "auto" (go on from the newest valid checkpoint, or start where there is none) or "never". Raises
    ConfigurationError when the directory holds another run, UsageError when it holds this one and ``resume`` is
    "never", StorageError when it cannot be created, when it has checkpoints of which none is valid, or when another job
    holds its lock: rank 0 takes ``lock``.
    """

    def prepare() -> RunDirectory:
        try:
            return _prepare(recipe, out, resume, lock)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"the run directory {out} cannot be created: {error}; choose another with --out"
            ) from error

    return on_first_rank(comm, prepare)


def _prepare(recipe: Recipe, out: Path | None, resume: str, lock: RunLock | None) -> RunDirectory:
    path = out or _new_default_path(recipe.parallel.strategy)
    stored = path / RECIPE_FILE
    if (path / STOP_FILE).is_dir():
        raise StorageError(
            f"{path / STOP_FILE} is a directory; a file of this name stops a run: move the directory away"
        )
    if stored.exists() and _has_begun(path):
        before = recipes.load_stored(stored)
        keys = recipes.differences(before, recipe)
        other = recipes.contradictions(before, recipe)
        if other:
            raise ConfigurationError(
                f"{path} holds another run: {_listed(other)}; choose another --out, or run it with its own "
                f"{RECIPE_FILE}{recipes.init_from_hint(path, other)}"
            )
        if resume == "never":
            raise UsageError(
                f"{path} holds this run already; add --resume auto (a script: resume='auto') to go on with it, or "
                "choose another --out"
            )
        if lock is not None:
            lock.take(path)
        atomic.sweep(path)
        if keys:
            _archive_recipe(stored)
            names.replace(stored, recipes.dump(recipe))
        checkpoint = newest_complete(path)  # the restore reads and verifies its bytes
        if checkpoint is None:
            refuse_restart_over_checkpoints(path)
        return RunDirectory(path, checkpoint, _listed(list(keys.values())), before.run.steps)
    if path.exists() and not path.is_dir():
        raise StorageError(f"{path} is a file; --out must name a directory")
    if path.is_dir() and not stored.exists() and not _has_only_start_files(path):
        raise ConfigurationError(f"{path} is not empty and holds no run of hpcdist; choose another --out")
    path.mkdir(parents=True, exist_ok=True)
    if lock is not None:
        lock.take(path)
    names.replace(stored, recipes.dump(recipe))
    return RunDirectory(path, None)


def refuse_restart_over_checkpoints(path: Path) -> None:
    """Raise StorageError where a checkpoint was complete once: a run that began again would replace it in time."""
    complete = [checkpoint for _, checkpoint in names.candidates(path / "checkpoints") if checkpoint.suffix != ".tmp"]
    if complete:
        raise StorageError(
            f"{path} has checkpoints, and none of them can be used, as told above; begin a new run with another --out, "
            f"perhaps with what can be read of one (--init-from {complete[0]} --allow-partial), or move "
            f"{path / 'checkpoints'} away to begin this one again"
        )


def _archive_recipe(stored: Path) -> None:
    """Copy the recipe of the starts so far to a name of its own: recipe-1.toml, recipe-2.toml, ..."""
    number = 1
    while (archive := stored.with_stem(f"{stored.stem}-{number}")).exists():
        number += 1
    names.replace(archive, regular.text(stored))


def _has_begun(path: Path) -> bool:
    """Whether a run got as far as its first row or checkpoint; a start that failed before leaves nothing to keep."""
    return (path / METRICS_FILE).exists() or (path / "checkpoints").exists()


def _has_only_start_files(path: Path) -> bool:
    """Whether all files are those of a batch job, of `hpcdist.init`, or of a start killed before its recipe."""
    left = [entry.name for entry in path.iterdir() if not _JOB_FILE.fullmatch(entry.name)]
    return all(
        name.removeprefix(".").startswith((LOCK_FILE, RECIPE_FILE)) or name in (JOBS_FILE, STOP_FILE, "recorder")
        for name in left
    )


def _new_default_path(strategy: str) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    path, number = Path("runs") / f"{stamp}-{strategy}", 1
    while path.exists():  # another run of the same second
        number += 1
        path = Path("runs") / f"{stamp}-{strategy}-{number}"
    return path


def _listed(texts: list[str]) -> str:
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
