"""The GPUs or processors whose limits a sweep changes around its trials."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hpcdist.errors import ConfigurationError, MissingCapabilityError, UsageError

if TYPE_CHECKING:  # late at run time: --help must not load what measures
    from hpcdist.bench.power.plan import PowerAxes
    from hpcdist.energy.power_limits.devices import DeviceLimit
    from hpcdist.energy.sources.nvml import NvmlDriver
    from hpcdist.training.recipe import Recipe

GPU: Final = "gpu"
CPU: Final = "cpu"


class Devices:
    """What ``axes`` limit, on this node; nothing where they limit nothing. A context manager, which holds the driver.

    ``on`` is "gpu" or "cpu", None for the GPUs that the trials of ``recipe`` hold, or else the processors. Raises
    MissingCapabilityError, UsageError or ConfigurationError on entry where that cannot be; nothing is changed by it.
    """

    def __init__(
        self, axes: "PowerAxes", recipe: "Recipe", on: str | None, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.kind = ""
        self.power: list[DeviceLimit] = []
        self.clocks: list[DeviceLimit] = []
        self._axes, self._recipe, self._on, self._environment = axes, recipe, on, environment
        self._stack = ExitStack()

    def __enter__(self) -> "Devices":
        limited = self._axes.limits_w or self._axes.clocks_mhz
        if self._on is not None and not limited:
            raise UsageError(f"--on {self._on} says whose --limits are changed, and there are none; leave it out")
        if limited:
            _one_node(self._environment)
            with self._stack:
                self._find()
                self._check()
                self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _find(self) -> None:
        from hpcdist.energy.power_limits import devices
        from hpcdist.energy.sources import nvml

        held = self._recipe.run.device == GPU or bool(self._environment.get(nvml.VISIBLE))
        self.kind = self._on or (GPU if held else CPU)
        if self.kind == GPU:
            driver = self._stack.enter_context(nvml.NvmlDriver())
            uuids = self._uuids(driver)
            self.power = devices.gpu_limits(driver, uuids, devices.GPU_POWER) if self._axes.limits_w else []
            self.clocks = devices.gpu_limits(driver, uuids, devices.GPU_CLOCK) if self._axes.clocks_mhz else []
        elif self._axes.clocks_mhz:
            raise UsageError("--clocks are those of GPUs; for processors there is --limits alone")
        else:
            self.power = list(devices.cpu_limits(Path(self._recipe.energy.powercap)))

    def _uuids(self, driver: "NvmlDriver") -> Sequence[str]:
        """Return the GPUs that the trials hold: others may be at work for somebody else."""
        from hpcdist.energy.sources import nvml

        if nvml.VISIBLE in self._environment:
            found = nvml.gpus_in_use(driver, None, self._environment)
            if found:
                return found
            raise UsageError(f"{nvml.VISIBLE}={self._environment[nvml.VISIBLE]} names no GPU whose limits could change")
        every, ranks = [gpu.uuid for gpu in driver.gpus()], max(self._axes.ranks)
        if self._recipe.run.device != GPU:
            raise UsageError(
                f"run.device = {self._recipe.run.device!r}: the trials compute on no GPU; set run.device = 'gpu', or "
                f"{nvml.VISIBLE} to those that they hold"
            )
        if len(every) > ranks:
            raise UsageError(
                f"{len(every)} GPUs are visible, more than the {ranks} ranks use: a limit would hold for the others "
                f"too; set {nvml.VISIBLE} to those that are meant"
            )
        return every

    def _check(self) -> None:
        from hpcdist.energy.power_limits import devices

        for knobs, values in ((self.power, self._axes.limits_w), (self.clocks, self._axes.clocks_mhz)):
            for knob in knobs:
                for value in values:
                    devices.check_value(knob, value)

    def described(self) -> list[str]:
        """Return a line for each device: what it is at, and what it takes."""
        from hpcdist.energy.power_limits.devices import CpuPowerLimit, range_text

        lines = []
        for knob in (*self.power, *self.clocks):
            allowed, now = knob.allowed(), knob.now()
            here = "clocks as they are" if now is None else f"at {now / knob.per_unit:g} {knob.unit}"
            default = "" if allowed.default is None else f", by default {allowed.default:g} {knob.unit}"
            window = knob.window_s if isinstance(knob, CpuPowerLimit) else None
            over = "" if window is None else f", in the mean over {window:.3g} s, and for all that runs on this node"
            lines.append(f"{knob.name}: {here}, takes {range_text(allowed, knob.unit)}{default}{over}")
        return lines

    def names(self, anonymous: bool) -> str:
        """Return the devices as text; ``anonymous`` leaves out the UUIDs."""
        names = [knob.name for knob in self.power or self.clocks]
        return ", ".join(
            name.partition(" (")[2].rstrip(")") if anonymous and self.kind == GPU else name for name in names
        )

    def permitted(self) -> None:
        """Raise MissingCapabilityError, with the cure, where this process may not change the limits."""
        from hpcdist.energy.power_limits import apply

        apply.check_permitted([*self.power, *self.clocks])

    @contextmanager
    def limited(self, limit_w: float | None, clock_mhz: float | None) -> Iterator[float | None]:
        """Hold the limits inside; yields the least power limit in force, None where no device tells one."""
        from hpcdist.energy.power_limits import apply

        power = [(knob, limit_w) for knob in self.power if limit_w is not None]
        clocks = [(knob, clock_mhz) for knob in self.clocks if clock_mhz is not None]
        if power or clocks:
            with apply.limited([*power, *clocks]):
                yield self.in_force()
        else:
            yield self.in_force()

    def in_force(self) -> float | None:
        """Return the least power limit that the devices show, in W."""
        found = [value for knob in self.power if (value := knob.in_force()) is not None]
        return min(found, default=None)


def _one_node(environment: Mapping[str, str]) -> None:
    from hpcdist.cli.jobs_begin import nodes

    count = nodes(environment)
    if count is not None and count > 1:
        raise MissingCapabilityError(
            f"limits are changed on this node alone, and the job has {count} nodes; use one node, or sweep keys of the "
            "recipe: --sweep KEY=V1,V2"
        )


def refuse_unmeasured(recipe: "Recipe") -> None:
    """Raise ConfigurationError where the trials would measure no energy at all."""
    if recipe.energy.sources == "none":
        raise ConfigurationError(
            "energy.sources = 'none': no trial would measure energy, which is what this is for; add --set "
            "energy.sources=auto"
        )
