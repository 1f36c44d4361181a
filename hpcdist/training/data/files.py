"""Open data files: tokens in .npy and HDF5, tables in HDF5, and text as bytes.

Data is read lazily. The text files of a directory are concatenated once into the cache directory, under a lock.
"""

import fcntl
import hashlib
import os
import platform
import stat
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.errors import DataError, MissingCapabilityError, StorageError
from hpcdist.reporting import atomic, regular
from hpcdist.training.data.samples import FileArray, Sliceable, allocated

HDF5_SUFFIXES: Final = (".h5", ".hdf5", ".hdf")
MOST_CLASSES: Final = 1 << 24
BLOCK_ROWS: Final = 1 << 22  # rows read at a time
FEW_FILES: Final = 8  # up to this number of files is checked after every read, more files once in CHECK_S
CHECK_S: Final = 1.0
TOKEN_TYPES: Final = tuple(np.dtype(name) for name in ("uint8", "uint16", "uint32", "int32", "int64"))
MOST_TOKEN: Final = 2**32 - 1  # the largest value of the largest unsigned type


class Hdf5Dataset:
    """HDF5 dataset that is not contiguous in one file, such as a compressed dataset. Slices are read on access."""

    def __init__(self, path: Path, dataset: Any) -> None:
        from hpcdist.hdf5 import files

        self._path, self._dataset, self.place = path, dataset, str(dataset.name)
        self._sizes, self._all_known = files.storage_of(dataset)
        self._checked_s = -CHECK_S
        self.dtype = dataset.dtype.newbyteorder("=")
        self.shape = dataset.shape

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Any, /) -> Any:
        elements = self._read(index)
        self._check_sizes()
        return elements

    def files(self) -> list[tuple[Path, os.stat_result]] | None:
        """Return a list of (path, `os.stat` result) of all files with this dataset, or None if a file is unknown."""
        return [(path.resolve(), path.stat()) for path in self._sizes] if self._all_known else None

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        rows = allocated((len(starts), length, *self.shape[1:]), self.dtype, self._path)
        for row, start in enumerate(starts.tolist()):
            rows[row] = self._read(slice(start, start + length))
        self._check_sizes()
        return rows

    def _read(self, index: Any) -> Any:
        try:
            return self._dataset[index]
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            # A damaged chunk, a filter that is not installed, a row that does not fit into memory.
            raise StorageError(
                f"{self._path}, dataset {self._dataset.name}: cannot be read: {error}; check file and HDF5 filters"
            ) from error

    def _check_sizes(self) -> None:
        from hpcdist.hdf5 import files

        if len(self._sizes) > FEW_FILES:
            if time.monotonic() - self._checked_s < CHECK_S:
                return
            self._checked_s = time.monotonic()
        # HDF5 would read the missing data of a truncated file as zeros.
        for path, size in self._sizes.items():
            files.check_size(path, size, self._dataset.name)


def missing_filters(path: Path) -> list[str]:
    """Return a list of messages about HDF5 filters that the file ``path`` needs and that are not installed."""
    from hpcdist.hdf5 import files

    missing = []
    for name in ("tokens", "x", "y"):
        try:
            with files.open_read(path) as file:
                dataset = files.resolved(file, name)
                if files.is_dataset(dataset):
                    files.storage_of(dataset)
        except MissingCapabilityError as error:
            missing.append(f"an HDF5 filter is missing for data.path: {error}")
        except files.FAILURES:
            continue  # the training raises the error
    return missing


def npy_tokens(path: Path) -> Sliceable:
    """Return the tokens in the .npy file ``path`` as a lazy array. Raises DataError if the file is invalid."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.memmap):
            raise ValueError("the file is an .npz archive of several arrays; expected one array")
        what = f"data.path = {path}"
        _check_tokens(array, what)
        tokens = FileArray(path, array.dtype, array.offset, array.shape)
        _check_range(tokens, what)
        return tokens
    except (DataError, StorageError):
        raise
    except (OSError, ValueError, EOFError, OverflowError, MemoryError) as error:
        raise DataError(f"data.path = {path} cannot be read as .npy: {error}; save it again with numpy.save") from error


def hdf5_tokens(path: Path) -> Sliceable:
    """Return the dataset ``tokens`` of the HDF5 file ``path`` as a lazy array. Raises DataError if unusable."""
    tokens = _datasets(path, ("tokens",))[0]
    _check_tokens(tokens, f"data.path = {path}, dataset tokens")
    _check_range(tokens, f"data.path = {path}, dataset tokens")
    return tokens


def holds_tokens(path: Path) -> bool:
    """Return True if the HDF5 file ``path`` has a dataset ``tokens``. Raises DataError if the file is unreadable."""
    from hpcdist.hdf5 import files

    try:
        with files.open_read(path) as file:
            return file.get("tokens", getlink=True) is not None
    except StorageError as error:
        raise DataError(f"cannot open the file of data.path: {error}; set data.path to an intact HDF5 file") from error


def hdf5_table(path: Path) -> tuple[Sliceable, Sliceable, int]:
    """Return (inputs, classes, number of classes) of an HDF5 file with datasets x and y. Raises DataError."""
    x, y = _datasets(path, ("x", "y"))
    if not (np.issubdtype(x.dtype, np.number) and not np.issubdtype(x.dtype, np.complexfloating) and len(x.shape) >= 2):
        raise DataError(
            f"data.path = {path}: x is {x.dtype} of shape {x.shape}; expected real numbers of shape (rows, features)"
        )
    if not (np.issubdtype(y.dtype, np.integer) and len(y.shape) == 1):
        raise DataError(
            f"data.path = {path}: y is {y.dtype} of shape {y.shape}; expected integer classes of shape (rows,)"
        )
    if len(x) != len(y):
        raise DataError(f"data.path = {path}: x has {len(x)} rows, but y has {len(y)} rows; make both equal")
    if not len(x) or 0 in x.shape:
        raise DataError(f"data.path = {path}: x has the shape {x.shape}; expected at least one row and one feature")
    blocks = (y[start : start + BLOCK_ROWS] for start in range(0, len(y), BLOCK_ROWS))
    extremes = [(int(block.min()), int(block.max())) for block in blocks]
    least, most = min(low for low, _ in extremes), max(high for _, high in extremes)
    if least < 0:
        raise DataError(f"data.path = {path}: y holds class {least}; number the classes from 0")
    if most >= MOST_CLASSES:
        raise DataError(
            f"data.path = {path}: y holds class {most}, so the model would need {most + 1:,} outputs; number the "
            f"classes consecutively from 0, with at most {MOST_CLASSES:,} classes"
        )
    return x, y, most + 1


def _datasets(path: Path, names: tuple[str, ...]) -> list[Sliceable]:
    from hpcdist.hdf5 import files  # runs on text do not load h5py

    try:
        file = files.open_read(path)
    except StorageError as error:
        raise DataError(f"cannot open the file of data.path: {error}; set data.path to an intact HDF5 file") from error
    missing = [name for name in names if file.get(name, getlink=True) is None]
    if missing:
        raise _no_dataset_error(path, file, " and ".join(missing))
    return [_open_dataset(path, file, name) for name in names]


def _no_dataset_error(path: Path, file: Any, names: str) -> DataError:
    present = ", ".join(file) or "nothing"
    return DataError(f"data.path = {path}: no dataset {names}; the file holds {present}")


def _open_dataset(path: Path, file: Any, name: str) -> Sliceable:
    from hpcdist.hdf5 import files

    source = f"data.path = {path}"
    try:
        dataset = files.resolved(file, name)
    except files.FAILURES as error:
        raise DataError(
            f"{source}: dataset {name} cannot be opened: {error}; write the dataset or its link again"
        ) from error
    if dataset is None:
        raise DataError(f"{source}: {name} is a link to a missing file or object; provide the file that it links to")
    if not files.is_dataset(dataset):
        raise _no_dataset_error(path, file, name)
    if not dataset.shape:
        extent = "is a single value" if dataset.shape == () else "has no shape"
        raise DataError(
            f"{source}: dataset {name} has dtype {dataset.dtype} and {extent}; expected an array with at least one "
            "dimension"
        )
    try:
        offset = files.offset_in_file(dataset)
        # The elements are not contiguous in one file.
        if offset is None:
            return Hdf5Dataset(path, dataset)
        return FileArray(Path(dataset.file.filename), dataset.dtype, offset, dataset.shape)
    except MissingCapabilityError as error:
        raise MissingCapabilityError(f"an HDF5 filter is missing for data.path: {error}") from error
    except files.FAILURES as error:
        raise DataError(f"{source}: dataset {name} cannot be read: {error}; copy or write the file again") from error


def _check_tokens(tokens: Sliceable, what: str) -> None:
    if tokens.dtype.newbyteorder("=") not in TOKEN_TYPES or len(tokens.shape) != 1:
        names = ", ".join(str(dtype) for dtype in TOKEN_TYPES)
        raise DataError(f"{what} has dtype {tokens.dtype}, shape {tokens.shape}; expected a 1-D array of {names}")
    if not len(tokens):
        raise DataError(f"{what} is empty; expected at least one token")


def _check_range(tokens: Sliceable, what: str) -> None:
    if tokens.dtype.kind != "i":
        return
    for start in range(0, len(tokens), BLOCK_ROWS):
        block = tokens[start : start + BLOCK_ROWS]
        least, most = int(block.min()), int(block.max())
        if least < 0 or most > MOST_TOKEN:
            raise DataError(
                f"{what} holds the token {least if least < 0 else most}; expected tokens from 0 to {MOST_TOKEN:,}"
            )


SNIFFED_BYTES = 8192
MOST_CONTROL: Final = 0.02  # largest fraction of control characters in text; random bytes have 0.1
CONTROL: Final = bytes(code for code in range(32) if code not in b"\b\t\n\f\r\x1b")
SHOWN_FILES: Final = 5
# Suffixes of files that are not training text, with the kind of format.
_CONVERSION_ADVICE: Final = "write the texts to a text file, or the tokens to a .npy or HDF5 file"
FORMATS: Final = {
    **dict.fromkeys((".parquet", ".arrow", ".feather", ".orc", ".avro", ".tfrecord"), "a table"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".csv", ".tsv"), "records with markup"),
    **dict.fromkeys(
        (".gz", ".tgz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".7z", ".tar", ".rar"), "compressed or packed"
    ),
    **dict.fromkeys(
        (".bin", ".idx", ".npz", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".safetensors", ".gguf"), "binary"
    ),
    **dict.fromkeys((".h5", ".hdf5", ".hdf", ".npy"), "an array"),
}
_RULES: Final = b"2"  # version of `not_text`: cached concatenations of other versions are not used


def not_text(path: Path, head: bytes) -> str:
    """Return the reason why the file ``path`` is not text, or "" if it is text. ``head``: first bytes of the file."""
    # UTF-8 and single-byte encodings are text. UTF-16 and UTF-32 are not, because they contain NUL bytes.
    suffix = path.suffix.lower()
    if suffix in FORMATS:
        return f"{suffix} is {FORMATS[suffix]}"
    head = head[:SNIFFED_BYTES]
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "its text is UTF-16 or UTF-32, expected UTF-8"
    if b"\0" in head:
        return "it has NUL bytes"
    control = len(head) - len(head.translate(None, CONTROL))
    return "it has control characters" if control > MOST_CONTROL * len(head) else ""


# Not part of the library: installed packages, and byte code.
SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__"}


def kind_of(path: Path) -> str:
    """Return the kind of data at ``path``: "directory", "hdf5", "npy" or "text". Raises DataError for other files."""
    if path.is_dir():
        return "directory"
    if not path.is_file():
        raise DataError(f"data.path = {path} is neither a file nor a directory; set data.path to a file or directory")
    try:
        with open(regular.open_regular(path), "rb") as file:
            head = file.read(SNIFFED_BYTES)
    except OSError as error:
        raise DataError(f"data.path = {path} cannot be read: {error.strerror}; choose a readable file") from error
    if not head:
        raise DataError(f"data.path = {path}: the file is empty; set data.path to a file with data")
    if head.startswith(b"\x89HDF\r\n\x1a\n") or path.suffix.lower() in HDF5_SUFFIXES:
        return "hdf5"
    if head.startswith(b"\x93NUMPY") or path.suffix.lower() == ".npy":
        return "npy"
    if reason := not_text(path, head):
        raise DataError(f"data.path = {path} is not text: {reason}; {_CONVERSION_ADVICE}")
    return "text"


def text_of_directory(path: Path) -> tuple[FileArray, np.ndarray, str]:
    """Return (concatenated text files below ``path``, end offset of each file in the text, name for messages)."""
    files = [name for name in _walk(path, set()) if not os.path.basename(name).startswith(".")]
    if not files:
        raise DataError(f"data.path = {path}: no files in the directory; give a text file or a directory of text files")
    tokens, ends = _concatenate(path, files)
    skipped = len(files) - len(ends)
    return tokens, ends, f"text files in {path}" + (f" ({skipped} skipped)" if skipped else "")


def text_of_standard_library() -> tuple[FileArray, np.ndarray, str]:
    """Return (source text of Python's standard library, end offset of each file in the text, name for messages)."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [name for name in _walk(root, SKIPPED_DIRECTORIES) if name.endswith(".py")]
    if not files:
        raise DataError(f"{root} holds no source text of the Python standard library; set data.path to a text file")
    return *_concatenate(root, files), f"{len(files)} files of the Python {platform.python_version()} standard library"


def bytes_of_file(path: Path) -> FileArray:
    """Return the bytes of the file ``path`` as a lazy array. Raises DataError if the file is empty or unreadable."""
    try:
        size = path.stat().st_size
        if size == 0:
            raise DataError(f"data.path = {path}: the file is empty; set data.path to a file with data")
        return FileArray(path, np.uint8, 0, (size,))
    except OSError as error:
        raise DataError(
            f"data.path = {path} cannot be read: {error.strerror or error}; set data.path to a readable file"
        ) from error


def _walk(root: Path, excluded: set[str]) -> list[str]:
    def refuse(error: OSError) -> None:
        raise DataError(f"directory {error.filename} cannot be read: {error.strerror}; make it readable") from error

    names = []
    for folder, below, files in os.walk(root, onerror=refuse):
        below[:] = [name for name in below if name not in excluded and not name.startswith(".")]
        paths = (os.path.join(folder, name) for name in files)
        names += [os.path.relpath(path, root) for path in paths if os.path.isfile(path)]
    # This order makes the last files, the validation data, a fair sample.
    return sorted(names, key=lambda name: hashlib.blake2b(os.fsencode(name)).digest())


def _concatenate(root: Path, files: list[str]) -> tuple[FileArray, np.ndarray]:
    # The result is the bytes (lazy) of the cache file, and the end offset of each file.
    state = hashlib.blake2b(os.fsencode(root) + b"\0" + _RULES, digest_size=16)
    for name in files:
        status = (root / name).stat()
        state.update(os.fsencode(name) + b"\0" + f"{status.st_size} {status.st_mtime_ns}\0".encode())
    folder = cache_directory()
    target = folder / f"text-{state.hexdigest()}.bytes"
    ends = target.with_suffix(".ends")  # appears before the target
    try:
        if not (target.exists() and ends.exists()):
            with _locked(target.with_suffix(".lock")):
                if not (target.exists() and ends.exists()):  # another process may have written them
                    atomic.sweep(folder)
                    atomic.sweep(folder, 0.0, target.name)  # only the lock holder writes this file
                    _write_concatenation(target, ends, (root / name for name in files))
    except OSError as error:
        raise StorageError(
            f"the text of {root} cannot be concatenated in {folder}: {error.strerror or error}; "
            "set HPCDIST_CACHE to a local directory with enough space"
        ) from error
    if target.stat().st_size == 0:
        raise DataError(f"data.path = {root}: the files of the directory hold no text; {_CONVERSION_ADVICE}")
    return bytes_of_file(target), np.fromfile(ends, np.int64)


def _write_concatenation(target: Path, ends: Path, files: Iterable[Path]) -> None:
    offsets, skipped = [], []
    with atomic.replacing(target) as out:
        for path in files:
            try:
                descriptor = regular.open_regular(path)
            except OSError as error:
                raise DataError(
                    f"{path} cannot be read: {error.strerror}; make the file readable, or remove the file"
                ) from error
            with open(descriptor, "rb") as text:
                head = text.read(SNIFFED_BYTES)
                if reason := not_text(path, head):
                    skipped.append(f"{path} ({reason})")
                    continue
                out.write(head)
                while block := text.read(1 << 20):
                    out.write(block)
                offsets.append(out.tell())
        with atomic.replacing(ends) as index:
            index.write(np.array(offsets, np.int64).tobytes())
    if skipped:
        listing = target.with_suffix(".skipped")
        with atomic.replacing(listing) as out:
            out.write("\n".join([*skipped, ""]).encode(errors="surrogateescape"))
        shown = "; ".join(skipped[:SHOWN_FILES]) + ("; ..." if len(skipped) > SHOWN_FILES else "")
        print(f"hpcdist: {len(skipped)} files are not text and are skipped: {shown}; all: {listing}", file=sys.stderr)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def cache_directory() -> Path:
    """Return the text cache directory: $HPCDIST_CACHE or a directory in /tmp. Raises StorageError if it is unusable."""
    configured = os.environ.get("HPCDIST_CACHE")
    folder = Path(configured) if configured else Path(tempfile.gettempdir()) / f"hpcdist-data-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise StorageError(
            f"the cache directory {folder} cannot be created: {error.strerror}; set HPCDIST_CACHE to another directory"
        ) from error
    # A directory that other users can write to is refused.
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    if not configured and not private:
        raise StorageError(
            f"the cache directory {folder} must be a directory that only this user can write; remove {folder}, or set "
            "HPCDIST_CACHE to another directory"
        )
    return folder
