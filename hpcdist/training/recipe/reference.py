"""Reference of the recipe keys: values, default, meaning, and requirements.

Meanings and values come from the declarations of the keys (`hpcdist.reporting.schema`), the start of the page from
``head.md``. `python -m hpcdist.training.recipe.reference` prints ``hpcdist/docs/recipe.md``. Light.
"""

import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Final

from hpcdist.comm import config as communication
from hpcdist.errors import UsageError
from hpcdist.reporting.rules import NO_EFFECT, OFF, Condition, Rule
from hpcdist.reporting.schema import toml_value
from hpcdist.reporting.table import aligned
from hpcdist.strategies import rules
from hpcdist.strategies.compressed import config as compression
from hpcdist.training.recipe import recipe, settings

_MODULES: Final = dict.fromkeys([*(kind.__module__ for kind in recipe.SECTIONS.values()), rules.__name__])
RULES: Final[tuple[Rule, ...]] = tuple(each for name in _MODULES for each in sys.modules[name].RULES)
_OPTIONS: Final = {"--survive": "", "--spares": 0, "data rank": 1}  # names in rules that are not keys: defaults
# Texts for conditions on derived values: `_INSTEAD` describes values that fail the condition, `_MET` that satisfy it.
_INSTEAD: Final = {
    "whole parameters": 'parallel.strategy = "zero3", or zero.parameters > 1',
    "whole gradients": 'parallel.strategy = "zero2" or "zero3", or zero.gradients > 1',
    "data rank": "at least 2 data ranks",
    "--spares": "--spares N",
}
_MET: Final = {
    "own steps": 'replicas that make their own steps ("gossip", "local_sgd", "asp", "ssp", backup_workers)',
    "asynchronous workers": 'asynchronous parameter servers ("asp", "ssp", backup_workers)',
    "--survive": "hpcdist run --survive",
}
_ANY: Final = "compressors"  # the compressor, or the candidates of auto


@dataclass(frozen=True)
class Need:
    """Requirement of a recipe key on another setting, as texts for the documentation."""

    what: str  # setting that the key needs, such as "parallel.pipeline > 1"
    of: str = ""  # values of the key that have this requirement ("": all values)
    where: str = ""  # setting under which the requirement holds ("": always)
    excludes: bool = False  # the key must not be used with the setting ``what``

    def __str__(self) -> str:
        where = f", where {self.where}" if self.where else ""
        return f"{self.of} {'not' if self.excludes else 'only'} with {self.what}{where}".strip()


@dataclass(frozen=True)
class KeyEntry:
    """Texts that document a recipe key: type or values, default, meaning, and requirements."""

    key: str
    values: str
    default: str
    meaning: str
    needs: tuple[Need, ...]

    @property
    def only_with(self) -> str:
        """Text of the other settings that this key or its values always require, or "" if there are none."""
        needs = [need for need in self.needs if not (need.excludes or need.where)]
        ordered = sorted(needs, key=lambda need: need.of != "")
        return "; ".join(f"{need.of}: {need.what}" if need.of else need.what for need in ordered)

    @property
    def block(self) -> str:
        """Text of this entry for the terminal, in several lines."""
        lines = [self.key, f"  {self.meaning}", f"  values: {self.values}", f"  default: {self.default}"]
        lines += [f"  {need}" for need in sorted(self.needs, key=lambda need: need.excludes)]
        return "\n".join(lines) + "\n"


def entry(key: str) -> KeyEntry:
    """Return the `KeyEntry` of the recipe key ``key``, which must exist."""
    field = recipe.known_keys()[key]
    needs = tuple(dict.fromkeys(need for each in RULES for need in _needs(each, key)))
    return KeyEntry(key, field.values, toml_value(field.default), field.key.meaning, needs)


def lookup(word: str) -> str:
    """Return the text about ``word``, a recipe key or section. Raises UsageError if ``word`` is unknown."""
    if word in recipe.known_keys():
        return entry(word).block
    if word not in recipe.SECTIONS:
        raise UsageError(f"a recipe has no key or section {word!r}; {settings.suggestion(word, recipe.known_keys())}")
    entries = _entries(word)
    rows = [(f"  {each.key}", each.default, each.meaning) for each in entries]
    common = "".join(f"  {need}\n" for need in _common(entries))
    return f"[{word}] {_headline(recipe.SECTIONS[word])}\n{common}" + "\n".join(aligned(rows, (0, 1, 2))) + "\n"


def key_of(name: str) -> str:
    """Return ``name`` if it is a recipe key. If it is a value such as "zero1", return the first key that allows it."""
    return next(key for key in recipe.known_keys() if key == name or name in _choices(key))


def _entries(section: str) -> list[KeyEntry]:
    return [entry(key) for key in recipe.known_keys() if key.startswith(section + ".")]


def _common(entries: Iterable[KeyEntry]) -> list[Need]:
    first, *others = entries
    return [need for need in first.needs if not need.excludes and all(need in each.needs for each in others)]


def _headline(section: Any) -> str:
    text = " ".join((inspect.getdoc(section) or "").partition("\n\n")[0].split())
    subject = text.partition("]``: ")[2].partition(". ")[0].rstrip(".")
    return f"{subject[:1].upper()}{subject[1:]}."


def _choices(key: str) -> tuple[Any, ...]:
    if key == _ANY:
        return communication.COMPRESSIONS
    return recipe.known_keys()[key].choices if key in recipe.known_keys() else ()


def _needs(each: Rule, key: str) -> Iterator[Need]:
    # ``each`` forbids a combination of settings.
    conditions = {**each.conditions, **each.given}
    other = {name: of for name, of in conditions.items() if name != key and (of.sign != "?" or name[:2] == "--")}
    if key not in conditions or not other or each.relation is not None or conditions[key].matches(_default(key)):
        return
    is_first = key == next(iter(conditions))
    if each.why == NO_EFFECT and not is_first:
        return
    failing = {name: of for name, of in other.items() if _has_to_fail(name, of, is_first)}
    met = ", and ".join(_affirmed(name, of) for name, of in other.items() if name not in failing)
    of = "" if each.why == NO_EFFECT else _subject(key, conditions[key])
    if failing:
        yield Need(", or ".join(_denied(name, of) for name, of in failing.items()), of, met)
    else:
        yield Need(met, of, excludes=True)


def _has_to_fail(key: str, condition: Condition, is_of_first: bool) -> bool:
    if key == "--survive":
        return False
    allows_few = condition.sign == "!=" and (is_of_first or 2 * len(condition.values) < len(_choices(key)))
    return allows_few or bool(condition.matches(_default(key)))


@cache
def _defaults() -> Mapping[str, Any]:
    return rules.derived({**recipe.defaults(), **_OPTIONS})


def _default(key: str) -> Any:
    return _defaults()[key]


def _subject(key: str, condition: Condition) -> str:
    default, choices = _default(key), _choices(key)
    if condition.sign in ("<", ">"):
        return f"{condition.sign} {condition.values[0]}"
    if not choices:
        return _one_of(condition.values) if condition.sign == "=" else ""
    meant = tuple(choice for choice in choices if condition.matches(choice))
    if len(meant) == len(choices) - 1:
        return "" if default in OFF else _one_of(meant) if len(meant) == 1 else f"other than {toml_value(default)}"
    return _one_of(meant)


def _affirmed(key: str, condition: Condition) -> str:
    default, values = _default(key), condition.values
    if key in _MET:
        return _MET[key] + (f" {values[0]}" if values else "")
    if key == _ANY:
        return _of_compressors(values)
    if condition.sign == "":
        if isinstance(default, bool):
            return f"{key} = true"
        return f"{key} set" if default in ("", ()) else f'{key} != "none"' if default == "none" else _other(key, 0)
    if condition.sign in ("=", "!="):
        meant = [choice for choice in _choices(key) if condition.matches(choice)]
        return f"{key} = {_one_of(meant or values)}"
    return f"{key} {condition.sign} {values[0]}"


def _denied(key: str, condition: Condition) -> str:
    sign, values = condition.sign, condition.values
    if key in _INSTEAD:
        return _INSTEAD[key]
    if sign == "=" and values == ("", ()):
        return f"{key} set"
    if sign in ("<", ">"):
        return f"{key} {'>=' if sign == '<' else '<='} {values[0]}"
    if key == _ANY:
        return _of_compressors(values)
    choices = _choices(key)
    if choices:
        left = [choice for choice in choices if not condition.matches(choice)]
        return f"{key} {_of_choices(left, choices)}"
    return f"{key} = {_one_of(values)}" if sign == "!=" else _other(key, values[0])


def _other(key: str, value: Any) -> str:
    field = recipe.known_keys().get(key)
    return f"{key} {'>' if field and field.key.ge == value else '!='} {value}"


def _of_compressors(names: tuple[str, ...]) -> str:
    candidates = set(names) & set(compression.COMPRESSORS)
    every = candidates == set(compression.COMPRESSORS)
    text = _of_choices([*names, *(["auto"] if every and "auto" not in names else [])], _choices(_ANY))
    return f"communication.compression {text}{' (or a candidate of auto)' if candidates and not every else ''}"


def _of_choices(named: list[Any], choices: tuple[Any, ...]) -> str:
    if len(named) > max(3, len(choices) / 2):
        return f"other than {_one_of(choice for choice in choices if choice not in named)}"
    return f"= {_one_of(named)}"


def _one_of(values: Iterable[Any]) -> str:
    *first, last = map(toml_value, values)
    return f"{', '.join(first)} or {last}" if first else last


def page() -> str:
    """Return the text of a Markdown page that documents all recipe keys."""
    sections = itertools.starmap(_section, recipe.SECTIONS.items())
    return "\n".join([(resources.files(__package__) / "head.md").read_text("utf-8"), *sections])


def _section(name: str, kind: Any) -> str:
    entries = _entries(name)
    common = _common(entries)
    rows = [("key", "type or values", "default", "meaning", "only with")]
    for each in entries:
        own_needs = replace(each, needs=tuple(need for need in each.needs if need not in common))
        needs = re.sub(rf"\b{name}\.", "", own_needs.only_with)
        rows.append((each.key.partition(".")[2], each.values, each.default, each.meaning.rstrip("."), needs))
    subject = _headline(kind).replace("``", "`").rstrip(".")
    lines = [f"## [{name}]: {subject[:1].lower()}{subject[1:]}"]
    lines += [line for need in common for line in (f"Only with {need.what}.", "")]
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([*lines, head, "|---|---|---|---|---|", *body]).replace("|  |", "| |") + "\n"


if __name__ == "__main__":
    print(page(), end="")
