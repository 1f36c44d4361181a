"""Results files of benchmarks: one HDF5 file of records with provenance, and the check of its place.

A benchmark declares its records as dataclasses. Of a record (`write_record`, `read_record`) a number or text is an
attribute of its group, NaN for None; a dataclass in it is flattened; and a field annotated with `SampleColumn` is a
dataset with units, meaning and dimension scales, so that other tools can read it. Other fields are the benchmark's own
affair.
A `ResultsFormat` names the schema of a file. What is changed reaches the disk as a whole or not at all
(`hpcdist.hdf5.files.edit`): a process that is killed loses what was under way.
"""

import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

import numpy as np

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import HpcdistError, StorageError
from hpcdist.hdf5 import files

_NOT_PROVENANCE: Final = ("schema", "schema_version", "NX_class")
_SCALARS: Final = (str, int, float, bool)
_CHUNK_ROWS: Final = 512
_CHUNK_COLUMNS: Final = 64
_SCALES: Final = {"rank": "rank in the world"}  # others: "number of the ..."
Record = TypeVar("Record")


class SampleColumn:
    """Declaration of a dataset: its meaning, the scales of its first dims, and its units in UCUM."""

    def __init__(self, meaning: str, *axes: str, units: str = "s") -> None:
        self.meaning, self.axes, self.units = meaning, axes, units


@dataclass(frozen=True)
class ResultsFormat:
    """Schema of a results file; its records are groups of the group ``records``, or of the root for ""."""

    schema: str
    version: int
    records: str = ""

    @contextmanager
    def edit(self, path: Path, provenance: Mapping[str, Any]) -> Iterator[Any]:
        """Open the file at ``path``, made with ``provenance`` when missing, and yield the group of its records.

        Raises StorageError; the file is then as it was before.
        """
        new = not path.exists()
        with files.edit(path, self.schema, self.version) as file:
            if new:
                file.attrs.update({**provenance, "NX_class": "NXroot"})
                if self.records:
                    file.create_group(self.records).attrs["NX_class"] = "NXentry"
            yield file[self.records] if self.records else file

    @contextmanager
    def read(self, path: Path) -> Iterator[tuple[dict[str, Any], Any]]:
        """Open the file at ``path`` and yield provenance and the group of its records. Raises StorageError.

        What h5py raises inside the block becomes a StorageError too: the file is damaged.
        """
        with files.open_read(path, self.schema, self.version) as file:
            try:
                provenance = {name: plain(value) for name, value in file.attrs.items() if name not in _NOT_PROVENANCE}
                yield provenance, file[self.records] if self.records else file
            except files.FAILURES as error:
                raise StorageError(f"{path}: is damaged: {error}") from error


def plain(value: Any) -> Any:
    """Return an attribute as Python has it, None for NaN."""
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value


def write_record(group: Any, record: Any, *, grows: bool = False) -> None:
    """Write the dataclass ``record`` into the empty ``group``; with ``grows``, `extend_record` can extend it."""
    group.attrs.update(_attributes(record))
    columns = {name: (getattr(record, name), samples) for name, samples in _declared(type(record)).items()}
    if columns:
        write_samples(group, columns, grows=grows)


def write_samples(group: Any, columns: Mapping[str, tuple[np.ndarray, SampleColumn]], *, grows: bool = False) -> None:
    """Write datasets and their scales into ``group``; the first one is what a viewer shows. A scale may be a column."""
    for name, (values, samples) in columns.items():
        options: dict[str, Any] = {}
        if grows:
            chunks = (_CHUNK_ROWS, *(min(extent, _CHUNK_COLUMNS) for extent in np.shape(values)[1:]))
            options = {"maxshape": (None, *np.shape(values)[1:]), "chunks": chunks}
            options |= {"compression": "gzip", "shuffle": True}
        dataset = group.create_dataset(name, data=values, **options)
        dataset.attrs.update({"units": samples.units, "long_name": samples.meaning})
        for axis, extent in zip(samples.axes, dataset.shape, strict=False):
            if axis not in group and axis not in columns:
                unlimited = {"maxshape": (None,)} if grows and axis == samples.axes[0] else {}
                scale = group.create_dataset(axis, data=np.arange(extent), **unlimited)
                scale.attrs.update({"units": "1", "long_name": _SCALES.get(axis, f"number of the {axis}")})
    attach_scales(group, {name: samples.axes for name, (_, samples) in columns.items()})
    signal, (_, first) = next(iter(columns.items()))
    group.attrs.update({"NX_class": "NXdata", "signal": signal, **({"axes": list(first.axes)} if first.axes else {})})


def attach_scales(group: Any, axes: Mapping[str, Sequence[str]]) -> None:
    """Make the datasets that ``axes`` names, by dataset, scales of the dims of the others in ``group``."""
    for scale in dict.fromkeys(axis for names in axes.values() for axis in names):
        group[scale].make_scale(scale)
    for name, scales in axes.items():
        for dim, scale in zip(group[name].dims, scales, strict=False):
            if scale != name:
                dim.attach_scale(group[scale])


def extend_record(group: Any, record: Any) -> None:
    """Append the samples of ``record`` to those in ``group``, along their first dim."""
    for name, samples in _declared(type(record)).items():
        values, dataset = getattr(record, name), group[name]
        before = dataset.shape[0]
        dataset.resize(before + len(values), axis=0)
        dataset[before:] = values
        scale = group[samples.axes[0]]
        scale.resize(dataset.shape[0], axis=0)
        scale[...] = np.arange(dataset.shape[0])


def read_record(group: Any, kind: type[Record], **known: Any) -> Record:
    """Return the record of ``kind`` in ``group``; fields that `write_record` does not write are ``known``."""
    values = dict(known)
    for name, hint in _hints(kind).items():
        if name in known:
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


def _declared(kind: type) -> dict[str, SampleColumn]:
    """Return the datasets of a record of ``kind``."""
    return {name: get_args(hint)[1] for name, hint in _hints(kind).items() if get_origin(hint) is Annotated}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _attributes(record: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for name, hint in _hints(type(record)).items():
        value = getattr(record, name)
        if is_dataclass(hint):
            attributes |= _attributes(value)
        elif set(_alternatives(hint)) <= {*_SCALARS, type(None)}:
            attributes[name] = math.nan if value is None else value
    return attributes


def check_on_all_ranks(comm: Communicator, check: Callable[[], object]) -> None:
    """Make ``check`` on rank 0 and raise on every rank the HpcdistError that it raised. Collective over ``comm``."""
    error: HpcdistError | None = None
    if comm.rank == 0:
        try:
            check()
        except HpcdistError as raised:
            error = raised
    error = comm.broadcast_object(error)
    if error is not None:
        raise error
