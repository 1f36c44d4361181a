"""Tables of columns, fast creation of datasets, and checks of the filters that a dataset needs.

A table is a group with one extendible dataset per `Column`, joined by dimension scales. The owner of a metrics table
declares a constant, and callers append rows by column name:

    CONSENSUS = MetricsTable("consensus", (Column("step", "i8", "1", "completed steps"), ...), remade=True)
    CONSENSUS.append(file, step=[7, 8], session=0, distance=[0.1, 0.2])

`DatasetMaker` creates datasets 10x faster than h5py. It writes attributes as UTF-8 strings of variable length, or as
int64.
"""

import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import h5py
import numpy as np
from h5py import h5a, h5d, h5p, h5s, h5t

from hpcdist.errors import MissingCapabilityError
from hpcdist.reporting.regular import BROKEN_LIBRARY_ERRORS

CHUNK_BYTES: Final = 64 << 10
CHUNK_ROWS: Final = 1024
TIMES: Final = {1: 2, 2: 4096}  # number of dims -> limit of column size / file size; above, the column is damaged
SLACK_BYTES: Final = 1 << 20
MAX_BLOCKS: Final = 1024  # row ranges of `spread_blocks`; each costs a lookup in the file's chunk index


@dataclass(frozen=True)
class Column:
    """Column of a table: a 1-D or 2-D dataset."""

    name: str
    dtype: str
    units: str  # in UCUM, such as "s", "By" or "1"
    meaning: str
    wide: bool = False  # a 2-D array of floats


def create(
    file: h5py.File,
    name: str,
    described: Sequence[Column],
    *,
    second: str = "",  # name of the second dimension of 2-D columns
    width: int = 0,  # its length
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Create the table ``name`` with the columns ``described``. The first column is the dimension scale of the rows."""
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
    """Append ``rows``, {column name: array}, to the table ``name``. 2-D columns get wider if necessary."""
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
    """Truncate all columns of the table ``name`` to ``rows`` rows, or to fewer rows if a column is shorter."""
    datasets = columns(file, name).values()
    for dataset in datasets:
        dataset.resize(min(rows, *(column.shape[0] for column in datasets)), axis=0)


def read(file: h5py.File, name: str, max_rows: int | None = None) -> dict[str, np.ndarray]:
    """Return {column name: array} of the table ``name``, with the first ``max_rows`` rows or, if None, all rows."""
    datasets = columns(file, name)
    lengths = [dataset.shape[0] for dataset in datasets.values()]
    length = min(lengths if max_rows is None else [max_rows, *lengths])
    return {column: dataset[:length] for column, dataset in datasets.items()}


def columns(file: h5py.File, name: str) -> dict[str, h5py.Dataset]:
    """Return {column name: dataset} of the table ``name``. Raises ValueError if a dataset is too large for the file."""
    group, size = file[name], file.id.get_filesize()
    datasets = {str(column): group[column] for column in group.attrs["columns"]}
    for column, dataset in datasets.items():
        if not 1 <= len(dataset.shape) <= 2 or dataset.nbytes > TIMES[len(dataset.shape)] * size + SLACK_BYTES:
            raise ValueError(
                f"{name}/{column} has the shape {dataset.shape}, too large for a file of {size} bytes; the file is "
                "damaged"
            )
    return datasets


@dataclass(frozen=True)
class MetricsTable:
    """Declaration of a table in an HDF5 file. Its rows are ordered by the first column, such as the step."""

    name: str
    columns: tuple[Column, ...]
    second: str = ""  # name of the second dimension of 2-D columns
    remade: bool = False  # appending rows first deletes the existing rows of the same and later steps

    def create(self, file: h5py.File, width: int = 0, attributes: Mapping[str, Any] | None = None) -> None:
        """Create the table with the HDF5 ``attributes`` if ``file`` lacks it. ``width``: row length of 2-D columns."""
        if self.name not in file:
            create(file, self.name, self.columns, second=self.second, width=width, attributes=attributes)

    def append(self, file: h5py.File, /, **values: Any) -> None:
        """Append rows to the table in the open ``file``. Local.

        Each column is a keyword: one value for all rows, or an array of shape (rows,) or (rows, width).
        """
        rows = {column.name: _array(values[column.name], np.dtype(column.dtype)) for column in self.columns}
        count = max((len(row) for row in rows.values() if row.ndim), default=1)
        if not count:
            return
        self.create(file, max((row.shape[1] for row in rows.values() if row.ndim > 1), default=0))
        if self.remade:
            self.drop_from(file, rows[self.columns[0].name].reshape(-1)[0])
        extend(file, self.name, {name: row if row.ndim else np.full(count, row) for name, row in rows.items()})

    def drop_from(self, file: h5py.File, first: float) -> None:
        """Delete all rows from the first row whose first column is at least ``first`` to the end of the table."""
        values = columns(file, self.name)[self.columns[0].name][...]
        later = np.flatnonzero(values >= first)
        shorten(file, self.name, int(later[0]) if later.size else len(values))

    def read(self, file: h5py.File, max_rows: int | None = None) -> dict[str, np.ndarray]:
        """Return {column name: array of the first ``max_rows`` rows (None: all)}, or {} if the table does not exist."""
        return read(file, self.name, max_rows) if self.name in file else {}


def spread_blocks(rows: int, chunk: int, limit: int) -> list[tuple[int, int]]:
    """Return evenly spread ranges (start, stop) of the ``rows`` rows of a table, with about ``limit`` rows in total.

    ``chunk``: rows per HDF5 chunk. The ranges are whole chunks, and include the first and the last chunk.
    """
    if rows <= limit:
        return [(0, rows)] if rows else []
    chunks = -(-rows // chunk)
    count = int(np.clip(min(limit // chunk, MAX_BLOCKS), 2, chunks))
    width = max(1, min(limit // (count * chunk), chunks // count))  # chunks per block
    starts = np.unique(np.linspace(0, chunks - width, count).astype(np.int64))
    return [(int(start) * chunk, min(rows, int(start + width) * chunk)) for start in starts]


def read_spread(file: h5py.File, name: str, columns: Sequence[str], limit: int) -> tuple[dict[str, np.ndarray], bool]:
    """Return ({column: values of about ``limit`` evenly spread rows of a table}, True if these are all rows)."""
    if name not in file or not file[f"{name}/{columns[0]}"].shape[0]:
        return {}, True
    datasets_of = {column: file[f"{name}/{column}"] for column in columns}
    rows = min(dataset.shape[0] for dataset in datasets_of.values())
    blocks = spread_blocks(rows, datasets_of[columns[0]].chunks[0], limit)
    read = {
        column: np.concatenate([dataset[start:stop] for start, stop in blocks])
        for column, dataset in datasets_of.items()
    }
    return read, len(read[columns[0]]) == rows


def _array(values: Any, dtype: np.dtype) -> np.ndarray:
    if dtype.kind != "S":
        return np.asarray(values, dtype)
    if isinstance(values, str):
        return np.array(_truncated(values, dtype.itemsize), dtype)
    return np.array([_truncated(text, dtype.itemsize) for text in values], dtype)


def _truncated(text: str, limit: int) -> bytes:
    return text.encode(errors="replace")[:limit].decode(errors="ignore").encode()


def texts(values: np.ndarray) -> list[str]:
    """Return the byte strings ``values`` of a column as a list of str."""
    return [value.decode(errors="replace") for value in values.tolist()]


Box = tuple[tuple[int, int], ...]
Region = tuple[Box, str, str, Sequence[int], Box]  # box in the whole; file, dataset, dataset shape, box in the dataset


class DatasetMaker:
    """Maker of datasets, and of their parent groups, in the open ``file``."""

    def __init__(self, file: h5py.File) -> None:
        self._file = file
        self._links = h5p.create(h5p.LINK_CREATE)
        self._links.set_create_intermediate_group(True)
        self._links.set_char_encoding(h5t.CSET_UTF8)
        self._contiguous = h5p.create(h5p.DATASET_CREATE)
        self._contiguous.set_layout(h5d.CONTIGUOUS)
        self._contiguous.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        self._contiguous.set_fill_time(h5d.FILL_TIME_NEVER)  # allocated early for a known offset, but not zeroed
        self._contiguous.set_obj_track_times(False)  # equal states give equal bytes at any time
        self._types: dict[Any, h5t.TypeID] = {}
        self._spaces: dict[tuple[int, ...], h5s.SpaceID] = {}
        self._boxes: dict[tuple[tuple[int, ...], Box], h5s.SpaceID] = {}  # many tensors have the same shape and region
        self._plans: dict[tuple[np.dtype, bytes], h5p.PropDCID] = {}  # of virtual datasets, by fill value
        self._text = h5py.string_dtype()
        self._text_type = h5t.py_create(self._text, logical=True)
        self._text_in_memory = h5t.py_create(self._text)
        self._texts: dict[str, np.ndarray] = {}  # by value: most datasets have the same

    def contiguous(self, name: str, shape: Sequence[int], dtype: np.dtype, attributes: Mapping[str, Any]) -> int:
        """Allocate the dataset ``name`` without writing its elements. Return the elements' byte offset in the file.

        ``attributes``: HDF5 attributes of the dataset.
        """
        dataset = h5d.create(
            self._file.id, name.encode(), self._type(dtype), self._space(shape), self._contiguous, self._links
        )
        self._describe(dataset, attributes)
        return int(dataset.get_offset() or 0)  # an empty dataset has no offset

    def virtual(
        self,
        name: str,
        shape: Sequence[int],
        dtype: np.dtype,
        regions: Iterable[Region],
        fill: np.ndarray,
        attributes: Mapping[str, Any],
    ) -> None:
        """Create a virtual dataset from regions of other datasets. Missing elements are read as ``fill``.

        ``regions``: tuples (box, source file, source dataset, source shape, source box). ``attributes``: for HDF5.
        """
        plan = self._virtual(fill).copy()
        for box, file, dataset, source_shape, source_box in regions:
            here, there = self._boxed(shape, box), self._boxed(source_shape, source_box)
            plan.set_virtual(here, file.encode(), dataset.encode(), there)
        created = h5d.create(self._file.id, name.encode(), self._type(dtype), self._space(shape), plan, self._links)
        self._describe(created, attributes)

    def _virtual(self, fill: np.ndarray) -> h5p.PropDCID:
        key = fill.dtype, fill.tobytes()
        if key not in self._plans:
            plan = self._plans[key] = h5p.create(h5p.DATASET_CREATE)
            plan.set_layout(h5d.VIRTUAL)
            plan.set_fill_value(fill)
        return self._plans[key]

    def _type(self, dtype: np.dtype) -> h5t.TypeID:
        if dtype not in self._types:
            self._types[dtype] = h5t.py_create(dtype, logical=True)
        return self._types[dtype]

    def _describe(self, dataset: h5d.DatasetID, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            if isinstance(value, str):
                attribute = h5a.create(dataset, name.encode(), self._text_type, self._space(()))
                text = self._texts.get(value)
                if text is None:
                    text = self._texts[value] = np.array(value, dtype=self._text)
                attribute.write(text, mtype=self._text_in_memory)
                continue
            numbers = np.asarray(value, np.int64)
            kind = self._type(numbers.dtype)
            attribute = h5a.create(dataset, name.encode(), kind, self._space(numbers.shape))
            if numbers.size:
                attribute.write(numbers, mtype=kind)

    def _space(self, shape: Sequence[int]) -> h5s.SpaceID:
        key = tuple(shape)
        if key not in self._spaces:
            self._spaces[key] = h5s.create_simple(key) if key else h5s.create(h5s.SCALAR)
        return self._spaces[key]

    def _boxed(self, shape: Sequence[int], box: Box) -> h5s.SpaceID:
        key = tuple(shape), box
        space = self._boxes.get(key)
        if space is None:
            space = self._space(shape)
            if any(start or stop < size for (start, stop), size in zip(box, shape, strict=True)):
                space = h5s.create_simple(tuple(shape))
                space.select_hyperslab(tuple(start for start, _ in box), tuple(stop - start for start, stop in box))
            self._boxes[key] = space
        return space


FILTER_PACKAGE: Final = "hdf5plugin"
FILTER_NAMES: Final = {
    307: "bzip2",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32017: "sz",
    32018: "fcidecomp",
    32024: "sz3",
    32026: "blosc2",
    32028: "sperr",
    32033: "htj2k",
}  # ids registered with the HDF Group -> names of the filters in hdf5plugin


def check_filters(dataset: h5py.Dataset) -> None:
    """Raise MissingCapabilityError if no plugin provides an HDF5 filter that ``dataset`` needs."""
    # Optional filters that the writer of the file skipped are not needed.
    if not _missing_filters(dataset):
        return
    problem = _import_filters()
    missing = _missing_filters(dataset)
    if not missing or _is_readable(dataset):
        return
    code, name = next(iter(missing.items()))
    path, filter_name = f"{dataset.file.filename}: dataset {dataset.name}", f"{FILTER_NAMES.get(code, name)} ({code})"
    if code in FILTER_NAMES and problem:
        raise MissingCapabilityError(
            f"{path} has the HDF5 filter {filter_name}, for which {sys.executable} needs the module {FILTER_PACKAGE}: "
            f"{problem}"
        )
    raise MissingCapabilityError(
        f"{path} has the HDF5 filter {filter_name}, but no HDF5 plugin for this filter was found; set HDF5_PLUGIN_PATH "
        "to the folder of the plugin"
    )


def _missing_filters(dataset: h5py.Dataset) -> dict[int, str]:
    properties = dataset.id.get_create_plist()
    missing = {}
    for index in range(properties.get_nfilters()):
        code, _, _, name = properties.get_filter(index)
        decodes = h5py.h5z.filter_avail(code) and (
            h5py.h5z.get_filter_info(code) & h5py.h5z.FILTER_CONFIG_DECODE_ENABLED
        )
        if not decodes:
            missing[code] = name.decode(errors="replace").split(" ")[0][:40]
    return missing


def _import_filters() -> str:
    try:
        importlib.import_module(FILTER_PACKAGE)
    except ModuleNotFoundError:
        return "pip install 'hpcdist[hdf5]'"
    except (ImportError, *BROKEN_LIBRARY_ERRORS) as error:  # e.g. built for another HDF5 than h5py
        return f"it is installed, but cannot be imported: {error}"
    return ""


def _is_readable(dataset: h5py.Dataset) -> bool:
    try:
        dataset[(0,) * len(dataset.shape)]
    except (OSError, RuntimeError, ValueError, IndexError):
        return not dataset.size  # an empty dataset needs no filter
    return True
