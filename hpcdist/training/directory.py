"""The run directory: one directory, one recipe, one run."""

import os
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hpcdist.checkpoint.restore import newest
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError, HpcdistError, StorageError, UsageError
from hpcdist.training import recipe as recipes
from hpcdist.training.metrics import METRICS_FILE
from hpcdist.training.recipe import Recipe

RECIPE_FILE = "recipe.toml"


@dataclass(frozen=True)
class RunDirectory:
    """Where a run keeps everything, and the checkpoint it goes on from (None: it starts)."""

    path: Path
    resume_from: Path | None


def prepare(comm: Communicator, recipe: Recipe, out: Path | None, resume: str) -> RunDirectory:
    """Create or reopen the run directory. Collective; rank 0 looks and decides, and all raise the same error.

    ``resume`` is "auto" (go on from the newest valid checkpoint, or start where there is none) or "never". Raises
    ConfigurationError when the directory holds another run, UsageError when it holds this one and ``resume`` is
    "never", StorageError when it cannot be created.
    """
    verdict: RunDirectory | HpcdistError | None = None
    if comm.rank == 0:
        try:
            verdict = _prepare(recipe, out, resume)
        except HpcdistError as error:
            verdict = error
        except OSError as error:
            verdict = StorageError(f"the run directory {out} cannot be created: {error}; choose another with --out")
    verdict = comm.broadcast_object(verdict)
    if isinstance(verdict, HpcdistError):
        raise verdict
    assert verdict is not None
    return verdict


def _prepare(recipe: Recipe, out: Path | None, resume: str) -> RunDirectory:
    path = out or _fresh(recipe.parallel.strategy)
    stored = path / RECIPE_FILE
    if stored.exists() and _begun(path):
        difference = _difference(stored, recipe)
        if difference:
            raise ConfigurationError(
                f"{path} holds another run: {difference}; choose another --out, or run it with its own {RECIPE_FILE}"
            )
        if resume == "never":
            raise UsageError(
                f"{path} holds this run already; add --resume auto to go on with it, or choose another --out"
            )
        return RunDirectory(path, newest(path))
    if path.exists() and not path.is_dir():
        raise StorageError(f"{path} is a file; --out must name a directory")
    if path.is_dir() and not stored.exists() and any(path.iterdir()):
        raise ConfigurationError(f"{path} is not empty and holds no run of hpcdist; choose another --out")
    path.mkdir(parents=True, exist_ok=True)
    temporary = stored.with_suffix(".tmp")
    temporary.write_text(recipes.dump(recipe))
    os.replace(temporary, stored)
    return RunDirectory(path, None)


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


def _difference(stored: Path, recipe: Recipe) -> str:
    """Return the keys in which the stored recipe differs, with both values; empty when it is the same run."""
    try:
        before = _flat(tomllib.loads(stored.read_text()))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise StorageError(f"{stored} cannot be read: {error}") from error
    now = _flat(tomllib.loads(recipes.dump(recipe)))
    keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    shown = ", ".join(f"{key} = {before.get(key)!r} there, {now.get(key)!r} now" for key in keys[:3])
    return shown + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
