"""Digests of whole data sets: every rank reads a part, and a cache keeps the digests of unchanged files."""

import json
import math
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

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
_memory_cache: dict[str, str] = {}  # digests by file state, for users without a writable cache directory


def digest(columns: Sequence[Sliceable], what: str, comm: Communicator, *, kept_only: bool = False) -> str:
    """Return a hexadecimal hash of all elements of the arrays ``columns``. Collective. Raises StorageError.

    ``what``: name of the data for messages. ``kept_only``: return a cached hash, or "" without a cached hash.
    """
    # Ranks with the same files share the work.
    began_ns = time.time_ns()
    key, newest_ns = _file_state(columns)
    states = comm.allgather_object((key, _cached(key)))
    members = [rank for rank, (other, _) in enumerate(states) if other == key]
    result = next((value for other, value in states if other == key and value), "")
    sizes = Counter(other for other, _ in states)
    waiting = set(sizes) - {other for other, value in states if value}
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
        if not result and index < blocks:
            try:
                part = _block(*_block_place(columns, index))
            except HpcdistError as error:
                part = error
        gathered = comm.allgather_object(part)
        for other_part in gathered:
            if isinstance(other_part, HpcdistError):
                raise other_part
        parts += [gathered[rank] for rank in members]  # in the order of the blocks; empty parts come last
    if result:
        return result
    types = json.dumps([[str(column.dtype), list(column.shape)] for column in columns])
    result = xxhash.xxh3_128_hexdigest(types.encode() + b"".join(parts))
    if newest_ns is not None and newest_ns < began_ns - SETTLED_NS and _file_state(columns)[0] == key:
        _memory_cache[key] = result
        if comm.rank == members[0]:
            _store_digest(key, result, what if rounds > ANNOUNCED_ROUNDS else "")
    return result


def _rows(column: Sliceable) -> int:
    return max(1, BLOCK_BYTES // _row_bytes(column))


def _blocks(column: Sliceable) -> int:
    return -(-len(column) // _rows(column))


def _block_place(columns: Sequence[Sliceable], number: int) -> tuple[Sliceable, int]:
    for column in columns:
        if number < _blocks(column):
            return column, number * _rows(column)
        number -= _blocks(column)
    raise IndexError(
        f"the training data has {sum(map(_blocks, columns))} blocks, but the caller asks for block "
        f"{sum(map(_blocks, columns)) + number}; ask for a smaller number"
    )


def _row_bytes(column: Sliceable) -> int:
    return max(1, column.dtype.itemsize * math.prod(column.shape[1:]))


def _block(column: Sliceable, start: int) -> bytes:
    state, stop = xxhash.xxh3_128(), min(start + _rows(column), len(column))
    step = max(1, READ_BYTES // _row_bytes(column))
    for first in range(start, stop, step):
        state.update(np.ascontiguousarray(column[first : min(first + step, stop)]).view(np.uint8).data)
    return state.digest()


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


def _cached(key: str) -> str:
    if key in _memory_cache:
        return _memory_cache[key]
    try:
        content = json.loads(user_cache.read(_cache_path(key)))
        value = content["digest"] if content["key"] == key else ""
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


def _store_digest(key: str, value: str, what: str) -> None:
    try:
        user_cache.write(_cache_path(key), {"key": key, "digest": value})
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
