"""Declaration of a metrics table: columns with types, units and meanings. The first append creates the table.

The owner of a table declares a constant, and callers append rows by column name:

    CONSENSUS = MetricsTable("consensus", (Column("step", "i8", "1", "completed steps"), ...), remade=True)
    CONSENSUS.append(file, step=[7, 8], session=0, distance=[0.1, 0.2])
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import h5py
import numpy as np

from hpcdist.hdf5 import datasets
from hpcdist.hdf5.datasets import Column

MAX_BLOCKS: Final = 1024  # each block costs a lookup in the file's chunk index


@dataclass(frozen=True)
class MetricsTable:
    """Table ``name`` of an HDF5 file. Rows are ordered by the first column, e.g. the step."""

    name: str
    columns: tuple[Column, ...]
    second: str = ""  # name of the second dimension of 2-D columns
    remade: bool = False  # appending rows first deletes the existing rows of the same and later steps

    def create(self, file: h5py.File, width: int = 0, attributes: Mapping[str, Any] | None = None) -> None:
        """Create the table and its HDF5 ``attributes`` if ``file`` lacks it. ``width``: row length of 2-D columns."""
        if self.name not in file:
            datasets.create(file, self.name, self.columns, second=self.second, width=width, attributes=attributes)

    def append(self, file: h5py.File, /, **values: Any) -> None:
        """Append rows to the table in the open ``file``. Local.

        Pass each column as a keyword: one value for all rows, or an array of shape (rows,) or (rows, width).
        """
        # Texts that are too long for the column are truncated.
        rows = {column.name: _array(values[column.name], np.dtype(column.dtype)) for column in self.columns}
        count = max((len(row) for row in rows.values() if row.ndim), default=1)
        if not count:
            return
        self.create(file, max((row.shape[1] for row in rows.values() if row.ndim > 1), default=0))
        if self.remade:
            self.drop_from(file, rows[self.columns[0].name].reshape(-1)[0])
        datasets.extend(file, self.name, {name: row if row.ndim else np.full(count, row) for name, row in rows.items()})

    def drop_from(self, file: h5py.File, first: float) -> None:
        """Drop the first row whose value in the first column is at least ``first``, and all later rows. Local."""
        values = datasets.columns(file, self.name)[self.columns[0].name][...]
        later = np.flatnonzero(values >= first)
        datasets.shorten(file, self.name, int(later[0]) if later.size else len(values))

    def read(self, file: h5py.File, most_rows: int | None = None) -> dict[str, np.ndarray]:
        """Return {column name: first ``most_rows`` rows (None: all)}, or {} if ``file`` lacks the table. Local."""
        return datasets.read(file, self.name, most_rows) if self.name in file else {}


def spread_blocks(rows: int, chunk: int, most: int) -> list[tuple[int, int]]:
    """Return evenly spread row ranges (start, stop) of a table of ``rows`` rows, with about ``most`` rows in total.

    ``chunk``: rows per HDF5 chunk. The ranges consist of whole chunks, including the first and last chunk.
    """
    if rows <= most:
        return [(0, rows)] if rows else []
    chunks = -(-rows // chunk)
    count = int(np.clip(min(most // chunk, MAX_BLOCKS), 2, chunks))
    width = max(1, min(most // (count * chunk), chunks // count))  # chunks per block
    starts = np.unique(np.linspace(0, chunks - width, count).astype(np.int64))
    return [(int(start) * chunk, min(rows, int(start + width) * chunk)) for start in starts]


def read_spread(file: h5py.File, name: str, columns: Sequence[str], most: int) -> tuple[dict[str, np.ndarray], bool]:
    """Return {column: values} of about ``most`` evenly spread rows of table ``name``, and True if these are all."""
    if name not in file or not file[f"{name}/{columns[0]}"].shape[0]:
        return {}, True
    datasets_of = {column: file[f"{name}/{column}"] for column in columns}
    rows = min(dataset.shape[0] for dataset in datasets_of.values())
    blocks = spread_blocks(rows, datasets_of[columns[0]].chunks[0], most)
    read = {
        column: np.concatenate([dataset[start:stop] for start, stop in blocks])
        for column, dataset in datasets_of.items()
    }
    return read, len(read[columns[0]]) == rows


def _array(values: Any, dtype: np.dtype) -> np.ndarray:
    if dtype.kind != "S":
        return np.asarray(values, dtype)
    texts = _cut(values, dtype.itemsize) if isinstance(values, str) else [_cut(text, dtype.itemsize) for text in values]
    return np.array(texts, dtype)


def _cut(text: str, most: int) -> bytes:
    return text.encode(errors="replace")[:most].decode(errors="ignore").encode()


def texts(values: np.ndarray) -> list[str]:
    """Return the byte strings ``values`` of a column as a list of str."""
    return [value.decode(errors="replace") for value in values.tolist()]
