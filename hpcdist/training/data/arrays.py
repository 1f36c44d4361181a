"""Arrays in files: tokens in .npy and HDF5, tables in HDF5. Nothing is read before it is asked for."""

from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.errors import DataError, StorageError
from hpcdist.training.data.samples import Sliceable

MOST_CLASSES: Final = 1 << 24
TOKEN_TYPES: Final = tuple(np.dtype(name) for name in ("uint8", "uint16", "uint32"))


class Dataset:
    """An HDF5 dataset that is read slice by slice, for what cannot be memory-mapped: chunks, filters, foreign types."""

    def __init__(self, path: Path, dataset: Any) -> None:
        self._path, self._dataset = path, dataset
        self.dtype = dataset.dtype.newbyteorder("=")
        self.shape = dataset.shape

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Any, /) -> Any:
        try:
            return self._dataset[index]
        except (OSError, RuntimeError) as error:  # a damaged chunk, a filter that is not installed
            raise StorageError(f"{self._path}, dataset {self._dataset.name}: cannot be read: {error}") from error


def npy_tokens(path: Path) -> Sliceable:
    """Return the tokens of a .npy file, memory-mapped. Raises DataError."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"data.path = {path} cannot be read as .npy: {error}") from error
    return _checked_tokens(np.asarray(array), f"data.path = {path}")


def hdf5_tokens(path: Path) -> Sliceable:
    """Return the dataset ``tokens`` of an HDF5 file. Raises DataError."""
    tokens = _datasets(path, ("tokens",))[0]
    return _checked_tokens(tokens, f"data.path = {path}, dataset tokens")


def holds_tokens(path: Path) -> bool:
    """Whether an HDF5 file has a dataset ``tokens``. Raises DataError where it cannot be read."""
    from hpcdist.hdf5 import files

    try:
        with files.open_read(path) as file:
            return "tokens" in file
    except StorageError as error:
        raise DataError(f"data.path = {error}") from error


def hdf5_table(path: Path) -> tuple[Sliceable, Sliceable, int]:
    """Return ``x`` (rows, ...) and ``y`` (rows,) of an HDF5 file, and the number of classes. Raises DataError."""
    x, y = _datasets(path, ("x", "y"))
    if not (np.issubdtype(x.dtype, np.number) and not np.issubdtype(x.dtype, np.complexfloating) and len(x.shape) >= 2):
        raise DataError(f"data.path = {path}: x is {x.dtype}{x.shape}; expected real numbers (rows, features)")
    if not (np.issubdtype(y.dtype, np.integer) and len(y.shape) == 1):
        raise DataError(
            f"data.path = {path}: y is {y.dtype}{y.shape}; expected the class of each row as an integer (rows,)"
        )
    if len(x) != len(y):
        raise DataError(f"data.path = {path}: x has {len(x)} rows and y has {len(y)}; they must be as many")
    if not len(x) or 0 in x.shape:
        raise DataError(f"data.path = {path}: x has the shape {x.shape}; there is nothing to train on")
    classes = y[:]
    if classes.min() < 0:
        raise DataError(f"data.path = {path}: y holds {classes.min()}; classes count from 0")
    if classes.max() >= MOST_CLASSES:
        raise DataError(
            f"data.path = {path}: y holds {classes.max()}, and a model has an output for each class up to that; number "
            f"them from 0 on, at most {MOST_CLASSES:,}"
        )
    return x, y, int(classes.max()) + 1


def _datasets(path: Path, names: tuple[str, ...]) -> list[Sliceable]:
    from hpcdist.hdf5 import files  # h5py is not for runs on text

    try:
        file = files.open_read(path)
    except StorageError as error:
        raise DataError(f"data.path = {error}") from error
    missing = [name for name in names if not hasattr(file.get(name), "dtype")]
    if missing:
        present = ", ".join(file) or "nothing"
        raise DataError(f"data.path = {path}: no dataset {' and '.join(missing)}; the file holds {present}")
    return [_mapped(path, file, file[name]) for name in names]


def _mapped(path: Path, file: Any, dataset: Any) -> Sliceable:
    """Return a memory map of a dataset whose elements lie in the file as they are; else read it through HDF5."""
    offset = dataset.id.get_offset()
    plain = dataset.chunks is None and dataset.dtype.isnative and dataset.dtype.kind in "iuf"
    if offset is None or not plain or file.userblock_size:
        return Dataset(path, dataset)
    try:
        return np.asarray(np.memmap(path, dataset.dtype, "r", offset, dataset.shape))
    except (OSError, ValueError) as error:
        raise DataError(f"data.path = {path}, dataset {dataset.name}: cannot be mapped: {error}") from error


def _checked_tokens(tokens: Sliceable, what: str) -> Sliceable:
    if tokens.dtype not in TOKEN_TYPES or len(tokens.shape) != 1:
        names = ", ".join(str(dtype) for dtype in TOKEN_TYPES)
        raise DataError(f"{what} is {tokens.dtype}{tokens.shape}; expected one dimension of {names}")
    if not len(tokens):
        raise DataError(f"{what} is empty")
    return tokens
