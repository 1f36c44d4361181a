"""Results file of a benchmark of collectives: HDF5, with the time of every iteration on every rank.

    /                             provenance
    /configurations/<id>          op, dtype, bytes, algorithm, buffers, implementation, mpi_library, ranks, nodes, ...
        iteration, rank           scales
        session                   (iteration): number of the process that measured, where several took turns
        time_s, start_s           (iteration, rank)

Configurations are appended when they have been measured, all or nothing (`hpcdist.hdf5.files.edit`): a process that
is killed loses those under way. A configuration that exists already is extended.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.errors import StorageError
from hpcdist.hdf5 import files

SCHEMA: Final = "hpcdist.collectives"
VERSION: Final = 1
CONFIGURATIONS: Final = "configurations"
OURS: Final = "hpcdist"
_NOT_PROVENANCE: Final = ("schema", "schema_version", "NX_class")
_CHUNK: Final = 512


@dataclass(frozen=True)
class ConfigurationKey:
    """What makes two configurations the same: only equal ones are compared, or extended."""

    op: str
    dtype: str
    bytes: int
    ranks: int
    nodes: int
    algorithm: str
    buffers: str
    cache: str  # "cold": every iteration on another buffer, from memory; "hot": on one that was just written
    implementation: str  # whose code it is: "hpcdist", "gloo", ...
    mpi_library: str

    @property
    def id(self) -> str:
        """Name of its group."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=4).hexdigest()
        return f"{self.op}-{self.dtype}-{self.bytes}-{self.ranks}-{self.algorithm}-{self.buffers}-{digest}"

    @property
    def label(self) -> str:
        """Name in tables and plots."""
        name = self.algorithm if self.buffers == "ordinary" else f"{self.algorithm} ({self.buffers})"
        return name if self.implementation == OURS else f"{self.implementation} {name}"

    @property
    def vendor(self) -> str:
        """Whose MPI library it is, without the version."""
        match = re.match(r"[A-Za-z() ]+?(?= v?\d| Version|$)", self.mpi_library)
        return match[0] if match else self.mpi_library


@dataclass(frozen=True)
class CollectivesConfiguration:
    """One configuration and its raw samples; see `collectives_measure.Samples`.

    ``reference`` is true for what is no collective but bounds one (a memcpy, the wire); ``slots`` buffers took turns.
    """

    key: ConfigurationKey
    reference: bool
    slots: int
    verified: int
    wrong: str
    time_s: np.ndarray  # (iteration, rank)
    start_s: np.ndarray
    session: np.ndarray  # (iteration,)

    @property
    def slowest_s(self) -> np.ndarray:
        """The time of each iteration: that of the slowest rank that took part."""
        filled = np.where(np.isnan(self.time_s), -np.inf, self.time_s)
        slowest: np.ndarray = filled.max(axis=1)
        return slowest


@dataclass(frozen=True)
class CollectivesResults:
    """A results file in memory."""

    provenance: Mapping[str, Any]
    configurations: tuple[CollectivesConfiguration, ...]


@contextmanager
def _edited(path: Path, provenance: Mapping[str, Any]) -> Iterator[Any]:
    new = not path.exists()
    with files.edit(path, SCHEMA, VERSION) as file:
        if new:
            file.attrs.update({**provenance, "NX_class": "NXroot"})
            file.create_group(CONFIGURATIONS).attrs["NX_class"] = "NXentry"
        yield file


def append(path: Path, configurations: Sequence[CollectivesConfiguration], provenance: Mapping[str, Any]) -> None:
    """Put ``configurations`` into the file at ``path``, made with ``provenance`` when missing. Raises StorageError.

    Sessions are numbered on from those that a configuration has already.
    """
    with _edited(path, provenance) as file:
        groups = file[CONFIGURATIONS]
        for one in configurations:
            if one.key.id in groups:
                _extend(groups[one.key.id], one)
            else:
                _create(groups.create_group(one.key.id), one)


def _create(group: Any, one: CollectivesConfiguration) -> None:
    attributes = {**asdict(one.key), **{name: getattr(one, name) for name in _OF_A_MEASUREMENT}}
    group.attrs.update({**attributes, "NX_class": "NXdata", "signal": "time_s", "axes": ["iteration", "rank"]})
    iterations, ranks = one.time_s.shape
    group.create_dataset("rank", data=np.arange(ranks)).make_scale("rank")
    columns = {"iteration": np.arange(iterations), "session": one.session, **{n: getattr(one, n) for n in _WIDE}}
    for name, values in columns.items():
        chunks = (_CHUNK,) if values.ndim == 1 else (_CHUNK, min(ranks, 64))
        dataset = group.create_dataset(
            name, data=values, maxshape=(None, *values.shape[1:]), chunks=chunks, compression="gzip", shuffle=True
        )
        units, meaning = _MEANINGS[name]
        dataset.attrs.update({"units": units, "long_name": meaning})
    group["rank"].attrs.update({"units": "1", "long_name": "rank in the world"})
    group["iteration"].make_scale("iteration")
    group["session"].dims[0].attach_scale(group["iteration"])
    for name in _WIDE:
        group[name].dims[0].attach_scale(group["iteration"])
        group[name].dims[1].attach_scale(group["rank"])


_OF_A_MEASUREMENT: Final = ("reference", "slots", "verified", "wrong")
_WIDE: Final = ("time_s", "start_s")
_MEANINGS: Final = {
    "iteration": ("1", "number of the iteration"),
    "session": ("1", "number of the process that measured it"),
    "time_s": ("s", "time from the barrier to the end of the call"),
    "start_s": (
        "s",
        "begin after that of the first rank, which is the skew of the barrier; NaN without a common clock",
    ),
}


def _extend(group: Any, one: CollectivesConfiguration) -> None:
    before = group["time_s"].shape[0]
    after = before + len(one.time_s)
    first = int(group["session"][:].max(initial=-1)) + 1
    for name, values in {"session": one.session + first, **{n: getattr(one, n) for n in _WIDE}}.items():
        group[name].resize(after, axis=0)
        group[name][before:] = values
    group["iteration"].resize(after, axis=0)
    group["iteration"][...] = np.arange(after)
    group.attrs["verified"] = int(group.attrs["verified"]) + one.verified
    group.attrs["wrong"] = str(group.attrs["wrong"]) or one.wrong


def read(path: Path) -> CollectivesResults:
    """Read a results file. Raises StorageError."""
    with files.open_read(path, SCHEMA, VERSION) as file:
        try:
            provenance = {name: _plain(value) for name, value in file.attrs.items() if name not in _NOT_PROVENANCE}
            found = [_configuration(group) for group in file[CONFIGURATIONS].values()]
        except files.FAILURES as error:
            raise StorageError(f"{path}: is damaged: {error}") from error
    return CollectivesResults(provenance, tuple(sorted(found, key=lambda one: _place(one.key))))


def _place(key: ConfigurationKey) -> tuple[Any, ...]:
    return (key.op, key.dtype, key.ranks, key.bytes, key.implementation, key.algorithm, key.buffers)


def _configuration(group: Any) -> CollectivesConfiguration:
    attributes = group.attrs
    key = ConfigurationKey(**{one.name: _plain(attributes[one.name]) for one in fields(ConfigurationKey)})
    measured = {name: _plain(attributes[name]) for name in _OF_A_MEASUREMENT}
    return CollectivesConfiguration(key, **measured, **{name: group[name][...] for name in (*_WIDE, "session")})


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
