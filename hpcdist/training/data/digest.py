"""Digest of all data elements, by which a resumed run knows that its data is unchanged.

It is the xxh3 of the digests of blocks, so ranks that see the same files read a part each, and it depends on the
elements only: a copy on another disk, or in another format, has the same. It is cached in the user's cache directory
under the state of the files: paths, inodes, sizes, times of the last change of their bytes and of their inodes.

Costs: once for each state of the files all bytes are read, by all ranks together from a shared file system, by the
ranks of a node from its own disk; 16 bytes a block are sent.
"""

import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import HpcdistError
from hpcdist.reporting import user_cache
from hpcdist.training.data.files import Hdf5Dataset
from hpcdist.training.data.samples import FileArray, Sliceable

KIND: Final = "data_digests"
BLOCK_BYTES: Final = 1 << 28  # read by one rank between two messages; part of the definition
READ_BYTES: Final = 1 << 22  # at a time
ANNOUNCED_ROUNDS: Final = 16  # reading more blocks than that one after the other is told
SETTLED_NS: Final = 2_000_000_000  # a file that changed later could change again without another time
_memory_cache: dict[str, str] = {}  # digests by the state of the files, for a process whose user has no cache directory


def digest(columns: Sequence[Sliceable], what: str, comm: Communicator, *, kept_only: bool = False) -> str:
    """Return the digest of ``columns``, which all ranks see in equal shape, as this rank has them. Collective.

    ``what`` describes them to a person who must wait. With ``kept_only`` it is "" where none is kept. Raises
    StorageError on all ranks where one cannot read them.
    """
    began_ns = time.time_ns()
    key, newest_ns = _file_state(columns)
    known = comm.allgather_object((key, _cached(key)))
    members = [rank for rank, (other, _) in enumerate(known) if other == key]
    own = next((value for other, value in known if other == key and value), "")
    sizes = {other: 0 for other, _ in known}
    for other, _ in known:
        sizes[other] += 1
    waiting = set(sizes) - {other for other, value in known if value}
    if kept_only and waiting:
        return ""
    blocks = sum(_blocks(column) for column in columns)
    rounds = max((-(-blocks // sizes[other]) for other in waiting), default=0)
    if rounds > ANNOUNCED_ROUNDS and comm.rank == 0:
        _announce(what, columns)
    parts: list[bytes] = []
    for number in range(rounds):
        index = number * len(members) + members.index(comm.rank)
        part: bytes | HpcdistError = b""
        if not own and index < blocks:
            try:
                part = _block(*_block_place(columns, index))
            except HpcdistError as error:
                part = error
        gathered = comm.allgather_object(part)
        for other_part in gathered:
            if isinstance(other_part, HpcdistError):
                raise other_part
        parts += [gathered[rank] for rank in members]  # in the order of the blocks; empty ones come last
    if own:
        return own
    types = json.dumps([[str(column.dtype), list(column.shape)] for column in columns])
    own = xxhash.xxh3_128_hexdigest(types.encode() + b"".join(parts))
    if newest_ns is not None and newest_ns < began_ns - SETTLED_NS and _file_state(columns)[0] == key:
        _cache(key, own, write=comm.rank == members[0])
    return own


def _rows(column: Sliceable) -> int:
    """Return how many rows a block has."""
    return max(1, BLOCK_BYTES // _row_bytes(column))


def _blocks(column: Sliceable) -> int:
    return -(-len(column) // _rows(column))


def _block_place(columns: Sequence[Sliceable], index: int) -> tuple[Sliceable, int]:
    """Return the column of block ``index`` of all columns, and the row with which it begins."""
    for column in columns:
        if index < _blocks(column):
            return column, index * _rows(column)
        index -= _blocks(column)
    raise IndexError("there are fewer blocks")


def _row_bytes(column: Sliceable) -> int:
    size = column.dtype.itemsize
    for extent in column.shape[1:]:
        size *= extent
    return max(1, size)


def _block(column: Sliceable, start: int) -> bytes:
    state = xxhash.xxh3_128()
    for rows in _slices(column, start, min(start + _rows(column), len(column))):
        state.update(np.ascontiguousarray(rows).view(np.uint8).data)
    return state.digest()


def _slices(column: Sliceable, start: int, stop: int) -> Iterator[np.ndarray]:
    step = max(1, READ_BYTES // _row_bytes(column))
    for first in range(start, stop, step):
        yield column[first : min(first + step, stop)]


def _file_state(columns: Sequence[Sliceable]) -> tuple[str, int | None]:
    """Return a name for the columns and the files that hold them, and when one of those changed last, in ns.

    None: not all files are known; the ranks of this host see the same ones.
    """
    state: list[Any] = []
    newest_ns = 0
    for column in columns:
        if not isinstance(column, FileArray | Hdf5Dataset) or (files := column.files()) is None:
            return f"of {socket.gethostname()}", None
        state.append([str(column.dtype), list(column.shape), column.place])
        for path, status in files:
            state.append([str(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
            newest_ns = max(newest_ns, status.st_mtime_ns, status.st_ctime_ns)
    return user_cache.digest({"state": state}), newest_ns


def _cached(key: str) -> str:
    """Return the digest that was kept under ``key``; "" where none can be used."""
    if key in _memory_cache:
        return _memory_cache[key]
    try:
        content = json.loads(user_cache.read(_cache_path(key)))
        value = content["digest"] if content["key"] == key else ""
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


def _cache(key: str, value: str, *, write: bool) -> None:
    _memory_cache[key] = value
    try:
        if write:
            user_cache.write(_cache_path(key), {"key": key, "digest": value})
    except OSError:
        pass  # the next start reads the data again


def _cache_path(key: str) -> Path:
    return user_cache.directory(KIND) / f"{key}.json"


def _announce(what: str, columns: Sequence[Sliceable]) -> None:
    size = sum(_row_bytes(column) * len(column) for column in columns)
    print(
        f"hpcdist: all {size / 1e9:,.0f} GB of {what} are read once, so that a resume knows them; "
        "data.digest = 'probes' looks at samples instead",
        file=sys.stderr,
        flush=True,
    )
