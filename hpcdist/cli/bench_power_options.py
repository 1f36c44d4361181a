"""What the options of `hpcdist bench power` mean: axes, recipes, and what does not go together."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hpcdist.errors import ConfigurationError, UsageError

if TYPE_CHECKING:  # late at run time: --help must not load numpy
    from hpcdist.bench.power.plan import PowerAxes
    from hpcdist.training.recipe import Recipe

RANKS: Final = "ranks"
THREADS: Final = "threads"
# Lists have commas of their own: [0, 1],[2, 3].
_SPLIT: Final = re.compile(r",(?![^\[]*\])")
_MEASURING: Final = ("limits", "clocks", "sweeps", "overrides", "on", "change_limits", "dry_run", "ranks", "run_args")


def check(options: Mapping[str, Any]) -> None:
    """Raise UsageError for options that do not go together."""
    asked = [name for name in ("restore", "show") if options[name]]
    extra = [name for name in ("recipe", *_MEASURING) if options[name]]
    if len(asked) == 2:
        raise UsageError("--restore and --show are two things to do; choose one")
    if asked:
        if extra:
            raise UsageError(f"--{asked[0]} measures nothing; leave out {_option(extra[0])}")
        return
    if options["recipe"] is None:
        raise UsageError("name a RECIPE to train, or use --show or --restore")
    if not (options["limits"] or options["clocks"] or options["sweeps"]):
        raise UsageError("nothing to vary; give --limits W,W, --clocks MHZ,MHZ or --sweep KEY=V1,V2")
    if options["change_limits"] and not (options["limits"] or options["clocks"]):
        raise UsageError("--change-limits: there are no --limits or --clocks to change; leave it out")


def _option(name: str) -> str:
    return {"recipe": "RECIPE", "sweeps": "--sweep", "overrides": "--set"}.get(name, "--" + name.replace("_", "-"))


def axes(options: Mapping[str, Any]) -> "PowerAxes":
    """Return what is varied. Raises UsageError for what cannot be read, and ConfigurationError for an unknown key."""
    from hpcdist.bench.power.plan import PowerAxes

    keys: dict[str, tuple[Any, ...]] = {}
    counts: dict[str, tuple[int, ...]] = {}
    for text in options["sweeps"]:
        key, texts = _swept(text)
        if key in keys or key in counts:
            raise UsageError(f"--sweep {key}=... is given twice; write all values in one")
        if key in (RANKS, THREADS):
            counts[key] = _counts(key, texts)
        else:
            keys[key] = tuple(_value(key, one) for one in texts)
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
    texts = [one.strip() for one in _SPLIT.split(values)]
    if not equals or not all(texts):
        raise UsageError(f"--sweep {text}: expected KEY=V1,V2, for example --sweep threads=1,2")
    return key.strip(), texts


def _value(key: str, text: str) -> Any:
    """Return one value in the type of its key."""
    from hpcdist.training import recipe as recipes
    from hpcdist.training import settings

    try:
        return settings.overrides([f"{key}={text}"], recipes.defaults()).values[key]
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace(" in --set", " in --sweep")) from error


def _counts(key: str, texts: Sequence[str]) -> tuple[int, ...]:
    if not all(text.isascii() and text.isdecimal() and int(text) for text in texts):
        raise UsageError(f"--sweep {key}={','.join(texts)}: give whole numbers of at least 1")
    return tuple(map(int, texts))


def _numbers(option: str, text: str | None, unit: str) -> tuple[float, ...]:
    """Return the numbers in a list. Raises UsageError for one that is none, or is there twice."""
    try:
        found = tuple(float(one) for one in text.split(",")) if text else ()
    except ValueError:
        found = (math.nan,)
    if not all(math.isfinite(value) for value in found):
        raise UsageError(f"{option} {text}: expected numbers of {unit} with commas between, such as 200,300")
    if option == "--clocks" and not all(value.is_integer() for value in found):
        raise UsageError(f"{option} {text}: clocks are whole numbers of {unit}")
    if len(set(found)) < len(found):
        raise UsageError(f"{option} {text}: a value is there twice; leave it out")
    return found


@dataclass(frozen=True)
class Recipes:
    """The recipe of ``path`` under ``overrides``, and those of the trials."""

    path: Path
    overrides: Sequence[str]

    def resolve(self, settings: Mapping[str, Any], ranks: int | None) -> "Recipe":
        """Return the recipe with ``settings``. Raises ConfigurationError where it does not fit ``ranks``."""
        from hpcdist.cli.degrees import equation
        from hpcdist.training import recipe as recipes
        from hpcdist.training.settings import overrides

        chosen = overrides(self.overrides, recipes.defaults())
        both = sorted(chosen.values.keys() & settings.keys())
        if both:
            raise UsageError(f"{both[0]} is given by --set and by --sweep; keep one of them")
        chosen.values |= settings
        chosen.origin |= dict.fromkeys(settings, "--sweep")
        found = recipes.load(self.path, chosen).recipe
        if ranks is not None:
            equation(found, ranks)
        return found

    def text(self, settings: Mapping[str, Any], ranks: int) -> str:
        """Return the recipe of a trial as TOML, with every key."""
        from hpcdist.training import recipe as recipes

        try:
            return recipes.dump(self.resolve(settings, ranks))
        except ConfigurationError as error:
            words = " ".join(f"{key}={value}" for key, value in settings.items())
            raise ConfigurationError(f"a trial on {ranks} ranks{words and ' with '}{words}: {error}") from error


def now() -> str:
    """Return the time as results files have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
