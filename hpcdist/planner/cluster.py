"""A cluster in numbers: devices, links by level, storage, power, failures, prices. See `clusters/` for those shipped.

Everything is in base units: bytes (never GiB), seconds, operations a second, watts. Files say their units themselves
(`hpcdist.planner.cluster_file`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

ACCELERATOR_FLOPS: Final = 10e12
ITEM_BYTES: Final[Mapping[str, int]] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of a number


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The share of its peak that a device reaches in a product of matrices, by size; linear in its logarithm between.

    The size of a product of (m, k) and (k, n) is the harmonic mean of its extents, 3 / (1/m + 1/k + 1/n): the smallest
    one decides most.
    """

    sizes: tuple[float, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Device:
    """What computes: a GPU, a die of one, or a core.

    ``peak_flops`` and ``matmul`` go by the type of the numbers. ``memory_share`` is the part of the memory's bandwidth
    that elementwise kernels reach, ``attention_share`` that of the peak in a fused attention, ``kernel_s`` what lies
    between two kernels, ``reserved_bytes`` what driver, libraries and the allocator's cracks take. ``best_mfu`` is
    the best MFU of a published training on such devices, 0 where none is known: no plan promises more before the
    device is measured (`Cluster.calibrated`).
    """

    name: str
    peak_flops: Mapping[str, float]
    matmul: Mapping[str, Curve]
    memory_bytes: float
    memory_bytes_per_s: float
    memory_share: float = 0.8
    attention_share: float = 0.4
    kernel_s: float = 0.0
    reserved_bytes: float = 0.0
    idle_w: float = 0.0
    peak_w: float = 0.0
    best_mfu: float = 0.0

    @property
    def is_accelerator(self) -> bool:
        """Whether it is a GPU or the like: no socket of plain cores has such a peak."""
        return max(self.peak_flops.values(), default=0.0) >= ACCELERATOR_FLOPS


@dataclass(frozen=True, kw_only=True)
class Level:
    """The links among ``devices`` neighbours, those of lower levels excepted; 0: among all there are.

    ``bytes_per_s`` is what a device sends, in one direction, while all of its neighbours send as well;
    ``alone_bytes_per_s`` while none of them does (0: the same).
    """

    name: str
    devices: int
    latency_s: float
    bytes_per_s: float
    alone_bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Fit:
    """An operation as it was measured: in pieces up to ``until_bytes``, latency + bytes * s_per_byte seconds.

    The first and the last size that were measured are ``from_bytes`` and the last of ``until_bytes``; ``error`` is the
    largest relative one at sizes that were measured, but not fitted. ``level`` names the links that the ranks use, the
    outermost of them; ``library`` whose operation it was, as `Layout.library` does: "mpi", "nccl", or "" for any.
    """

    operation: str  # "allreduce", "reduce_scatter", "all_gather", "message"
    ranks: int
    until_bytes: tuple[float, ...]
    latency_s: tuple[float, ...]
    s_per_byte: tuple[float, ...]
    algorithm: str = "auto"
    level: str = ""
    from_bytes: float = 0.0
    error: float = 0.0
    library: str = ""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A parallel file system: what all nodes together, and one of them, write and read."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    node_write_bytes_per_s: float
    node_read_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Node:
    """``devices`` in a box; ``host_w`` is its power beside them, ``network_w`` that of its share of the switches."""

    devices: int
    host_w: float = 0.0
    network_w: float = 0.0
    host_memory_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often a node, or a device of it, ends a job, and what a restart takes beside the work that is lost."""

    node_mtbf_s: float
    restart_s: float


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a joule weighs and costs: PUE, carbon, prices. None: not known, and then nothing is said of it."""

    pue: float | None = None
    carbon_g_per_kwh: float | None = None
    carbon_source: str = ""
    device_hour_price: float | None = None
    kwh_price: float | None = None
    currency: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All of it. ``levels`` go from the fastest links outwards; ``calibrated`` says by what (file, date), or is empty.

    ``sources`` tells where the numbers of a section are from.
    """

    name: str
    about: str
    devices: int
    device: Device
    node: Node
    levels: tuple[Level, ...]
    storage: Storage
    failures: Failures
    site: Site = Site()
    fits: tuple[Fit, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    calibrated: str = ""

    @property
    def most_mfu(self) -> float:
        """The MFU that no plan may go beyond, 0 where there is none: measured devices speak for themselves."""
        return 0.0 if self.calibrated else self.device.best_mfu

    @property
    def nodes(self) -> int:
        """Boxes with devices."""
        return -(-self.devices // self.node.devices)
