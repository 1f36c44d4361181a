"""Run directory: one directory, one recipe, one run. Earlier recipes are archived as recipe-1.toml, ..."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hpcdist.arrays.dtypes import FLOATS
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint.convert import families
from hpcdist.checkpoint.convert.huggingface import SETTINGS
from hpcdist.checkpoint.convert.huggingface_export import ExportPlan
from hpcdist.checkpoint.convert.safetensors import SHARD_BYTES
from hpcdist.checkpoint.lock import LOCK_FILE, RunLock
from hpcdist.checkpoint.restoring.restore import newest_complete, on_first_rank
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.record.run_journal import JOURNAL_FILE, OLD_JOBS_FILE
from hpcdist.constants import METRICS_FILE, RECIPE_FILE, STOP_FILE
from hpcdist.errors import ConfigurationError, StorageError, UsageError
from hpcdist.reporting import atomic, regular
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.recipe import Recipe

# Job scripts and their recipes, including partly written files (of `batch.submission`).
_JOB_FILE: Final = re.compile(r"\.?job(?:(?:-\d+)?\.(?:sbatch|pbs|sh)|-[0-9a-f]{8}\.toml)(?:\..+)?", re.ASCII)


@dataclass(frozen=True)
class RunDirectory:
    """Run directory, the checkpoint to resume from, and the recipe changes since the last start."""

    path: Path
    resume_from: Path | None  # None for a new run
    changed: str = ""  # recipe keys whose values differ from the last start
    steps_before: int | None = None  # run.steps of the last start


def prepare_run_directory(
    comm: Communicator, recipe: Recipe, out: Path | None, resume: str, lock: RunLock | None = None
) -> RunDirectory:
    """Create or reopen a run directory, and return a `RunDirectory`. All ranks raise the same error. Collective.

    ``out``: path, or None to choose a name. ``resume``: "auto" (newest valid checkpoint) or "never". ``lock``: lock to
    acquire, or None.
    """

    # Rank 0 decides. ConfigurationError: the directory holds another run. UsageError: it holds this run, and ``resume``
    # is "never". StorageError: it is locked, unusable, or has only invalid checkpoints.
    def prepare() -> RunDirectory:
        try:
            return _prepare(recipe, out, resume, lock)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"the run directory {out} cannot be created: {error}; choose another directory with --out"
            ) from error

    return on_first_rank(comm, prepare)


def _prepare(recipe: Recipe, out: Path | None, resume: str, lock: RunLock | None) -> RunDirectory:
    path = out or _new_default_path(recipe.parallel.strategy)
    stored = path / RECIPE_FILE
    if (path / STOP_FILE).is_dir():
        raise StorageError(
            f"{path / STOP_FILE} is a directory, but a file of this name stops the run: move the directory away"
        )
    has_begun = (path / METRICS_FILE).exists() or (path / "checkpoints").exists()
    if stored.exists() and has_begun:
        before = recipes.load_stored(stored)
        keys = recipes.differences(before, recipe)
        differences = recipes.contradictions(before, recipe)
        if differences:
            raise ConfigurationError(
                f"{path} holds another run: {_listed(differences)}; choose another --out, or continue that run with "
                f"its {RECIPE_FILE}{recipes.init_from_hint(path, differences)}"
            )
        if resume == "never":
            raise UsageError(
                f"{path} holds this run already; to continue the run, add --resume auto (in a script: resume='auto'), "
                "or choose another --out"
            )
        if lock is not None:
            lock.take(path)
        atomic.sweep(path)
        if keys:
            _archive_recipe(stored)
            names.replace(stored, recipes.dump(recipe))
        checkpoint = newest_complete(path)  # the restore verifies the contents
        if checkpoint is None:
            refuse_restart_over_checkpoints(path)
        return RunDirectory(path, checkpoint, _listed(list(keys.values())), before.run.steps)
    if path.exists() and not path.is_dir():
        raise StorageError(f"{path} is a file; --out must name a directory")
    if path.is_dir() and not stored.exists() and not _has_only_start_files(path):
        raise ConfigurationError(f"{path} is not empty, but holds no run of hpcdist; choose another --out")
    path.mkdir(parents=True, exist_ok=True)
    if lock is not None:
        lock.take(path)
    names.replace(stored, recipes.dump(recipe))
    return RunDirectory(path, None)


def plan_export(
    run_dir: Path,
    recipe: Recipe,
    target: Path,
    *,
    replace: bool,
    shard_bytes: int = SHARD_BYTES,
    only_adapters: bool = False,
) -> ExportPlan:
    """Return the `ExportPlan` of the model of the run in ``run_dir`` to the Hugging Face directory ``target``. Local.

    Tokenizer and settings come from the imported directory, or from the directory in run.init_from. The tensors get
    the type of this directory, else precision.mode. ``replace``, ``shard_bytes``: see `ExportPlan`.
    ``only_adapters``: True for the files of PEFT.
    """
    origin = Path(recipe.run.init_from) if recipe.run.init_from else run_dir
    folders = (run_dir / SETTINGS, origin, origin / SETTINGS)
    settings = next((folder for folder in folders if families.is_source(folder)), None)
    config = {} if settings is None else families.read_config(settings)
    dtype = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    dtype = dtype if dtype in FLOATS else recipe.precision.mode
    base, dtype = (recipe.run.init_from, "float32") if only_adapters else (None, dtype)
    options = settings, config, replace, shard_bytes, recipe.lora, base
    return ExportPlan(target, recipe.model, recipe.data.context, dtype, *options)


def plan_stored_export(
    checkpoint: Path, target: Path, *, replace: bool, shard_bytes: int, only_adapters: bool
) -> ExportPlan:
    """Return the `ExportPlan` of ``checkpoint`` to the Hugging Face directory ``target``. Raises HpcdistError. Local.

    ``checkpoint``: checkpoint directory inside of a run directory with a recipe. ``only_adapters``: True for PEFT's
    files.
    """
    run_dir = checkpoint.absolute().parent.parent
    if not (run_dir / RECIPE_FILE).is_file():
        raise UsageError(
            f"{run_dir} has no {RECIPE_FILE}, which describes the model of {checkpoint}; export to a file with the "
            "suffix .safetensors, or move the checkpoint back to its run"
        )
    recipe = recipes.load_stored(run_dir / RECIPE_FILE)
    if only_adapters and not recipe.lora.rank:
        raise UsageError(f"{run_dir} was trained without adapters (lora.rank = 0); leave out --adapters")
    return plan_export(run_dir, recipe, target, replace=replace, shard_bytes=shard_bytes, only_adapters=only_adapters)


def refuse_restart_over_checkpoints(path: Path) -> None:
    """Raise StorageError if the run directory ``path`` has a complete checkpoint, which a new run would overwrite."""
    complete = [checkpoint for _, checkpoint in names.candidates(path / "checkpoints") if checkpoint.suffix != ".tmp"]
    if complete:
        raise StorageError(
            f"{path} has checkpoints, but none of them can be used (see the messages above); choose another --out "
            f"(to keep the readable parameters, add --init-from {complete[0]} --allow-partial), or move "
            f"{path / 'checkpoints'} away to start this run again"
        )


def _archive_recipe(stored: Path) -> None:
    number = 1
    while (archive := stored.with_stem(f"{stored.stem}-{number}")).exists():
        number += 1
    names.replace(archive, regular.text(stored))


def _has_only_start_files(path: Path) -> bool:
    left = [entry.name for entry in path.iterdir() if not _JOB_FILE.fullmatch(entry.name)]
    expected = (JOURNAL_FILE, OLD_JOBS_FILE, STOP_FILE, "recorder")
    return all(name.removeprefix(".").startswith((LOCK_FILE, RECIPE_FILE)) or name in expected for name in left)


def _new_default_path(strategy: str) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    path, number = Path("runs") / f"{stamp}-{strategy}", 1
    while path.exists():  # another run started in the same second
        number += 1
        path = Path("runs") / f"{stamp}-{strategy}-{number}"
    return path


def _listed(texts: list[str]) -> str:
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
