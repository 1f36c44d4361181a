"""List, verify and prune the checkpoints of a run. Local.

A list needs only names, file sizes and manifests. `verify` reads every byte and compares it with its digest.
"""

import math
import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import xxhash

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.ranges import Range, gaps
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.directory import Retention, loss_of
from hpcdist.checkpoint.lock import RunLock
from hpcdist.checkpoint.manifest import BLOCK_BYTES, INDEX_FILE, Manifest, StoredPiece
from hpcdist.checkpoint.shard import READ_BYTES, BlockReader, size_mismatch
from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting.regular import open_regular
from hpcdist.reporting.units import counted

PARAMETERS: Final = "parameters"
AVERAGES: Final = "optimizer.ema"  # moving averages of the parameters
STATISTICS: Final = "statistics"  # running statistics of BatchNorm modules
STATE: Final = "state"  # arrays of a script, saved by `hpcdist.checkpoint.state`
COMPLETE: Final = "complete"
UNFINISHED: Final = "unfinished"
DAMAGED: Final = "damaged"
NEWER: Final = "newer"


@dataclass(frozen=True)
class StoredTensor:
    """Whole tensor in a checkpoint, stored in one or several slices."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str = ""  # kind to read, if it differs from ``kind``

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
    """Checkpoint directory, which may be damaged or unfinished. The tensor data is not verified."""

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
        """Total size of the shards in bytes according to the manifest, or 0 without a manifest."""
        return sum(self.manifest.files.values()) if self.manifest is not None else 0


def checkpoints_directory(run_dir: Path) -> Path:
    """Return ``run_dir/checkpoints``, or ``run_dir`` if this directory contains checkpoints. Raises StorageError."""
    inside = run_dir / "checkpoints"
    if inside.is_dir():
        return inside
    if run_dir.is_dir() and names.candidates(run_dir):
        return run_dir
    raise StorageError(f"{run_dir} has no checkpoints; give the directory of a run, as in --out")


def list_checkpoints(run_dir: Path) -> list[ListedCheckpoint]:
    """Return a list of all complete, unfinished and damaged checkpoints of ``run_dir``, highest step first."""
    return [inspect(path) for _, path in names.candidates(checkpoints_directory(run_dir))]


def inspect(path: Path) -> ListedCheckpoint:
    """Return a description of the checkpoint at ``path``, from the manifest and the file sizes."""
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
    """Return the manifest of the checkpoint at ``path``. Raises StorageError if it is not complete."""
    listed = inspect(path)
    if listed.manifest is None or listed.reason:
        raise StorageError(f"{path} is {listed.state}: {listed.reason}; choose another checkpoint")
    return listed.manifest


def load_parameters(path: Path, *, averaged: bool = False) -> Manifest:
    """Return the manifest of the checkpoint at ``path``, reduced to the model parameters. Raises StorageError.

    ``averaged``: True for the moving average of the parameters. Raises UsageError if the checkpoint has no average.
    """
    loaded = manifest.load(path)
    kind = kind_of_parameters(loaded, averaged)
    return replace(loaded, pieces=tuple(entry for entry in loaded.pieces if entry.kind == kind), unused=())


def kind_of_parameters(loaded: Manifest, averaged: bool) -> str:
    """Return the tensor kind of the parameters, or of their moving average if ``averaged``. Raises UsageError."""
    if averaged and not any(entry.kind == AVERAGES for entry in loaded.pieces):
        raise UsageError(
            "the checkpoint has no moving average of the parameters; leave out --averaged, or train with "
            "optimizer.ema_decay above 0"
        )
    return AVERAGES if averaged else PARAMETERS


def select(path: Path) -> Path:
    """Return the checkpoint ``path``, or the newest complete checkpoint of the run ``path``. Raises StorageError."""
    if (path / manifest.FILE_NAME).exists() or (path.is_dir() and path.name.startswith("step-")):
        return path
    for listed in list_checkpoints(path):
        if listed.state == COMPLETE:
            return listed.path
    raise StorageError(f"{path} has no complete checkpoint; `hpcdist checkpoint ls {path}` lists the reasons")


def stored_tensors(loaded: Manifest, kinds: Collection[str] | None = None) -> list[StoredTensor]:
    """Return a list of the tensors in ``loaded``, sorted by kind, layer and name. ``kinds``: kinds, or None for all."""
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
    """Return a dict for JSON about a checkpoint: step, state, total size, and the sizes of each tensor kind."""
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


@dataclass(frozen=True)
class VerifyResult:
    """Result of the verification of a checkpoint."""

    path: Path
    state: str
    damage: tuple[str, ...]  # error texts
    read_bytes: int
    not_covered: tuple[str, ...] = ()  # files without a stored digest


def verify(path: Path) -> VerifyResult:
    """Read and verify every byte of the checkpoint at ``path``. Return a `VerifyResult` with a list of all damage."""
    listed = inspect(path)
    loaded = listed.manifest
    if loaded is None:
        return VerifyResult(path, listed.state, (listed.reason,) if listed.state == DAMAGED else (), 0)
    by_file: dict[str, list[StoredPiece]] = {name: [] for name in loaded.files}
    for entry in (*loaded.pieces, *loaded.unused):
        by_file[entry.file].append(entry)
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        results = list(pool.map(lambda name: _of_file(path, loaded, name, by_file[name]), by_file))
    results.append(_of_index(path, loaded))
    # A file of another size is damaged even if it holds every block: it is not the file that was written.
    damage = [listed.reason] if listed.reason else []
    damage += [line for lines, _ in results for line in lines]
    state = DAMAGED if damage else COMPLETE
    return VerifyResult(path, state, tuple(damage), sum(count for _, count in results), _not_covered(path, loaded))


def _not_covered(path: Path, loaded: Manifest) -> tuple[str, ...]:
    lacking = len(loaded.files.keys() - loaded.outside.keys())
    lines = [f"HDF5's own bytes in {counted(lacking, 'shard')}"] if lacking else []
    return (*lines, INDEX_FILE) if loaded.index is None and (path / INDEX_FILE).exists() else tuple(lines)


def _of_index(path: Path, loaded: Manifest) -> tuple[list[str], int]:
    index = loaded.index
    if index is None:
        return [], 0
    digest, read_bytes = xxhash.xxh3_128(), 0
    try:
        with open(open_regular(path / index.file), "rb") as file:
            if os.fstat(file.fileno()).st_size == index.nbytes:
                while part := file.read(READ_BYTES):
                    digest.update(part)
                    read_bytes += len(part)
    except OSError as error:
        return [f"{path.name}/{index.file} cannot be read: {error.strerror}; a restore does not need it"], read_bytes
    if digest.hexdigest() != index.digest:
        reason = f"{path.name}/{index.file} is damaged: its digest does not match; a restore does not need it"
        return [reason], read_bytes
    return [], read_bytes


def _of_file(path: Path, loaded: Manifest, name: str, entries: Sequence[StoredPiece]) -> tuple[list[str], int]:
    damage, read_bytes = [], 0
    with BlockReader(path) as reader:
        for entry in entries:
            for block in range(-(-entry.nbytes // BLOCK_BYTES)):
                try:
                    read_bytes += reader.read(entry, block)
                except StorageError as error:
                    damage.append(str(error))
                except OSError as error:  # the file is missing or not readable
                    damage.append(f"{path.name}/{name} cannot be read: {error.strerror}; it holds {entry.name}")
                    return damage, read_bytes
        if name in loaded.outside:  # the digest of HDF5's own bytes: everything between the pieces
            tensor_ranges = [Range(entry.offset, entry.offset + entry.nbytes) for entry in entries]
            try:
                count, digest = reader.digest_of(name, gaps(Range(0, loaded.files[name]), tensor_ranges))
            except OSError as error:
                return [*damage, f"{path.name}/{name} cannot be read: {error.strerror}"], read_bytes
            read_bytes += count
            if digest != loaded.outside[name]:
                damage.append(
                    f"{path.name}/{name} is damaged outside its tensors: the digest of HDF5's own bytes does not "
                    "match; a restore does not need them, but other tools do"
                )
    return damage, read_bytes


@dataclass(frozen=True)
class PrunePlan:
    """Plan of the checkpoints to remove (``doomed``), and of the checkpoints to keep (``kept``, newest first)."""

    doomed: tuple[ListedCheckpoint, ...]
    kept: tuple[ListedCheckpoint, ...]


@contextmanager
def exclude_jobs(run_dir: Path) -> Iterator[None]:
    """Context manager that prevents jobs from starting in ``run_dir``. Raises StorageError if a job runs there."""
    folder, lock = checkpoints_directory(run_dir), RunLock()
    lock.take(
        folder.parent if folder.name == "checkpoints" else folder,
        waits=False,
        otherwise="let it keep fewer itself (checkpoint.keep)",
    )
    try:
        yield
    finally:
        lock.release()


def plan_pruning(run_dir: Path, rule: Retention, remove_damaged: bool) -> PrunePlan:
    """Return a plan to keep the checkpoints that ``rule`` selects. Raises StorageError if no checkpoint is intact.

    ``remove_damaged``: True to remove damaged checkpoints, False to keep them.
    """
    # Checkpoints are read in full, newest first, until one is intact.
    checkpoints = [listed for listed in list_checkpoints(run_dir) if listed.path.suffix == ""]
    complete = [listed for listed in checkpoints if listed.state == COMPLETE]
    while complete and verify(complete[0].path).damage:
        complete.pop(0)
    if not complete:
        raise StorageError(
            f"{run_dir} has no checkpoint that can be restored; nothing is removed. `hpcdist checkpoint verify "
            f"{run_dir}` lists the damage"
        )
    stay = rule.kept({listed.step: loss_of(listed.path) if rule.best else float("nan") for listed in complete})
    usable = {listed.path for listed in complete}
    doomed = [listed for listed in complete if listed.step not in stay]
    if remove_damaged:
        doomed += [
            listed for listed in checkpoints if listed.path not in usable and listed.state in (COMPLETE, DAMAGED)
        ]
    gone = {listed.path for listed in doomed}
    return PrunePlan(tuple(doomed), tuple(listed for listed in checkpoints if listed.path not in gone))


def prune(plan: PrunePlan) -> tuple[list[Path], dict[Path, str]]:
    """Remove the ``doomed`` checkpoints of ``plan``. Return (list of removed paths, {path not removed: error text})."""
    gone, failed = [], {}
    for checkpoint in plan.doomed:
        try:
            names.remove(checkpoint.path)
            gone.append(checkpoint.path)
        except OSError as error:
            failed[checkpoint.path] = error.strerror or str(error)
    return gone, failed
