"""Manifest of a checkpoint: which bytes of which file are which elements of which tensor, with their digests.

It is all that a restore needs. Shards are ordinary HDF5 files for people and tools, but a restore reads verified byte
ranges of them and never opens them through libhdf5, which can crash on damaged files.

`load` calls `inconsistency` before anything in a manifest is used, since its author may be hostile. The types are
right already; every number is bounded by the others: a box lies inside its tensor, a stretch inside its box, its
bytes inside a shard, no two of them overlap, and a shard lies inside the directory. Sizes that are multiplied stay
below 2^60, so that nothing overflows; the memory of a restore follows from what is wanted, never from what a manifest
claims. That check is pure: it looks at no file.
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

from hpcdist.arrays.dtypes import FLOATS, INTEGERS, dtype_of, name_of
from hpcdist.arrays.piece import Box, Piece, Runs, first_gap, runs, whole_box
from hpcdist.arrays.ranges import Range
from hpcdist.errors import StorageError, UsageError
from hpcdist.hdf5.overlay import pread_all
from hpcdist.reporting.regular import open_regular

MAX_SIZE: Final = 1 << 60  # elements of a tensor, and bytes of a file
MAX_DIMS: Final = 32  # of HDF5
MAX_NAME_LENGTH: Final = 1024
INDEX_FILE: Final = "index.h5"
_SHARD: Final = re.compile(r"([0-9a-f]{2,8}/)?shard-[0-9]{5,9}(-of-[0-9]{1,18})?\.h5")
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")

SCHEMA: Final = "hpcdist.checkpoint"
VERSION: Final = 2  # 1 has no ``about`` and no ``index``, and all shards in one directory
FILE_NAME: Final = "manifest.json"
BLOCK_BYTES: Final = 16 << 20  # a multiple of every item size: no element straddles two blocks
MAX_BYTES: Final = 1 << 30  # of a manifest that is read: some millions of pieces
MIN_LIMIT_BYTES: Final = 16 << 20  # of a manifest that is read in any case
MAX_FREE_FORM_BYTES: Final = 4 << 20  # of ``scalars``, and of ``about``

# The text of `seal` has its keys sorted: "about" is the first, "scalars" the one behind "pieces", "digest" the last.
_ABOUT: Final = b'{"about":'
_SCALARS: Final = b'],"scalars":'
_SEAL: Final = re.compile(rb',"digest":"([0-9a-f]{32})"}\n\Z')
_SEAL_BYTES: Final = 46

_DECODER: Final = json.JSONDecoder(object_pairs_hook=lambda pairs: unique_keys(pairs))


class NewerVersionError(StorageError):
    """Manifest of a later version of hpcdist: nothing is damaged, and this version must not replace it."""


@dataclass(frozen=True)
class Slot:
    """Description of a piece: of a tensor of ``shape`` the ``box``, of that the elements ``flat`` (row-major).

    It describes a piece before a byte of it is written; it is small and travels to the rank that writes.
    """

    kind: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    flat: tuple[int, int]

    @classmethod
    def of(cls, piece: Piece) -> "Slot":
        """Return the slot for ``piece``."""
        flat = piece.flat.start, piece.flat.stop
        return cls(piece.kind, piece.tensor, name_of(piece.array.dtype), piece.global_shape, piece.box, flat)

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return (self.flat[1] - self.flat[0]) * dtype_of(self.dtype).itemsize

    def blocks(self) -> list[int]:
        """Return the bytes of each block of the piece."""
        return [min(BLOCK_BYTES, self.nbytes - start) for start in range(0, self.nbytes, BLOCK_BYTES)]

    def stored_shape(self) -> tuple[int, ...]:
        """Return how a piece is stored: a whole tensor or box in its shape, a flat part of one in one dim."""
        # ``flat`` counts within the box: only where it is all of it do the elements have the shape of the box.
        extent = tuple(stop - start for start, stop in self.box)
        if Range(*self.flat) != Range(0, math.prod(extent)):
            return (self.flat[1] - self.flat[0],)
        return self.shape if self.box == whole_box(self.shape) else extent


@dataclass(frozen=True)
class StoredPiece(Slot):
    """Stored piece: ``offset`` is the byte where it begins in ``file``, ``digests`` are xxh3-128 of each block."""

    file: str
    dataset: str
    offset: int
    digests: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name for errors."""
        return f"{self.kind}/{self.tensor}"

    def runs(self) -> Runs:
        """Return the runs of the piece in its tensor."""
        return runs(self.shape, self.box, Range(*self.flat))


@dataclass(frozen=True)
class IndexFile:
    """File of virtual datasets that shows whole tensors, for people and tools; a restore does not look at it."""

    file: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class _Header:
    """Head of a manifest: schema and version, which decide whether the rest can be read."""

    schema: str
    version: int


@dataclass(frozen=True, kw_only=True)
class _Shards(_Header):
    """Fields of a manifest about the shards, all of fixed types (`Manifest` adds the two of free form)."""

    step: int
    world: int
    byte_order: str
    block_bytes: int
    files: dict[str, int]
    pieces: tuple[StoredPiece, ...]
    index: IndexFile | None = None
    outside: dict[str, str] = field(default_factory=dict)
    unused: tuple[StoredPiece, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest(_Shards):
    """Content of ``manifest.json``. ``files`` gives the size of each shard in bytes.

    ``about`` says where the state comes from (topology, recipe, versions), for people and tools. ``outside`` has by
    shard the digest of its bytes that lie in no piece, ``unused`` what else lies in shards of earlier checkpoints:
    with them all bytes of a shard can be verified. Earlier versions wrote neither.
    """

    scalars: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)


def inconsistency(manifest: Manifest) -> str:
    """Return why ``manifest`` cannot be used, as the rest of a sentence about its file; "" when it can."""
    if not (0 <= manifest.step < MAX_SIZE and 1 <= manifest.world < MAX_SIZE):
        return f"is not valid: step {_short(manifest.step)} of {_short(manifest.world)} ranks"
    for name, size in manifest.files.items():
        if not _SHARD.fullmatch(name):
            return f"names {_short(name)!r}, which is no shard of a checkpoint"
        if not 0 <= size < MAX_SIZE:
            return f"is not valid: {name} with {_short(size)} bytes"
    index = manifest.index
    if index is not None and not (
        index.file == INDEX_FILE and 0 <= index.nbytes < MAX_SIZE and _DIGEST.fullmatch(index.digest)
    ):
        return f"is not valid: the index {_short(index.file)!r}"
    for name, digest in manifest.outside.items():
        if name not in manifest.files or not _DIGEST.fullmatch(digest):
            return f"is not valid: {_short(name)!r} has the digest {_short(digest)!r}"
    for entry in (*manifest.pieces, *manifest.unused):
        reason = _entry_problem(entry, manifest.files, manifest.block_bytes)
        if reason:
            return f"is not valid: {_short(entry.name)}: {reason}"
    return _overlap(manifest)


def _entry_problem(entry: StoredPiece, files: dict[str, int], block_bytes: int) -> str:
    """Return what is wrong with one piece."""
    if not 0 < len(entry.kind) + len(entry.tensor) + len(entry.dataset) <= 3 * MAX_NAME_LENGTH:
        return f"names of more than {MAX_NAME_LENGTH} letters"
    if not (entry.kind + entry.tensor + entry.dataset).isprintable():
        return "names that are no text"
    if entry.dtype not in FLOATS | INTEGERS:
        return f"no dtype is called {_short(entry.dtype)!r}"
    if (
        len(entry.shape) > MAX_DIMS
        or min(entry.shape, default=0) < 0
        or math.prod(max(1, size) for size in entry.shape) > MAX_SIZE  # a dim without elements must not hide others
    ):
        return f"the shape {_short(entry.shape)}"
    if len(entry.box) != len(entry.shape) or not all(
        0 <= start <= stop <= size for (start, stop), size in zip(entry.box, entry.shape, strict=True)
    ):
        return f"the box {_short(entry.box)} is not inside {_short(entry.shape)}"
    if not 0 <= entry.flat[0] <= entry.flat[1] <= math.prod(stop - start for start, stop in entry.box):
        return f"elements {_short(entry.flat)} are not inside the box {_short(entry.box)}"
    if entry.file not in files:
        return f"it lies in {_short(entry.file)!r}, which is no shard of this checkpoint"
    # Each bound is checked before a number is used: the box is inside the shape by now, and ``flat`` inside the box.
    nbytes = (entry.flat[1] - entry.flat[0]) * dtype_of(entry.dtype).itemsize
    if not 0 <= entry.offset <= files[entry.file] - nbytes:
        return f"{nbytes} bytes at {_short(entry.offset)} are not inside {entry.file} of {files[entry.file]} bytes"
    if len(entry.digests) != -(-nbytes // block_bytes) or not all(map(_DIGEST.fullmatch, entry.digests)):
        return f"{len(entry.digests)} digests of {nbytes} bytes"
    return ""


def _overlap(manifest: Manifest) -> str:
    """Return which pieces share bytes of a file; "" where none do."""
    # In the order of their offsets, some two neighbours overlap where any two do.
    placed = sorted((e.file, e.offset, e.nbytes, e.name) for e in (*manifest.pieces, *manifest.unused) if e.nbytes)
    for (file, start, size, name), (other_file, other, _, other_name) in zip(placed, placed[1:], strict=False):
        if file == other_file and start + size > other:
            return f"is not valid: {_short(name)} and {_short(other_name)} overlap in {file}"
    return ""


def _short(value: object) -> str:
    """Return ``value`` as text for a message, of bounded length and in ASCII, whatever was forged."""
    if isinstance(value, int) and abs(value) > 1 << 70:
        return "a number of more than 70 bits"
    if isinstance(value, tuple):
        return "[" + ", ".join(_short(item) for item in value[:4]) + (", ...]" if len(value) > 4 else "]")
    text = str(value).encode("ascii", "backslashreplace").decode()  # a terminal must not obey it
    return text if len(text) <= 200 else text[:200] + "..."


def build(
    step: int,
    world: int,
    scalars: dict[str, Any],
    files: dict[str, int],
    pieces: Iterable[StoredPiece],
    about: dict[str, Any] | None = None,
) -> Manifest:
    """Return the manifest of a checkpoint. Raises StorageError when the pieces leave a part of a tensor out."""
    entries = tuple(sorted(pieces, key=lambda e: (e.kind, e.tensor, e.box, e.flat)))
    by_tensor: dict[tuple[str, str, tuple[int, ...], str], list[StoredPiece]] = {}
    for entry in entries:
        by_tensor.setdefault((entry.kind, entry.tensor, entry.shape, entry.dtype), []).append(entry)
    for (kind, tensor, shape, _), parts in by_tensor.items():
        if any(part.flat == (0, math.prod(shape)) for part in parts):
            continue  # one piece has all of it
        stretches = ((piece_runs.start, piece_runs.size) for piece_runs in (part.runs() for part in parts))
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
            if size > MAX_FREE_FORM_BYTES:
                raise StorageError(f"{name} of {size} bytes, expected at most {MAX_FREE_FORM_BYTES} in a checkpoint")
        return seal(vars(manifest) | plain)
    except TypeError as error:
        raise UsageError(f"the scalars of a checkpoint must be JSON values: {error}") from error


def seal(body: dict[str, Any]) -> str:
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

    The manifest is not trusted: whoever wrote it, the result names bytes inside the shards of this directory, and
    pieces that fit their tensors.
    """
    path = directory / FILE_NAME
    try:
        data = _read(path)
        seal = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
        manifest = (
            _parse_free_form(path, data) if seal is None else _parse_sealed(path, data, seal.start(), seal[1].decode())
        )
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
    reason = inconsistency(manifest)
    if reason:
        raise StorageError(f"{path} {reason}")
    return manifest


def _read(path: Path) -> bytes:
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        most = MAX_BYTES if size <= MIN_LIMIT_BYTES else min(MAX_BYTES, MIN_LIMIT_BYTES + 2 * _shard_bytes(path.parent))
        if size > most:
            raise OSError(f"it has {size} bytes, expected at most {most}, as there is no more in its shards")
        return pread_all(fd, size, 0)
    finally:
        os.close(fd)


def _shard_bytes(directory: Path) -> int:
    """Return the bytes of the shards: HDF5 says of each piece about as much there as the manifest."""
    return sum(path.stat().st_size for pattern in ("*.h5", "*/*.h5") for path in directory.glob(pattern))


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of ``pairs``. Raises ValueError for a key that comes twice: readers differ on its value."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a key comes twice in one object")
    return entries


def _parse_sealed(path: Path, data: bytes, end: int, digest: str) -> Manifest:
    """Return the manifest in ``data``, a text of `seal` whose digest begins at the byte ``end``.

    Values that are free in form take far more memory than text, so that there are two places for them only, each of a
    bounded size. All else is read into the types that it must have; what has no place there is passed over.
    """
    # `seal` took the digest of a text that ended with "}", and put the digest in the place of that.
    computed = xxhash.xxh3_128(memoryview(data)[:end])
    computed.update(b"}")
    if computed.hexdigest() != digest:
        raise StorageError(f"{path} is damaged: its digest does not match")
    if not data.startswith(_ABOUT):
        return _parse_free_form(path, data)
    about, start = _value(data, len(_ABOUT))
    # Nothing between the two is of free form. Quotes within a string are escaped, so the first match is the key.
    stop = data.find(_SCALARS, start)
    if stop < 0:
        raise ValueError("it has no scalars")
    scalars, end = _value(data, stop + len(_SCALARS))
    # The text without its free-form values; the unnamed key takes the comma that follows "about".
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
    text = data[start : start + MAX_FREE_FORM_BYTES + 1].decode("ascii", "replace")  # as `json.dumps` writes it
    try:
        value, size = _DECODER.raw_decode(text)
    except ValueError as error:
        raise ValueError(f"{error}; expected a value of at most {MAX_FREE_FORM_BYTES} bytes") from error
    return value, start + size


def _parse_free_form(path: Path, data: bytes) -> Manifest:
    """Return the manifest in ``data``, JSON that another version of hpcdist or a person wrote; of bounded size."""
    if len(data) > MIN_LIMIT_BYTES:
        raise ValueError(f"it has {len(data)} bytes and is not as this version writes it")
    body = json.loads(data, object_pairs_hook=unique_keys)
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
    """Raise StorageError for what is no manifest, `NewerVersionError` for one of a later version."""
    if schema != SCHEMA:
        raise StorageError(f"{path} is not a manifest of {SCHEMA}")
    if type(version) is not int or not 1 <= version <= VERSION:
        kind = NewerVersionError if type(version) is int and version > VERSION else StorageError
        raise kind(f"{path} has version {str(version)[:20]}, known here are 1 to {VERSION}; update hpcdist")
