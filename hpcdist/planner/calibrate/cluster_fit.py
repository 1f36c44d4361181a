"""Assemble a calibrated cluster from measurements of device, links and collectives.

Values that are not measured (storage, failures, power, prices) come from a base cluster, and are marked as assumptions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from hpcdist.errors import UsageError
from hpcdist.planner.calibrate import device_fits, line_fits
from hpcdist.planner.calibrate.device_fits import MeasuredProduct, MeasuredStep
from hpcdist.planner.calibrate.line_fits import FittedPieces
from hpcdist.planner.cluster.hardware import Cluster, ClusterNode, Device, EfficiencyCurve, LinkLevel, MeasuredFit
from hpcdist.reporting.units import counted, format_bytes

MESSAGE: Final = "message"
LONG: Final = 8  # messages of at least (longest / LONG) bytes determine the bandwidth
CLOCK_S: Final = 1e-9  # clock resolution
_LIBRARY: Final = "mpi"  # library of the measured messages and collectives
_KEPT: Final = ("storage", "failures", "site")


@dataclass(frozen=True, kw_only=True)
class TimingSeries:
    """Measured times of one operation (point-to-point message or collective) at several message sizes."""

    operation: str
    algorithm: str
    level: str
    ranks: int
    nbytes: tuple[float, ...]  # message sizes
    seconds: tuple[float, ...]  # while all ranks communicate
    alone_s: tuple[float, ...] = ()  # while no other ranks communicate; (): not measured
    borders: tuple[float, ...] = ()  # sizes measured to locate a protocol change of the library


@dataclass(frozen=True, kw_only=True)
class ClusterMeasurements:
    """Measurements of a cluster: speed and memory of a device, and times of messages and collectives."""

    date: str
    device: str
    hosts: int
    ranks_per_host: int
    devices_per_host: int
    memory_bytes: float
    host_memory_bytes: float
    products: Mapping[str, Sequence[MeasuredProduct]]
    moves: Sequence[tuple[float, float]]  # (bytes, seconds) of each measured memory copy
    steps: Sequence[MeasuredStep]
    series: Sequence[TimingSeries]
    by: str = ""  # libraries and settings
    busy: str = ""  # evidence that the machine was busy, or ""


@dataclass(frozen=True, kw_only=True)
class CalibratedCluster:
    """Cluster description whose constants were fitted to measurements, and one text per fit."""

    cluster: Cluster
    lines: tuple[str, ...]  # texts for the user, one line per fit


def assemble(name: str, base: Cluster, measurements: ClusterMeasurements) -> CalibratedCluster:
    """Fit the constants of a cluster called ``name`` to ``measurements``. Raises UsageError for too few measurements.

    ``base``: cluster whose values are used for all quantities that were not measured.
    """
    lines: list[str] = []
    device = _device(base, measurements, lines)
    fits, levels, remarks = _links(base, measurements, lines)
    if measurements.busy:
        lines.append(f"the machine was busy: {measurements.busy}")
    devices = measurements.hosts * measurements.devices_per_host
    cluster = Cluster(
        name=name,
        about=f"{measurements.device}, measured on {counted(measurements.hosts, 'host')} with "
        f"{counted(measurements.ranks_per_host, 'rank')} each",
        devices=devices,
        device=device,
        node=replace(
            base.node
            if base.node.devices == measurements.devices_per_host
            else ClusterNode(devices=measurements.devices_per_host),
            host_memory_bytes=measurements.host_memory_bytes,
        ),
        levels=levels,
        storage=base.storage,
        failures=base.failures,
        site=base.site,
        fits=fits,
        sources=_sources(base, measurements, remarks, measured_links=bool(fits)),
        calibrated=f"{measurements.date}; {counted(measurements.hosts, 'host')}; {'; '.join(lines)}",
    )
    return CalibratedCluster(cluster=cluster, lines=tuple(lines))


def _device(base: Cluster, measurements: ClusterMeasurements, lines: list[str]) -> Device:
    if not measurements.moves:
        raise UsageError("the memory bandwidth was not measured; measure copies of arrays larger than the caches")
    peaks, curves = {}, {}
    for dtype, products in measurements.products.items():
        fitted = device_fits.fit_curve(products)
        peaks[dtype], curves[dtype] = (
            fitted.peak_flops,
            EfficiencyCurve(
                sizes=tuple(round(size, 1) for size in fitted.curve.sizes),
                shares=tuple(round(share, 4) for share in fitted.curve.shares),
            ),
        )
        sizes = curves[dtype].sizes
        lines.append(
            f"{dtype} products of sizes {sizes[0]:.0f} to {sizes[-1]:.0f}, median error {fitted.error:.1%} at others"
        )
    nbytes, seconds = max(measurements.moves)
    device = Device(
        name=measurements.device,
        peak_flops=peaks,
        matmul=curves,
        memory_bytes=measurements.memory_bytes,
        memory_bytes_per_s=nbytes / seconds,
        memory_share=base.device.memory_share,
        attention_share=base.device.attention_share,
        kernel_s=base.device.kernel_s,
        reserved_bytes=base.device.reserved_bytes,
        idle_w=base.device.idle_w,
        peak_w=base.device.peak_w,
    )
    lines.append(f"memory with {format_bytes(int(nbytes))} moved")
    if not measurements.steps:
        lines.append("no steps of models: memory_share and attention_share are assumptions")
        return device
    shares = device_fits.fit_shares(measurements.steps, replace(base, device=device))
    lines.append(
        f"{counted(len(measurements.steps), 'step')} of models, error {shares.error:.1%} at other steps (maximum)"
    )
    return replace(
        device, memory_share=shares.memory_share, attention_share=shares.attention_share, kernel_s=shares.kernel_s
    )


def _links(
    base: Cluster, measurements: ClusterMeasurements, lines: list[str]
) -> tuple[tuple[MeasuredFit, ...], tuple[LinkLevel, ...], tuple[str, ...]]:
    # Without measured messages, the links of ``base`` are used. A description of each fit is appended to ``lines``.
    fits: list[MeasuredFit] = []
    levels: list[TimingSeries] = []
    for series in measurements.series:
        pieces = line_fits.fit_pieces(series.nbytes, series.seconds, required_sizes=series.borders)
        fits.append(_fit(series, pieces))
        first, last = format_bytes(int(pieces.from_bytes)), format_bytes(int(pieces.until_bytes[-1]))
        label = series.operation if series.operation == MESSAGE else f"{series.algorithm} {series.operation}"
        lines.append(
            f"{label} over {counted(series.ranks, 'rank')}, {series.level}, {first} to {last}, error up to "
            f"{pieces.error:.0%} at other sizes"
        )
        if series.operation == MESSAGE:
            levels.append(series)
    if not levels:
        return tuple(fits), _borrowed(base, measurements), ()
    remarks = []
    if measurements.hosts > 1 and len(levels) == 1:
        remarks.append(f"links inside a node are as fast as {levels[0].level!r}: each node had only one rank")
    inner = [_level(series, measurements.devices_per_host) for series in levels[:-1]]
    outer = _level(levels[-1], 0)
    if inner and outer.bytes_per_s > inner[-1].bytes_per_s:
        remarks.append(
            f"links of {outer.name!r} are as fast as those of {inner[-1].name!r}: they were measured to be faster, at "
            f"{outer.bytes_per_s:.3g} bytes/s"
        )
        # `hardware.validate` refuses outer levels that are faster than inner levels.
        outer = replace(outer, bytes_per_s=inner[-1].bytes_per_s)
    return tuple(fits), (*inner, outer), tuple(remarks)


def _borrowed(base: Cluster, measurements: ClusterMeasurements) -> tuple[LinkLevel, ...]:
    node, devices = measurements.devices_per_host, measurements.hosts * measurements.devices_per_host
    # Levels nest if one is a multiple of the other; a level may not split a node.
    nest = all(level.devices % node == 0 or node % level.devices == 0 for level in base.levels if level.devices)
    if nest and (base.levels[-1].devices == 0 or base.levels[-1].devices >= devices):
        return base.levels
    joins = (level for level in base.levels if level.devices == 0 or level.devices >= base.node.devices)
    return (replace(next(joins, base.levels[-1]), devices=0),)


def _level(series: TimingSeries, devices: int) -> LinkLevel:
    latency_s = min(series.seconds)
    long_bytes = max(series.nbytes) / LONG

    def rate(seconds: Sequence[float]) -> float:
        # At most half of a time is latency: on a busy machine a long message may be the fastest.
        pairs = zip(series.nbytes, seconds, strict=True)
        return median(size / max(time - min(seconds), time / 2) for size, time in pairs if size >= long_bytes)

    together = rate(series.seconds)
    return LinkLevel(
        name=series.level,
        devices=devices,
        latency_s=latency_s,
        bytes_per_s=together,
        alone_bytes_per_s=max(together, rate(series.alone_s or series.seconds)),
    )


def _fit(series: TimingSeries, pieces: FittedPieces) -> MeasuredFit:
    return MeasuredFit(
        operation=series.operation,
        ranks=series.ranks,
        until_bytes=pieces.until_bytes,
        latency_s=tuple(line.latency_s if line.latency_s >= CLOCK_S else 0.0 for line in pieces.lines),
        s_per_byte=tuple(line.s_per_byte for line in pieces.lines),
        algorithm=series.algorithm,
        level=series.level,
        library=_LIBRARY,
        from_bytes=pieces.from_bytes,
        error=0.0 if math.isnan(pieces.error) else round(pieces.error, 4),
    )


def _sources(
    base: Cluster, measurements: ClusterMeasurements, remarks: Sequence[str], *, measured_links: bool
) -> dict[str, str]:
    measured = f"measured on {measurements.date}" + (f" with {measurements.by}" if measurements.by else "")
    assumed = f"assumption: as in {base.name}"
    device, level = [measured, f"power and reserved memory: {assumed}"], [measured if measured_links else assumed]
    if measurements.busy:
        busy = f"assumption: the machine was busy ({measurements.busy}), so the measurements are of its free capacity"
        device.append(busy.replace(";", ","))
    if measurements.ranks_per_host < measurements.devices_per_host:
        devices = counted(measurements.devices_per_host, "device")
        part = f"measured with {measurements.ranks_per_host} of {devices} of a node"
        device.append(f"assumption: all devices together are as fast, {part}")
        if measured_links:
            level.append(f"assumption: all devices sending together are as fast, {part}")
    level += [f"assumption: {remark}" for remark in remarks]
    return {
        "device": "; ".join(device),
        "matmul": measured,
        "node": f"devices and memory: {measured}; power: {assumed}",
        "level": "; ".join(level),
        **dict.fromkeys(_KEPT, assumed),
        **({"fit": measured} if measured_links else {}),
    }
