"""Manifest of a checkpoint: maps elements of tensors to bytes of files, with digests.

A restore needs only the manifest and verified byte ranges of the shards. It does not use libhdf5, which can crash on
damaged files. `load` checks all values, because a manifest may be hostile.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
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
MAX_DIMS: Final = 32  # limit of HDF5
MAX_NAME_LENGTH: Final = 1024
INDEX_FILE: Final = "index.h5"
_SHARD: Final = re.compile(r"([0-9a-f]{2,8}/)?shard-[0-9]{5,9}(-of-[0-9]{1,18})?\.h5")
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")

SCHEMA: Final = "hpcdist.checkpoint"
VERSION: Final = 2  # version 1 has no ``about`` and no ``index``, and keeps all shards in one directory
FILE_NAME: Final = "manifest.json"
BLOCK_BYTES: Final = 16 << 20  # a multiple of every item size: no element crosses a block boundary
MAX_BYTES: Final = 1 << 30  # largest manifest to read: a few million pieces
MIN_LIMIT_BYTES: Final = 16 << 20  # a manifest up to this size is always read
MAX_FREE_FORM_BYTES: Final = 4 << 20  # limit of ``scalars``, and of ``about``

# The text of `seal` has sorted keys: "about" is first, "scalars" follows "pieces", "digest" is last.
_ABOUT: Final = b'{"about":'
_SCALARS: Final = b'],"scalars":'
_SEAL: Final = re.compile(rb',"digest":"([0-9a-f]{32})"}\n\Z')
_SEAL_BYTES: Final = 46

_DECODER: Final = json.JSONDecoder(object_pairs_hook=lambda pairs: unique_keys(pairs))


class NewerVersionError(StorageError):
    """Error: a later version of hpcdist wrote the manifest, and this version cannot read it."""


@dataclass(frozen=True)
class Slot:
    """Description of a tensor, or a slice of a tensor, that one rank saves: name, shape, dtype and range."""

    kind: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    box: Box  # region of the tensor: (start, stop) per dim
    flat: tuple[int, int]  # range of stored elements in the flattened region, row-major

    @classmethod
    def of(cls, piece: Piece) -> "Slot":
        """Return the description of the tensor slice ``piece`` of this rank."""
        flat = piece.flat.start, piece.flat.stop
        return cls(piece.kind, piece.tensor, name_of(piece.array.dtype), piece.global_shape, piece.box, flat)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the described elements."""
        return (self.flat[1] - self.flat[0]) * dtype_of(self.dtype).itemsize

    def blocks(self) -> list[int]:
        """Return a list of the sizes in bytes of the blocks into which the data is divided for the digests."""
        return [min(BLOCK_BYTES, self.nbytes - start) for start in range(0, self.nbytes, BLOCK_BYTES)]

    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape of the HDF5 dataset: 1-D if ``flat`` covers a part of ``box``, else the shape of ``box``."""
        # ``flat`` counts within the box: the elements have the shape of the box only if ``flat`` covers it.
        extent = tuple(stop - start for start, stop in self.box)
        if Range(*self.flat) != Range(0, math.prod(extent)):
            return (self.flat[1] - self.flat[0],)
        return self.shape if self.box == whole_box(self.shape) else extent


@dataclass(frozen=True)
class StoredPiece(Slot):
    """Tensor slice stored at byte ``offset`` of ``file``. ``digests``: xxh3-128 hash of each block."""

    file: str
    dataset: str
    offset: int
    digests: tuple[str, ...]

    @property
    def name(self) -> str:
        """Kind and name of the tensor as "kind/name", for error messages."""
        return f"{self.kind}/{self.tensor}"

    def run(self) -> tuple[int, int] | None:
        """Return the range of the stored elements in the flattened tensor if they are consecutive, else None."""
        if self.box[1:] != whole_box(self.shape[1:]):
            return None
        start = self.box[0][0] * math.prod(self.shape[1:]) if self.box else 0
        return start + self.flat[0], start + self.flat[1]

    def runs(self) -> Runs:
        """Return the ranges of the stored elements in the flattened tensor, as `Runs`."""
        return runs(self.shape, self.box, Range(*self.flat))


@dataclass(frozen=True)
class IndexFile:
    """Description of the HDF5 file that presents whole tensors to users and tools. A restore does not read it."""

    file: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class _Header:
    # These fields decide if this version of hpcdist can read the remaining fields.
    schema: str
    version: int


@dataclass(frozen=True, kw_only=True)
class _Shards(_Header):
    # All fields of a manifest with fixed types: not ``scalars`` and ``about``.
    step: int
    world: int
    byte_order: str
    block_bytes: int
    files: dict[str, int]  # size of each shard in bytes
    pieces: tuple[StoredPiece, ...]
    index: IndexFile | None = None
    # digest of each shard's bytes that are not tensor data; absent in manifests of older versions
    outside: dict[str, str] = field(default_factory=dict)
    unused: tuple[StoredPiece, ...] = ()  # tensor parts in hard-linked shards that this checkpoint does not need


@dataclass(frozen=True, kw_only=True)
class Manifest(_Shards):
    """Content of ``manifest.json``: the tensor slices, shard files and digests of a checkpoint."""

    scalars: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)  # description of the run


def inconsistency(manifest: Manifest) -> str:
    """Return the reason why ``manifest`` is invalid, as a predicate to put after the file name, or "" if valid."""
    if not (0 <= manifest.step < MAX_SIZE and 1 <= manifest.world < MAX_SIZE):
        return f"is not valid: step {_short(manifest.step)} of {_short(manifest.world)} ranks"
    for name, size in manifest.files.items():
        if not _SHARD.fullmatch(name):
            return f"names {_short(name)!r}, which is not a shard of a checkpoint"
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
    if not 0 < len(entry.kind) + len(entry.tensor) + len(entry.dataset) <= 3 * MAX_NAME_LENGTH:
        return f"its names are empty or longer than {MAX_NAME_LENGTH} letters"
    if not (entry.kind + entry.tensor + entry.dataset).isprintable():
        return "its names have unprintable characters"
    if entry.dtype not in FLOATS | INTEGERS:
        return f"the dtype {_short(entry.dtype)!r} is unknown"
    if (
        len(entry.shape) > MAX_DIMS
        or min(entry.shape, default=0) < 0
        or math.prod(max(1, size) for size in entry.shape) > MAX_SIZE  # an empty dimension must not hide large ones
    ):
        return f"the shape {_short(entry.shape)} is invalid"
    if len(entry.box) != len(entry.shape) or not all(
        0 <= start <= stop <= size for (start, stop), size in zip(entry.box, entry.shape, strict=True)
    ):
        return f"the box {_short(entry.box)} is not inside {_short(entry.shape)}"
    if not 0 <= entry.flat[0] <= entry.flat[1] <= math.prod(stop - start for start, stop in entry.box):
        return f"elements {_short(entry.flat)} are not inside the box {_short(entry.box)}"
    if entry.file not in files:
        return f"it lies in {_short(entry.file)!r}, which is not a shard of this checkpoint"
    # Each number is bounded before it is used: here the box is inside the shape, and ``flat`` inside the box.
    nbytes = (entry.flat[1] - entry.flat[0]) * dtype_of(entry.dtype).itemsize
    if not 0 <= entry.offset <= files[entry.file] - nbytes:
        return f"{nbytes} bytes at {_short(entry.offset)} are not inside {entry.file} of {files[entry.file]} bytes"
    if len(entry.digests) != -(-nbytes // block_bytes) or not all(map(_DIGEST.fullmatch, entry.digests)):
        return f"{len(entry.digests)} digests for {nbytes} bytes"
    return ""


def _overlap(manifest: Manifest) -> str:
    # Sorted by offset, two neighbours overlap if any two pieces do.
    placed = sorted((e.file, e.offset, e.nbytes, e.name) for e in (*manifest.pieces, *manifest.unused) if e.nbytes)
    for (file, start, size, name), (other_file, other, _, other_name) in zip(placed, placed[1:], strict=False):
        if file == other_file and start + size > other:
            return f"is not valid: {_short(name)} and {_short(other_name)} overlap in {file}"
    return ""


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) > 1 << 70:
        return "a number of more than 70 bits"
    if isinstance(value, tuple):
        return "[" + ", ".join(_short(item) for item in value[:4]) + (", ...]" if len(value) > 4 else "]")
    text = str(value).encode("ascii", "backslashreplace").decode()  # no escape sequences
    return text if len(text) <= 200 else text[:200] + "..."


def _first_gap(parts: Sequence[StoredPiece], size: int) -> int | None:
    # The first element of a tensor of ``size`` elements that no part stores, or None.
    reached = 0
    for start, stop in sorted((part.run() or (-1, -1)) for part in parts):
        if start < 0 or start > reached:  # not a single run, or not in order
            all_runs = (part.runs() for part in parts)
            return first_gap(((piece_runs.start, piece_runs.size) for piece_runs in all_runs), size)
        reached = max(reached, stop)
    return None if reached >= size else reached


def build(
    step: int,
    world: int,
    scalars: dict[str, Any],
    files: dict[str, int],
    pieces: Iterable[StoredPiece],
    about: dict[str, Any] | None = None,
) -> Manifest:
    """Return a new manifest. Raises StorageError if the stored slices ``pieces`` do not cover every tensor.

    ``world``: number of ranks. ``scalars``: JSON values to restore. ``files``: {shard file: size in bytes}. ``about``:
    description of the run.
    """
    entries = tuple(sorted(pieces, key=lambda e: (e.kind, e.tensor, e.box, e.flat)))
    by_tensor: dict[tuple[str, str, tuple[int, ...], str], list[StoredPiece]] = {}
    for entry in entries:
        by_tensor.setdefault((entry.kind, entry.tensor, entry.shape, entry.dtype), []).append(entry)
    for (kind, tensor, shape, _), parts in by_tensor.items():
        if any(part.flat == (0, math.prod(shape)) for part in parts):
            continue  # one piece covers the tensor
        gap = _first_gap(parts, math.prod(shape))
        if gap is not None:
            raise StorageError(
                f"tensor {kind}/{tensor}: no rank saved element {gap} of {math.prod(shape)}; nothing is saved. The "
                "parts of all ranks must cover the tensor"
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
    """Return ``manifest`` as JSON text. Raises UsageError for values that are not JSON, StorageError for large ones."""
    plain = {name: msgspec.to_builtins(getattr(manifest, name)) for name in ("pieces", "index", "unused")}
    try:
        for name, values in (("scalars", manifest.scalars), ("about", manifest.about)):
            size = len(_canonical(values))
            if size > MAX_FREE_FORM_BYTES:
                raise StorageError(
                    f"{name} takes {size} bytes; a checkpoint allows at most {MAX_FREE_FORM_BYTES} bytes for this "
                    "field; save fewer values"
                )
        return seal(vars(manifest) | plain)
    except TypeError as error:
        raise UsageError(f"the scalars of a checkpoint must be JSON values: {error}") from error


def seal(body: dict[str, Any]) -> str:
    """Return JSON text of ``body``, the fields of a manifest. The text ends with a digest of these fields."""
    text = _canonical(body)
    return f'{text[:-1]},"digest":"{xxhash.xxh3_128_hexdigest(text.encode())}"}}\n'


def digest_of(body: dict[str, Any]) -> str:
    """Return the hexadecimal digest of ``body``, the fields of a manifest without the field ``digest``."""
    return xxhash.xxh3_128_hexdigest(_canonical(body).encode())


def _canonical(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def load(directory: Path) -> Manifest:
    """Return the manifest in ``directory``, without reading shards. Raises StorageError for an invalid manifest."""
    # All pieces lie inside their tensors and shards, even if someone manipulated the file.
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
        raise StorageError(f"{path} is missing: the checkpoint was not finished; use another checkpoint") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise StorageError(f"{path} cannot be read: {error or type(error).__name__}") from error
    if manifest.byte_order != sys.byteorder:
        raise StorageError(
            f"{path} was written on a {manifest.byte_order[:20]}-endian machine, but this machine is "
            f"{sys.byteorder}-endian; use a machine with the same byte order"
        )
    if manifest.block_bytes != BLOCK_BYTES:
        raise StorageError(
            f"{path} has one digest per {manifest.block_bytes} bytes of tensor data, expected one digest per "
            f"{BLOCK_BYTES} bytes; restore this file from a copy"
        )
    reason = inconsistency(manifest)
    if reason:
        raise StorageError(f"{path} {reason}; restore this file from a copy")
    return manifest


def _read(path: Path) -> bytes:
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        limit = MAX_BYTES
        if size > MIN_LIMIT_BYTES:
            shards = (shard for pattern in ("*.h5", "*/*.h5") for shard in path.parent.glob(pattern))
            limit = min(MAX_BYTES, MIN_LIMIT_BYTES + 2 * sum(shard.stat().st_size for shard in shards))
        if size > limit:
            raise OSError(
                f"the manifest has {size} bytes; expected at most {limit} bytes for shards of this size; restore the "
                "manifest from a copy"
            )
        return pread_all(fd, size, 0)
    finally:
        os.close(fd)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of ``pairs``, the (key, value) pairs of a JSON object. Raises ValueError for a repeated key."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError(
            f"a JSON object of the checkpoint file has {len(pairs)} keys, but only {len(entries)} different keys (the "
            f"first key is {pairs[0][0][:80]!r}); restore the file from a copy"
        )
    return entries


def _parse_sealed(path: Path, data: bytes, end: int, digest: str) -> Manifest:
    # `seal` replaced the final "}" of the digested text by the digest.
    computed = xxhash.xxh3_128(memoryview(data)[:end])
    computed.update(b"}")
    if computed.hexdigest() != digest:
        raise StorageError(f"{path} is damaged: its digest does not match; restore this file from a copy")
    if not data.startswith(_ABOUT):
        return _parse_free_form(path, data)
    about, start = _value(data, len(_ABOUT))
    # Only typed fields lie between the two. Quotes within a string are escaped, so the first match is the key.
    stop = data.find(_SCALARS, start)
    if stop < 0:
        raise ValueError("the manifest lacks the field scalars; restore the manifest from a copy")
    scalars, end = _value(data, stop + len(_SCALARS))
    # The text without its free-form values; the empty key takes the comma that follows "about".
    typed = b"".join((b'{"": 0', memoryview(data)[start : stop + 1], memoryview(data)[end:]))
    try:
        header = msgspec.json.decode(typed, type=_Header)
        _check_version(path, header.schema, header.version)
        shards = msgspec.json.decode(typed, type=_Shards)
    except msgspec.DecodeError as error:
        raise StorageError(f"{path} is not valid: {error}; restore this file from a copy") from error
    if not (isinstance(scalars, dict) and isinstance(about, dict)):
        raise StorageError(
            f"{path} is not valid: ``scalars`` and ``about`` must be JSON objects; restore the manifest from a copy"
        )
    return Manifest(**vars(shards), scalars=scalars, about=about)


def _value(data: bytes, start: int) -> tuple[Any, int]:
    text = data[start : start + MAX_FREE_FORM_BYTES + 1].decode("ascii", "replace")  # `json.dumps` writes ASCII
    try:
        value, size = _DECODER.raw_decode(text)
    except ValueError as error:
        raise ValueError(f"a field is not a JSON value of at most {MAX_FREE_FORM_BYTES} bytes: {error}") from error
    return value, start + size


def _parse_free_form(path: Path, data: bytes) -> Manifest:
    # A user or another version of hpcdist wrote ``data``.
    if len(data) > MIN_LIMIT_BYTES:
        raise ValueError(
            f"the manifest does not end with a digest and has {len(data)} bytes; expected at most {MIN_LIMIT_BYTES} "
            "bytes for a manifest without a digest. Restore the manifest from a copy, or update hpcdist"
        )
    body = json.loads(data, object_pairs_hook=unique_keys)
    if not isinstance(body, dict):
        raise StorageError(f"{path} is not a manifest of {SCHEMA}; restore this file from a copy")
    _check_version(path, body.get("schema"), body.get("version"))
    digest = body.pop("digest", None)
    if digest_of(body) != digest:
        raise StorageError(f"{path} is damaged: its digest does not match; restore this file from a copy")
    try:
        return msgspec.convert(body, Manifest)
    except msgspec.ValidationError as error:
        raise StorageError(f"{path} is not valid: {error}; restore this file from a copy") from error


def _check_version(path: Path, schema: object, version: object) -> None:
    if schema != SCHEMA:
        raise StorageError(f"{path} is not a manifest of {SCHEMA}; restore this file from a copy")
    if type(version) is not int or not 1 <= version <= VERSION:
        error_type = NewerVersionError if type(version) is int and version > VERSION else StorageError
        raise error_type(f"{path} has version {str(version)[:20]}, expected 1 to {VERSION}; update hpcdist")
