"""Limits that the power study varies, and the GPUs or processors of this node to which they apply."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hpcdist.batch.ledger import node_count
from hpcdist.constants import VISIBLE_GPUS
from hpcdist.energy import limit_devices as limits
from hpcdist.energy import power_limits
from hpcdist.energy.limit_devices import CpuPowerLimit, DeviceLimit
from hpcdist.energy.sources import nvml
from hpcdist.errors import MissingCapabilityError, UsageError

GPU: Final = "gpu"
CPU: Final = "cpu"


@dataclass(frozen=True)
class Axes:
    """Varied values of ranks, threads, power limits, clocks and recipe keys. Every combination is a trial."""

    ranks: tuple[int, ...] = (1,)
    threads: tuple[int, ...] = ()
    limits_w: tuple[float, ...] = ()
    clocks_mhz: tuple[float, ...] = ()
    keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def limits(self) -> list[tuple[float | None, float | None]]:
        """Pairs of a power limit and a clock. The first pair is (None, None): nothing is changed."""
        pairs = itertools.product(self.limits_w or (None,), self.clocks_mhz or (None,))
        return list(dict.fromkeys([(None, None), *pairs]))


@dataclass(frozen=True)
class Devices:
    """Power and clock limits of the devices of ``kind``, "gpu" or "cpu"; without varied limits, no devices."""

    kind: str = ""
    power: Sequence[DeviceLimit] = ()
    clocks: Sequence[DeviceLimit] = ()

    def lines(self) -> list[str]:
        """Return a line per limit: the present value and the allowed values."""
        lines = []
        for knob in (*self.power, *self.clocks):
            allowed, now = knob.allowed(), knob.now()
            present = "now unlocked or unknown" if now is None else f"now {now / knob.per_unit:g} {knob.unit}"
            default = "" if allowed.default is None else f", default {allowed.default:g} {knob.unit}"
            window = knob.window_s if isinstance(knob, CpuPowerLimit) else None
            scope = "" if window is None else f", mean over {window:.3g} s, for all programs on this node"
            lines.append(f"{knob.name}: {present}, allowed {limits.range_text(allowed, knob.unit)}{default}{scope}")
        return lines

    def names(self, anonymous: bool = False) -> str:
        """Return the device names, separated by commas. ``anonymous`` leaves out the UUIDs of GPUs."""
        names = [knob.name for knob in self.power or self.clocks]
        if anonymous and self.kind == GPU:
            names = [name.partition(" (")[2].rstrip(")") for name in names]
        return ", ".join(names)

    def check_permitted(self) -> None:
        """Raise MissingCapabilityError if this process may not change the limits."""
        power_limits.check_permitted([*self.power, *self.clocks])

    @contextmanager
    def limited(self, limit_w: float | None, clock_mhz: float | None) -> Iterator[float | None]:
        """Apply the limits in the ``with`` block. Yield the lowest power limit in force, or None if it is unknown."""
        requested = [(knob, limit_w) for knob in self.power if limit_w is not None]
        requested += [(knob, clock_mhz) for knob in self.clocks if clock_mhz is not None]
        with power_limits.limited(requested) if requested else ExitStack():
            yield self.in_force()

    def in_force(self) -> float | None:
        """Return the lowest power limit that the devices report, in W, or None if no device reports a limit."""
        return min((value for knob in self.power if (value := knob.in_force()) is not None), default=None)


@contextmanager
def opened(
    axes: Axes, settings: Mapping[str, Any], on: str | None, environment: Mapping[str, str] = os.environ
) -> Iterator[Devices]:
    """Yield the devices whose limits ``axes`` vary. The GPU driver stays open in the ``with`` block. Local.

    ``settings``: recipe values by key. ``on``: "gpu" or "cpu"; None selects the GPUs of the trials, or the processors
    if the trials have no GPU. Raises MissingCapabilityError, UsageError or ConfigurationError before any change.
    """
    if not (axes.limits_w or axes.clocks_mhz):
        yield Devices()
        return
    _check_one_node(environment)
    has_gpu = settings["run.device"] == GPU or bool(environment.get(VISIBLE_GPUS))
    kind = on or (GPU if has_gpu else CPU)
    with ExitStack() as stack:
        if kind == GPU:
            driver = stack.enter_context(nvml.NvmlDriver())
            uuids = _gpus(driver, max(axes.ranks), settings["run.device"], environment)
            power = limits.gpu_limits(driver, uuids, limits.GPU_POWER) if axes.limits_w else []
            clocks = limits.gpu_limits(driver, uuids, limits.GPU_CLOCK) if axes.clocks_mhz else []
        elif axes.clocks_mhz:
            raise UsageError("--clocks works for GPUs only; for processors use --limits")
        else:
            power, clocks = list(limits.cpu_limits(Path(settings["energy.powercap"]))), []
        for knobs, values in ((power, axes.limits_w), (clocks, axes.clocks_mhz)):
            for knob, value in itertools.product(knobs, values):
                limits.check_value(knob, value)
        yield Devices(kind, power, clocks)


def _gpus(driver: nvml.NvmlDriver, ranks: int, device: str, environment: Mapping[str, str]) -> Sequence[str]:
    """Return the UUIDs of the GPUs that the trials use. Other GPUs may belong to other users."""
    if VISIBLE_GPUS in environment:
        if visible := nvml.gpus_in_use(driver, None, environment):
            return visible
        raise UsageError(f"{VISIBLE_GPUS}={environment[VISIBLE_GPUS]} names no GPU; set it to the GPUs to limit")
    if device != GPU:
        raise UsageError(
            f"run.device = {device!r}: the trials use no GPU; set run.device = 'gpu', or set {VISIBLE_GPUS} to the "
            "GPUs to limit"
        )
    uuids = [gpu.uuid for gpu in driver.gpus()]
    if len(uuids) > ranks:
        raise UsageError(
            f"{len(uuids)} GPUs are visible, but {ranks} ranks use fewer, and a limit would also apply to the other "
            f"GPUs; set {VISIBLE_GPUS} to the GPUs to limit"
        )
    return uuids


def _check_one_node(environment: Mapping[str, str]) -> None:
    count = node_count(environment)
    if count is not None and count > 1:
        raise MissingCapabilityError(
            f"the job has {count} nodes, but limits are changed on this node only; use one node, or vary recipe keys "
            "with --sweep KEY=V1,V2"
        )
