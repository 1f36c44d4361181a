"""Request and results file of a benchmark of collectives: operations, sizes and types, and the time of every iteration.

**Request.** `cells` orders them so that drift of the machine stays out of the comparison. Sizes and bandwidths are
those of nccl-tests (doc/PERFORMANCE.md), so that figures can be compared. With n ranks and S bytes, S being the whole
buffer of one rank in every operation:

    operation       S is                                                            bus bandwidth = S / t times
    allreduce       what a rank contributes, and what it ends with                  2 (n-1) / n
    reduce_scatter  what a rank contributes; it ends with about S / n               (n-1) / n
    all_gather      what a rank ends with; it contributes about S / n               (n-1) / n
    broadcast       what every rank ends with                                       1
    all_to_all      what a rank sends, the part for itself included                 (n-1) / n
    alltoallv-...   what the rank that gets most receives                           (n-1) / n

Parts of an alltoallv are uneven, the same from every rank: alltoallv-uniform has even ones, for comparison; of
alltoallv-zipf rank q gets 1 / (q+1) of what rank 0 gets; of alltoallv-hot rank 0 gets four fifths of what each sends.

S / t is the algorithm bandwidth. Bus bandwidth is what an ideal network would show for every n.

**File.** HDF5, with the time of every iteration on every rank:

    /                             provenance
    /configurations/<id>          op, dtype, bytes, algorithm, buffers, implementation, mpi_library, ranks, nodes, ...
        iteration, rank           scales
        session                   (iteration): number of the process that measured, where several took turns
        time_s, start_s           (iteration, rank)

Configurations are appended when they have been measured; one that exists already is extended.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.bench import output_file
from hpcdist.bench.output_file import ResultsFormat, SampleColumn
from hpcdist.errors import UsageError
from hpcdist.reporting.units import parse_bytes

SKEWS: Final = ("uniform", "zipf", "hot")
UNEVEN: Final = "alltoallv"
OPERATIONS: Final = (
    *("allreduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"),
    *(f"{UNEVEN}-{skew}" for skew in SKEWS),
)
ORDINARY: Final = "ordinary"
SHARED: Final = "shared"
COLD: Final = "cold"
HOT: Final = "hot"
_SIZE: Final = r"\d+[KMG]?"
_TOKEN: Final = re.compile(rf"({_SIZE})(?:-({_SIZE})(?:\s*x(\d+))?)?(?:\s*,\s*|\s+|$)", re.IGNORECASE)
RANGE_FACTOR: Final = 2
SCHEMA: Final = "hpcdist.collectives"
FORMAT: Final = ResultsFormat(SCHEMA, 1, "configurations")
OURS: Final = "hpcdist"
_START: Final = "begin after that of the first rank, which is the skew of the barrier; NaN without a common clock"


@dataclass(frozen=True)
class CollectivesCell:
    """One operation on one size and dtype, on which contenders take turns."""

    op: str
    dtype: str
    bytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.bytes // dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class CollectivesRequest:
    """Request: ``algorithms`` is empty for all that run here, ``iterations`` None for ``seconds``."""

    operations: tuple[str, ...]
    algorithms: tuple[str, ...]
    bytes: tuple[int, ...]
    dtypes: tuple[str, ...]
    buffers: tuple[str, ...]
    seconds: float
    iterations: int | None
    warmup: int
    least: int
    check: bool
    hot: bool
    seed: int


def part_sizes(op: str, size: int, ranks: int) -> list[int]:
    """Return how many of ``size`` elements a rank sends to each rank in the all-to-all ``op`` (local)."""
    each = size // ranks  # to rank 0, which then receives ``size`` from all
    if op.endswith("-zipf"):
        return [each // (rank + 1) for rank in range(ranks)]
    if op.endswith("-hot"):
        return [each, *[each // (4 * max(1, ranks - 1))] * (ranks - 1)]
    return [each] * ranks


def bus_factor(op: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth of ``op``; 0 on one rank, where nothing travels."""
    if ranks == 1:
        return 0.0
    if op == "broadcast":
        return 1.0
    return (2.0 if op == "allreduce" else 1.0) * (ranks - 1) / ranks


def sizes(texts: Iterable[str]) -> tuple[int, ...]:
    """Return the numbers of bytes in ``texts``, ascending: 4096, 16K, 1M, 4K-64M (each twice the last), 4K-64M x4.

    Several in one text are separated by commas or blanks. Raises UsageError.
    """
    numbers: set[int] = set()
    for text in texts:
        place = 0
        stripped = text.strip()
        while place < len(stripped) or not stripped:
            match = _TOKEN.match(stripped, place)
            if match is None:
                raise UsageError(
                    f"--bytes {text!r}: expected sizes such as 4096, 16K or 1M, or a range such as 4K-64M x4"
                )
            numbers |= set(_expanded(text, match))
            place = match.end()
    return tuple(sorted(numbers))


def _expanded(text: str, match: "re.Match[str]") -> list[int]:
    try:
        first, last = parse_bytes(match[1]), parse_bytes(match[2] or match[1])
    except ValueError as error:
        raise UsageError(f"--bytes {text!r}: {error}") from None
    factor = int(match[3] or RANGE_FACTOR)
    if last < first or factor < 2:
        raise UsageError(f"--bytes {text!r}: a range ascends, by a factor of at least 2")
    expanded = [first]
    while expanded[-1] * factor <= last:
        expanded.append(expanded[-1] * factor)
    return expanded


def cells(wanted: CollectivesRequest, ranks: int) -> tuple[list[CollectivesCell], list[str]]:
    """Return the cells in the order in which they are measured, the same on all ranks, and what was rounded (local).

    The parts of an all_to_all are of one size, as in nccl-tests.
    """
    combinations, notes = [], []
    for name in wanted.dtypes:
        for op in wanted.operations:
            parts = ranks if op == "all_to_all" or op.startswith(UNEVEN) else 1
            unit = dtype_of(name).itemsize * parts
            for nbytes in wanted.bytes:
                rounded = max(unit, nbytes // unit * unit)
                if rounded != nbytes:
                    what = f"{name} elements" + (f" for each of {ranks} ranks" if parts > 1 else "")
                    notes.append(f"{op}: {nbytes} bytes are no whole number of {what}; {rounded} are measured")
                combinations.append(CollectivesCell(op, name, rounded))
    distinct = list(dict.fromkeys(combinations))
    order = np.random.default_rng(wanted.seed).permutation(len(distinct))
    return [distinct[index] for index in order], notes


@dataclass(frozen=True)
class ConfigurationKey:
    """Key of a configuration: only equal ones are compared, or extended."""

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
        """The name of the MPI library, without the version."""
        match = re.match(r"[A-Za-z() ]+?(?= v?\d| Version|$)", self.mpi_library)
        return match[0] if match else self.mpi_library


@dataclass(frozen=True)
class CollectivesConfiguration:
    """One configuration and its raw samples; see `hpcdist.bench.collectives.run.CellSamples`.

    ``reference`` is true for what is no collective but bounds one (a memcpy, the wire); ``slots`` buffers took turns.
    """

    key: ConfigurationKey
    reference: bool
    slots: int
    verified: int
    wrong: str
    time_s: Annotated[np.ndarray, SampleColumn("time from the barrier to the end of the call", "iteration", "rank")]
    start_s: Annotated[np.ndarray, SampleColumn(_START, "iteration", "rank")]
    session: Annotated[np.ndarray, SampleColumn("number of the process that measured it", "iteration", units="1")]

    @property
    def slowest_s(self) -> np.ndarray:
        """The time of each iteration: that of the slowest rank that took part."""
        filled = np.where(np.isnan(self.time_s), -np.inf, self.time_s)
        slowest: np.ndarray = filled.max(axis=1)
        return slowest


@dataclass(frozen=True)
class CollectivesResults:
    """Contents of a results file."""

    provenance: Mapping[str, Any]
    configurations: tuple[CollectivesConfiguration, ...]


def append(path: Path, configurations: Sequence[CollectivesConfiguration], provenance: Mapping[str, Any]) -> None:
    """Put ``configurations`` into the file at ``path``, made with ``provenance`` when missing. Raises StorageError.

    Sessions are numbered on from those that a configuration has already.
    """
    with FORMAT.edit(path, provenance) as groups:
        for configuration in configurations:
            if configuration.key.id not in groups:
                output_file.write_record(groups.create_group(configuration.key.id), configuration, grows=True)
                continue
            group = groups[configuration.key.id]
            first = int(group["session"][:].max(initial=-1)) + 1
            output_file.extend_record(group, replace(configuration, session=configuration.session + first))
            group.attrs["verified"] = int(group.attrs["verified"]) + configuration.verified
            group.attrs["wrong"] = str(group.attrs["wrong"]) or configuration.wrong


def read(path: Path) -> CollectivesResults:
    """Read a results file. Raises StorageError."""
    with FORMAT.read(path) as (provenance, groups):
        configurations = [output_file.read_record(group, CollectivesConfiguration) for group in groups.values()]
    return CollectivesResults(
        provenance, tuple(sorted(configurations, key=lambda configuration: _place(configuration.key)))
    )


def _place(key: ConfigurationKey) -> tuple[Any, ...]:
    return (key.op, key.dtype, key.ranks, key.bytes, key.implementation, key.algorithm, key.buffers)
