"""Definition of a sweep: a TOML file that expands into trials, the selection of a trial, and a frozen copy for a job.

    [sweep]
    ranks = [2, 4]                                  # numbers of MPI ranks
    repeats = 3
    recipe = "base.toml"                            # or inline tables, such as [recipe.model]

    [axes]                                          # every combination of these values
    communication.bucket_bytes = [1048576, 4194304]

    [[trial]]                                       # settings that are combined with every combination of [axes]
    name = "ring"
    ranks = [4]                                     # replaces sweep.ranks
    communication.algorithm = "ring"

    [[exclude]]                                     # drops the trials that match all conditions of the table
    ranks = 2
    communication.bucket_bytes = [1048576]          # a list matches any of its values

The dotted keys are recipe keys, and their values must have the recipe's types.

`freeze` writes a submitted sweep to one file that needs no other file. Variables ``HPCDIST_SET__...`` override the base
recipe in a frozen file too, so a job that reads a frozen file must unset these variables.
"""

import hashlib
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.reporting import regular, schema
from hpcdist.reporting.nearest import nearest
from hpcdist.reporting.schema import Field, TableFormat, check_section, fields_of, toml_value
from hpcdist.reporting.table import aligned
from hpcdist.reporting.units import counted


class ResolvedTrial(NamedTuple):
    """Complete recipe of a trial: the ``text`` in TOML, and the ``values`` by dotted key such as "model.layers"."""

    text: str
    values: Mapping[str, Any]


class RecipeResolver(Protocol):
    """Interface that checks settings of recipe keys, and completes the recipes of a sweep."""

    def convert(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert ``settings``, {dotted recipe key: value}, to the types of the keys. Raises ConfigurationError."""

    def resolve(self, settings: Mapping[str, Any], ranks: int | None = None) -> ResolvedTrial:
        """Return the base recipe, changed by ``settings`` and valid for ``ranks`` ranks. Raises ConfigurationError."""


class TrialCandidate(NamedTuple):
    """Trial of a sweep before the ``[[exclude]]`` tables are applied."""

    name: str
    variant: str  # name of its ``[[trial]]`` table
    ranks: int
    settings: Mapping[str, Any]  # by dotted recipe key, as in the file
    values: Mapping[str, Any]  # ``settings``, converted to the types of the recipe keys


@dataclass(frozen=True)
class TrialVariant:
    """``[[trial]]`` table of a sweep file. If ``ranks`` is empty, ``ranks`` in ``[sweep]`` applies."""

    name: str
    settings: Mapping[str, Any]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Sweep:
    """Content of the sweep file ``path``. ``recipe``: path of the base recipe, or a dict of inline recipe tables."""

    path: Path
    ranks: tuple[int, ...]
    repeats: int
    recipe: Path | Mapping[str, Any]
    axes: Mapping[str, list[Any]]
    variants: tuple[TrialVariant, ...]
    excludes: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class SweepTrial:
    """Trial of a sweep: a complete recipe as TOML text, and a number of MPI ranks. ``id``: hash of recipe and ranks."""

    id: str
    name: str
    ranks: int
    settings: Mapping[str, Any]
    recipe: str


@dataclass(frozen=True, kw_only=True)
class SweepSection:
    """Section ``[sweep]`` of a sweep file. In the file, ``ranks`` may be one number or a list."""

    ranks: tuple[int, ...] = schema.key((), "Numbers of MPI ranks.", ge=1)
    repeats: int = schema.key(1, "Number of runs of each trial.", ge=1)
    recipe: str = schema.key(
        "", "Base recipe: a file. Without it, the tables [recipe.*] are the base recipe.", path=True
    )


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """Sections of a sweep file. All sections except ``[sweep]`` contain dotted recipe keys."""

    sweep: SweepSection = SweepSection()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, Any] = field(default_factory=dict)
    trial: tuple[Mapping[str, Any], ...] = ()
    exclude: tuple[Mapping[str, Any], ...] = ()


def read(path: Path) -> Sweep:
    """Read the sweep file ``path``. Raises StorageError if reading fails, ConfigurationError for invalid content."""
    tree, place = regular.settings(path, "sweep"), f"sweep file {path}"

    def leaf(raw: Any, item: Field, where: str) -> Any:
        if item.key is not None:
            listed = item.is_list and not isinstance(raw, list)
            return item.convert([raw] if listed else raw, where.removeprefix(f"{place}: "), str(path), path.parent)
        if item.is_list and not (isinstance(raw, list) and all(isinstance(table, dict) and table for table in raw)):
            raise ConfigurationError(f"{where} is invalid; write non-empty tables, each below a line [[{item.name}]]")
        return raw

    file: SweepFile = TableFormat(leaf).read(SweepFile, tree, f"{place}: ")
    try:
        check_section((), "sweep", file.sweep)
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from None
    axes = dict(flat(file.axes))
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigurationError(
                f"axes.{name} = {values!r} in {path} is invalid; give a list of at least one value"
            )
    variants = tuple(_variants(file.trial, axes, path))
    # The sweep needs no ranks if every [[trial]] table sets ranks.
    is_optional = bool(variants) and all(variant.ranks for variant in variants)
    head = tree.get("sweep", {})
    if not file.sweep.ranks and ("ranks" in head or not is_optional):
        given = head.get("ranks")
        raise ConfigurationError(f"sweep.ranks = {given!r} in {path} is invalid; give numbers of ranks, such as [2, 4]")
    if file.sweep.recipe and file.recipe:
        raise ConfigurationError(
            f"sweep.recipe = {head['recipe']!r} in {path} cannot be combined with tables [recipe.*]; remove "
            "sweep.recipe or the tables"
        )
    base = Path(file.sweep.recipe) if file.sweep.recipe else file.recipe
    excludes = tuple(dict(flat(table)) for table in file.exclude)
    return Sweep(path, file.sweep.ranks, file.sweep.repeats, base, axes, variants, excludes)


def _variants(tables: Sequence[Mapping[str, Any]], axes: Mapping[str, Any], path: Path) -> Iterator[TrialVariant]:
    names: set[str] = set()
    for number, table in enumerate(tables, 1):
        settings = dict(table)
        name = settings.pop("name", None)
        if not isinstance(name, str) or not name or name in names:
            raise ConfigurationError(f"[[trial]] {number} of {path} has name = {name!r}; give each trial a unique name")
        names.add(name)
        ranks = _ranks(settings.pop("ranks"), f"trial {name!r} of {path}") if "ranks" in settings else ()
        values = dict(flat(settings))
        if duplicates := sorted(values.keys() & axes.keys()):
            raise ConfigurationError(
                f"key {duplicates[0]} is an axis of {path} and is set by trial {name!r}; remove the axis or the setting"
            )
        yield TrialVariant(name, values, ranks)


def _ranks(value: Any, place: str) -> tuple[int, ...]:
    declared = fields_of(SweepSection)["ranks"]
    counts: tuple[int, ...] = declared.convert(value if isinstance(value, list) else [value], "ranks", place, Path())
    if not counts or not all(map(declared.key.is_valid, counts)):
        raise ConfigurationError(f"ranks = {value!r} in {place} is invalid; give numbers of ranks, such as [2, 4]")
    return counts


def expand(sweep: Sweep, recipes: RecipeResolver) -> list[SweepTrial]:
    """Return a list of the trials of ``sweep``, in the order of the sweep file. Raises ConfigurationError."""
    candidates = list(_candidates(sweep, recipes))
    excluded = _excluded(sweep, recipes, candidates)
    trials: dict[str, SweepTrial] = {}
    for trial in (_trial(candidate, recipes) for at, candidate in enumerate(candidates) if at not in excluded):
        if trial.id in trials:
            raise ConfigurationError(
                f"trials {trials[trial.id].name!r} and {trial.name!r} of {sweep.path} are the same configuration "
                f"on {trial.ranks} ranks; remove one of these trials"
            )
        trials[trial.id] = trial
    if not trials:
        raise ConfigurationError(f"sweep file {sweep.path} has no trial left; remove an [[exclude]] table")
    return list(trials.values())


def _candidates(sweep: Sweep, recipes: RecipeResolver) -> Iterator[TrialCandidate]:
    for variant in sweep.variants or (TrialVariant("", {}, ()),):
        for combination in itertools.product(*sweep.axes.values()):
            choice = dict(zip(sweep.axes, combination, strict=True))
            settings = {**variant.settings, **choice}
            name = " ".join([*([variant.name] if variant.name else []), *labels(choice)]) or "base"
            values = recipes.convert(settings)
            for ranks in variant.ranks or sweep.ranks:
                yield TrialCandidate(name, variant.name, ranks, settings, values)


def _trial(candidate: TrialCandidate, recipes: RecipeResolver) -> SweepTrial:
    name, _, ranks, settings, _ = candidate
    try:
        text = recipes.resolve(settings, ranks).text
    except ConfigurationError as error:
        raise ConfigurationError(f"trial {name!r} on {ranks} ranks: {error}") from error
    digest = hashlib.blake2b(f"{ranks}\n{text}".encode(), digest_size=6).hexdigest()
    return SweepTrial(digest, name, ranks, settings, text)


def _excluded(sweep: Sweep, recipes: RecipeResolver, candidates: Sequence[TrialCandidate]) -> set[int]:
    if not sweep.excludes:
        return set()
    try:
        base = recipes.resolve({}).values
    except ConfigurationError as error:
        raise ConfigurationError(f"the base recipe of sweep file {sweep.path} is invalid: {error}") from error
    rows = [{**base, **trial.values, "ranks": trial.ranks, "trial": trial.variant} for trial in candidates]
    excluded: set[int] = set()
    for number, table in enumerate(sweep.excludes, 1):
        place = f"[[exclude]] {number} of {sweep.path}"
        conditions = {key: _condition(key, value, recipes, place) for key, value in table.items()}
        for key, values in conditions.items():
            choices = list(dict.fromkeys(row[key] for row in rows))
            for value in values:
                if value not in choices:
                    raise ConfigurationError(f"{key} = {value!r} in {place} matches no trial; use a value of {choices}")
        matches = {at for at, row in enumerate(rows) if all(row[key] in values for key, values in conditions.items())}
        if not matches:
            raise ConfigurationError(f"no trial matches all conditions of {place}, {dict(table)}; remove the table")
        excluded |= matches
    return excluded


def _condition(key: str, value: Any, recipes: RecipeResolver, place: str) -> list[Any]:
    if value == []:
        raise ConfigurationError(f"{key} = [] in {place} matches no trial; give at least one value")
    if key == "ranks":
        return list(_ranks(value, place))
    values = value if isinstance(value, list) else [value]
    if key == "trial":
        return values
    try:
        return [recipes.convert({key: item})[key] for item in values]
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from error


def labels(choice: Mapping[str, Any]) -> list[str]:
    """Return a list of texts "key=value", one per item of ``choice``. Keys are cut to unique last components."""
    names = [key.rpartition(".")[2] for key in choice]
    return [
        f"{name if names.count(name) == 1 else key}={value}"
        for name, (key, value) in zip(names, choice.items(), strict=True)
    ]


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each value in the nested dict ``tree``. ``prefix``: text to put before each key."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def trial_position(trials: Sequence[SweepTrial], text: str, place: str) -> int:
    """Return the index of the trial whose index, id or unique name is ``text``. Raises UsageError."""
    number = int(text) if re.fullmatch(r"[+-]?\d+", text, re.ASCII) else None
    last = len(trials) - 1
    if number is not None and 0 <= number <= last:
        return number
    positions = [at for at, trial in enumerate(trials) if text in (trial.id, trial.name)]
    if len(positions) == 1:
        return positions[0]
    if positions:
        matches = ", ".join(f"{at} ({counted(trials[at].ranks, 'rank')})" for at in positions)
        raise UsageError(
            f"--trial {text!r} is the name of {len(positions)} trials of {place}: {matches}; give a number or an id"
        )
    if number is not None:
        raise UsageError(
            f"--trial {text}: sweep file {place} has {counted(len(trials), 'trial')}, with numbers from 0 to {last}; "
            f"the nearest is {max(0, min(number, last))}"
        )
    name = nearest(text, [word for trial in trials for word in (trial.name, trial.id)])
    advice = f"the nearest is {name!r}" if name else f"give a number from 0 to {last}; --list shows the trials"
    raise UsageError(f"--trial {text!r}: sweep file {place} has no trial with this id or name; {advice}")


def trial_rows(trials: Sequence[SweepTrial], sweep: Sweep) -> list[dict[str, Any]]:
    """Return a list of dicts for JSON, one per trial: index, id, name, and numbers of ranks and runs (``repeats``)."""
    return [
        {"index": at, "id": trial.id, "name": trial.name, "ranks": trial.ranks, "repeats": sweep.repeats}
        for at, trial in enumerate(trials)
    ]


def trial_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format ``rows``, the result of `trial_rows`, as a text table."""
    titles = ("index", "id", "ranks", "repeats", "name")
    return "\n".join(aligned([titles, *([str(row[title]) for title in titles] for row in rows)], (-1,)))


def freeze(trials: Sequence[SweepTrial], repeats: int) -> str:
    """Return the text of a sweep file with ``trials`` as ``[[trial]]`` tables, and with ``repeats`` runs per trial."""
    # Values that all trials share are written once, as recipe tables.
    keys = {trial.id: _toml_by_key(trial.recipe) for trial in trials}
    first, *others = keys.values()
    common = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    lines = ["[sweep]", f"repeats = {repeats}"]
    for section, names in itertools.groupby(common, lambda key: key.partition(".")[0]):
        lines += ["", f"[recipe.{section}]", *(f"{key.partition('.')[2]} = {common[key]}" for key in names)]
    for name, group in itertools.groupby(trials, lambda trial: trial.name):
        variants = list(group)  # the same settings on several numbers of ranks
        lines += ["", "[[trial]]", f"name = {toml_value(name)}", f"ranks = {[trial.ranks for trial in variants]}"]
        lines += [f"{key} = {value}" for key, value in keys[variants[0].id].items() if key not in common]
    return "\n".join(lines) + "\n"


def _toml_by_key(recipe: str) -> dict[str, str]:
    tree = tomllib.loads(recipe)
    return {f"{section}.{name}": toml_value(value) for section, keys in tree.items() for name, value in keys.items()}
