"""Request and results file of the benchmark of collectives: operations, sizes, dtypes, and times of all iterations.

**Request.** `cells` puts the cells in random order, so that drift of the machine affects all sizes alike. Sizes and
bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md). n is the number of ranks, S the size of one rank's whole
buffer in bytes, and t the time. S / t is the algorithm bandwidth. The bus bandwidth is (S / t) x factor. In an ideal
network it does not depend on n.

    operation       S                                                               factor
    allreduce       contribution of a rank, and size of the result                  2 (n-1) / n
    reduce_scatter  contribution of a rank; its result has about S / n              (n-1) / n
    all_gather      result of a rank; its contribution has about S / n              (n-1) / n
    broadcast       result of every rank                                            1
    all_to_all      data that a rank sends, including the part for itself           (n-1) / n
    alltoallv-...   data received by the rank that receives most                    (n-1) / n

Every rank of an alltoallv sends parts of the same sizes. In alltoallv-uniform all parts are equal, for comparison. In
alltoallv-zipf rank q receives 1 / (q+1) of the part of rank 0. In alltoallv-hot rank 0 receives 4/5 of all data.

**File.** HDF5, with the time of every iteration on every rank:

    /                             provenance
    /configurations/<id>          op, dtype, bytes, algorithm, buffers, implementation, mpi_library, ranks, nodes, ...
        iteration, rank           scales
        session                   (iteration): number of the measuring process, if several processes took turns
        time_s, start_s           (iteration, rank)

`append` adds a configuration, or extends the configuration with the same key.
"""

import hashlib
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, repeat, takewhile
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.bench import output_file
from hpcdist.bench.output_file import ResultsFormat, SampleColumn
from hpcdist.errors import UsageError
from hpcdist.reporting.units import parse_bytes

UNEVEN: Final = "alltoallv"
OPERATIONS: Final = (
    *("allreduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"),
    *(f"{UNEVEN}-{skew}" for skew in ("uniform", "zipf", "hot")),
)
ORDINARY: Final = "ordinary"
SHARED: Final = "shared"
COLD: Final = "cold"
HOT: Final = "hot"
_TOKEN: Final = re.compile(r"(\d+[KMG]?)(?:-(\d+[KMG]?)(?:\s*x(\d+))?)?(?:\s*,\s*|\s+|$)", re.IGNORECASE)
SCHEMA: Final = "hpcdist.collectives"
FORMAT: Final = ResultsFormat(SCHEMA, 1, "configurations")
OURS: Final = "hpcdist"
_START: Final = "delay from the first rank's begin: skew of the barrier; NaN without a common clock"


@dataclass(frozen=True)
class CollectivesCell:
    """Collective, dtype and buffer size in bytes for which all algorithms are compared."""

    op: str
    dtype: str
    bytes: int

    @property
    def size(self) -> int:
        """Number of elements of a buffer."""
        return self.bytes // dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class CellLimits:
    """Length of one measurement: ``iterations`` iterations, or about ``seconds`` if ``iterations`` is None."""

    seconds: float  # of all algorithms together, if ``iterations`` is None
    iterations: int | None
    warmup: int  # untimed iterations per algorithm
    least: int  # minimum number of iterations per algorithm


@dataclass(frozen=True, kw_only=True)
class CollectivesRequest(CellLimits):
    """Settings of a benchmark of collectives. If ``algorithms`` is empty, all supported algorithms are measured."""

    operations: tuple[str, ...]
    algorithms: tuple[str, ...]
    bytes: tuple[int, ...]
    dtypes: tuple[str, ...]
    buffers: tuple[str, ...]
    check: bool
    hot: bool
    seed: int


def part_sizes(op: str, size: int, ranks: int) -> list[int]:
    """Return a list: item i is the number of elements that every rank sends to rank i in the all-to-all ``op``.

    The items are equal, or largest for rank 0 if ``op`` is uneven. ``size``: total number of elements that rank 0
    receives. ``ranks``: number of ranks.
    """
    first = size // ranks
    if op.endswith("-zipf"):
        return [first // (rank + 1) for rank in range(ranks)]
    if op.endswith("-hot"):
        return [first, *[first // (4 * max(1, ranks - 1))] * (ranks - 1)]
    return [first] * ranks


def bus_factor(op: str, ranks: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth of ``op``. The ratio is 0 on one rank."""
    if op == "broadcast":
        return float(ranks > 1)
    return (2.0 if op == "allreduce" else 1.0) * (ranks - 1) / ranks


def sizes(texts: Iterable[str]) -> tuple[int, ...]:
    """Parse texts such as "16K" or the range "4K-64M x4" to an ascending tuple of bytes. Raises UsageError."""
    numbers: set[int] = set()
    for text in texts:
        position, stripped = 0, text.strip()
        while position < len(stripped) or not stripped:
            match = _TOKEN.match(stripped, position)
            if match is None:
                raise UsageError(
                    f"--bytes {text!r}: expected sizes such as 4096, 16K or 1M, or a range such as 4K-64M x4"
                )
            numbers.update(_expanded(text, match))
            position = match.end()
    return tuple(sorted(numbers))


def _expanded(text: str, match: "re.Match[str]") -> list[int]:
    try:
        first, last = parse_bytes(match[1]), parse_bytes(match[2] or match[1])
    except ValueError as error:
        raise UsageError(f"--bytes {text!r}: {error}") from None
    factor = int(match[3] or 2)
    if last < first or factor < 2:
        raise UsageError(f"--bytes {text!r}: a range must ascend, with a factor of at least 2, as in 4K-64M x4")
    return list(takewhile(lambda nbytes: nbytes <= last, accumulate(repeat(factor), operator.mul, initial=first)))


def cells(request: CollectivesRequest, ranks: int) -> tuple[list[CollectivesCell], list[str]]:
    """Return (cells to measure, in a random order that is equal on all ranks; messages about rounded sizes)."""
    combinations, notes = [], []
    for dtype in request.dtypes:
        for op in request.operations:
            parts = ranks if op == "all_to_all" or op.startswith(UNEVEN) else 1
            granularity = dtype_of(dtype).itemsize * parts
            for nbytes in request.bytes:
                rounded = max(granularity, nbytes // granularity * granularity)
                if rounded != nbytes:
                    elements = f"{dtype} elements" + (f" for each of {ranks} ranks" if parts > 1 else "")
                    notes.append(f"{op}: {nbytes} bytes are no whole number of {elements}; {rounded} are measured")
                combinations.append(CollectivesCell(op, dtype, rounded))
    distinct = list(dict.fromkeys(combinations))
    order = np.random.default_rng(request.seed).permutation(len(distinct))
    return [distinct[index] for index in order], notes


@dataclass(frozen=True)
class ConfigurationKey:
    """Identity of a benchmark configuration. Only results with equal keys are compared or merged."""

    op: str
    dtype: str
    bytes: int
    ranks: int
    nodes: int
    algorithm: str
    buffers: str
    cache: str  # "cold": a different buffer in each iteration, from memory; "hot": the same, recently written buffer
    implementation: str  # library with the algorithm: "hpcdist", "gloo", ...
    mpi_library: str

    @property
    def id(self) -> str:
        """Name of the configuration's HDF5 group."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=4).hexdigest()
        return f"{self.op}-{self.dtype}-{self.bytes}-{self.ranks}-{self.algorithm}-{self.buffers}-{digest}"

    @property
    def label(self) -> str:
        """Name of the configuration in tables and plots."""
        name = self.algorithm if self.buffers == ORDINARY else f"{self.algorithm} ({self.buffers})"
        return name if self.implementation == OURS else f"{self.implementation} {name}"

    @property
    def vendor(self) -> str:
        """Name of the MPI library, without the version."""
        match = re.match(r"[A-Za-z() ]+?(?= v?\d| Version|$)", self.mpi_library)
        return match[0] if match else self.mpi_library


@dataclass(frozen=True)
class CollectivesConfiguration:
    """Measurements of one configuration: an algorithm, or a reference transfer such as a memory copy."""

    key: ConfigurationKey
    reference: bool  # a memory copy, or an exchange between nodes
    slots: int  # number of buffers used in turn
    verified: int  # number of checked iterations
    wrong: str  # text on the first wrong result, or ""
    time_s: Annotated[np.ndarray, SampleColumn("time from the barrier to the end of the call", "iteration", "rank")]
    start_s: Annotated[np.ndarray, SampleColumn(_START, "iteration", "rank")]
    session: Annotated[np.ndarray, SampleColumn("number of the process that measured it", "iteration", units="1")]

    @property
    def slowest_s(self) -> np.ndarray:
        """Array of the longest duration of each iteration over all ranks, in seconds. Idle ranks (NaN) are ignored."""
        slowest: np.ndarray = np.fmax.reduce(self.time_s, axis=1)
        return slowest


@dataclass(frozen=True)
class CollectivesResults:
    """Contents of a results file of the collectives benchmark: provenance of the file, and measurements."""

    provenance: Mapping[str, Any]
    configurations: tuple[CollectivesConfiguration, ...]


def append(path: Path, configurations: Sequence[CollectivesConfiguration], provenance: Mapping[str, Any]) -> None:
    """Add measurements to the results file ``path``. ``provenance``: attributes of a new file. Raises StorageError."""
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
    """Return the content of the results file ``path``, with sorted configurations. Raises StorageError."""
    with FORMAT.read(path) as (provenance, groups):
        configurations = [output_file.read_record(group, CollectivesConfiguration) for group in groups.values()]

    def order(configuration: CollectivesConfiguration) -> tuple[Any, ...]:
        key = configuration.key
        return key.op, key.dtype, key.ranks, key.bytes, key.implementation, key.algorithm, key.buffers

    return CollectivesResults(provenance, tuple(sorted(configurations, key=order)))
