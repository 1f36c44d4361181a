"""Configuration keys, each declared once. Begin with `key`, which declares a key as a field of a dataclass.

    @dataclass(frozen=True, kw_only=True)
    class RunConfig:
        steps: int = key(1000, "Length of the run in steps.", ge=1)

        def __post_init__(self) -> None:
            check_section(RULES, "run", self)

`fields_of` lists the keys of such a class. `TableFormat` reads nested dataclasses from TOML tables and writes them.
Light: imports `msgspec`, but no NumPy.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from hpcdist.errors import ConfigurationError
from hpcdist.reporting.jsonable import plain_number
from hpcdist.reporting.nearest import suggestion
from hpcdist.reporting.rules import Rule, check, must, one_of, section_values, written

T = TypeVar("T")
INTERNAL: Final = "internal"  # metadata of dataclass fields that are not in the file
TYPES: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple[int, ...]: "a list of whole numbers",
    tuple[float, ...]: "a list of numbers",
    tuple[str, ...]: "a list of texts",
}


@dataclass(frozen=True)
class Key:
    """Declaration of a configuration key: its meaning and its valid values."""

    meaning: str  # one or two sentences with the unit
    _: KW_ONLY
    gt: float | None = None  # bounds (>, >=, <, <=) of a number or of each item of a list
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    unit: str = ""  # of the bounds
    off: float | None = None  # value that is valid although it is out of bounds, usually 0
    choices: tuple[Any, ...] = ()  # the valid values, or the valid items of a list
    valid: Callable[[Any], object] | None = None  # returns true for further valid values
    expected: str = ""  # description of the further valid values
    word: str = ""  # text that a number key accepts instead of a number
    digits: bool = False  # a text key accepts whole numbers
    path: bool | str = False  # the value is a path; a text: only values that contain this text are paths

    def bounds(self, *, signs: bool) -> str:
        """Return the bounds of valid values as text: "at least 0 and below 1", or ">= 0 and < 1" if ``signs``."""
        limits = {"above": self.gt, "at least": self.ge, "below": self.lt, "at most": self.le}
        parts = [
            f"{_SIGNS[word] if signs else word} {_number(limit)}" for word, limit in limits.items() if limit is not None
        ]
        text = " and ".join(parts)
        if self.ge is not None and self.le is not None:
            first, last = _number(self.ge), _number(self.le)
            text = f"from {first} to {last}" if signs else f"between {first} and {last}"
        return f"{text} {self.unit}".rstrip() + (f", or {_number(self.off)}" if self.off is not None else "")

    def is_valid(self, value: Any) -> bool:
        """Return True if ``value`` is valid. ``value``: value of this key, or one item if the key has a list."""
        if value in self.choices or (self.off is not None and value == self.off) or (self.word and value == self.word):
            return True
        if self.choices or self.valid is not None:
            return self.valid is not None and bool(self.valid(value))
        return (
            not isinstance(value, str)
            and (isinstance(value, int) or math.isfinite(value))
            and (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )


def key(default: T, meaning: str, **limits: Any) -> T:
    """Return a dataclass field that declares a configuration key with its ``default`` value.

    ``meaning``: text for the documentation. ``**limits``: fields of `Key`, such as ``ge=0``.
    """
    return dataclasses.field(default=default, metadata={"key": Key(meaning, **limits)})


_SIGNS: Final = {"above": ">", "at least": ">=", "below": "<", "at most": "<="}


def _number(value: float) -> str:
    if value >= 1 << 16 and math.frexp(value)[0] == 0.5:
        return f"2^{math.frexp(value)[1] - 1}"
    return str(value) if isinstance(value, int) else f"{value:g}"


class Field(NamedTuple):
    """Field of a configuration class: name, type and default value, and its `Key` declaration ``key``."""

    name: str
    type: Any
    default: Any
    key: Any  # a `Key`, or the second argument of Annotated, or None

    @property
    def is_list(self) -> bool:
        """True if the value is a list."""
        return get_origin(self.type) is tuple

    @property
    def is_table(self) -> bool:
        """True if the value is a table (dict) with free names and values of one type."""
        return get_origin(self.type) is Mapping

    @property
    def item(self) -> Any:
        """Type of one item of a list or one value of a table. For other fields, the type of the field."""
        return get_args(self.type)[-1 if self.is_table else 0] if self.is_table or self.is_list else self.type

    @property
    def is_leaf(self) -> bool:
        """True if the value is written on one line of the file, False if it is written as tables."""
        return not self.is_table and not dataclasses.is_dataclass(self.item)

    @property
    def kind(self) -> str:
        """Noun for the type of the values, for the documentation: "integer", "list of texts" or "path"."""
        if not self.is_leaf:
            return "list of tables"
        name = "a path" if self.key.path is True else TYPES[self.type]
        return name.removeprefix("a ").replace("whole number", "integer")

    @property
    def choices(self) -> tuple[Any, ...]:
        """The valid values as a tuple, or () if their number is not limited."""
        return (False, True) if self.type is bool else () if self.is_list else self.key.choices

    @property
    def values(self) -> str:
        """Text of the valid values for the documentation, such as "integer >= 1" or "none, thread, poll"."""
        key = self.key
        names = ", ".join(toml_value(choice).strip('"') for choice in self.choices or key.choices)
        if self.choices:
            return names + (f", or {key.expected}" if key.expected else "")
        if names or key.expected:
            return f"{self.kind}: {names}" if names else f"{self.kind}, {key.expected}"
        return f"{self.kind} {key.bounds(signs=True)}".rstrip() + (f" or {key.word}" if key.word else "")

    def rule(self, section: str) -> Rule | None:
        """Return the `Rule` that this key of section ``section`` must be valid, or None if all values are valid."""
        key, label = self.key, f"{section}.{self.name}"
        names, bounds = ", ".join(map(str, key.choices)), key.bounds(signs=False)
        if key.valid is not None:
            text = f"choose {names}, or {key.expected}" if names else f"it must be {key.expected}"
        elif names and self.type is not str:
            text = f"choose among {names}"
        elif names:
            return None if key.expected else one_of(label, key.choices)
        elif bounds:
            is_open = self.type is float and key.lt is None and key.le is None
            text = f"{'each' if self.is_list else 'it'} must be {'finite and ' if is_open else ''}{bounds}"
            text += f", or {key.word!r}" if key.word else ""
        else:
            return None
        meaning = key.meaning.rstrip(".").replace("{", "{{").replace("}", "}}")
        is_valid = (lambda items: all(map(key.is_valid, items))) if self.is_list else key.is_valid
        return must(label, is_valid, f"{text}. Meaning: {meaning}")

    def convert(self, value: Any, label: str, source: str, base: Path) -> Any:
        """Return ``value`` converted to the type of this key. Raises ConfigurationError if ``value`` has another type.

        ``label``: name of the key in errors. ``source``: file name in errors. ``base``: directory for relative paths.
        """
        if not self.is_leaf:
            tables = TableFormat(lambda raw, field, where: field.convert(raw, where, source, base))
            return tables.value(value, self, label, self.name)
        value = plain_number(value)
        if value == self.key.word and self.key.word:
            return value
        if self.key.digits and type(value) is int:
            value = str(value)
        try:
            value = msgspec.convert(value, self.type)
        except msgspec.ValidationError:
            expected = TYPES[self.type] + (f" or {self.key.word!r}" if self.key.word else "")
            example = f". Meaning: {self.key.meaning}" if self.is_list else f", such as {written(self.default)}"
            raise ConfigurationError(
                f"{label} = {value!r} in {source} has the wrong type: expected {expected}{example}"
            ) from None
        if self.key.path and value and (self.key.path is True or self.key.path in value):
            return os.path.abspath(base / Path(value).expanduser())
        return value


@cache
def fields_of(kind: Any) -> Mapping[str, Field]:
    """Return the fields of the dataclass ``kind`` as a dict {key in the file: `Field`}."""
    result = {}
    for item in dataclasses.fields(kind):
        hint, key = get_args(item.type) if get_origin(item.type) is Annotated else (item.type, item.metadata.get("key"))
        default = item.default_factory() if callable(item.default_factory) else item.default
        if isinstance(key, Key) and not isinstance(default, tuple):
            hint = type(default)
        if not item.metadata.get(INTERNAL):
            result[getattr(key, "key", item.name)] = Field(item.name, hint, default, key)
    return result


@cache
def _rules_of(kind: Any, section: str) -> tuple[Rule, ...]:
    fields = [field for field in fields_of(kind).values() if isinstance(field.key, Key)]
    return tuple(rule for field in fields if (rule := field.rule(section)) is not None)


def check_section(rules: Iterable[Rule], name: str, section: Any, **derived: Any) -> None:
    """Raise ConfigurationError if ``section`` has an invalid value or breaks a rule. ``name``: name of the section."""
    check((*_rules_of(section.__class__, name), *rules), section_values(name, section) | derived)


@dataclass(frozen=True)
class TableFormat:
    """Conversion between nested dataclasses and TOML text."""

    leaf: Callable[[Any, Field, str], Any]  # (TOML value or None, field, name in messages) -> converted value
    literal: Callable[[Any, Field], str] = lambda value, field: toml_value(value)  # converts to TOML text
    names: Mapping[str, Iterable[str]] = dataclasses.field(default_factory=dict)  # valid names in the table of a key

    def read(self, kind: Any, table: Mapping[str, Any], place: str = "") -> Any:
        """Return an instance of the dataclass ``kind``, filled from ``table``. ``place``: prefix of keys in errors."""
        fields = fields_of(kind)
        check_names(table, fields, place)
        values = {
            field.name: self.value(table.get(key), field, f"{place}{key}", key)
            for key, field in fields.items()
            if field.default is dataclasses.MISSING or key in table
        }
        try:
            return kind(**values)
        except ConfigurationError as error:
            # The checks of a class do not know in which table of alike values the object is.
            raise ConfigurationError(str(error) if place in str(error) else f"{place}{error}") from None

    def value(self, raw: Any, field: Field, where: str, key: str) -> Any:
        """Return the TOML value ``raw`` of ``field``, converted. ``where``: name of the ``key`` in errors."""
        if field.is_leaf:
            return self.leaf(raw, field, where)
        if (raw is None or raw == []) and field.default is dataclasses.MISSING:
            section = f"[[{where}]] is missing; add at least one" if field.is_list else f"[{where}] is missing"
            raise ConfigurationError(f"the section {section}")
        if field.is_list:
            if not isinstance(raw, list) or not all(isinstance(row, dict) for row in raw):
                raise ConfigurationError(f"{where} is {raw!r}; expected sections [[{where}]]")
            return tuple(self.read(field.item, row, f"{where} {number}: ") for number, row in enumerate(raw, 1))
        if not isinstance(raw, dict):
            raise ConfigurationError(f"{where} is {raw!r}; expected a section [{where}]")
        if not field.is_table:
            return self.read(field.type, raw, f"{where}.")
        check_names(raw, self.names.get(key, raw), f"{where}.")
        inner = field._replace(type=field.item, default=dataclasses.MISSING)
        return {name: self.value(value, inner, f"{where}.{name}", name) for name, value in raw.items()}

    def lines(self, source: Any, header: str = "") -> Iterator[str]:
        """Yield the TOML lines of the dataclass object ``source``. ``header``: prefix of table names."""
        tables = []
        for key, field in fields_of(source.__class__).items():
            value = getattr(source, field.name)
            if not field.is_leaf:
                tables.append((f"{header}{key}", field, value))
            elif value is not None and (field.default is dataclasses.MISSING or value != field.default):
                yield f"{key} = {self.literal(value, field)}"
        for name, field, value in tables:
            if field.is_list:
                for row in value:
                    yield from ("", f"[[{name}]]", *self.lines(row, f"{name}."))
            elif not field.is_table:
                yield from ("", f"[{name}]", *self.lines(value, f"{name}."))
            elif dataclasses.is_dataclass(field.item):
                for key, row in value.items():
                    yield from ("", f"[{name}.{key}]", *self.lines(row, f"{name}.{key}."))
            elif value:
                inner = field._replace(type=field.item)
                yield from ("", f"[{name}]", *(f"{key} = {self.literal(row, inner)}" for key, row in value.items()))


def check_names(table: Iterable[str], names: Iterable[str], place: str) -> None:
    """Raise ConfigurationError if a key of ``table`` is not in ``names``. ``place``: prefix of the key in the error."""
    for key in table:
        if key not in names:
            raise ConfigurationError(f"unknown field {place}{key}; {suggestion(key, names)}")


def toml_value(value: Any) -> str:
    """Return ``value`` as TOML text. Raises ConfigurationError if a text is not valid Unicode."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{toml_value(name)} = {toml_value(item)}' for name, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # inf, nan and exponents have the same form in both languages
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"the path {value!r} is not valid Unicode; rename the file or directory") from None
    # A TOML basic string is a JSON string in which DEL is escaped too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """Return one line ``key = value`` for each entry of ``values``."""
    return [f"{name} = {toml_value(value)}" for name, value in values.items()]
