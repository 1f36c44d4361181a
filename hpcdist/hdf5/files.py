"""HDF5 files: opened for reading, edited in one transaction, or written as contiguous datasets.

Every file of hpcdist has the root attributes ``schema`` and ``schema_version``. Old tools can open the files
(``libver=("earliest", "v110")``), and no file is held open for writing: open, change, close.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import h5py
import numpy as np
import xxhash

from hpcdist.arrays.dtypes import BFLOAT16, name_of
from hpcdist.arrays.ranges import Range, cut, gaps
from hpcdist.errors import StorageError
from hpcdist.hdf5 import datasets
from hpcdist.hdf5.datasets import DatasetMaker
from hpcdist.hdf5.overlay import Overlay, journal_of
from hpcdist.reporting import atomic
from hpcdist.reporting.regular import BROKEN_LIBRARY_ERRORS, DamagedFileError, damage, is_damage

LIBVER: Final = ("earliest", "v110")  # "latest" leaves an unreadable file behind when its writer is killed
CHECKSUMMED: Final = ("v108", "v110")  # metadata has checksums, so readers refuse damage; for files that never change
WRITE_BYTES: Final = 16 << 20
OUTSIDE_BYTES: Final = 1 << 18  # bytes outside of datasets that are digested at a time
ALIGNED_BYTES: Final = 4096  # datasets of a page and more begin at a page
RETRY_S: Final = 2.0
MOST_LINKS: Final = 16  # one behind the other, as HDF5 allows
FAILURES: Final = (OSError, RuntimeError, ValueError, KeyError, TypeError)  # what h5py raises for broken files
MOST_TEXT: Final = 1 << 20  # letters of an attribute


def attributes_of(file: h5py.File) -> dict[str, float | str]:
    """Return the root attributes that are a single number or text; others, and damaged ones, are left out."""
    attributes: dict[str, float | str] = {}
    for name in file.attrs:
        try:
            value = file.attrs[name]
        except BROKEN_LIBRARY_ERRORS:
            continue
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, int | float) or (isinstance(value, str) and len(value) <= MOST_TEXT):
            attributes[str(name)] = value
    return attributes


class Blocks(Protocol):
    """Dataset that is too large for an array in memory: it has a shape and a dtype, and is written in blocks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent by dim."""

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements, one that HDF5 has."""

    def blocks(self, offset: int) -> Iterator[np.ndarray]:
        """Yield all elements in row-major order: 1-D arrays, each to be used before the next is asked for.

        They will be written from byte ``offset`` of the file on, so that blocks can end at page boundaries.
        """


def open_read(path: str | os.PathLike[str], schema: str | None = None, version: int | None = None) -> h5py.File:
    """Open ``path`` for reading, to be closed by the caller (or as a context manager).

    With ``schema`` the file must be one of ours of that schema and of no later ``version``. A file that another
    process is changing is tried again for two seconds. Raises StorageError.
    """
    path = Path(path)
    if not path.is_file():
        raise StorageError(f"{path}: there is no such file")
    limit = time.monotonic() + RETRY_S
    while True:
        try:
            waiting = journal_of(path).exists()
            file = h5py.File(Overlay.reading(path), "r") if waiting else h5py.File(path, "r", locking="best-effort")
            break
        except OSError as error:
            # An HDF5 file that does not open may be changing just now; anything else will not turn into HDF5.
            if time.monotonic() > limit or not _has_signature(path):
                raise DamagedFileError(f"{path}: cannot be read as HDF5: {error}") from error
            time.sleep(0.05)
    try:
        _check_schema(path, file, schema, version)
    except BaseException:
        file.close()
        raise
    return file


def is_dataset(entry: Any) -> bool:
    """Whether ``entry`` of a file is a dataset, and no group or named type."""
    return isinstance(entry, h5py.Dataset)


def resolved(file: h5py.File, name: str) -> Any:
    """Return the object that ``name`` leads to through links, or None. Raises StorageError for a bad file.

    Links are followed here because HDF5 would block for ever on a pipe in the place of a linked file.
    """
    for _ in range(MOST_LINKS):
        link = file.get(name, getlink=True)
        if isinstance(link, h5py.SoftLink):
            name = link.path
        elif isinstance(link, h5py.ExternalLink):
            own = Path(file.filename)
            path = _external_path(own, link.filename, "HDF5_EXT_PREFIX", own.parent)
            if not path.exists():
                return None
            file, name = open_read(path), link.path
        else:
            return file.get(name)
    raise StorageError(f"{file.filename}: too many links")


def offset_in_file(dataset: h5py.Dataset) -> int | None:
    """Return the byte offset in ``dataset.file`` of its elements if they lie there contiguously in numpy's format.

    None where they must be read through HDF5: chunks, filters, other types, a user block, external or virtual storage,
    elements that were never written. Use ``dataset.file``: a link may have led to another file.
    """
    properties = dataset.id.get_create_plist()
    file = dataset.file
    plain = (
        dataset.dtype.kind in "iuf"
        and dataset.dtype.isnative
        and dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype))
        and properties.get_layout() == h5py.h5d.CONTIGUOUS
        and properties.get_external_count() == 0
        and file.driver == "sec2"  # read from the file itself, not through an overlay with its journal
        and not file.userblock_size
    )
    offset = dataset.id.get_offset() if plain else None
    return None if offset is None else int(offset)


def storage_of(dataset: h5py.Dataset) -> tuple[dict[Path, int], bool]:
    """Return the files that hold elements of ``dataset`` with their least sizes in bytes, and whether these are all.

    Sources of virtual datasets are included. Not all are known where virtual sources are a pattern of names, or where
    a journal lies over a file. HDF5 itself shows zeros for elements behind the end of a file, and the fill value for a
    missing virtual source: so this raises StorageError where a file is missing or too short, or a source has no such
    dataset, and MissingCapabilityError where one needs a filter that is missing here.
    """
    sizes: dict[Path, int] = {}
    complete = _add_storage(dataset, sizes, set(), ())
    for path, needed in sizes.items():
        check_size(path, needed, dataset.name)
    return sizes, complete


def check_size(path: Path, needed: int, name: str) -> None:
    """Raise StorageError when the file at ``path``, part of dataset ``name``, has fewer than ``needed`` bytes."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise StorageError(f"{path}, with elements of dataset {name}: cannot be read: {error.strerror}") from error
    if size < needed:
        raise StorageError(
            f"{path}, with elements of dataset {name}, has {size:,} bytes of {needed:,}: it was cut, or is still being "
            "written; give back the whole file"
        )


_Place = tuple[Path, str]  # a file, and a dataset in it


def _add_storage(dataset: h5py.Dataset, sizes: dict[Path, int], seen: set[_Place], outer: tuple[_Place, ...]) -> bool:
    """Add the files of ``dataset`` to ``sizes``, skipping sources in ``seen``; return whether these are all.

    ``outer`` are the virtual datasets that it is a part of: HDF5 would follow a cycle until the stack overflows.
    """
    datasets.check_filters(dataset)
    own, complete = Path(dataset.file.filename), dataset.file.driver == "sec2"
    place = own.resolve(), str(dataset.name)
    if place in outer:
        raise StorageError(f"{own}: the virtual dataset {dataset.name} is a part of itself")
    if complete:
        sizes.setdefault(own, own.stat().st_size)
    rest = dataset.nbytes
    for name, offset, size in dataset.external or ():
        path = _external_path(own, name, "HDF5_EXTFILE_PREFIX", Path())
        used = min(rest, size)  # external files are filled in order; the last may have unlimited size
        sizes[path] = max(sizes.get(path, 0), offset + used)
        rest -= used
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        file_name, name = source.file_name, source.dset_name
        path = own if file_name == "." else _external_path(own, file_name, "HDF5_VDS_PREFIX", own.parent)
        if (path, name) in seen:
            continue
        seen.add((path, name))
        if "%b" in file_name + name:  # a printf-style pattern: as many sources as there are files
            complete = False
            continue
        with open_read(path) as file:
            part = file.get(name)
            if not is_dataset(part):
                raise StorageError(f"{path}: no dataset {name}, which is part of a virtual one")
            complete &= _add_storage(part, sizes, seen, (*outer, place))
    return complete


def _external_path(own: Path, name: str, variable: str, folder: Path) -> Path:
    """Return the path at which HDF5 finds the file ``name`` that ``own`` refers to."""
    # HDF5's search order: the prefix, then `folder`, the name by itself, and its last part beside `own`.
    prefix = os.environ.get(variable, "").replace("${ORIGIN}", str(own.resolve().parent))
    places = [Path(prefix) / name] if prefix else []
    places += [folder / name, Path(name), own.parent / Path(name).name]
    return next((place for place in places if place.exists()), folder / name)


def _has_signature(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"


def _check_schema(path: Path, file: h5py.File, schema: str | None, version: int | None) -> None:
    if schema is None:
        return
    with damage(path, "it is not known of which schema it is"):
        file_schema = file.attrs.get("schema")
        number = int(file.attrs.get("schema_version", 0))
    if not isinstance(file_schema, str) or file_schema != schema:
        shown = repr(file_schema)[:80]
        raise DamagedFileError(f"{path}: a file of schema {shown}, expected {schema!r}; is this the right directory?")
    if version is not None and number > version:
        raise StorageError(f"{path}: {schema} version {number} is newer than the {version} known here; update hpcdist")


@contextmanager
def edit(path: str | os.PathLike[str], schema: str, version: int) -> Iterator[h5py.File]:
    """Open the file at ``path`` for changes (made when missing): all of them reach the disk at the end, or none.

    Raises StorageError when the disk is full or fails, DamagedFileError when the file is not of ``schema``; the file is
    then as it was before.
    """
    path = Path(path)
    created = not path.exists()
    if not created and not path.is_file():
        raise DamagedFileError(f"{path}: it is not a regular file")
    # A new file gets its name when it is complete: a writer killed before that leaves nothing that looks like one.
    written = atomic.temporary_path(path) if created else path
    try:
        overlay = Overlay(written, create=created)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        with overlay:
            with _edited(path, overlay, created) as file:
                if created:
                    file.attrs.update({"schema": schema, "schema_version": version})
                else:
                    _check_schema(path, file, schema, version)
                yield file
            try:
                overlay.commit()
                if created:
                    written.replace(path)
            except OSError as error:
                raise StorageError(f"{path}: cannot be written: {error.strerror}; what was there is kept") from error
    except BaseException:
        if created:
            atomic.discard(written)
        raise


def check_place(path: str | os.PathLike[str]) -> None:
    """Raise StorageError when no new file can be written at ``path``; a probe file is written and removed."""
    path = Path(path)
    if path.exists():
        raise StorageError(f"{path}: exists already; remove it, or choose another --output")
    try:
        with edit(path, "hpcdist.probe", 1):
            pass
    finally:
        atomic.discard(path)


def _edited(path: Path, overlay: Overlay, created: bool) -> h5py.File:
    try:
        return h5py.File(overlay, "w" if created else "r+", libver=LIBVER)
    except FAILURES as error:
        kind = DamagedFileError if is_damage(error) else StorageError
        raise kind(f"{path}: cannot be read as HDF5: {error}") from error


def storable(array: np.ndarray) -> np.ndarray:
    """Return ``array`` in a dtype that HDF5 has: bfloat16 as its bits in uint16. Copies only what is not contiguous."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint16) if array.dtype == BFLOAT16 else array


def write_contiguous(
    path: str | os.PathLike[str],
    datasets: Mapping[str, np.ndarray | Blocks],
    attributes: Mapping[str, Any],
    dataset_attributes: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    schema: str,
    version: int,
    opens: Callable[[Path], Overlay] = Overlay.created,
    outside: xxhash.xxh3_128 | None = None,
) -> dict[str, int]:
    """Write a new file of contiguous datasets to the disk (fsync included) and return the byte offset of each.

    Each dataset gets an attribute ``dtype``, which differs from HDF5's for bfloat16. `Blocks` are requested as they are
    written. ``opens`` makes the overlay of the file. ``outside`` digests the bytes of the file that lie in no dataset,
    in their order. Raises StorageError; no file is left then.
    """
    path = Path(path)
    try:
        with opens(path) as overlay:
            aligned = {"alignment_threshold": ALIGNED_BYTES, "alignment_interval": ALIGNED_BYTES}
            with h5py.File(overlay, "w", libver=CHECKSUMMED, **aligned) as file:
                file.attrs.update({"schema": schema, "schema_version": version, **attributes})
                make = DatasetMaker(file).contiguous
                offsets = {}
                for name, array in datasets.items():
                    stored = storable(np.empty(0, array.dtype)).dtype
                    own_attributes = {"dtype": name_of(array.dtype), **(dataset_attributes or {}).get(name, {})}
                    offsets[name] = make(name, array.shape, stored, own_attributes)
            if outside is not None:
                _digest_outside(
                    overlay, [_range_in_file(array, offsets[name]) for name, array in datasets.items()], outside
                )
            # The metadata first, through the overlay; then the elements at their offsets, straight to the disk.
            overlay.commit(wait=False)
            for name, array in datasets.items():
                _write_bytes(overlay, array, offsets[name])
            overlay.fsync()
    except FileExistsError as error:
        raise StorageError(f"{path}: exists already") from error
    except StorageError:  # raised by `Blocks` whose source cannot be read
        atomic.discard(path)
        raise
    except OSError as error:
        atomic.discard(path)
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error
    return offsets


def _range_in_file(array: np.ndarray | Blocks, offset: int) -> Range:
    return Range(offset, offset + math.prod(array.shape) * array.dtype.itemsize)


def _digest_outside(overlay: Overlay, places: Sequence[Range], digest: xxhash.xxh3_128) -> None:
    """Digest the bytes of the file outside ``places`` from the overlay in memory, before any disk can alter them."""
    memory = bytearray(OUTSIDE_BYTES)
    for gap in gaps(Range(0, overlay.seek(0, os.SEEK_END)), places):
        overlay.seek(gap.start)
        for part in cut(gap, OUTSIDE_BYTES):
            digest.update(memoryview(memory)[: overlay.readinto(memoryview(memory)[: part.size])])


def _write_bytes(overlay: Overlay, array: np.ndarray | Blocks, offset: int) -> None:
    for block in [storable(array).reshape(-1)] if isinstance(array, np.ndarray | np.generic) else array.blocks(offset):
        view = block.view(np.uint8).data if block.size else memoryview(b"")
        for start in range(0, len(view), WRITE_BYTES):
            overlay.pwrite(view[start : start + WRITE_BYTES], offset + start)
        offset += len(view)
