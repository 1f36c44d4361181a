"""Rules between keys of a configuration, and their check. Begin with `rule`, which parses a rule from text.

`hpcdist.reporting.schema` has the rules of single keys. The rules between sections are in `hpcdist.strategies.rules`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hpcdist.errors import ConfigurationError
from hpcdist.reporting.nearest import nearest
from hpcdist.reporting.units import counted

Values = Mapping[str, Any]
Text = str | Callable[..., str]
OFF: Final = (0, "none", "", ())  # values that switch a key off; also False, which equals 0
NO_EFFECT: Final = " has no effect"
UNBUILT: Final = " is not built in this version"
_TERM: Final = re.compile(r"([^=!<>~?]+)(!=|!~|=|<|>|~|\?|)(.*?)(?:->(.*))?")


def written(value: Any) -> str:
    """Format ``value`` as in a recipe, for an error message."""
    if isinstance(value, tuple):
        return repr(list(value))
    return str(value).lower() if isinstance(value, bool) else repr(value)


@dataclass(frozen=True)
class Condition:
    """Condition of a `Rule` on the value of a configuration key."""

    matches: Callable[[Any], object]  # true if the value satisfies the condition
    cure: Callable[[str, Any], str] | None = None  # (key, value) -> proposed setting, such as "run.steps = 1"
    sign: str | None = None  # operator of the condition, such as ">"
    values: tuple[Any, ...] = ()  # operands of the operator


@dataclass(frozen=True)
class Rule:
    """Forbidden combination of settings. Settings break the rule if they satisfy all of its conditions."""

    # A key is a setting `section.name`, an option such as `--survive`, or a name that the caller of `check` defines.
    conditions: Mapping[str, Condition]  # The error message lists these keys with their values.
    why: Text = ""  # text after the list in the message, such as " has no effect"; or a function of the listed values
    cure: Text = ""  # advice at the end of the message; by default, the results of `Condition.cure`
    given: Mapping[str, Condition] = field(default_factory=dict)  # further conditions, which the message does not list
    relation: Callable[..., object] | None = None  # function of the listed values, which must also return true

    def refusal(self, values: Values) -> str:
        """Return the error message if ``values``, {key: value}, break this rule, else ""."""
        for conditions in (self.conditions, self.given):
            for key, condition in conditions.items():  # no generator: a search evaluates this thousands of times
                if not condition.matches(values[key]):
                    return ""
        quoted_values = [values[key] for key in self.conditions]
        if self.relation is not None and not self.relation(*quoted_values):
            return ""
        first, *others = [_quoted(key, value) for key, value in zip(self.conditions, quoted_values, strict=True)]
        with_others = f" with {' and '.join(others)}" if others else ""
        why, cure = _text(self.why, quoted_values), _text(self.cure, quoted_values) or self._settings(values)
        if why == NO_EFFECT:
            return f"{first}{NO_EFFECT}{with_others}; {cure}"
        return first + with_others + (why if why[:1] in ("", " ") else f": {why}") + f"; {cure}"

    def is_known(self, values: Values) -> bool:
        """Return True if ``values``, {key: value}, contain all keys of this rule."""
        return self.conditions.keys() <= values.keys() and self.given.keys() <= values.keys()

    def _settings(self, values: Values) -> str:
        cures = [
            condition.cure(key, values[key])
            for index, (key, condition) in enumerate(self.conditions.items())
            if condition.cure is not None and "." in key and not (index == 0 and self.why == NO_EFFECT)
        ]
        return ("remove it, or set " if self.why == NO_EFFECT else "set ") + ", or ".join(cures)


def _quoted(key: str, value: Any) -> str:
    if key.startswith("--"):
        return f"{key} {value}"
    if "." in key:
        return f"{key} = {written(value)}"
    return value if isinstance(value, str) else counted(value, key)


def _text(text: Text, values: list[Any]) -> str:
    return text.format(*values) if isinstance(text, str) else text(*values)


def rule(
    terms: str, why: Text = "", cure: Text = "", relation: Callable[..., object] | None = None, **sets: Iterable[str]
) -> Rule:
    """Return the `Rule` that forbids the settings ``terms``, such as "run.steps>1 with run.mode=fast|slow".

    The rule is broken if all ``terms`` hold and ``relation(*values)`` is true, where ``values`` are the values of the
    settings in ``terms``. ``why``, ``cure``: reason and advice in the error message.
    """
    # " with " and " where " join conditions, which must all hold. The message omits the conditions after " where ".
    # {NAME} stands for the values of the keyword NAME, joined by "|". Conditions on the value of KEY:
    # KEY: switched on (not in `OFF`). KEY?: any value. KEY=: an empty text or list.
    # KEY=A|B: A or B. KEY=A|B->C: the same, and the message proposes KEY = C. KEY!=A|B: neither A nor B.
    # KEY>1, KEY<1: more or less than 1. KEY~A|B: a list that contains A or B. KEY!~A|B: a list with neither.
    quoted, _, given = terms.format(**{name: "|".join(values) for name, values in sets.items()}).partition(" where ")
    conditions, others = (dict(map(_condition, part.split(" with "))) if part else {} for part in (quoted, given))
    return Rule(conditions, why, cure, others, relation)


def each_of(form: str, why: Text, *terms: str, cure: Text = "") -> Iterator[Rule]:
    """Yield one `Rule` per term of ``terms``: ``form`` with * replaced by the term. ``why``: reason in the message."""
    for term in terms:
        yield rule(form.replace("*", term), why, cure)


def _condition(term: str) -> tuple[str, Condition]:
    match = _TERM.fullmatch(term)
    assert match is not None, term
    key, sign, listed, instead = match.groups()
    values = tuple(map(_value, listed.split("|"))) if listed else ("", ())
    if sign == "":
        return key, Condition(lambda value: value not in OFF, _switch_off, "")
    if sign == "?":
        return key, Condition(lambda _: True, sign=sign)
    if sign == "=":
        cure = None if instead is None else lambda key, _: f"{key} = {written(_value(instead))}"
        return key, Condition(lambda value: value in values, cure, sign, values)
    if sign == "!=":
        return key, other_than(*values)
    if sign in ("~", "!~"):
        return key, Condition(lambda used: set(values).isdisjoint(used) == (sign == "!~"), None, sign, values)
    (limit,) = values
    return key, Condition(
        (lambda value: value > limit) if sign == ">" else (lambda value: value < limit),
        lambda key, _: f"{key} = {limit}",
        sign,
        values,
    )


def _value(text: str) -> Any:
    return {"true": True, "false": False}.get(text, int(text) if text.isdecimal() else text)


def _switch_off(key: str, value: Any) -> str:
    return f"{key} = {written('none' if isinstance(value, str) else type(value)())}"


def other_than(*values: Any) -> Condition:
    """Return a `Condition` that is true for all values except the arguments ``*values``."""
    cure = f" to one of {', '.join(map(str, values))}" if len(values) > 1 else f" = {written(*values)}"
    return Condition(lambda value: value not in values, lambda key, _: key + cure, "!=", values)


def no_effect(key: str, default: Any, other: str, required_values: Iterable[Any], cure: Text = "") -> Rule:
    """Return the `Rule` that ``key`` has no effect unless the key ``other`` has one of ``required_values``.

    ``default``: value of ``key`` that is always allowed. ``cure``: advice in the error message.
    """
    return Rule({key: other_than(default), other: other_than(*required_values)}, NO_EFFECT, cure)


def one_of(key: str, choices: Iterable[str]) -> Rule:
    """Return the `Rule` that the configuration ``key`` must have one of the values ``choices``."""
    names = tuple(choices)

    def cure(value: str) -> str:
        near = nearest(value, names)
        return f"choose one of {', '.join(names)}" + (f"; the nearest is {near!r}" if near else "")

    return Rule({key: other_than(*names)}, cure=cure)


def must(key: str, holds: Callable[[Any], object], expected: str) -> Rule:
    """Return the `Rule` that ``holds(value of key)`` must be true. ``expected``: advice in the error message."""
    return Rule({key: Condition(lambda value: not holds(value))}, cure=expected)


def refusals(rules: Iterable[Rule], values: Values) -> Iterator[str]:
    """Yield the message of each rule that ``values``, {key: value}, break. Skips rules on keys not in ``values``."""
    yield from filter(None, (rule.refusal(values) for rule in rules if rule.is_known(values)))


def check(rules: Iterable[Rule], values: Values) -> None:
    """Raise ConfigurationError for the first of ``rules`` that ``values``, {key: value}, break."""
    for message in refusals(rules, values):
        raise ConfigurationError(message)


def section_values(name: str, section: Any) -> dict[str, Any]:
    """Return {"<name>.<field>": value} for the fields of ``section``, a configuration dataclass called ``name``."""
    return {f"{name}.{key}": value for key, value in vars(section).items()}
