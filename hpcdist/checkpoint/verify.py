"""Verify every byte of a checkpoint against its digests, and prune checkpoints on request. Local."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpcdist.arrays.ranges import Range, gaps
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint import listing
from hpcdist.checkpoint.directory import Retention, loss_of
from hpcdist.checkpoint.format.manifest import BLOCK_BYTES, INDEX_FILE, Manifest, StoredPiece
from hpcdist.checkpoint.format.shard import READ_BYTES, BlockReader
from hpcdist.checkpoint.listing import COMPLETE, DAMAGED, ListedCheckpoint
from hpcdist.checkpoint.lock import RunLock
from hpcdist.errors import StorageError
from hpcdist.reporting.regular import open_regular
from hpcdist.reporting.units import counted


@dataclass(frozen=True)
class VerifyResult:
    """Result of the verification of a checkpoint. ``damage``: texts on damaged blocks.

    ``not_covered``: texts on data without a stored hash, which cannot be verified.
    """

    path: Path
    state: str
    damage: tuple[str, ...]
    read_bytes: int
    not_covered: tuple[str, ...] = ()


def verify(path: Path) -> VerifyResult:
    """Read and verify the whole checkpoint at ``path``. The result lists all damage, not only the first."""
    listed = listing.inspect(path)
    loaded = listed.manifest
    if loaded is None:
        return VerifyResult(path, listed.state, (listed.reason,) if listed.state == listing.DAMAGED else (), 0)
    by_file: dict[str, list[StoredPiece]] = {name: [] for name in loaded.files}
    for entry in (*loaded.pieces, *loaded.unused):
        by_file[entry.file].append(entry)
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        results = list(pool.map(lambda name: _of_file(path, loaded, name, by_file[name]), by_file))
    results.append(_of_index(path, loaded))
    # A file of another size is damaged even if it holds every block: it is not the file that was written.
    damage = [listed.reason] if listed.reason else []
    damage += [line for lines, _ in results for line in lines]
    state = listing.DAMAGED if damage else listing.COMPLETE
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
    """Checkpoints of a run to remove (``doomed``) and to keep (``kept``), the newest first."""

    doomed: tuple[ListedCheckpoint, ...]
    kept: tuple[ListedCheckpoint, ...]


@contextmanager
def exclude_jobs(run_dir: Path) -> Iterator[None]:
    """Context manager that prevents other jobs from starting in ``run_dir``. Raises StorageError if one runs there."""
    folder, lock = listing.checkpoints_directory(run_dir), RunLock()
    lock.take(
        folder.parent if folder.name == "checkpoints" else folder,
        waits=False,
        otherwise="let it keep fewer itself (checkpoint.keep)",
    )
    try:
        yield
    finally:
        lock.release()


def plan(run_dir: Path, rule: Retention, damaged: bool = False) -> PrunePlan:
    """Return the checkpoints in ``run_dir`` to keep and to remove. ``rule``: rule that selects checkpoints to keep.

    ``damaged``: True to also remove damaged checkpoints. Raises StorageError if every checkpoint is damaged.
    """
    # Checkpoints are read in full, newest first, until one is intact.
    checkpoints = [listed for listed in listing.list_checkpoints(run_dir) if listed.path.suffix == ""]
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
    if damaged:
        doomed += [
            listed for listed in checkpoints if listed.path not in usable and listed.state in (COMPLETE, DAMAGED)
        ]
    gone = {listed.path for listed in doomed}
    return PrunePlan(tuple(doomed), tuple(listed for listed in checkpoints if listed.path not in gone))


def remove(prune_plan: PrunePlan) -> tuple[list[Path], dict[Path, str]]:
    """Remove the ``doomed`` checkpoints of ``prune_plan``. Return (removed paths, dict from path to error text)."""
    gone, failed = [], {}
    for checkpoint in prune_plan.doomed:
        try:
            names.remove(checkpoint.path)
            gone.append(checkpoint.path)
        except OSError as error:
            failed[checkpoint.path] = error.strerror or str(error)
    return gone, failed
