"""Declaration of a metrics table: its columns with types, units and meanings; made at the first append, and read.

A module that owns tables declares them as constants, and its callers append rows by the names of the columns:

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

MAX_BLOCKS: Final = 1024  # fewer than chunks of a row would be: each is a look into the file's index


@dataclass(frozen=True)
class MetricsTable:
    """Table ``name`` of a file. The first of ``columns`` orders the rows; ``second`` is the second dim of wide ones.

    ``remade``: an append drops the rows from its first one on, since a run that goes on from a checkpoint makes these
    steps again.
    """

    name: str
    columns: tuple[Column, ...]
    second: str = ""
    remade: bool = False

    def create(self, file: h5py.File, width: int = 0, attributes: Mapping[str, Any] | None = None) -> None:
        """Make the table in an open file, unless it is there (local)."""
        if self.name not in file:
            datasets.create(file, self.name, self.columns, second=self.second, width=width, attributes=attributes)

    def append(self, file: h5py.File, /, **values: Any) -> None:
        """Append rows to an open file, of every column (n,), of a wide one (n, width), or one value for all (local).

        Texts are cut to the bytes of their column, at a whole character. Nothing happens where n is 0.
        """
        rows = {column.name: _array(values[column.name], np.dtype(column.dtype)) for column in self.columns}
        count = max((len(row) for row in rows.values() if row.ndim), default=1)
        if not count:
            return
        self.create(file, max((row.shape[1] for row in rows.values() if row.ndim > 1), default=0))
        if self.remade:
            self.drop_from(file, rows[self.columns[0].name].reshape(-1)[0])
        datasets.extend(file, self.name, {name: row if row.ndim else np.full(count, row) for name, row in rows.items()})

    def drop_from(self, file: h5py.File, first: float) -> None:
        """Drop the rows of an open file from the first one on whose first column is at least ``first`` (local)."""
        known = datasets.columns(file, self.name)[self.columns[0].name][...]
        later = np.flatnonzero(known >= first)
        datasets.shorten(file, self.name, int(later[0]) if later.size else len(known))

    def read(self, file: h5py.File, most_rows: int | None = None) -> dict[str, np.ndarray]:
        """Return the columns, as `datasets.read`; {} where the file has no such table (local)."""
        return datasets.read(file, self.name, most_rows) if self.name in file else {}


def spread_blocks(rows: int, chunk: int, most: int) -> list[tuple[int, int]]:
    """Return blocks (start, stop) of ``rows`` rows: all of them, or whole chunks with about ``most`` rows in total.

    The blocks are spread evenly, and the first and the last rows are among them.
    """
    if rows <= most:
        return [(0, rows)] if rows else []
    chunks = -(-rows // chunk)
    count = int(np.clip(min(most // chunk, MAX_BLOCKS), 2, chunks))
    width = max(1, min(most // (count * chunk), chunks // count))  # chunks of one block
    starts = np.unique(np.linspace(0, chunks - width, count).astype(np.int64))
    return [(int(start) * chunk, min(rows, int(start + width) * chunk)) for start in starts]


def read_spread(file: h5py.File, name: str, columns: Sequence[str], most: int) -> tuple[dict[str, np.ndarray], bool]:
    """Return about ``most`` rows of some columns of the table ``name``, spread evenly, and whether they are all.

    No columns where the file has no such table, or no rows of it. Raises h5py's errors for a broken file.
    """
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
    """Return ``text`` as UTF-8 of at most so many bytes: no character is cut in two."""
    return text.encode(errors="replace")[:most].decode(errors="ignore").encode()


def texts(values: np.ndarray) -> list[str]:
    """Return a column of texts, (n,) of bytes, as str."""
    return [value.decode(errors="replace") for value in values.tolist()]
