"""The manifest of a checkpoint: which bytes of which file are which elements of which tensor, with their digests.

It is all that a restore needs. Shards are ordinary HDF5 files for people and tools, but a restore reads verified byte
ranges of them and never opens them through libhdf5, which can crash on damaged files.
"""

import json
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.piece import Box, Runs, first_gap, runs
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint import checks
from hpcdist.errors import StorageError, UsageError
from hpcdist.hdf5.overlay import pread_all
from hpcdist.reporting.regular import open_regular

SCHEMA: Final = "hpcdist.checkpoint"
VERSION: Final = 2  # 1 has no ``about`` and no ``index``, and all shards in one directory
FILE_NAME: Final = "manifest.json"
BLOCK_BYTES: Final = 16 << 20  # a multiple of every item size: no element straddles two blocks
MOST_BYTES: Final = 1 << 30  # of a manifest that is read: some millions of pieces


class NewerError(StorageError):
    """A later version of hpcdist wrote it: nothing is damaged, and nobody here may take its place."""


@dataclass(frozen=True)
class Entry:
    """One stored piece: ``offset`` is the byte where it begins in ``file``, ``digests`` xxh3-128 of each block."""

    kind: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    flat: tuple[int, int]
    file: str
    dataset: str
    offset: int
    digests: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name for errors."""
        return f"{self.kind}/{self.tensor}"

    @property
    def nbytes(self) -> int:
        """Bytes of the piece in the file."""
        return (self.flat[1] - self.flat[0]) * dtype_of(self.dtype).itemsize

    def runs(self) -> Runs:
        """Return the runs of the piece in its tensor."""
        return runs(self.shape, self.box, Range(*self.flat))


@dataclass(frozen=True)
class Index:
    """The file of virtual datasets that shows whole tensors: for people and tools, a restore does not look at it."""

    file: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says. ``files`` gives the size of each shard in bytes.

    ``about`` says where the state comes from (topology, recipe, versions), for people and tools.
    """

    schema: str
    version: int
    step: int
    world: int
    byte_order: str
    block_bytes: int
    scalars: dict[str, Any]
    files: dict[str, int]
    pieces: tuple[Entry, ...]
    about: dict[str, Any] = field(default_factory=dict)
    index: Index | None = None


def block_digests(data: np.ndarray) -> tuple[str, ...]:
    """Return the digests of the blocks of a contiguous 1-D array."""
    if not data.size:
        return ()
    view = data.view(np.uint8).data
    starts = range(0, len(view), BLOCK_BYTES)
    return tuple(xxhash.xxh3_128_hexdigest(view[start : start + BLOCK_BYTES]) for start in starts)


def build(
    step: int,
    world: int,
    scalars: dict[str, Any],
    files: dict[str, int],
    pieces: Iterable[Entry],
    about: dict[str, Any] | None = None,
) -> Manifest:
    """Return the manifest of a checkpoint. Raises StorageError when the pieces leave a part of a tensor out."""
    entries = tuple(sorted(pieces, key=lambda e: (e.kind, e.tensor, e.box, e.flat)))
    by_tensor: dict[tuple[str, str, tuple[int, ...], str], list[Entry]] = {}
    for entry in entries:
        by_tensor.setdefault((entry.kind, entry.tensor, entry.shape, entry.dtype), []).append(entry)
    for (kind, tensor, shape, _), parts in by_tensor.items():
        if any(part.flat == (0, math.prod(shape)) for part in parts):
            continue  # in one piece
        stretches = ((found.start, found.size) for found in (part.runs() for part in parts))
        gap = first_gap(stretches, math.prod(shape))
        if gap is not None:
            raise StorageError(
                f"{kind}/{tensor}: no rank saved element {gap} of its {math.prod(shape)}; the checkpoint is refused"
            )
    return Manifest(SCHEMA, VERSION, step, world, sys.byteorder, BLOCK_BYTES, scalars, files, entries, about or {})


def encode(manifest: Manifest) -> str:
    """Return the text of ``manifest.json``. Raises UsageError when a scalar is not a JSON value."""
    plain = {"pieces": msgspec.to_builtins(manifest.pieces), "index": msgspec.to_builtins(manifest.index)}
    try:
        text = _canonical(vars(manifest) | plain)
        return f'{text[:-1]},"digest":"{xxhash.xxh3_128_hexdigest(text.encode())}"}}\n'
    except TypeError as error:
        raise UsageError(f"the scalars of a checkpoint must be JSON values: {error}") from error


def _canonical(body: dict[str, Any]) -> str:
    """Return the text over which the digest is taken."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def _digest(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_canonical(body).encode())


def _is_whole(data: bytes, body: dict[str, Any], digest: Any) -> bool:
    """Whether ``digest`` is that of ``body``, which was read from ``data``."""
    tail = f',"digest":"{digest}"}}\n'.encode()
    if data.endswith(tail) and xxhash.xxh3_128_hexdigest(data[: -len(tail)] + b"}") == digest:
        return True  # as `encode` writes it
    return bool(_digest(body) == digest)


def load(directory: Path) -> Manifest:
    """Read and check the manifest in ``directory``; no shard is looked at. Raises StorageError.

    Nothing in it is believed: whoever wrote it, what is returned names bytes inside the shards of this directory, and
    pieces that fit their tensors.
    """
    path = directory / FILE_NAME
    try:
        data = _read(path)
        manifest = _converted(path, data, json.loads(data, object_pairs_hook=_once))
    except StorageError:
        raise
    except FileNotFoundError:
        raise StorageError(f"{path} is missing: the checkpoint was not finished") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise StorageError(f"{path} cannot be read: {error or type(error).__name__}") from error
    if manifest.byte_order != sys.byteorder:
        raise StorageError(
            f"{path} was written on a {manifest.byte_order[:20]}-endian machine, this one is {sys.byteorder}"
        )
    if manifest.block_bytes != BLOCK_BYTES:
        raise StorageError(f"{path} has blocks of {manifest.block_bytes} bytes, known here are {BLOCK_BYTES}")
    reason = checks.problem(manifest)
    if reason:
        raise StorageError(f"{path} {reason}")
    return manifest


def _read(path: Path) -> bytes:
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > MOST_BYTES:
            raise OSError(f"it has {size} bytes, at most {MOST_BYTES} are read")
        return pread_all(fd, size, 0)
    finally:
        os.close(fd)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of ``pairs``; of a key that comes twice nobody knows which value counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice in one object")
    return found


def _converted(path: Path, data: bytes, body: Any) -> Manifest:
    """Return what the JSON value ``body`` says, once its digest has been looked at."""
    if not isinstance(body, dict) or body.get("schema") != SCHEMA:
        raise StorageError(f"{path} is not a manifest of {SCHEMA}")
    version = body.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        kind = NewerError if type(version) is int and version > VERSION else StorageError
        raise kind(f"{path} has version {str(version)[:20]}, known here are 1 to {VERSION}; update hpcdist")
    if not _is_whole(data, body, body.pop("digest", None)):
        raise StorageError(f"{path} is damaged: its digest does not match")
    try:
        return msgspec.convert(body, Manifest)
    except msgspec.ValidationError as error:
        raise StorageError(f"{path} is not valid: {error}") from error
