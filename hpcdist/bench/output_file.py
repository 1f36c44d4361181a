"""HDF5 results files of benchmarks: records in groups, with provenance.

A benchmark declares its records as dataclasses. `write_record` and `read_record` store each record in an HDF5 group. A
number, text or None becomes an attribute (NaN stands for None). The fields of a nested dataclass become attributes of
the same group. An array annotated with `SampleColumn` becomes a dataset with units, meaning and dimension scales, which
other tools can read. The benchmark stores fields of other types itself.
"""

import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import numpy as np

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import HpcdistError, StorageError
from hpcdist.hdf5 import files

Record = TypeVar("Record")


class SampleColumn:
    """Description of an HDF5 dataset: a text on the ``meaning``, the names ``axes`` of the dimensions, and the unit."""

    def __init__(self, meaning: str, *axes: str, units: str = "s") -> None:
        self.meaning, self.axes, self.units = meaning, axes, units


@dataclass(frozen=True)
class ResultsFormat:
    """Schema name and version of an HDF5 results file. ``records``: name of the results group, or "" for the root."""

    schema: str
    version: int
    records: str = ""

    @contextmanager
    def edit(self, path: Path, provenance: Mapping[str, Any]) -> Iterator[Any]:
        """Open or create the results file ``path``. Yield the HDF5 group of the records. Raises StorageError.

        ``provenance``: attributes to write if the file is new.
        """
        created = not path.exists()
        with files.edit(path, self.schema, self.version) as file:
            if created:
                file.attrs.update({**provenance, "NX_class": "NXroot"})
                if self.records:
                    file.create_group(self.records).attrs["NX_class"] = "NXentry"
            yield file[self.records] if self.records else file

    @contextmanager
    def read(self, path: Path) -> Iterator[tuple[dict[str, Any], Any]]:
        """Open the results file ``path``. Yield (dict of provenance, HDF5 group of records). Raises StorageError."""
        with files.open_read(path, self.schema, self.version) as file:
            try:
                header = ("schema", "schema_version", "NX_class")
                provenance = {name: plain(value) for name, value in file.attrs.items() if name not in header}
                yield provenance, file[self.records] if self.records else file
            except files.FAILURES as error:
                raise StorageError(f"{path} is damaged: {error}; delete the file and measure again") from error


def plain(value: Any) -> Any:
    """Convert a NumPy array to a list, or a NumPy scalar to a Python scalar. A NaN scalar becomes None."""
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value


def write_record(group: Any, record: Any, *, grows: bool = False) -> None:
    """Write the dataclass object ``record`` into the HDF5 ``group``. ``grows``: True if `extend_record` follows."""
    group.attrs.update(_attributes(record))
    columns = {name: (getattr(record, name), column) for name, column in _sample_columns(type(record)).items()}
    if columns:
        write_samples(group, columns, grows=grows)


def write_samples(group: Any, columns: Mapping[str, tuple[np.ndarray, SampleColumn]], *, grows: bool = False) -> None:
    """Create HDF5 datasets in ``group``. ``columns``: {name: (values, description)}. ``grows``: resizable datasets."""
    # NeXus viewers show the first dataset. A dataset can be the scale of another dataset.
    for name, (values, column) in columns.items():
        options: dict[str, Any] = {}
        if grows:
            options = {"maxshape": (None, *np.shape(values)[1:]), "compression": "gzip", "shuffle": True}
            options["chunks"] = (512, *(min(extent, 64) for extent in np.shape(values)[1:]))
        dataset = group.create_dataset(name, data=values, **options)
        dataset.attrs.update({"units": column.units, "long_name": column.meaning})
        for axis, extent in zip(column.axes, dataset.shape, strict=False):
            if axis not in group and axis not in columns:
                unlimited = {"maxshape": (None,)} if grows and axis == column.axes[0] else {}
                scale = group.create_dataset(axis, data=np.arange(extent), **unlimited)
                meaning = "rank in the world" if axis == "rank" else f"number of the {axis}"
                scale.attrs.update({"units": "1", "long_name": meaning})
    attach_scales(group, {name: column.axes for name, (_, column) in columns.items()})
    signal, (_, first) = next(iter(columns.items()))
    group.attrs.update({"NX_class": "NXdata", "signal": signal, **({"axes": list(first.axes)} if first.axes else {})})


def attach_scales(group: Any, axes: Mapping[str, Sequence[str]]) -> None:
    """Attach HDF5 dimension scales to datasets of ``group``. ``axes``: {dataset name: scale name of each dimension}."""
    for scale in dict.fromkeys(axis for names in axes.values() for axis in names):
        group[scale].make_scale(scale)
    for name, scales in axes.items():
        for dim, scale in zip(group[name].dims, scales, strict=False):
            if scale != name:
                dim.attach_scale(group[scale])


def extend_record(group: Any, record: Any) -> None:
    """Append each array of the dataclass object ``record`` to the dataset with the array's name in ``group``."""
    for name, column in _sample_columns(type(record)).items():
        values, dataset, scale = getattr(record, name), group[name], group[column.axes[0]]
        length = len(dataset) + len(values)
        dataset.resize(length, axis=0)
        dataset[length - len(values) :] = values
        scale.resize(length, axis=0)
        scale[...] = np.arange(length)


def read_record(group: Any, kind: type[Record], **values: Any) -> Record:
    """Return an object of the dataclass ``kind``. Fields that are not in ``values`` come from the HDF5 ``group``."""
    for name, hint in _hints(kind).items():
        if name in values:
            continue
        if get_origin(hint) is Annotated:
            values[name] = group[name][...]
        elif is_dataclass(hint):
            values[name] = read_record(group, typing.cast(type, hint))
        else:
            value = plain(group.attrs[name])
            values[name] = float(value) if float in _alternatives(hint) and value is not None else value
    return kind(**values)


def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def _sample_columns(kind: type) -> dict[str, SampleColumn]:
    return {name: get_args(hint)[1] for name, hint in _hints(kind).items() if get_origin(hint) is Annotated}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _attributes(record: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for name, hint in _hints(type(record)).items():
        value = getattr(record, name)
        if is_dataclass(hint):
            attributes |= _attributes(value)
        elif {*_alternatives(hint)} <= {str, int, float, bool, type(None)}:
            attributes[name] = math.nan if value is None else value
    return attributes


def check_on_all_ranks(comm: Communicator, check: Callable[[], object]) -> None:
    """Call ``check`` on rank 0. Raise an HpcdistError of this call on every rank. Collective over ``comm``."""
    error: HpcdistError | None = None
    try:
        if comm.rank == 0:
            check()
    except HpcdistError as raised:
        error = raised
    error = comm.broadcast_object(error)
    if error is not None:
        raise error
