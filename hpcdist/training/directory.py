"""The run directory: one directory, one recipe, one run."""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hpcdist.checkpoint.lock import Lock
from hpcdist.checkpoint.restore import newest
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError, HpcdistError, StorageError, UsageError
from hpcdist.training import recipe as recipes
from hpcdist.training.config import written
from hpcdist.training.metrics import METRICS_FILE
from hpcdist.training.recipe import Recipe

RECIPE_FILE = "recipe.toml"


# What a run is made with, not what it is: a run may go on with other values, in another layout, on other machines.
OPERATIONAL: Final = (
    *("parallel.", "parameter_server.", "zero.", "decentralised.", "communication."),
    *("checkpoint.", "energy.", "chaos."),
)
OPERATIONAL_KEYS: Final = (
    "run.steps",
    "data.shares",
    "run.device",
    "run.logical_shards",
    "run.sentinel_every_steps",
    "run.log_every_s",
)


@dataclass(frozen=True)
class RunDirectory:
    """Where a run keeps everything, and the checkpoint it goes on from (None: it starts).

    ``changed`` tells the operational keys in which the recipe differs from that of the start before.
    """

    path: Path
    resume_from: Path | None
    changed: str = ""


def prepare(
    comm: Communicator, recipe: Recipe, out: Path | None, resume: str, lock: Lock | None = None
) -> RunDirectory:
    """Create or reopen the run directory. Collective; rank 0 looks and decides, and all raise the same error.

    ``resume`` is "auto" (go on from the newest valid checkpoint, or start where there is none) or "never". Raises
    ConfigurationError when the directory holds another run, UsageError when it holds this one and ``resume`` is
    "never", StorageError when it cannot be created, or when another job has it: rank 0 takes ``lock`` for it.
    """
    verdict: RunDirectory | HpcdistError | None = None
    if comm.rank == 0:
        try:
            verdict = _prepare(recipe, out, resume, lock)
        except HpcdistError as error:
            verdict = error
        except OSError as error:
            verdict = StorageError(f"the run directory {out} cannot be created: {error}; choose another with --out")
    verdict = comm.broadcast_object(verdict)
    if isinstance(verdict, HpcdistError):
        raise verdict
    assert verdict is not None
    return verdict


def _prepare(recipe: Recipe, out: Path | None, resume: str, lock: Lock | None) -> RunDirectory:
    path = out or _fresh(recipe.parallel.strategy)
    stored = path / RECIPE_FILE
    if stored.exists() and _begun(path):
        keys = _differences(stored, recipe)
        other = [text for key, text in keys.items() if not operational(key)]
        if other:
            raise ConfigurationError(
                f"{path} holds another run: {_listed(other)}; choose another --out, or run it with its own "
                f"{RECIPE_FILE}"
            )
        if resume == "never":
            raise UsageError(
                f"{path} holds this run already; add --resume auto to go on with it, or choose another --out"
            )
        if lock is not None:
            lock.take(path)
        if keys:
            _keep(stored)
            _write(stored, recipe)
        return RunDirectory(path, newest(path), _listed(list(keys.values())))
    if path.exists() and not path.is_dir():
        raise StorageError(f"{path} is a file; --out must name a directory")
    if path.is_dir() and not stored.exists() and any(path.iterdir()):
        raise ConfigurationError(f"{path} is not empty and holds no run of hpcdist; choose another --out")
    path.mkdir(parents=True, exist_ok=True)
    if lock is not None:
        lock.take(path)
    _write(stored, recipe)
    return RunDirectory(path, None)


def operational(key: str) -> bool:
    """Whether a run may go on with another value of ``key`` (local)."""
    return key.startswith(OPERATIONAL) or key in OPERATIONAL_KEYS


def _write(stored: Path, recipe: Recipe) -> None:
    temporary = stored.with_suffix(".tmp")
    temporary.write_text(recipes.dump(recipe))
    os.replace(temporary, stored)


def _keep(stored: Path) -> None:
    """Give the recipe of the starts so far a name of its own: recipe-1.toml, recipe-2.toml, ..."""
    number = 1
    while (kept := stored.with_stem(f"{stored.stem}-{number}")).exists():
        number += 1
    os.replace(stored, kept)


def _begun(path: Path) -> bool:
    """Whether a run got as far as its first row or checkpoint; a start that failed before leaves nothing to keep."""
    return (path / METRICS_FILE).exists() or (path / "checkpoints").exists()


def _fresh(strategy: str) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    path, number = Path("runs") / f"{stamp}-{strategy}", 1
    while path.exists():  # another run of the same second
        number += 1
        path = Path("runs") / f"{stamp}-{strategy}-{number}"
    return path


def _differences(stored: Path, recipe: Recipe) -> dict[str, str]:
    """Return, for each key in which the stored recipe differs, both values as text; none when it is the same run.

    A recipe of an older version lacks keys: they had their defaults.
    """
    before, now = recipes.flat(recipes.load_stored(stored)), recipes.flat(recipe)
    return {
        key: f"{key} = {written(before[key])} there, {written(value)} now"
        for key, value in now.items()
        if before[key] != value
    }


def _listed(texts: list[str]) -> str:
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
