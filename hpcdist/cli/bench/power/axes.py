"""Axes, recipes and devices of a power sweep, and the options that do not go together.

LimitedDevices are the GPUs or processors whose limits a sweep changes around its trials; it holds the limits inside a
context, and refuses where this process may not change them.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hpcdist.errors import ConfigurationError, MissingCapabilityError, UsageError

if TYPE_CHECKING:  # late at run time: --help must not load what measures
    from hpcdist.bench.power.pareto import PowerAxes
    from hpcdist.energy.power_limits.devices import DeviceLimit
    from hpcdist.energy.sources.nvml import NvmlDriver
    from hpcdist.training.recipe.recipe import Recipe

GPU: Final = "gpu"
CPU: Final = "cpu"
RANKS: Final = "ranks"
THREADS: Final = "threads"
# Lists have commas of their own: [0, 1],[2, 3].
_LIST_COMMA: Final = re.compile(r",(?![^\[]*\])")
_MEASURING_OPTIONS: Final = (
    "limits",
    "clocks",
    "sweeps",
    "overrides",
    "on",
    "change_limits",
    "dry_run",
    "ranks",
    "run_args",
)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UsageError for options that do not go together."""
    actions = [name for name in ("restore", "show") if options[name]]
    extra = [name for name in ("recipe", *_MEASURING_OPTIONS) if options[name]]
    if len(actions) == 2:
        raise UsageError("--restore and --show are two things to do; choose one")
    if actions:
        if extra:
            raise UsageError(f"--{actions[0]} measures nothing; leave out {_option(extra[0])}")
        return
    if options["recipe"] is None:
        raise UsageError("name a RECIPE to train, or use --show or --restore")
    if not (options["limits"] or options["clocks"] or options["sweeps"]):
        raise UsageError("nothing to vary; give --limits W,W, --clocks MHZ,MHZ or --sweep KEY=V1,V2")
    if options["change_limits"] and not (options["limits"] or options["clocks"]):
        raise UsageError("--change-limits: there are no --limits or --clocks to change; leave it out")


def _option(name: str) -> str:
    return {"recipe": "RECIPE", "sweeps": "--sweep", "overrides": "--set"}.get(name, "--" + name.replace("_", "-"))


def sweep_axes(options: Mapping[str, Any]) -> "PowerAxes":
    """Return what is varied. Raises UsageError for what cannot be read, and ConfigurationError for an unknown key."""
    from hpcdist.bench.power.pareto import PowerAxes

    keys: dict[str, tuple[Any, ...]] = {}
    counts: dict[str, tuple[int, ...]] = {}
    for text in options["sweeps"]:
        key, texts = _swept(text)
        if key in keys or key in counts:
            raise UsageError(f"--sweep {key}=... is given twice; write all values in one")
        if key in (RANKS, THREADS):
            counts[key] = _counts(key, texts)
        else:
            keys[key] = tuple(_value(key, value) for value in texts)
    if RANKS in counts and options["ranks"] is not None:
        raise UsageError(f"-n {options['ranks']} and --sweep ranks=... both say how many ranks; leave -n out")
    return PowerAxes(
        ranks=counts.get(RANKS, (options["ranks"] or 1,)),
        threads=counts.get(THREADS, ()),
        limits_w=_numbers("--limits", options["limits"], "W"),
        clocks_mhz=_numbers("--clocks", options["clocks"], "MHz"),
        keys=keys,
    )


def _swept(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    texts = [value.strip() for value in _LIST_COMMA.split(values)]
    if not equals or not all(texts):
        raise UsageError(f"--sweep {text}: expected KEY=V1,V2, for example --sweep threads=1,2")
    return key.strip(), texts


def _value(key: str, text: str) -> Any:
    """Return one value in the type of its key."""
    from hpcdist.training.recipe import recipe as recipes
    from hpcdist.training.recipe import settings

    try:
        return settings.overrides([f"{key}={text}"], recipes.known_keys()).values[key]
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace(" in --set", " in --sweep")) from error


def _counts(key: str, texts: Sequence[str]) -> tuple[int, ...]:
    if not all(text.isascii() and text.isdecimal() and int(text) for text in texts):
        raise UsageError(f"--sweep {key}={','.join(texts)}: give whole numbers of at least 1")
    return tuple(map(int, texts))


def _numbers(option: str, text: str | None, unit: str) -> tuple[float, ...]:
    """Return the numbers in a list. Raises UsageError for one that is none, or is there twice."""
    try:
        numbers = tuple(float(word) for word in text.split(",")) if text else ()
    except ValueError:
        numbers = (math.nan,)
    if not all(math.isfinite(value) for value in numbers):
        raise UsageError(f"{option} {text}: expected numbers of {unit} with commas between, such as 200,300")
    if option == "--clocks" and not all(value.is_integer() for value in numbers):
        raise UsageError(f"{option} {text}: clocks are whole numbers of {unit}")
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{option} {text}: a value is there twice; leave it out")
    return numbers


@dataclass(frozen=True)
class PowerRecipes:
    """The recipe of ``path`` under ``overrides``, and those of the trials."""

    path: Path
    overrides: Sequence[str]

    def resolve(self, settings: Mapping[str, Any], ranks: int | None) -> "Recipe":
        """Return the recipe with ``settings``. Raises ConfigurationError where it does not fit ``ranks``."""
        from hpcdist.training.recipe import recipe as recipes
        from hpcdist.training.recipe.requirements import degrees_equation
        from hpcdist.training.recipe.settings import overrides

        chosen = overrides(self.overrides, recipes.known_keys())
        both = sorted(chosen.values.keys() & settings.keys())
        if both:
            raise UsageError(f"{both[0]} is given by --set and by --sweep; keep one of them")
        chosen.values |= settings
        chosen.origin |= dict.fromkeys(settings, "--sweep")
        recipe = recipes.load(self.path, chosen).recipe
        if ranks is not None:
            degrees_equation(recipe, ranks)
        return recipe

    def text(self, settings: Mapping[str, Any], ranks: int) -> str:
        """Return the recipe of a trial as TOML, with every key."""
        from hpcdist.training.recipe import recipe as recipes

        try:
            return recipes.dump(self.resolve(settings, ranks))
        except ConfigurationError as error:
            words = " ".join(f"{key}={value}" for key, value in settings.items())
            raise ConfigurationError(f"a trial on {ranks} ranks{words and ' with '}{words}: {error}") from error


class LimitedDevices:
    """Devices that ``axes`` limit on this node, if they limit any. A context manager, which holds the driver.

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

    def __enter__(self) -> "LimitedDevices":
        limited = self._axes.limits_w or self._axes.clocks_mhz
        if self._on is not None and not limited:
            raise UsageError(f"--on {self._on} says whose --limits are changed, and there are none; leave it out")
        if limited:
            _check_one_node(self._environment)
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
            visible = nvml.gpus_in_use(driver, None, self._environment)
            if visible:
                return visible
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
        limits = [value for knob in self.power if (value := knob.in_force()) is not None]
        return min(limits, default=None)


def _check_one_node(environment: Mapping[str, str]) -> None:
    from hpcdist.batch.requeue import node_count

    count = node_count(environment)
    if count is not None and count > 1:
        raise MissingCapabilityError(
            f"limits are changed on this node alone, and the job has {count} nodes; use one node, or sweep keys of the "
            "recipe: --sweep KEY=V1,V2"
        )


def check_energy_is_measured(recipe: "Recipe") -> None:
    """Raise ConfigurationError where the trials would measure no energy at all."""
    if recipe.energy.sources == "none":
        raise ConfigurationError(
            "energy.sources = 'none': no trial would measure energy, which is what this is for; add --set "
            "energy.sources=auto"
        )
