"""Rules between keys of a configuration: a table of `Rule`, one evaluation, one form of message.

A section checks the rules of its own keys when it is made (`check_section`). Rules between sections stand in
`hpcdist.strategies.rules`, and are asked by the recipe, the planner and `--survive` with the values that each knows:
a rule with a key that is not among the values is passed over (`refusals`). Begin with `rule`, which reads a rule from
text.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hpcdist.errors import ConfigurationError
from hpcdist.reporting.nearest import nearest
from hpcdist.reporting.units import counted

Values = Mapping[str, Any]
Text = str | Callable[..., str]
OFF: Final = (0, "none", "", ())  # values that switch a key off; False equals 0
NO_EFFECT: Final = " has no effect"
UNBUILT: Final = " is not built in this version"
_TERM: Final = re.compile(r"([^=!<>~?]+)(!=|!~|=|<|>|~|\?|)(.*?)(?:->(.*))?")


def written(value: Any) -> str:
    """Return ``value`` as messages quote it: true, false and lists as a recipe has them, the rest as Python has it."""
    if isinstance(value, tuple):
        return repr(list(value))
    return str(value).lower() if isinstance(value, bool) else repr(value)


@dataclass(frozen=True)
class Condition:
    """Condition on the value of a key; ``cure`` makes the part of a message that says what to set it to.

    ``sign`` and ``values`` are those of the term that says the same (see `rule`), None where no term does.
    """

    matches: Callable[[Any], object]
    cure: Callable[[str, Any], str] | None = None
    sign: str | None = None
    values: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Rule:
    """Rule: keys whose values meet all ``conditions`` do not go together.

    The message quotes their values, then says ``why``: a reason, `NO_EFFECT` (of the first key) or `UNBUILT`; then the
    ``cure``, without one what each condition says to set. ``given`` are conditions that are not quoted. ``relation``
    must hold besides, of the quoted values in their order. Texts are formatted with, or called with, these values.

    Keys are ``section.name`` or options (``--survive``). A key without a dot is derived from others: its value is
    the text to quote, or a number of what the key says.
    """

    conditions: Mapping[str, Condition]
    why: Text = ""
    cure: Text = ""
    given: Mapping[str, Condition] = field(default_factory=dict)
    relation: Callable[..., object] | None = None

    def refusal(self, values: Values) -> str:
        """Return the message where ``values``, which have all keys of the rule, are refused; else ""."""
        for conditions in (self.conditions, self.given):
            for key, condition in conditions.items():  # a search asks thousands of times: no generator
                if not condition.matches(values[key]):
                    return ""
        own = [values[key] for key in self.conditions]
        if self.relation is not None and not self.relation(*own):
            return ""
        first, *others = [_quoted(key, value) for key, value in zip(self.conditions, own, strict=True)]
        beside = f" with {' and '.join(others)}" if others else ""
        why, cure = _text(self.why, own), _text(self.cure, own) or self._settings(values)
        if why == NO_EFFECT:
            return f"{first}{NO_EFFECT}{beside}; {cure}"
        return first + beside + (why if why[:1] in ("", " ") else f": {why}") + f"; {cure}"

    def is_known(self, values: Values) -> bool:
        """Whether ``values`` have all keys of the rule."""
        return self.conditions.keys() <= values.keys() and self.given.keys() <= values.keys()

    def _settings(self, values: Values) -> str:
        """Return the cures of the conditions on keys of a recipe; a key without effect can be removed."""
        cures = [
            condition.cure(key, values[key])
            for place, (key, condition) in enumerate(self.conditions.items())
            if condition.cure is not None and "." in key and not (place == 0 and self.why == NO_EFFECT)
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
    """Return the rule whose conditions are ``terms``: those that it quotes, "with" between, those given after "where".

    A term is KEY (switched on: none of `OFF`), KEY? (any value), KEY= (an empty text or list), KEY=A|B (one of these),
    KEY=A|B->C (which should be C), KEY!=A|B (none of these), KEY>1, KEY<1, or of a key with several values KEY~A|B (one
    of these is among them) and KEY!~A|B. ``sets`` are names for values: {NAME} in
    the terms.
    """
    quoted, _, given = terms.format(**{name: "|".join(values) for name, values in sets.items()}).partition(" where ")
    conditions, others = (dict(map(_condition, part.split(" with "))) if part else {} for part in (quoted, given))
    return Rule(conditions, why, cure, others, relation)


def each_of(form: str, why: Text, *terms: str, cure: Text = "") -> Iterator[Rule]:
    """Yield the rule of ``form`` for each of ``terms``, which stand in the place of its *."""
    for term in terms:
        yield rule(form.replace("*", term), why, cure)


def _condition(term: str) -> tuple[str, Condition]:
    """Return the key of a term, and its condition."""
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
    """Return the value that a term names: a whole number, a truth value, or a text."""
    return {"true": True, "false": False}.get(text, int(text) if text.isdecimal() else text)


def _switch_off(key: str, value: Any) -> str:
    return f"{key} = {written('none' if isinstance(value, str) else type(value)())}"


def other_than(*values: Any) -> Condition:
    """Return the condition that a value is none of ``values``."""
    cure = f" to one of {', '.join(map(str, values))}" if len(values) > 1 else f" = {written(*values)}"
    return Condition(lambda value: value not in values, lambda key, _: key + cure, "!=", values)


def no_effect(key: str, default: Any, other: str, needed: Iterable[Any], cure: Text = "") -> Rule:
    """Return the rule that ``key`` has its ``default`` where the value of the ``other`` key is none of ``needed``."""
    return Rule({key: other_than(default), other: other_than(*needed)}, NO_EFFECT, cure)


def one_of(key: str, choices: Iterable[str]) -> Rule:
    """Return the rule that the value is one of ``choices``."""
    names = tuple(choices)

    def cure(value: str) -> str:
        near = nearest(value, names)
        return f"choose one of {', '.join(names)}" + (f"; the nearest is {near!r}" if near else "")

    return Rule({key: other_than(*names)}, cure=cure)


def must(key: str, holds: Callable[[Any], object], expected: str) -> Rule:
    """Return the rule that ``holds`` is true of the value; ``expected`` says so in words."""
    return Rule({key: Condition(lambda value: not holds(value))}, cure=expected)


def at_least(least: float, *keys: str, expected: str = "") -> Iterator[Rule]:
    """Yield the rules that the numbers of ``keys`` are at least ``least``."""
    for key in keys:
        below = Condition(lambda value: not value >= least, sign="<", values=(least,))  # and what is not a number
        yield Rule({key: below}, cure=expected or f"it must be at least {least}")


def at_most(most: float, *keys: str) -> Iterator[Rule]:
    """Yield the rules that the numbers of ``keys`` are at most ``most``."""
    for key in keys:
        yield Rule(
            {key: Condition(lambda value: value > most, sign=">", values=(most,))}, cure=f"it must be at most {most}"
        )


def finite(key: str, holds: Callable[[float], object], expected: str) -> Rule:
    """Return the rule that a number is finite, and ``holds`` true of it."""
    return must(key, lambda value: math.isfinite(value) and holds(value), f"it must be finite and {expected}")


def refusals(rules: Iterable[Rule], values: Values) -> Iterator[str]:
    """Yield the message of each of ``rules`` that refuses ``values``; those with unknown keys are passed over."""
    yield from filter(None, (each.refusal(values) for each in rules if each.is_known(values)))


def check(rules: Iterable[Rule], values: Values) -> None:
    """Raise ConfigurationError for the first of ``rules`` that refuses ``values``."""
    for message in refusals(rules, values):
        raise ConfigurationError(message)


def section_values(name: str, section: Any) -> dict[str, Any]:
    """Return the values of a section, a dataclass, by key."""
    return {f"{name}.{key}": value for key, value in vars(section).items()}


def check_section(rules: Iterable[Rule], name: str, section: Any, **derived: Any) -> None:
    """Raise ConfigurationError for the first of ``rules`` that refuses values of a section, or those ``derived``."""
    check(rules, section_values(name, section) | derived)
