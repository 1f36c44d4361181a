"""Cluster description: devices, link levels, storage, power, failures and prices, with units and consistency checks.

Values are in base units: bytes, seconds, FLOP/s, watts. TOML files have units such as "80 GiB", "400 Gbit/s" or "5 us".
Missing and ambiguous units are refused. Case matters: GB is 10^9 bytes, and GiB is 2^30 bytes.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from typing import Annotated, Final, NamedTuple

from hpcdist.errors import ConfigurationError
from hpcdist.planner.layout import LIBRARIES
from hpcdist.reporting.nearest import nearest

_SI: Final = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}


def _prefixed(unit: str, prefixes: Mapping[str, float], times: float = 1.0) -> dict[str, float]:
    return {prefix + unit: factor * times for prefix, factor in prefixes.items()}


UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "bytes": {**_prefixed("B", {**_SI, **_BINARY}), "bytes": 1.0, "byte": 1.0},
    "bandwidth": {**_prefixed("B/s", {**_SI, **_BINARY}), **_prefixed("bit/s", _SI, 1 / 8)},
    "flops": _prefixed("FLOP/s", _SI),
    "time": {
        "s": 1.0,
        "ms": 1e-3,
        "us": 1e-6,
        "µs": 1e-6,  # the micro sign
        "μs": 1e-6,  # the letter mu
        "ns": 1e-9,
        "min": 60.0,
        "h": 3600.0,
        "hours": 3600.0,
        "hour": 3600.0,
        "days": 86400.0,
        "day": 86400.0,
        "years": 365.25 * 86400.0,
        "year": 365.25 * 86400.0,
    },
    "slowness": {"s/B": 1.0, "ms/B": 1e-3, "us/B": 1e-6, "ns/B": 1e-9, "ps/B": 1e-12},
    "power": {"W": 1.0, "mW": 1e-3, "kW": 1e3, "MW": 1e6, "GW": 1e9},
    "carbon": {"g/kWh": 1.0, "kg/kWh": 1e3, "g/MWh": 1e-3, "kg/MWh": 1.0},
}
EXAMPLES: Final[Mapping[str, str]] = {
    "bytes": '"80 GiB" or "512 GB"',
    "bandwidth": '"25 GB/s" or "400 Gbit/s"',
    "flops": '"312 TFLOP/s"',
    "time": '"5 us", "3 min" or "3 years"',
    "slowness": '"40 ps/B"',
    "power": '"700 W" or "10.2 kW"',
    "carbon": '"369 g/kWh"',
}
_NAMES: Final[Mapping[str, str]] = {
    "bytes": "a number of bytes",
    "bandwidth": "a bandwidth",
    "flops": "a number of operations per second",
    "time": "a time",
    "slowness": "a time per byte",
    "power": "a power",
    "carbon": "a carbon intensity",
}
_QUANTITY: Final = re.compile(r"\s*([+-]?(?:[0-9][0-9_,]*)?\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*(.*?)\s*", re.DOTALL)
_BITS: Final = re.compile(r"([KkMmGgTtPp]?)(?:b/s|bps|Bps|b)")  # ambiguous: bits or bytes


def parse(text: str, dimension: str) -> float:
    """Convert a quantity ``text``, such as "5 us", to a number in base units. Raises ConfigurationError.

    ``dimension``: expected kind of quantity, such as "time" or "bytes".
    """
    units = UNITS[dimension]
    example = f"{_NAMES[dimension]} such as {EXAMPLES[dimension]}"
    match = _QUANTITY.fullmatch(text)
    number, unit = (match[1], match[2]) if match else ("", text)
    try:
        value = Decimal(number.replace("_", ""))
    except InvalidOperation:
        raise ConfigurationError(f"the quantity {text!r} has no readable number; expected {example}") from None
    if not unit:
        raise ConfigurationError(f"the quantity {text!r} has no unit; expected {example}")
    if unit not in units:
        raise ConfigurationError(f"the unit of {text!r} is invalid: {_wrong(unit, dimension)}; expected {example}")
    base_value = _times(value, units[unit])
    if not math.isfinite(base_value) or base_value < 0:
        raise ConfigurationError(f"the quantity {text!r} is not a finite number of at least 0; expected {example}")
    return base_value


def text(value: float, dimension: str) -> str:
    """Return the shortest exact text, such as "5 us", for ``value`` in base units of ``dimension``, such as "time"."""
    spellings = []
    for unit, factor in UNITS[dimension].items():
        if "bit" in unit or not unit.isascii():
            continue
        for digits in (3, 6, 9, 12, 15, 17):
            number = f"{value / factor:.{digits}g}"
            if _times(Decimal(number), factor) == value:
                spellings.append((len(number) + 6 * ("e" in number) + number.startswith("0."), f"{number} {unit}"))
                break
    base = next(unit for unit, factor in UNITS[dimension].items() if factor == 1.0)
    return min(spellings, key=lambda spelling: spelling[0])[1] if spellings else f"{value!r} {base}"


def rough(value: float, dimension: str) -> str:
    """Return ``value`` in base units of ``dimension``, such as "time", as a text with 3 digits, such as "5.23 us"."""
    units = {unit: factor for unit, factor in UNITS[dimension].items() if "bit" not in unit and "i" not in unit[:2]}
    best = max(units, key=lambda unit: (units[unit] <= value, units[unit] if units[unit] <= value else -units[unit]))
    return f"{value / units[best]:.3g} {best}"


def _times(number: Decimal, factor: float) -> float:
    return float(number * Decimal(repr(factor)))  # rounded once: 66.9 * 10^12 is exactly 66,900,000,000,000


def _wrong(unit: str, dimension: str) -> str:
    bits = _BITS.fullmatch(unit)
    if bits:
        prefix = bits[1].upper().replace("K", "k")
        if dimension == "bytes":
            return f"is {unit!r} bits or bytes? Write {prefix}B for powers of ten, {prefix.upper()}iB for powers of two"
        return f"is {unit!r} bits or bytes? Write {prefix}bit/s or {prefix}B/s"
    for other, units in UNITS.items():
        if unit in units:
            return f"{unit!r} is a unit for {_NAMES[other]}"
    same = [candidate for candidate in UNITS[dimension] if candidate.lower() == unit.lower()]
    near = same[0] if same else nearest(unit, UNITS[dimension])
    return f"unknown unit {unit!r}" + (f", the nearest is {near!r}" if near else "")


class QuantityField(NamedTuple):
    """Declaration of a field in a cluster file: key, kind of value, and inclusive bounds."""

    key: str
    kind: str = "text"  # "count", "number", "text", or a quantity such as "time"
    low: float = 0.0  # bounds are in base units
    high: float = math.inf
    zero: bool = False  # 0 is allowed despite the bounds


ACCELERATOR_FLOPS: Final = 10e12
MOST_FLOPS: Final = 50e15  # a higher peak is TFLOP/s written as PFLOP/s
ITEM_BYTES: Final[Mapping[str, int]] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
OPERATIONS: Final = ("allreduce", "reduce_scatter", "all_gather", "message")


@dataclass(frozen=True, kw_only=True)
class EfficiencyCurve:
    """Fractions of the peak FLOP rate that matrix products reach: ``shares[i]`` for products of size ``sizes[i]``."""

    # Size of (m, k) times (k, n): the harmonic mean of m, k and n. Between sizes, the fraction is linear in log(size).

    sizes: Annotated[tuple[float, ...], QuantityField("sizes", "number", 1, 1e6)]
    shares: Annotated[tuple[float, ...], QuantityField("shares", "number", 1e-6, 1)]


@dataclass(frozen=True, kw_only=True)
class Device:
    """Device that one rank uses: a GPU, a die of a GPU, or a CPU core."""

    name: str
    peak_flops: Annotated[
        Mapping[str, float], QuantityField("flops", "flops", 100e6, MOST_FLOPS)
    ]  # FLOP/s by data type
    matmul: Mapping[str, EfficiencyCurve]  # efficiency of matrix products by data type
    memory_bytes: Annotated[float, QuantityField("memory", "bytes", 64e6, 64e12)]
    memory_bytes_per_s: Annotated[float, QuantityField("memory_bandwidth", "bandwidth", 100e6, 1e15)]
    # Fraction of the memory bandwidth that elementwise kernels reach.
    memory_share: Annotated[float, QuantityField("memory_share", "number", 0.01, 1)] = 0.8
    # Fraction of the peak FLOP/s that fused attention reaches.
    attention_share: Annotated[float, QuantityField("attention_share", "number", 0.001, 1)] = 0.4
    # Time between two kernels.
    kernel_s: Annotated[float, QuantityField("kernel", "time", 1e-9, 10e-3, zero=True)] = 0.0
    reserved_bytes: Annotated[float, QuantityField("reserved", "bytes", 0, 1e12, zero=True)] = 0.0
    idle_w: Annotated[float, QuantityField("idle", "power", 0, 5e3, zero=True)] = 0.0
    peak_w: Annotated[float, QuantityField("peak", "power", 0.1, 20e3, zero=True)] = 0.0
    # Highest published MFU on such devices; 0: unknown.
    best_mfu: Annotated[float, QuantityField("best_mfu", "number", 0.01, 1, zero=True)] = 0.0

    @property
    def is_accelerator(self) -> bool:
        """True if the peak FLOP rate of the device is at least `ACCELERATOR_FLOPS`, as on GPUs."""
        return max(self.peak_flops.values(), default=0.0) >= ACCELERATOR_FLOPS


@dataclass(frozen=True, kw_only=True)
class LinkLevel:
    """Links of one kind, such as NVLink, which join each group of ``devices`` consecutive devices."""

    # Two devices communicate over the fastest level that joins them.

    name: str
    devices: Annotated[int, QuantityField("devices", "count", 2, 1e7, zero=True)]  # 0: all devices
    latency_s: Annotated[float, QuantityField("latency", "time", 10e-9, 100e-3)]
    # Rate of a device in one direction while all devices send.
    bytes_per_s: Annotated[float, QuantityField("bandwidth", "bandwidth", 1e6, 100e12)]
    # Rate of a device that sends alone (0: ``bytes_per_s``).
    alone_bytes_per_s: Annotated[float, QuantityField("alone_bandwidth", "bandwidth", 1e6, 100e12, zero=True)] = 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredFit:
    """Fitted seconds of an operation: ``latency_s[i] + bytes * s_per_byte[i]`` for message sizes in range i."""

    operation: str  # one of `OPERATIONS`
    ranks: Annotated[int, QuantityField("ranks", "count", 1, 1e7)]
    until_bytes: Annotated[tuple[float, ...], QuantityField("until", "bytes", 1, 1e15)]  # Ends of the size ranges.
    latency_s: Annotated[tuple[float, ...], QuantityField("latency", "time", 1e-9, 10, zero=True)]
    s_per_byte: Annotated[tuple[float, ...], QuantityField("slowness", "slowness", 1e-15, 1e-3, zero=True)]
    algorithm: str = "auto"
    level: str = ""  # slowest `LinkLevel` between the ranks
    # Start of the first size range.
    from_bytes: Annotated[float, QuantityField("from", "bytes", 0, 1e15, zero=True)] = 0.0
    # largest relative error at sizes not used for the fit
    error: Annotated[float, QuantityField("error", "number", 0, 1e9, zero=True)] = 0.0
    library: str = ""  # "mpi", "nccl", or "" for any


@dataclass(frozen=True, kw_only=True)
class ClusterStorage:
    """Read and write bandwidth of the parallel file system, for all nodes together and for one node."""

    write_bytes_per_s: Annotated[float, QuantityField("write", "bandwidth", 1e6, 1e15)]
    read_bytes_per_s: Annotated[float, QuantityField("read", "bandwidth", 1e6, 1e15)]
    node_write_bytes_per_s: Annotated[float, QuantityField("node_write", "bandwidth", 1e6, 1e13)]
    node_read_bytes_per_s: Annotated[float, QuantityField("node_read", "bandwidth", 1e6, 1e13)]


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """Node of a cluster: number of devices, power without devices, and host memory."""

    devices: Annotated[int, QuantityField("devices", "count", 1, 1024)]
    host_w: Annotated[float, QuantityField("host", "power", 1, 100e3, zero=True)] = 0.0  # power without devices
    network_w: Annotated[float, QuantityField("network", "power", 1, 100e3, zero=True)] = 0.0  # switches, per node
    host_memory_bytes: Annotated[float, QuantityField("host_memory", "bytes", 64e6, 1e15, zero=True)] = 0.0


@dataclass(frozen=True, kw_only=True)
class FailureRates:
    """Mean time between two failures of the same node, and time to restart a job after a failure."""

    node_mtbf_s: Annotated[float, QuantityField("node_mtbf", "time", 3600, 1000 * UNITS["time"]["years"])]
    restart_s: Annotated[float, QuantityField("restart", "time", 1, 86400)]


@dataclass(frozen=True, kw_only=True)
class ClusterSite:
    """Power usage effectiveness (PUE), carbon intensity and prices of a site. Unknown values are None."""

    pue: Annotated[float | None, QuantityField("pue", "number", 1, 5)] = None
    carbon_g_per_kwh: Annotated[float | None, QuantityField("carbon", "carbon", 0, 2000, zero=True)] = None
    carbon_source: str = ""
    device_hour_price: Annotated[float | None, QuantityField("device_hour_price", "number", 0, 1000, zero=True)] = None
    kwh_price: Annotated[float | None, QuantityField("kwh_price", "number", 0, 1000, zero=True)] = None
    currency: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Description of a cluster: devices, nodes, links, storage, failure rates, and prices of the site."""

    name: str
    about: str
    devices: Annotated[int, QuantityField("devices", "count", 1, 1e7)]
    device: Device
    node: ClusterNode
    levels: Annotated[tuple[LinkLevel, ...], QuantityField("level")]  # fastest links first
    storage: ClusterStorage
    failures: FailureRates
    site: ClusterSite = ClusterSite()
    fits: Annotated[tuple[MeasuredFit, ...], QuantityField("fit")] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    calibrated: str = ""

    @property
    def most_mfu(self) -> float:
        """Highest MFU that a plan may predict, or 0 if any MFU is allowed, as on a calibrated cluster."""
        return 0.0 if self.calibrated else self.device.best_mfu

    @property
    def nodes(self) -> int:
        """Number of nodes, including a last node with fewer devices."""
        return -(-self.devices // self.node.devices)


def validate(cluster: Cluster) -> None:
    """Raise ConfigurationError if values of ``cluster`` contradict each other or are not plausible."""
    _check_device(cluster.device)
    if not cluster.calibrated:
        _check_curves(cluster.device)
    _check_levels(cluster.levels, cluster.devices)
    _check_boxes(cluster)
    storage = cluster.storage
    for operation in ("write", "read"):
        node, all_nodes = (getattr(storage, f"{prefix}{operation}_bytes_per_s") for prefix in ("node_", ""))
        if node > all_nodes:
            raise ConfigurationError(
                f"storage.node_{operation} of {rough(node, 'bandwidth')} is more than storage.{operation} of "
                f"{rough(all_nodes, 'bandwidth')}, the total of all nodes; correct one of the two keys"
            )
    _check_site(cluster.site)
    for place, fit in enumerate(cluster.fits):
        _check_fit(fit, f"fit {place + 1}", [level.name for level in cluster.levels])


def _check_device(device: Device) -> None:
    if not device.peak_flops:
        raise ConfigurationError("device.flops is empty; add the peak FLOP rate of a data type, e.g. bfloat16")
    for kind, peak in device.peak_flops.items():
        if kind not in device.matmul:
            raise ConfigurationError(f"device.matmul.{kind} is missing; add this curve, or remove device.flops.{kind}")
        fed = device.memory_bytes_per_s / ITEM_BYTES[kind]
        if peak < fed:
            raise ConfigurationError(
                f"device.flops.{kind} of {rough(peak, 'flops')} is not plausible: device.memory_bandwidth of "
                f"{rough(device.memory_bytes_per_s, 'bandwidth')} supplies {fed:.3g} {kind} numbers per second, more "
                "than the device could process at this peak; check the units of both keys"
            )
    for kind, curve in device.matmul.items():
        if kind not in device.peak_flops:
            raise ConfigurationError(
                f"device.flops.{kind} is missing: device.matmul has a curve for {kind}; add device.flops.{kind}"
            )
        if len(curve.sizes) != len(curve.shares):
            raise ConfigurationError(
                f"the curve device.matmul.{kind} has {len(curve.sizes)} sizes and {len(curve.shares)} shares; write "
                "one share per size"
            )
        _check_ascending(curve.sizes, f"device.matmul.{kind}.sizes")
    if device.memory_bytes_per_s < device.memory_bytes / 1000:
        raise ConfigurationError(
            f"device.memory_bandwidth of {rough(device.memory_bytes_per_s, 'bandwidth')} is not plausible: reading the "
            f"memory of {rough(device.memory_bytes, 'bytes')} once would take more than 1000 s; check both units"
        )
    if device.reserved_bytes >= device.memory_bytes:
        raise ConfigurationError(
            f"device.reserved of {rough(device.reserved_bytes, 'bytes')} must be less than device.memory, "
            f"{rough(device.memory_bytes, 'bytes')}; correct one of the two keys"
        )
    if device.idle_w > device.peak_w:
        raise ConfigurationError(
            f"device.idle of {device.idle_w:g} W is more than device.peak of {device.peak_w:g} W; lower device.idle"
        )


def _check_curves(device: Device) -> None:
    for kind, curve in device.matmul.items():
        for size, before, share in zip(curve.sizes[1:], curve.shares, curve.shares[1:], strict=False):
            if share < before:
                text = f"device.matmul.{kind} falls from {before:g} to {share:g} at the size {size:g}"
                raise ConfigurationError(f"{text}; larger products must be at least as efficient: correct `shares`")


def _check_levels(levels: Sequence[LinkLevel], devices: int) -> None:
    for inner, outer in pairwise(levels):
        two_levels = f"level {inner.name!r} of {inner.devices} devices and level {outer.name!r} of {outer.devices}"
        if inner.devices == 0:
            raise ConfigurationError(
                f"{two_levels} do not nest: only the last level may have devices = 0, which means all devices of the "
                f"cluster; set `devices` of level {inner.name!r} to a number"
            )
        if outer.devices and (outer.devices <= inner.devices or outer.devices % inner.devices):
            raise ConfigurationError(
                f"{two_levels} do not nest: each level must hold at least two complete groups of the level before; "
                "change `devices` of one of the two levels"
            )
        if outer.bytes_per_s > inner.bytes_per_s:
            raise ConfigurationError(
                f"{two_levels} are in the wrong order: levels must be sorted from the fastest links outwards, but the "
                f"first has {rough(inner.bytes_per_s, 'bandwidth')} and the second has "
                f"{rough(outer.bytes_per_s, 'bandwidth')} per device; swap the levels, or correct their bandwidths"
            )
    for level in levels:
        if level.alone_bytes_per_s and level.alone_bytes_per_s < level.bytes_per_s:
            raise ConfigurationError(
                f"level {level.name!r} has the alone_bandwidth {rough(level.alone_bytes_per_s, 'bandwidth')}, which "
                f"must be at least its bandwidth, {rough(level.bytes_per_s, 'bandwidth')}; correct one of the two keys"
            )
    last = levels[-1]
    if last.devices and last.devices < devices:
        raise ConfigurationError(
            f"the last level {last.name!r} joins {last.devices} devices, but the cluster has {devices} devices; set "
            f"devices = 0 (all devices) at the level {last.name!r}, or add a level"
        )


def _check_boxes(cluster: Cluster) -> None:
    names = [level.name for level in cluster.levels]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"two [[level]] sections have the name {name!r}; rename one of these levels")
    box = cluster.node.devices
    for level in cluster.levels:
        if level.devices and level.devices % box and box % level.devices:
            raise ConfigurationError(
                f"level {level.name!r} joins {level.devices} devices, but a node has {box} devices: a level must "
                "join whole nodes, or divide a node evenly; change `devices` of this level, or node.devices"
            )


def _check_site(site: ClusterSite) -> None:
    if not site.currency and (site.device_hour_price is not None or site.kwh_price is not None):
        raise ConfigurationError('the cluster file has a price but no site.currency; set for example currency = "USD"')
    if site.carbon_g_per_kwh is not None and not site.carbon_source:
        raise ConfigurationError(
            "the cluster file has site.carbon but no site.carbon_source; set site.carbon_source to the power grid "
            "and the year of the carbon intensity"
        )


def _check_fit(fit: MeasuredFit, fit_name: str, levels: Sequence[str]) -> None:
    if fit.operation not in OPERATIONS:
        raise ConfigurationError(
            f"{fit_name} has the unknown operation {fit.operation!r}; choose one of {', '.join(OPERATIONS)}"
        )
    if fit.level and fit.level not in levels:
        raise ConfigurationError(f"{fit_name} has the unknown level {fit.level!r}; choose one of {', '.join(levels)}")
    if fit.library not in LIBRARIES:
        accepted = ", ".join(name for name in LIBRARIES if name)
        raise ConfigurationError(
            f"{fit_name} has the unknown library {fit.library!r}; choose {accepted}, or omit `library`"
        )
    lengths = {len(fit.until_bytes), len(fit.latency_s), len(fit.s_per_byte)}
    if len(lengths) != 1:
        raise ConfigurationError(
            f"{fit_name} has {len(fit.until_bytes)} values of `until`, {len(fit.latency_s)} of `latency` and "
            f"{len(fit.s_per_byte)} of `slowness`; expected one value of each key per size range"
        )
    _check_ascending(fit.until_bytes, f"`until` of {fit_name}")
    if fit.from_bytes > fit.until_bytes[-1]:
        raise ConfigurationError(
            f"`from` of {fit_name} is {rough(fit.from_bytes, 'bytes')}, but must be at most the last value of "
            f"`until`, {rough(fit.until_bytes[-1], 'bytes')}; lower `from`"
        )


def _check_ascending(values: Sequence[float], list_name: str) -> None:
    for before, after in pairwise(values):
        if not before < after:
            raise ConfigurationError(
                f"{list_name} has the value {after:g} after {before:g}; write the values in ascending order"
            )
