"""The manifest of a checkpoint: which bytes of which file are which elements of which tensor, with their digests.

It is all that a restore needs. Shards are ordinary HDF5 files for people and tools, but a restore reads verified byte
ranges of them and never opens them through libhdf5, which can crash on damaged files.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
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
LEAST_BYTES: Final = 16 << 20  # of a manifest that is read in any case
MOST_FREE_BYTES: Final = 4 << 20  # of the scalars, and of what is told about a checkpoint

# The text of `sealed` has its keys in order, the first one and those around the pieces being these.
_ABOUT: Final = b'{"about":'
_SCALARS: Final = b'],"scalars":'
_SEAL: Final = re.compile(rb',"digest":"([0-9a-f]{32})"}\n\Z')
_SEAL_BYTES: Final = 46


_DECODER: Final = json.JSONDecoder(object_pairs_hook=lambda pairs: _once(pairs))


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
class _Header:
    """What tells whether the rest can be read."""

    schema: str
    version: int


@dataclass(frozen=True, kw_only=True)
class _Shards(_Header):
    """What the manifest says of the shards: nothing in it is free in form."""

    step: int
    world: int
    byte_order: str
    block_bytes: int
    files: dict[str, int]
    pieces: tuple[Entry, ...]
    index: Index | None = None
    outside: dict[str, str] = field(default_factory=dict)
    unused: tuple[Entry, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest(_Shards):
    """What ``manifest.json`` says. ``files`` gives the size of each shard in bytes.

    ``about`` says where the state comes from (topology, recipe, versions), for people and tools. ``outside`` has by
    shard the digest of its bytes that lie in no piece, ``unused`` what else lies in shards of earlier checkpoints:
    with them all bytes of a shard can be verified. Earlier versions wrote neither.
    """

    scalars: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)


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
    return Manifest(
        schema=SCHEMA,
        version=VERSION,
        step=step,
        world=world,
        byte_order=sys.byteorder,
        block_bytes=BLOCK_BYTES,
        scalars=scalars,
        files=files,
        pieces=entries,
        about=about or {},
    )


def encode(manifest: Manifest) -> str:
    """Return the text of ``manifest.json``.

    Raises UsageError when a scalar is not a JSON value, StorageError when the scalars are more than a reader takes.
    """
    plain = {name: msgspec.to_builtins(getattr(manifest, name)) for name in ("pieces", "index", "unused")}
    try:
        for name, values in (("scalars", manifest.scalars), ("about", manifest.about)):
            size = len(_canonical(values))
            if size > MOST_FREE_BYTES:
                raise StorageError(f"{name} of {size} bytes, expected at most {MOST_FREE_BYTES} in a checkpoint")
        return sealed(vars(manifest) | plain)
    except TypeError as error:
        raise UsageError(f"the scalars of a checkpoint must be JSON values: {error}") from error


def sealed(body: dict[str, Any]) -> str:
    """Return the text of a manifest that says ``body``, with the digest at its end: it is checked before all else."""
    text = _canonical(body)
    return f'{text[:-1]},"digest":"{xxhash.xxh3_128_hexdigest(text.encode())}"}}\n'


def digest_of(body: dict[str, Any]) -> str:
    """Return the digest of a manifest that says ``body``."""
    return xxhash.xxh3_128_hexdigest(_canonical(body).encode())


def _canonical(body: dict[str, Any]) -> str:
    """Return the text over which the digest is taken."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def load(directory: Path) -> Manifest:
    """Read and check the manifest in ``directory``; no shard is looked at. Raises StorageError.

    Nothing in it is believed: whoever wrote it, what is returned names bytes inside the shards of this directory, and
    pieces that fit their tensors.
    """
    path = directory / FILE_NAME
    try:
        data = _read(path)
        seal = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
        manifest = _free_form(path, data) if seal is None else _of_sealed(path, data, seal.start(), seal[1].decode())
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
        most = MOST_BYTES if size <= LEAST_BYTES else min(MOST_BYTES, LEAST_BYTES + 2 * _shard_bytes(path.parent))
        if size > most:
            raise OSError(f"it has {size} bytes, expected at most {most}, as there is no more in its shards")
        return pread_all(fd, size, 0)
    finally:
        os.close(fd)


def _shard_bytes(directory: Path) -> int:
    """Return the bytes of the shards: HDF5 says of each piece about as much there as the manifest."""
    return sum(path.stat().st_size for pattern in ("*.h5", "*/*.h5") for path in directory.glob(pattern))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of ``pairs``; of a key that comes twice nobody knows which value counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice in one object")
    return found


def _of_sealed(path: Path, data: bytes, end: int, digest: str) -> Manifest:
    """Return what ``data`` says, a text of `sealed`; its digest stands behind ``end``.

    Values that are free in form take far more memory than text, so that there are two places for them only, each of a
    bounded size. All else is read into the types that it must have; what has no place there is passed over.
    """
    found = xxhash.xxh3_128(memoryview(data)[:end])
    found.update(b"}")
    if found.hexdigest() != digest:
        raise StorageError(f"{path} is damaged: its digest does not match")
    if not data.startswith(_ABOUT):
        return _free_form(path, data)
    about, start = _value(data, len(_ABOUT))
    stop = data.find(_SCALARS, start)
    if stop < 0:
        raise ValueError("it has no scalars")
    scalars, end = _value(data, stop + len(_SCALARS))
    typed = b"".join((b'{"": 0', memoryview(data)[start : stop + 1], memoryview(data)[end:]))
    try:
        header = msgspec.json.decode(typed, type=_Header)
        _check_version(path, header.schema, header.version)
        shards = msgspec.json.decode(typed, type=_Shards)
    except msgspec.DecodeError as error:
        raise StorageError(f"{path} is not valid: {error}") from error
    if not (isinstance(scalars, dict) and isinstance(about, dict)):
        raise StorageError(f"{path} is not valid: its scalars, or what is told about it, are no object")
    return Manifest(**vars(shards), scalars=scalars, about=about)


def _value(data: bytes, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at the byte ``start``, and where it ends. Raises ValueError."""
    text = data[start : start + MOST_FREE_BYTES + 1].decode("ascii", "replace")  # as `json.dumps` writes it
    try:
        value, size = _DECODER.raw_decode(text)
    except ValueError as error:
        raise ValueError(f"{error}; expected a value of at most {MOST_FREE_BYTES} bytes") from error
    return value, start + size


def _free_form(path: Path, data: bytes) -> Manifest:
    """Return what ``data`` says, the JSON text of an early or a later version, or of a person."""
    if len(data) > LEAST_BYTES:
        raise ValueError(f"it has {len(data)} bytes and is not as this version writes it")
    body = json.loads(data, object_pairs_hook=_once)
    if not isinstance(body, dict):
        raise StorageError(f"{path} is not a manifest of {SCHEMA}")
    _check_version(path, body.get("schema"), body.get("version"))
    digest = body.pop("digest", None)
    if digest_of(body) != digest:
        raise StorageError(f"{path} is damaged: its digest does not match")
    try:
        return msgspec.convert(body, Manifest)
    except msgspec.ValidationError as error:
        raise StorageError(f"{path} is not valid: {error}") from error


def _check_version(path: Path, schema: object, version: object) -> None:
    """Raise StorageError for what is no manifest, `NewerError` for one of a later version."""
    if schema != SCHEMA:
        raise StorageError(f"{path} is not a manifest of {SCHEMA}")
    if type(version) is not int or not 1 <= version <= VERSION:
        kind = NewerError if type(version) is int and version > VERSION else StorageError
        raise kind(f"{path} has version {str(version)[:20]}, known here are 1 to {VERSION}; update hpcdist")
