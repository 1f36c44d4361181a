"""Definition of a sweep: a TOML file, expanded into trials; one trial chosen; the trials frozen for a job.

    [sweep]
    ranks = [2, 4]
    repeats = 3
    recipe = "base.toml"                            # or the sections themselves, as [recipe.model]

    [axes]                                          # every combination of these values
    communication.bucket_bytes = [1048576, 4194304]

    [[trial]]                                       # what sets several keys at once; each meets every combination
    name = "ring"
    ranks = [4]                                     # instead of those of [sweep]
    communication.algorithm = "ring"

    [[exclude]]                                     # drops the trials that meet all of its conditions
    ranks = 2
    communication.bucket_bytes = [1048576]          # any of these

Keys are those of recipes; values must be of the types that a recipe has. A condition that no trial meets is an error.

A trial is chosen by its place in the file, its id or its name (`trial_position`). `freeze` writes a sweep as it was
when it was submitted: one file that needs no other, and that no other file changes. Variables (``HPCDIST_SET__...``)
override it, as they override any base recipe: a job that reads it unsets them.
"""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.reporting import regular
from hpcdist.reporting.nearest import nearest
from hpcdist.reporting.schema import check_names
from hpcdist.reporting.table import aligned
from hpcdist.reporting.toml_text import toml_value
from hpcdist.reporting.units import counted

TABLES: Final = ("sweep", "recipe", "axes", "trial", "exclude")
HEAD: Final = ("ranks", "repeats", "recipe")


class ResolvedTrial(NamedTuple):
    """A recipe with every key: as TOML, and as values by key."""

    text: str
    values: Mapping[str, Any]


class RecipeResolver(Protocol):
    """Reader of recipes, and the base recipe of a sweep. Both raise ConfigurationError."""

    def convert(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of ``settings`` (by key) in the types of a recipe; refuse unknown keys and wrong types."""

    def resolve(self, settings: Mapping[str, Any], ranks: int | None = None) -> ResolvedTrial:
        """Put ``settings`` over the base recipe; refuse what cannot be run, and with ``ranks`` not on so many."""


class TrialCandidate(NamedTuple):
    """A trial that the ``[[exclude]]`` tables may drop; ``values`` are the settings in the types of a recipe."""

    name: str
    variant: str
    ranks: int
    settings: Mapping[str, Any]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class TrialVariant:
    """A ``[[trial]]`` table; ``ranks`` is empty where those of the sweep count."""

    name: str
    settings: Mapping[str, Any]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Sweep:
    """A sweep file as it was written. ``recipe`` is the path of the base recipe, or its sections."""

    path: Path
    ranks: tuple[int, ...]
    repeats: int
    recipe: Path | Mapping[str, Any]
    axes: Mapping[str, list[Any]]
    variants: tuple[TrialVariant, ...]
    excludes: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class SweepTrial:
    """One configuration on one number of ranks; ``id`` depends on nothing but these two."""

    id: str
    name: str
    ranks: int
    settings: Mapping[str, Any]
    recipe: str  # resolved, as TOML


def read(path: Path) -> Sweep:
    """Read a sweep file. Raises StorageError where it cannot be read, ConfigurationError when it is not one."""
    tree = regular.settings(path, "sweep")
    check_names(tree, TABLES, f"sweep {path}: ")
    head = _table(tree, "sweep", path)
    check_names(head, HEAD, f"sweep {path}: sweep.")
    repeats = head.get("repeats", 1)
    if not _is_count(repeats):
        raise ConfigurationError(f"sweep.repeats = {repeats!r} in {path}; give a whole number of at least 1")
    axes = dict(_flat(_table(tree, "axes", path)))
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigurationError(f"axes.{key} = {values!r} in {path}; give a list of one value or more")
    variants = tuple(_variants(tree.get("trial", []), axes, path))
    # A sweep whose trials all name their ranks needs none of its own.
    named = bool(variants) and all(variant.ranks for variant in variants)
    ranks = () if named and "ranks" not in head else _ranks(head.get("ranks"), f"sweep.ranks in {path}")
    excludes = tuple(dict(_flat(table)) for table in _list_of_tables(tree.get("exclude", []), "exclude", path))
    return Sweep(path, ranks, repeats, _base(tree, head, path), axes, variants, excludes)


def _base(tree: Mapping[str, Any], head: Mapping[str, Any], path: Path) -> Path | Mapping[str, Any]:
    named, sections = head.get("recipe"), _table(tree, "recipe", path)
    if named is None:
        return sections
    if not isinstance(named, str) or sections:
        raise ConfigurationError(
            f"sweep.recipe = {named!r} in {path}; name one recipe file, or leave it out and write [recipe.*] sections"
        )
    return path.parent / Path(named).expanduser()


def _variants(tables: Any, axes: Mapping[str, Any], path: Path) -> Iterator[TrialVariant]:
    names: set[str] = set()
    for number, table in enumerate(_list_of_tables(tables, "trial", path), 1):
        settings = dict(table)
        name = settings.pop("name", None)
        if not isinstance(name, str) or not name or name in names:
            raise ConfigurationError(f"[[trial]] {number} of {path} has name = {name!r}; give each a name of its own")
        names.add(name)
        ranks = _ranks(settings.pop("ranks"), f"ranks of trial {name!r} in {path}") if "ranks" in settings else ()
        flat = dict(_flat(settings))
        both = sorted(flat.keys() & axes.keys())
        if both:
            raise ConfigurationError(f"{both[0]} is an axis of {path} and set by its trial {name!r}; keep one of them")
        yield TrialVariant(name, flat, ranks)


def expand(sweep: Sweep, recipes: RecipeResolver) -> list[SweepTrial]:
    """Return the trials of ``sweep`` in the order of the file.

    Raises ConfigurationError for a key, type or value that ``recipes`` refuses, for degrees of parallelism that do not
    fit the ranks of a trial, for two trials that are the same, for an exclusion that drops nothing, and when nothing is
    left.
    """
    candidates = list(_candidates(sweep, recipes))
    dropped = _dropped(sweep, recipes, candidates)
    trials: dict[str, SweepTrial] = {}
    for number, candidate in enumerate(candidates):
        if number in dropped:
            continue
        trial = _trial(candidate, recipes)
        if trial.id in trials:
            raise ConfigurationError(
                f"trials {trials[trial.id].name!r} and {trial.name!r} of {sweep.path} are the same configuration "
                f"on {trial.ranks} ranks; remove one"
            )
        trials[trial.id] = trial
    if not trials:
        raise ConfigurationError(f"sweep {sweep.path} has no trial left; loosen its [[exclude]] tables")
    return list(trials.values())


def _candidates(sweep: Sweep, recipes: RecipeResolver) -> Iterator[TrialCandidate]:
    for variant in sweep.variants or (TrialVariant("", {}, ()),):
        for chosen in itertools.product(*sweep.axes.values()):
            choice = dict(zip(sweep.axes, chosen, strict=True))
            settings = {**variant.settings, **choice}
            name = " ".join([*([variant.name] if variant.name else []), *labels(choice)]) or "base"
            values = recipes.convert(settings)
            for ranks in variant.ranks or sweep.ranks:
                yield TrialCandidate(name, variant.name, ranks, settings, values)


def _trial(candidate: TrialCandidate, recipes: RecipeResolver) -> SweepTrial:
    name, _, ranks, settings, _ = candidate
    try:
        return resolved(name, ranks, settings, recipes)
    except ConfigurationError as error:
        raise ConfigurationError(f"trial {name!r} on {ranks} ranks: {error}") from error


def resolved(name: str, ranks: int, settings: Mapping[str, Any], recipes: RecipeResolver) -> SweepTrial:
    """Return the trial of ``settings`` on ``ranks``. Raises ConfigurationError where they cannot be trained so."""
    text = recipes.resolve(settings, ranks).text
    digest = hashlib.blake2b(f"{ranks}\n{text}".encode(), digest_size=6).hexdigest()
    return SweepTrial(digest, name, ranks, settings, text)


def _dropped(sweep: Sweep, recipes: RecipeResolver, candidates: Sequence[TrialCandidate]) -> set[int]:
    """Return which of ``candidates`` meet all conditions of an ``[[exclude]]`` table.

    A trial that does not set the key of a condition has the value of the base recipe. A table, or one of its values,
    that no trial meets is a slip of the pen: it raises ConfigurationError.
    """
    if not sweep.excludes:
        return set()
    try:
        base = recipes.resolve({}).values
    except ConfigurationError as error:
        raise ConfigurationError(f"the base recipe of {sweep.path}, which its [[exclude]] compares: {error}") from error
    known = [{**base, **of.values, "ranks": of.ranks, "trial": of.variant} for of in candidates]
    dropped: set[int] = set()
    for number, table in enumerate(sweep.excludes, 1):
        place = f"[[exclude]] {number} of {sweep.path}"
        conditions = {key: _condition(key, value, recipes, place) for key, value in table.items()}
        for key, values in conditions.items():
            there = list(dict.fromkeys(actual[key] for actual in known))
            for value in values:
                if value not in there:
                    raise ConfigurationError(f"{key} = {value!r} in {place} meets no trial: they have {there}")
        met = {n for n, actual in enumerate(known) if all(actual[key] in conditions[key] for key in conditions)}
        if not met:
            raise ConfigurationError(f"{place} drops nothing: no trial meets all of its conditions, {dict(table)}")
        dropped |= met
    return dropped


def _condition(key: str, value: Any, recipes: RecipeResolver, place: str) -> list[Any]:
    """Return the values that meet a condition, as a recipe would have them. Raises ConfigurationError."""
    values = _as_list(value)
    if not values:
        raise ConfigurationError(f"{key} = [] in {place} meets no trial; give a value or more")
    if key == "ranks":
        return list(_ranks(value, f"ranks in {place}"))
    if key == "trial":
        return values
    try:
        return [recipes.convert({key: each})[key] for each in values]
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from error


def labels(choice: Mapping[str, Any]) -> list[str]:
    """Return key=value of each axis, the key without its section where no other axis has the same."""
    leaves = [key.rpartition(".")[2] for key in choice]
    short = {key: leaf if leaves.count(leaf) == 1 else key for key, leaf in zip(choice, leaves, strict=True)}
    return [f"{short[key]}={value}" for key, value in choice.items()]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _ranks(value: Any, what: str) -> tuple[int, ...]:
    counts = _as_list(value)
    if not counts or not all(_is_count(count) for count in counts):
        raise ConfigurationError(f"{what} = {value!r}; give a list of numbers of ranks, such as [2, 4]")
    return tuple(counts)


def _table(tree: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    table = tree.get(name, {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{name} = {table!r} in {path}; write a table, [{name}]")
    return table


def _list_of_tables(tables: Any, name: str, path: Path) -> list[Mapping[str, Any]]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) and table for table in tables):
        raise ConfigurationError(f"{name} in {path} must be tables with keys, each under a line [[{name}]]")
    return tables


_INTEGER: Final = re.compile(r"[+-]?\d+", re.ASCII)


def trial_position(trials: Sequence[SweepTrial], text: str, place: str) -> int:
    """Return where the trial that ``text`` names stands in ``trials``, counted from 0; ``place`` is their sweep file.

    A number that is such a place is one, whatever a trial is called. Raises UsageError, with the nearest, for none, and
    for the name of several.
    """
    number = int(text) if _INTEGER.fullmatch(text) else None
    if number is not None and 0 <= number < len(trials):
        return number
    positions = [at for at, trial in enumerate(trials) if text in (trial.id, trial.name)]
    if len(positions) == 1:
        return positions[0]
    if positions:
        each = ", ".join(f"{at} ({counted(trials[at].ranks, 'rank')})" for at in positions)
        raise UsageError(f"--trial {text!r} of {place} is {len(positions)} trials: {each}; give a number, or an id")
    last = len(trials) - 1
    if number is not None:
        raise UsageError(
            f"--trial {text}: {place} has {counted(len(trials), 'trial')}, counted from 0 to {last}; the nearest is "
            f"{0 if number < 0 else last}"
        )
    close = nearest(text, [word for trial in trials for word in (trial.name, trial.id)])
    cure = f"the nearest is {close!r}" if close else f"give a number from 0 to {last}; --list shows them"
    raise UsageError(f"--trial {text!r}: {place} has no trial of this id or name; {cure}")


def trial_rows(trials: Sequence[SweepTrial], sweep: Sweep) -> list[dict[str, Any]]:
    """Return what each trial is, in the order of the file, in values that JSON has."""
    return [
        {"index": at, "id": trial.id, "name": trial.name, "ranks": trial.ranks, "repeats": sweep.repeats}
        for at, trial in enumerate(trials)
    ]


def trial_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the trials as a table; the name, which may hold spaces, comes last."""
    titles = ("index", "id", "ranks", "repeats", "name")
    return "\n".join(aligned([titles, *([str(row[title]) for title in titles] for row in rows)], (-1,)))


_SECTION: Final = re.compile(r"\[(\w+)\]", re.ASCII)


def freeze(trials: Sequence[SweepTrial], repeats: int) -> str:
    """Return a sweep file that expands into ``trials``: the same ids, names and order.

    What all trials have in common is its recipe, with every key; each trial has its others.
    """
    keys = {trial.id: _keys(trial.recipe) for trial in trials}
    first = keys[trials[0].id]
    common = {key: value for key, value in first.items() if all(of.get(key) == value for of in keys.values())}
    lines = ["[sweep]", f"repeats = {repeats}"]
    for section, names in itertools.groupby(common, lambda key: key.partition(".")[0]):
        lines += ["", f"[recipe.{section}]", *(f"{key.partition('.')[2]} = {common[key]}" for key in names)]
    for name, of_name in itertools.groupby(trials, lambda trial: trial.name):
        alike = list(of_name)  # one configuration on several numbers of ranks
        own = [f"{key} = {value}" for key, value in keys[alike[0].id].items() if key not in common]
        lines += ["", "[[trial]]", f"name = {toml_value(name)}", f"ranks = {[trial.ranks for trial in alike]}", *own]
    return "\n".join(lines) + "\n"


def _keys(recipe: str) -> Mapping[str, str]:
    """Return the values of a resolved recipe by key, as TOML: it has one key on a line."""
    values: dict[str, str] = {}
    section = ""
    for line in recipe.split("\n"):
        head = _SECTION.fullmatch(line)
        section = head[1] if head else section
        name, equals, value = line.partition(" = ")
        if equals and not head:
            values[f"{section}.{name}"] = value
    return values
