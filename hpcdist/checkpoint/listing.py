"""List the checkpoints of a run, and the tensors of a checkpoint, from names, file sizes and manifests. Local."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint.format import manifest
from hpcdist.checkpoint.format.manifest import Manifest
from hpcdist.checkpoint.format.shard import size_mismatch
from hpcdist.errors import StorageError

PARAMETERS: Final = "parameters"
COMPLETE: Final = "complete"
UNFINISHED: Final = "unfinished"
DAMAGED: Final = "damaged"
NEWER: Final = "newer"


@dataclass(frozen=True)
class StoredTensor:
    """Kind, name, dtype and shape of a whole tensor in a checkpoint, which may be stored in several parts."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.size * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class ListedCheckpoint:
    """Directory of a complete, damaged or unfinished checkpoint. Data digests are not verified."""

    path: Path
    step: int
    state: str
    reason: str  # why the checkpoint is unusable, or ""
    # In a complete checkpoint, the files have the sizes of the manifest.
    manifest: Manifest | None

    @property
    def written_utc(self) -> str:
        """UTC time at which the manifest was written, in ISO format, or "" if there is no manifest."""
        try:
            seconds = (self.path / manifest.FILE_NAME).stat().st_mtime
        except OSError:
            return ""
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")

    @property
    def nbytes(self) -> int:
        """Total size of the shards in bytes, according to the manifest."""
        return sum(self.manifest.files.values()) if self.manifest is not None else 0


def checkpoints_directory(run_dir: Path) -> Path:
    """Return ``run_dir/checkpoints`` if it exists, else ``run_dir`` if it has checkpoints, else raise StorageError."""
    inside = run_dir / "checkpoints"
    if inside.is_dir():
        return inside
    if run_dir.is_dir() and names.candidates(run_dir):
        return run_dir
    raise StorageError(f"{run_dir} has no checkpoints; give the directory of a run (the --out of its hpcdist run)")


def list_checkpoints(run_dir: Path) -> list[ListedCheckpoint]:
    """Return every complete, unfinished or damaged checkpoint of ``run_dir``, the most recent first."""
    return [inspect(path) for _, path in names.candidates(checkpoints_directory(run_dir))]


def inspect(path: Path) -> ListedCheckpoint:
    """Return the checkpoint at ``path`` with its state, determined from the manifest and the sizes of the files."""
    stem = path.name.partition(".")[0].removeprefix("step-")
    step = int(stem) if stem.isdecimal() else -1
    if path.suffix == ".tmp":
        return ListedCheckpoint(path, step, UNFINISHED, "the save did not finish, or is still running", None)
    try:
        loaded = manifest.load(path)
    except StorageError as error:
        return ListedCheckpoint(
            path, step, NEWER if isinstance(error, manifest.NewerVersionError) else DAMAGED, str(error), None
        )
    reason = size_mismatch(path, loaded)
    if step not in (-1, loaded.step):
        reason = f"its manifest is of step {loaded.step}"
    return ListedCheckpoint(path, loaded.step, DAMAGED if reason else COMPLETE, reason, loaded)


def load_usable(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at ``path``. Raises StorageError if it is incomplete or damaged."""
    listed = inspect(path)
    if listed.manifest is None or listed.reason:
        raise StorageError(f"{path} is {listed.state}: {listed.reason}; choose another checkpoint")
    return listed.manifest


def load_parameters(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at ``path``, reduced to the model parameters. Raises StorageError."""
    loaded = manifest.load(path)
    return replace(loaded, pieces=tuple(entry for entry in loaded.pieces if entry.kind == PARAMETERS), unused=())


def select(path: Path) -> Path:
    """Return ``path`` if it is a checkpoint directory, else the newest complete checkpoint of the run in ``path``.

    Raises StorageError if the run has no complete checkpoint.
    """
    if (path / manifest.FILE_NAME).exists() or (path.is_dir() and path.name.startswith("step-")):
        return path
    for listed in list_checkpoints(path):
        if listed.state == COMPLETE:
            return listed.path
    raise StorageError(f"{path} has no complete checkpoint; `hpcdist checkpoint ls {path}` lists the reasons")


def stored_tensors(loaded: Manifest, kinds: Collection[str] | None = None) -> list[StoredTensor]:
    """Return the tensors in a checkpoint, sorted by kind, layer and name. ``loaded``: its manifest.

    ``kinds``: kinds to return, such as "parameters" or "optimizer.m", or None for all.
    """
    tensors = {
        (entry.kind, entry.tensor): StoredTensor(entry.kind, entry.tensor, entry.dtype, entry.shape)
        for entry in loaded.pieces
        if kinds is None or entry.kind in kinds
    }
    return sorted(tensors.values(), key=lambda tensor: (tensor.kind != PARAMETERS, tensor.kind, _by_layer(tensor.name)))


def _by_layer(name: str) -> tuple[int, str]:
    layer, _, rest = name.partition(".")
    return (int(layer), rest) if layer.isdecimal() else (0, name)


def summary(listed: ListedCheckpoint) -> dict[str, Any]:
    """Return the step, completeness and size of a checkpoint, and the size of each kind of tensor, as a JSON object."""
    loaded = listed.manifest
    figures: dict[str, Any] = {
        "path": str(listed.path),
        "step": listed.step,
        "state": listed.state,
        "reason": listed.reason,
        "written_utc": listed.written_utc,
        "bytes": listed.nbytes,
    }
    if loaded is None:
        return figures
    by_kind: dict[str, dict[str, int]] = {}
    for tensor in stored_tensors(loaded):
        sums = by_kind.setdefault(tensor.kind, {"tensors": 0, "elements": 0, "bytes": 0})
        for name, value in (("tensors", 1), ("elements", tensor.size), ("bytes", tensor.nbytes)):
            sums[name] += value
    return figures | {
        "ranks": loaded.world,
        "files": len(loaded.files),
        "pieces": len(loaded.pieces),
        "schema_version": loaded.version,
        "kinds": by_kind,
    }
