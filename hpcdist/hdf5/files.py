"""HDF5 files: open for reading, edit in one transaction, or write as contiguous datasets.

Every file has the root attributes ``schema`` and ``schema_version``. Old tools can open the files (HDF5 1.10), and no
file stays open for writing.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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

LIBVER: Final = ("earliest", "v110")  # "latest" leaves an unreadable file if the writer is killed
CHECKSUMMED: Final = ("v108", "v110")  # checksums detect damaged metadata; for files that never change
WRITE_BYTES: Final = 16 << 20
OUTSIDE_BYTES: Final = 1 << 18  # bytes outside of datasets that are digested at a time
ALIGNED_BYTES: Final = 4096  # datasets of at least a page are page-aligned
RETRY_S: Final = 2.0
MOST_LINKS: Final = 16  # maximum length of a chain of links, as in HDF5
FAILURES: Final = (OSError, RuntimeError, ValueError, KeyError, TypeError)  # raised by h5py for broken files
MOST_TEXT: Final = 1 << 20  # maximum number of characters of an attribute


def attributes_of(file: h5py.File) -> dict[str, float | str]:
    """Return {name: value} for the root attributes of ``file`` that are numbers or strings. Skip damaged attributes."""
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
    """Protocol of a dataset that is too large for memory and is written in blocks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dataset."""

    @property
    def dtype(self) -> np.dtype:
        """Data type of the elements, which HDF5 must support."""

    def blocks(self, offset: int) -> Iterator[np.ndarray]:
        """Yield all elements in 1-D arrays, each valid until the next yield. ``offset``: byte offset in the file."""


def open_read(path: str | os.PathLike[str], schema: str | None = None, version: int | None = None) -> h5py.File:
    """Open the HDF5 file ``path`` for reading. The caller must close the file. Raises StorageError.

    ``schema``: required schema, or None. ``version``: newest version of the schema that is accepted, or None.
    """
    path = Path(path)
    if not path.is_file():
        raise StorageError(f"{path}: there is no such file; check the path")
    # for a file that another process is changing
    limit = time.monotonic() + RETRY_S
    while True:
        try:
            if journal_of(path).exists():
                file = h5py.File(Overlay(path, read_only=True), "r")
            else:
                file = h5py.File(path, "r", locking="best-effort")
            break
        except OSError as error:
            # An HDF5 file may be changing at the moment; a file without the HDF5 signature is rejected at once.
            with path.open("rb") as opened:
                has_signature = opened.read(8) == b"\x89HDF\r\n\x1a\n"
            if time.monotonic() > limit or not has_signature:
                raise DamagedFileError(f"{path}: cannot be read as HDF5: {error}; restore the file") from error
            time.sleep(0.05)
    try:
        _check_schema(path, file, schema, version)
    except BaseException:
        file.close()
        raise
    return file


def is_dataset(entry: Any) -> bool:
    """Return True if the HDF5 object ``entry`` is a dataset."""
    return isinstance(entry, h5py.Dataset)


def resolved(file: h5py.File, name: str) -> Any:
    """Follow links and return object ``name`` of ``file``, or None if missing. Raises StorageError for bad links."""
    for _ in range(MOST_LINKS):
        link = file.get(name, getlink=True)
        if isinstance(link, h5py.SoftLink):
            name = link.path
        elif isinstance(link, h5py.ExternalLink):
            origin = Path(file.filename)
            # HDF5 itself would block forever if the linked file is a pipe.
            path = _external_path(origin, link.filename, "HDF5_EXT_PREFIX", origin.parent)
            if not path.exists():
                return None
            file, name = open_read(path), link.path
        else:
            return file.get(name)
    raise StorageError(f"{file.filename}: {name} leads over too many links, more than {MOST_LINKS}; remove any cycle")


def offset_in_file(dataset: h5py.Dataset) -> int | None:
    """Return the byte offset of ``dataset``'s elements in its file, or None if they are not stored as a plain array."""
    properties = dataset.id.get_create_plist()
    file = dataset.file
    plain = (
        dataset.dtype.kind in "iuf"
        and dataset.dtype.isnative
        and dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype))
        and properties.get_layout() == h5py.h5d.CONTIGUOUS
        and properties.get_external_count() == 0
        and file.driver == "sec2"  # not read through an overlay with a journal
        and not file.userblock_size
    )
    offset = dataset.id.get_offset() if plain else None
    return None if offset is None else int(offset)


def storage_of(dataset: h5py.Dataset) -> tuple[dict[Path, int], bool]:
    """Return ({file: required bytes} of the files that store ``dataset``, True if no file is missing in this dict).

    Raises StorageError for missing data, and MissingCapabilityError for a missing filter.
    """
    sizes: dict[Path, int] = {}
    # The dict lacks files that a virtual dataset names by a pattern, and files that need a special HDF5 driver.
    complete = _add_storage(dataset, sizes, set(), ())
    for path, needed in sizes.items():
        check_size(path, needed, dataset.name)
    return sizes, complete


def check_size(path: Path, needed: int, name: str) -> None:
    """Raise StorageError if the file ``path``, which stores the dataset ``name``, has fewer than ``needed`` bytes."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise StorageError(
            f"{path} stores elements of dataset {name}, but cannot be read: {error.strerror}; restore {path}"
        ) from error
    if size < needed:
        raise StorageError(
            f"{path} stores elements of dataset {name}, but has {size:,} of {needed:,} bytes: it was truncated, or is "
            "still being written; restore the whole file"
        )


_Place = tuple[Path, str]  # a file, and the name of a dataset in the file


def _add_storage(dataset: h5py.Dataset, sizes: dict[Path, int], seen: set[_Place], outer: tuple[_Place, ...]) -> bool:
    datasets.check_filters(dataset)
    holder, complete = Path(dataset.file.filename), dataset.file.driver == "sec2"
    location = holder.resolve(), str(dataset.name)
    if location in outer:
        raise StorageError(f"{holder}: the virtual dataset {dataset.name} is a part of itself; create a new dataset")
    if complete:
        sizes.setdefault(holder, holder.stat().st_size)
    rest = dataset.nbytes
    for name, offset, size in dataset.external or ():
        path = _external_path(holder, name, "HDF5_EXTFILE_PREFIX", Path())
        used = min(rest, size)  # external files are filled in order; the last file may have unlimited size
        sizes[path] = max(sizes.get(path, 0), offset + used)
        rest -= used
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        file_name, name = source.file_name, source.dset_name
        path = holder if file_name == "." else _external_path(holder, file_name, "HDF5_VDS_PREFIX", holder.parent)
        if (path, name) in seen:
            continue
        seen.add((path, name))
        if "%b" in file_name + name:  # a printf-style pattern for any number of files
            complete = False
            continue
        with open_read(path) as file:
            part = file.get(name)
            if not is_dataset(part):
                raise StorageError(f"{path}: has no dataset {name}, which a virtual dataset needs; restore the file")
            complete &= _add_storage(part, sizes, seen, (*outer, location))
    return complete


def _external_path(origin: Path, name: str, variable: str, folder: Path) -> Path:
    # HDF5's search order: the prefix in `variable`, `folder`, the name itself, then the directory of `origin`.
    prefix = os.environ.get(variable, "").replace("${ORIGIN}", str(origin.resolve().parent))
    candidates = [Path(prefix) / name] if prefix else []
    candidates += [folder / name, Path(name), origin.parent / Path(name).name]
    return next((candidate for candidate in candidates if candidate.exists()), folder / name)


def _check_schema(path: Path, file: h5py.File, schema: str | None, version: int | None) -> None:
    if schema is None:
        return
    with damage(path, "its schema cannot be read"):
        file_schema = file.attrs.get("schema")
        number = int(file.attrs.get("schema_version", 0))
    if not isinstance(file_schema, str) or file_schema != schema:
        shown = repr(file_schema)[:80]
        raise DamagedFileError(f"{path}: its schema is {shown}, expected {schema!r}; check the path")
    if version is not None and number > version:
        raise StorageError(f"{path}: its {schema} version {number} is newer than version {version}; update hpcdist")


@contextmanager
def edit(path: str | os.PathLike[str], schema: str, version: int) -> Iterator[h5py.File]:
    """Context manager that edits or creates the HDF5 file ``path``. On exit, all changes reach the disk, or none.

    ``schema``, ``version``: name and version of the file's format. Raises StorageError, or DamagedFileError for another
    schema.
    """
    path = Path(path)
    created = not path.exists()
    if not created and not path.is_file():
        raise DamagedFileError(f"{path}: not a regular file; remove or rename {path}")
    # A new file is renamed when complete: a killed writer leaves no file at `path`.
    written = atomic.temporary_path(path) if created else path
    try:
        overlay = Overlay(written, create=created)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}; check its directory") from error
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
                raise StorageError(f"{path}: cannot be written: {error.strerror}; the file was not changed") from error
    except BaseException:
        if created:
            atomic.discard(written)
        raise


def check_place(path: str | os.PathLike[str]) -> None:
    """Raise StorageError if the file ``path`` exists, or if it cannot be created."""
    path = Path(path)
    if path.exists():
        raise StorageError(f"{path}: exists already; remove the file, or choose another --output")
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
        raise kind(f"{path}: cannot be read as HDF5: {error}; restore the file") from error


def storable(array: np.ndarray) -> np.ndarray:
    """Return ``array`` as a contiguous array of a dtype that HDF5 supports: bfloat16 becomes uint16."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint16) if array.dtype == BFLOAT16 else array


def finish(file: Overlay) -> None:
    """Wait until ``file`` is on the disk, and close ``file``. Raises OSError."""
    with file:
        file.fsync()


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
    sync: Callable[[Overlay], object] = finish,
) -> dict[str, int]:
    """Write ``datasets``, {name: array}, to a new HDF5 file ``path``, and fsync it. Raises StorageError.

    Return {dataset name: byte offset of its elements}. ``attributes``: root attributes. ``dataset_attributes``:
    attributes by dataset name. ``sync``: function that gets the complete file, and must fsync and close it.
    """
    path = Path(path)
    try:
        # `opens` creates the file `path` and returns its `Overlay`.
        with ExitStack() as stack:
            overlay = stack.enter_context(opens(path))
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
                # `outside` is updated with all bytes of the file outside the datasets.
                sizes = {name: math.prod(array.shape) * array.dtype.itemsize for name, array in datasets.items()}
                stored_ranges = [Range(offsets[name], offsets[name] + size) for name, size in sizes.items()]
                _digest_outside(overlay, stored_ranges, outside)
            # Write the metadata through the overlay, then the elements at their offsets directly to the disk.
            overlay.commit(wait=False)
            for name, array in datasets.items():
                _write_bytes(overlay, array, offsets[name])
            stack.pop_all()
            sync(overlay)
    except FileExistsError as error:
        raise StorageError(f"{path}: exists already; remove the file, or choose another path") from error
    except StorageError:  # raised by `Blocks` if the source cannot be read
        atomic.discard(path)
        raise
    except OSError as error:
        atomic.discard(path)
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}; check the disk") from error
    return offsets


def _digest_outside(overlay: Overlay, stored_ranges: Sequence[Range], digest: xxhash.xxh3_128) -> None:
    memory = memoryview(bytearray(OUTSIDE_BYTES))
    for gap in gaps(Range(0, overlay.seek(0, os.SEEK_END)), stored_ranges):
        overlay.seek(gap.start)
        for block in cut(gap, OUTSIDE_BYTES):
            digest.update(memory[: overlay.readinto(memory[: block.size])])


def _write_bytes(overlay: Overlay, array: np.ndarray | Blocks, offset: int) -> None:
    for block in [storable(array).reshape(-1)] if isinstance(array, np.ndarray | np.generic) else array.blocks(offset):
        view = block.view(np.uint8).data if block.size else memoryview(b"")
        for start in range(0, len(view), WRITE_BYTES):
            overlay.pwrite(view[start : start + WRITE_BYTES], offset + start)
        offset += len(view)
