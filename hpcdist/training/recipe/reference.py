"""Reference of the recipe keys: values, default, meaning, and requirements.

Meanings come from ``keys.toml``, the start of the page from ``head.md``. `python -m hpcdist.training.recipe.reference`
prints ``hpcdist/docs/recipe.md``. Light.
"""

import inspect
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Any, Final

from hpcdist.checkpoint import config as checkpoint
from hpcdist.comm import config as communication
from hpcdist.energy import config as energy
from hpcdist.errors import UsageError
from hpcdist.models import config as model
from hpcdist.optim import config as optimizer
from hpcdist.reporting.rules import NO_EFFECT, OFF, Condition, Rule
from hpcdist.reporting.table import aligned
from hpcdist.reporting.toml_text import toml_value
from hpcdist.strategies import config as parallel
from hpcdist.strategies import rules
from hpcdist.strategies.compressed import config as compression
from hpcdist.strategies.decentralised import config as decentralised
from hpcdist.strategies.parameter_server import config as parameter_server
from hpcdist.strategies.zero import config as zero
from hpcdist.telemetry import config as telemetry
from hpcdist.training.chaos import config as chaos
from hpcdist.training.recipe import config as own
from hpcdist.training.recipe import recipe, settings

_TABLES: Final = (
    *(model.RULES, optimizer.RULES, parallel.RULES, parameter_server.RULES, zero.RULES, decentralised.RULES),
    *(communication.RULES, compression.RULES, checkpoint.RULES, energy.RULES, telemetry.RULES, chaos.RULES),
    *(own.DATA_RULES, own.PRECISION_RULES, own.RUN_RULES, own.SURVIVAL_RULES, rules.RULES),
)
RULES: Final[tuple[Rule, ...]] = tuple(each for table in _TABLES for each in table)
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
_PHRASES: Final = (
    (r"finite and ", ""),
    (r"(, such as|, so that|, with which).*", ""),
    (r"between (\S+) and ", r"from \1 to "),
    (r"\bat least ", ">= "),
    (r"\b(above|and above) ", "> "),
    (r"\b(below|less than) ", "< "),
)


@dataclass(frozen=True)
class Need:
    """Requirement of a recipe key, as texts for the documentation."""

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
        """Text of the settings that this key or its values require in all cases, or "" if there are none."""
        needs = [need for need in self.needs if not (need.excludes or need.where)]
        ordered = sorted(needs, key=lambda need: need.of != "")
        return "; ".join(f"{need.of}: {need.what}" if need.of else need.what for need in ordered)

    @property
    def block(self) -> str:
        """Text of this entry for the terminal, in several lines."""
        lines = [self.key, f"  {self.meaning}", f"  values: {self.values}", f"  default: {self.default}"]
        lines += [f"  {need}" for need in sorted(self.needs, key=lambda need: need.excludes)]
        return "\n".join(lines) + "\n"


@cache
def _meanings() -> Mapping[str, Mapping[str, str]]:
    table: dict[str, dict[str, str]] = tomllib.loads(_text_of("keys.toml"))
    return table


def _text_of(name: str) -> str:
    return (resources.files(__package__) / name).read_text("utf-8")


def entry(key: str) -> KeyEntry:
    """Return the documentation of the recipe key ``key``, which must exist."""
    section, _, name = key.partition(".")
    needs = tuple(dict.fromkeys(need for each in RULES for need in _needs(each, key)))
    return KeyEntry(key, _values(key), toml_value(recipe.defaults()[key]), _meanings()[section][name], needs)


def lookup(word: str) -> str:
    """Return the documentation of the key or section ``word``, e.g. "parallel.pipeline". Raises UsageError."""
    defaults = recipe.defaults()
    if word in defaults:
        return entry(word).block
    sections = {item.name: item.default_factory for item in fields(recipe.Recipe)}
    if word not in sections:
        suggestion = settings.known_instead(word, defaults)
        raise UsageError(f"a recipe has no key or section {word!r}; {suggestion}")
    entries = _entries(word)
    rows = [(f"  {each.key}", each.default, each.meaning) for each in entries]
    common = "".join(f"  {need}\n" for need in _common(entries))
    return f"[{word}] {_headline(sections[word])}\n{common}" + "\n".join(aligned(rows, (0, 1, 2))) + "\n"


def key_of(name: str) -> str:
    """Return ``name`` if it is a recipe key, else the first recipe key with ``name`` as a possible value."""
    return next(key for key in recipe.defaults() if key == name or name in _choices(key))


def _entries(section: str) -> list[KeyEntry]:
    return [entry(key) for key in recipe.defaults() if key.startswith(section + ".")]


def _common(entries: Iterable[KeyEntry]) -> list[Need]:
    first, *others = entries
    return [need for need in first.needs if not need.excludes and all(need in each.needs for each in others)]


def _headline(section: Any) -> str:
    text = " ".join((inspect.getdoc(section) or "").partition("\n\n")[0].split())
    subject = text.partition("]``: ")[2].partition(". ")[0].rstrip(".")
    return f"{subject[:1].upper()}{subject[1:]}."


@cache
def _choices(key: str) -> tuple[Any, ...]:
    if key == _ANY:
        return communication.COMPRESSIONS
    if key == "communication.algorithm":
        return communication.ALGORITHMS
    if isinstance(recipe.defaults().get(key), bool):
        return (False, True)
    single = (each.conditions[key] for each in RULES if each.conditions.keys() == {key} and not each.given)
    return next((condition.values for condition in single if condition.sign == "!="), ())


def _values(key: str) -> str:
    default = recipe.defaults()[key]
    if choices := _choices(key):
        more = " or a table" if key == "communication.algorithm" else ""
        return ", ".join(toml_value(choice).strip('"') for choice in choices) + more
    kind = settings.TYPES[type(default)].removeprefix("a ").replace("whole number", "integer")
    if key in settings.TEXTS:
        kind = "list of texts"
    elif key in settings.PATHS and key != "model.factory":
        kind = "path"
    elif key in settings.TEXTS_FOR_NUMBERS:
        kind += f" or {settings.TEXTS_FOR_NUMBERS[key]}"
    for each in RULES:
        if each.conditions.keys() == {key} and not each.given and each.relation is None:
            sign, values = each.conditions[key].sign, each.conditions[key].values
            if sign == "<":
                return f"{kind} >= {values[0]}"
            if sign is None and isinstance(each.cure, str):
                kind = _bounded(kind, each.cure)
    return kind


def _bounded(kind: str, cure: str) -> str:
    # "float" and "it must be between 0 and 1" give "float from 0 to 1".
    if not (match := re.match(r"(it must be|choose among|choose) ", cure)):
        return kind
    text = re.sub(r" \([^)]*\)|'", "", cure[match.end() :])
    if match[1] != "it must be":
        return text if match[1] == "choose" else f"{kind}: {text}"
    for pattern, instead in _PHRASES:
        text = re.sub(pattern, instead, text)
    return f"{kind}{' ' if text.startswith(('<', '>', 'from')) else ', '}{text}"


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
    least = (each.conditions.get(key) for each in RULES if len(each.conditions) == 1)
    return f"{key} {'>' if any(of and (of.sign, of.values) == ('<', (value,)) for of in least) else '!='} {value}"


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
    """Return the documentation of all recipe keys as a Markdown page."""
    sections = (_section(item.name, item.default_factory) for item in fields(recipe.Recipe))
    return "\n".join([_text_of("head.md"), *sections])


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
