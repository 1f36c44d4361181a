"""Digests of whole data sets: every rank reads a part, and a cache keeps the digests of unchanged files."""

import json
import math
import operator
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import HpcdistError
from hpcdist.reporting import user_cache
from hpcdist.training.data.files import Hdf5Dataset
from hpcdist.training.data.samples import FileArray, Sliceable
from hpcdist.training.data.token_files import ShardedArray

KIND: Final = "data_digests"
BLOCK_BYTES: Final = 1 << 28  # block that one rank reads between two messages; part of the digest's definition
READ_BYTES: Final = 1 << 22  # bytes read at a time
ANNOUNCED_ROUNDS: Final = 16  # the reading of more blocks per rank is announced
SETTLED_NS: Final = 2_000_000_000  # a file changed more recently could change again without a new timestamp


class DataDigest(NamedTuple):
    """Hexadecimal hash of all elements of some arrays, and the largest element of each array (0 if not integers)."""

    value: str = ""
    largest: tuple[int, ...] = ()


_memory_cache: dict[str, DataDigest] = {}  # digests by file state, for users without a writable cache directory


def digest(columns: Sequence[Sliceable], what: str, comm: Communicator, *, kept_only: bool = False) -> DataDigest:
    """Return the `DataDigest` of the arrays ``columns``. Collective. Raises StorageError.

    ``what``: name of the data for messages. ``kept_only``: return a cached digest, or an empty one.
    """
    # Ranks with the same files share the work.
    began_ns = time.time_ns()
    key, newest_ns = _file_state(columns)
    states = comm.allgather_object((key, _cached(key)))
    members = [rank for rank, (other, _) in enumerate(states) if other == key]
    result = next((kept for other, kept in states if other == key and kept.value), DataDigest())
    sizes = Counter(other for other, _ in states)
    waiting = set(sizes) - {other for other, kept in states if kept.value}
    if kept_only and waiting:
        return DataDigest()
    blocks = sum(_blocks(column) for column in columns)
    rounds = max((-(-blocks // sizes[other]) for other in waiting), default=0)
    if rounds > ANNOUNCED_ROUNDS and comm.rank == 0:
        _announce(what, columns)
    parts: list[bytes] = []
    largest = [0] * len(columns)
    for number in range(rounds):
        index = number * len(members) + members.index(comm.rank)
        part: tuple[bytes, int, int] | HpcdistError = b"", 0, 0
        if not result.value and index < blocks:
            try:
                column, start = _block_place(columns, index)
                part = (*_block(columns[column], start), column)
            except HpcdistError as error:
                part = error
        gathered = comm.allgather_object(part)
        for other_part in gathered:
            if isinstance(other_part, HpcdistError):
                raise other_part
        for rank in members:  # in the order of the blocks; empty parts come last
            hashed, top, column = gathered[rank]
            parts.append(hashed)
            largest[column] = max(largest[column], top)
    if result.value:
        return result
    types = json.dumps([[str(column.dtype), list(column.shape)] for column in columns])
    value = xxhash.xxh3_128_hexdigest(types.encode() + b"".join(parts))
    result = DataDigest(value, tuple(largest))
    if newest_ns is not None and newest_ns < began_ns - SETTLED_NS and _file_state(columns)[0] == key:
        _memory_cache[key] = result
        if comm.rank == members[0]:
            _store_digest(key, result, what if rounds > ANNOUNCED_ROUNDS else "")
    return result


def _rows(column: Sliceable) -> int:
    return max(1, BLOCK_BYTES // _row_bytes(column))


def _blocks(column: Sliceable) -> int:
    return -(-len(column) // _rows(column))


def _block_place(columns: Sequence[Sliceable], number: int) -> tuple[int, int]:
    for index, column in enumerate(columns):
        if number < _blocks(column):
            return index, number * _rows(column)
        number -= _blocks(column)
    raise IndexError(
        f"the training data has {sum(map(_blocks, columns))} blocks, but the caller asks for block "
        f"{sum(map(_blocks, columns)) + number}; ask for a smaller number"
    )


def _row_bytes(column: Sliceable) -> int:
    return max(1, column.dtype.itemsize * math.prod(column.shape[1:]))


def _block(column: Sliceable, start: int) -> tuple[bytes, int]:
    # Return (hash, largest element or 0) of a block.
    state, stop, largest = xxhash.xxh3_128(), min(start + _rows(column), len(column)), 0
    step = max(1, READ_BYTES // _row_bytes(column))
    for first in range(start, stop, step):
        elements = np.ascontiguousarray(column[first : min(first + step, stop)])
        state.update(elements.view(np.uint8).data)
        if elements.dtype.kind in "iu":
            largest = max(largest, int(elements.max(initial=0)))
    return state.digest(), largest


def _file_state(columns: Sequence[Sliceable]) -> tuple[str, int | None]:
    state: list[Any] = []
    newest_ns = 0
    for column in columns:
        if not isinstance(column, FileArray | ShardedArray | Hdf5Dataset) or (files := column.files()) is None:
            return f"of {socket.gethostname()}", None
        state.append([str(column.dtype), list(column.shape), column.place])
        for path, status in files:
            state.append([str(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
            newest_ns = max(newest_ns, status.st_mtime_ns, status.st_ctime_ns)
    return user_cache.digest({"state": state}), newest_ns


def _cached(key: str) -> DataDigest:
    if key in _memory_cache:
        return _memory_cache[key]
    try:
        content = json.loads(user_cache.read(_cache_path(key)))
        value, largest = content["digest"], tuple(map(operator.index, content["largest"]))
        return DataDigest(value, largest) if content["key"] == key and isinstance(value, str) else DataDigest()
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return DataDigest()


def _store_digest(key: str, result: DataDigest, what: str) -> None:
    try:
        user_cache.write(_cache_path(key), {"key": key, "digest": result.value, "largest": result.largest})
    except OSError as error:
        if what:
            reason = f"{error.strerror or error}; set XDG_CACHE_HOME to a directory"
            print(f"hpcdist: each start reads all of {what}: its digest cannot be cached ({reason})", file=sys.stderr)


def _cache_path(key: str) -> Path:
    return user_cache.directory(KIND) / f"{key}.json"


def _announce(what: str, columns: Sequence[Sliceable]) -> None:
    size = sum(_row_bytes(column) * len(column) for column in columns)
    print(
        f"hpcdist: all {size / 1e9:,.0f} GB of {what} are read once to verify the data in a resume; "
        "data.digest = 'probes' reads only samples of it",
        file=sys.stderr,
        flush=True,
    )
