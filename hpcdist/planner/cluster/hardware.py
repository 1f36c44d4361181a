"""Cluster description: devices, link levels, storage, power, failures and prices, and their consistency checks.

Everything is in base units: bytes (never GiB), seconds, operations a second, watts. The TOML files name their units
(`hpcdist.planner.cluster.toml_file`). `validate` raises for the first number that contradicts another one: levels
that do not nest, a peak that the memory cannot feed, curves that do not ascend, prices without a currency.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.planner.cluster.units import rough
from hpcdist.planner.layout import LIBRARIES

ACCELERATOR_FLOPS: Final = 10e12
ITEM_BYTES: Final[Mapping[str, int]] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of a number


@dataclass(frozen=True, kw_only=True)
class EfficiencyCurve:
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
    matmul: Mapping[str, EfficiencyCurve]
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
class LinkLevel:
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
class MeasuredFit:
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
class ClusterStorage:
    """A parallel file system: what all nodes together, and one of them, write and read."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    node_write_bytes_per_s: float
    node_read_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """``devices`` in a box; ``host_w`` is its power beside them, ``network_w`` that of its share of the switches."""

    devices: int
    host_w: float = 0.0
    network_w: float = 0.0
    host_memory_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FailureRates:
    """How often a node, or a device of it, ends a job, and what a restart takes beside the work that is lost."""

    node_mtbf_s: float
    restart_s: float


@dataclass(frozen=True, kw_only=True)
class ClusterSite:
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
    node: ClusterNode
    levels: tuple[LinkLevel, ...]
    storage: ClusterStorage
    failures: FailureRates
    site: ClusterSite = ClusterSite()
    fits: tuple[MeasuredFit, ...] = ()
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


def validate(cluster: Cluster) -> None:
    """Raise ConfigurationError for the first thing that contradicts another."""
    _check_device(cluster.device)
    _check_levels(cluster.levels, cluster.devices)
    _check_boxes(cluster)
    storage = cluster.storage
    for what in ("write", "read"):
        node, all_nodes = (getattr(storage, f"{part}{what}_bytes_per_s") for part in ("node_", ""))
        if node > all_nodes:
            raise ConfigurationError(
                f"storage.node_{what} of {rough(node, 'bandwidth')} is more than storage.{what} of "
                f"{rough(all_nodes, 'bandwidth')}, which all nodes share"
            )
    _check_site(cluster.site)
    for place, fit in enumerate(cluster.fits):
        _check_fit(fit, f"fit {place + 1}", [level.name for level in cluster.levels])


def _check_device(device: Device) -> None:
    if not device.peak_flops:
        raise ConfigurationError("device.flops is empty; expected a peak for one type of numbers, as bfloat16")
    for kind, peak in device.peak_flops.items():
        if kind not in device.matmul:
            raise ConfigurationError(f"device.matmul.{kind} is missing: device.flops has a peak for {kind}")
        fed = device.memory_bytes_per_s / ITEM_BYTES[kind]
        if peak < fed:
            raise ConfigurationError(
                f"device.flops.{kind} of {rough(peak, 'flops')} is not plausible: the memory alone feeds "
                f"{fed:.3g} numbers a second at {rough(device.memory_bytes_per_s, 'bandwidth')}; is one of them in "
                "another unit?"
            )
    for kind, curve in device.matmul.items():
        if kind not in device.peak_flops:
            raise ConfigurationError(f"device.flops.{kind} is missing: device.matmul has a curve for {kind}")
        _check_curve(curve, f"device.matmul.{kind}")
    if device.memory_bytes_per_s < device.memory_bytes / 1000:
        raise ConfigurationError(
            f"device.memory_bandwidth of {rough(device.memory_bytes_per_s, 'bandwidth')} is not plausible: to read the "
            f"memory of {rough(device.memory_bytes, 'bytes')} once would take more than 1000 s"
        )
    if device.reserved_bytes >= device.memory_bytes:
        raise ConfigurationError(
            f"device.reserved of {rough(device.reserved_bytes, 'bytes')} leaves nothing of device.memory, "
            f"{rough(device.memory_bytes, 'bytes')}"
        )
    if device.idle_w > device.peak_w:
        raise ConfigurationError(f"device.idle of {device.idle_w:g} W is more than device.peak of {device.peak_w:g} W")


def _check_curve(curve: EfficiencyCurve, place: str) -> None:
    if len(curve.sizes) != len(curve.shares):
        raise ConfigurationError(f"{place} has {len(curve.sizes)} sizes and {len(curve.shares)} shares; one of each")
    _check_ascending(curve.sizes, f"{place}.sizes")


def _check_levels(levels: Sequence[LinkLevel], devices: int) -> None:
    for inner, outer in pairwise(levels):
        both = f"level {inner.name!r} of {inner.devices} devices and level {outer.name!r} of {outer.devices}"
        if inner.devices == 0:
            raise ConfigurationError(f"{both} do not nest: only the last may have 0 devices (all of them)")
        if outer.devices and (outer.devices <= inner.devices or outer.devices % inner.devices):
            raise ConfigurationError(
                f"{both} do not nest: from the inside out, each must hold the one before twice or more, and whole"
            )
        if outer.bytes_per_s > inner.bytes_per_s:
            raise ConfigurationError(
                f"{both} do not nest: levels go from the fastest links outwards, but a device sends "
                f"{rough(inner.bytes_per_s, 'bandwidth')} in the inner and {rough(outer.bytes_per_s, 'bandwidth')} in "
                "the outer one"
            )
    for level in levels:
        if level.alone_bytes_per_s and level.alone_bytes_per_s < level.bytes_per_s:
            raise ConfigurationError(
                f"level {level.name!r}: a device that sends alone, {rough(level.alone_bytes_per_s, 'bandwidth')}, "
                f"would be slower than beside its neighbours, {rough(level.bytes_per_s, 'bandwidth')}"
            )
    last = levels[-1]
    if last.devices and last.devices < devices:
        raise ConfigurationError(
            f"the last level {last.name!r} joins {last.devices} devices, the cluster has {devices}; give that level "
            "devices = 0 (all), or add one"
        )


def _check_boxes(cluster: Cluster) -> None:
    """Refuse two levels of one name, and a level that ends within a node as well as in another."""
    names = [level.name for level in cluster.levels]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"two levels are called {name!r}; give each a name of its own")
    box = cluster.node.devices
    for level in cluster.levels:
        if level.devices and level.devices % box and box % level.devices:
            raise ConfigurationError(
                f"level {level.name!r} of {level.devices} devices and nodes of {box} do not nest: a level must hold "
                "whole nodes, or a node it whole"
            )


def _check_site(site: ClusterSite) -> None:
    if not site.currency and (site.device_hour_price is not None or site.kwh_price is not None):
        raise ConfigurationError('site.currency is missing: a price is given; expected for example "USD"')
    if site.carbon_g_per_kwh is not None and not site.carbon_source:
        raise ConfigurationError("site.carbon_source is missing: say which grid and year site.carbon is of")


def _check_fit(fit: MeasuredFit, place: str, levels: Sequence[str]) -> None:
    if fit.level and fit.level not in levels:
        raise ConfigurationError(f"{place}: there is no level {fit.level!r}; known are {', '.join(levels)}")
    if fit.library not in LIBRARIES:
        known = ", ".join(name for name in LIBRARIES if name)
        raise ConfigurationError(f"{place}: library {fit.library!r} is none of {known}; leave it out for any")
    lengths = {len(fit.until_bytes), len(fit.latency_s), len(fit.s_per_byte)}
    if len(lengths) != 1:
        raise ConfigurationError(f"{place}: until, latency and slowness have different lengths; one each for a piece")
    _check_ascending(fit.until_bytes, f"{place}: until")
    if fit.from_bytes > fit.until_bytes[-1]:
        raise ConfigurationError(
            f"{place}: from {rough(fit.from_bytes, 'bytes')} lies above until {rough(fit.until_bytes[-1], 'bytes')}"
        )


def _check_ascending(values: Sequence[float], place: str) -> None:
    for before, after in pairwise(values):
        if not before < after:
            raise ConfigurationError(f"{place} has {after:g} after {before:g}; expected them to ascend")
