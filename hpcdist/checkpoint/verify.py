"""Every block of a checkpoint read and compared with its digest, and all damage told, not the first alone (local)."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpcdist.checkpoint import catalogue
from hpcdist.checkpoint.blocks import READ_BYTES, BlockReader
from hpcdist.checkpoint.manifest import BLOCK_BYTES, Entry, Index
from hpcdist.errors import StorageError
from hpcdist.reporting.regular import open_regular


@dataclass(frozen=True)
class Verdict:
    """What a look at every byte found. ``damage`` names file, bytes and tensor of each block that cannot be used."""

    path: Path
    state: str
    damage: tuple[str, ...]
    read_bytes: int


def verify(path: Path) -> Verdict:
    """Read the whole checkpoint at ``path``, its files side by side (xxhash and pread work without the GIL)."""
    found = catalogue.look(path)
    if found.manifest is None:
        return Verdict(path, found.state, (found.reason,) if found.state == catalogue.DAMAGED else (), 0)
    by_file: dict[str, list[Entry]] = {}
    for entry in found.manifest.pieces:
        by_file.setdefault(entry.file, []).append(entry)
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        results = list(pool.map(lambda entries: _of_file(path, entries), by_file.values()))
    # A file of another size may still hold every block, and is damaged all the same: it is not what was written.
    damage = [found.reason] if found.reason else []
    damage += [line for lines, _ in results for line in lines]
    damage += _of_index(path, found.manifest.index)
    state = catalogue.DAMAGED if damage else catalogue.COMPLETE
    return Verdict(path, state, tuple(damage), sum(count for _, count in results))


def _of_index(path: Path, index: Index | None) -> list[str]:
    """Return what is wrong with the file that shows whole tensors to other tools; a restore does not look at it."""
    if index is None:
        return []
    digest = xxhash.xxh3_128()
    try:
        with open(open_regular(path / index.file), "rb") as file:
            if os.fstat(file.fileno()).st_size == index.nbytes:
                while part := file.read(READ_BYTES):
                    digest.update(part)
    except OSError as error:
        return [f"{path.name}/{index.file} cannot be read: {error.strerror}; a restore does not need it"]
    if digest.hexdigest() != index.digest:
        return [f"{path.name}/{index.file} is damaged: its digest does not match; a restore does not need it"]
    return []


def _of_file(path: Path, entries: Sequence[Entry]) -> tuple[list[str], int]:
    """Return what is wrong with the blocks of ``entries``, which lie in one file, and the bytes that were read."""
    damage, read_bytes = [], 0
    with BlockReader(path) as reader:
        for entry in entries:
            for block in range(-(-entry.nbytes // BLOCK_BYTES)):
                try:
                    read_bytes += reader.read(entry, block)
                except StorageError as error:
                    damage.append(str(error))
                except OSError as error:  # the file is not there, or may not be read
                    damage.append(f"{path.name}/{entry.file} cannot be read: {error.strerror}; it holds {entry.name}")
                    return damage, read_bytes
    return damage, read_bytes
