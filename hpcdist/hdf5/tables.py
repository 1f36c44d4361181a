"""Tables in HDF5: columns of equal length along a common dim, with scales and units, that can grow and be cut.

The file is one from `hpcdist.hdf5.files.edit`. Columns are extendible datasets of one group; a column with a second
dim (per rank) is widened when a row needs it, and what was never measured is NaN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import h5py
import numpy as np

CHUNK_BYTES: Final = 64 << 10
CHUNK_ROWS: Final = 1024
TIMES: Final = {1: 2, 2: 4096}  # that a column of so many dims may be larger than its file
SLACK_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Column:
    """A column: ``units`` in UCUM ("s", "By", "1"); ``wide`` ones have a second dim. Wide columns are floats."""

    name: str
    dtype: str
    units: str
    meaning: str
    wide: bool = False


def create(
    file: h5py.File,
    name: str,
    described: Sequence[Column],
    *,
    second: str = "",
    width: int = 0,
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Make the table ``name``. The first column is the scale of the rows; ``second`` names that of the second dim."""
    group = file.create_group(name)
    group.attrs.update({"columns": [column.name for column in described], "second": second, **(attributes or {})})
    for column in described:
        _dataset(group, column, width)
    rows = group[described[0].name]
    rows.make_scale(described[0].name)
    if second:
        group.create_dataset(second, data=np.arange(width), maxshape=(None,), chunks=(CHUNK_ROWS,)).make_scale(second)
    for column in described:
        if column.name != described[0].name:
            group[column.name].dims[0].attach_scale(rows)
        if column.wide:
            group[column.name].dims[1].attach_scale(group[second])


def _dataset(group: h5py.Group, column: Column, width: int) -> None:
    across = max(1, min(width, CHUNK_BYTES // 8))
    rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES // (8 * across))) if column.wide else CHUNK_ROWS
    dataset = group.create_dataset(
        column.name,
        (0, width) if column.wide else (0,),
        column.dtype,
        maxshape=(None, None) if column.wide else (None,),
        chunks=(rows, across) if column.wide else (rows,),
        fillvalue=np.nan if np.dtype(column.dtype).kind == "f" else np.zeros((), column.dtype)[()],
    )
    dataset.attrs.update({"units": column.units, "long_name": column.meaning})


def extend(file: h5py.File, name: str, rows: Mapping[str, np.ndarray]) -> None:
    """Append ``rows`` (all columns, equal lengths); wide ones may be wider or narrower than the table."""
    group = file[name]
    for column, dataset in columns(file, name).items():
        values = rows[column]
        before = dataset.shape[0]
        if values.ndim == 1:
            dataset.resize((before + len(values),))
            dataset[before:] = values
        else:
            dataset.resize((before + len(values), max(dataset.shape[1], values.shape[1])))
            dataset[before:, : values.shape[1]] = values
            _widen(group[group.attrs["second"]], dataset.shape[1])


def _widen(scale: h5py.Dataset, width: int) -> None:
    if scale.shape[0] < width:
        scale.resize((width,))
        scale[...] = np.arange(width)


def shorten(file: h5py.File, name: str, rows: int) -> None:
    """Keep the first ``rows`` rows, or those that all columns have: a killed writer may leave fewer of some."""
    datasets = columns(file, name).values()
    for column in datasets:
        column.resize(min(rows, *(other.shape[0] for other in datasets)), axis=0)


def read(file: h5py.File, name: str, most_rows: int | None = None) -> dict[str, np.ndarray]:
    """Return the columns as arrays, cut to the rows that all have (another process may be extending them).

    At most the first ``most_rows`` rows. Raises what h5py does for a broken file.
    """
    datasets = columns(file, name)
    lengths = [dataset.shape[0] for dataset in datasets.values()]
    length = min(lengths if most_rows is None else [most_rows, *lengths])
    return {column: dataset[:length] for column, dataset in datasets.items()}


def columns(file: h5py.File, name: str) -> dict[str, h5py.Dataset]:
    """Return the columns of a table. Raises ValueError where one cannot be what was written: it would fill the memory.

    A column of one number a row is written in full; of a wide one, ranks that were not there may be left out.
    """
    group, size = file[name], file.id.get_filesize()
    datasets = {str(column): group[column] for column in group.attrs["columns"]}
    for column, dataset in datasets.items():
        if not 1 <= len(dataset.shape) <= 2 or dataset.nbytes > TIMES[len(dataset.shape)] * size + SLACK_BYTES:
            raise ValueError(f"{name}/{column} has the shape {dataset.shape} in a file of {size} bytes")
    return datasets
