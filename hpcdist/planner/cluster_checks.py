"""Whether a cluster's numbers go together: levels that nest, a peak that its memory can feed, curves, prices."""

from collections.abc import Sequence
from itertools import pairwise

from hpcdist.errors import ConfigurationError
from hpcdist.planner.cluster import ITEM_BYTES, Cluster, Curve, Device, Fit, Level, Site
from hpcdist.planner.layout import LIBRARIES
from hpcdist.planner.units import rough


def check(cluster: Cluster) -> None:
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


def _check_curve(curve: Curve, place: str) -> None:
    if len(curve.sizes) != len(curve.shares):
        raise ConfigurationError(f"{place} has {len(curve.sizes)} sizes and {len(curve.shares)} shares; one of each")
    _check_ascending(curve.sizes, f"{place}.sizes")


def _check_levels(levels: Sequence[Level], devices: int) -> None:
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


def _check_site(site: Site) -> None:
    if not site.currency and (site.device_hour_price is not None or site.kwh_price is not None):
        raise ConfigurationError('site.currency is missing: a price is given; expected for example "USD"')
    if site.carbon_g_per_kwh is not None and not site.carbon_source:
        raise ConfigurationError("site.carbon_source is missing: say which grid and year site.carbon is of")


def _check_fit(fit: Fit, place: str, levels: Sequence[str]) -> None:
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
