"""TOML files of clusters: read, check and write them; quantities are texts with units.

`read` takes the name of a shipped cluster (`clusters/`) or any path. Nothing is guessed: a field that is missing,
unknown, of the wrong dimension or out of bounds is refused with the names of the file and of the field. The classes of
`hpcdist.planner.cluster.hardware` say of each field its key, its dimension and its bounds.
"""

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from hpcdist.errors import ConfigurationError
from hpcdist.planner.cluster import hardware
from hpcdist.planner.cluster.hardware import ITEM_BYTES, Cluster, QuantityField
from hpcdist.reporting import regular
from hpcdist.reporting.nearest import nearest, suggestion
from hpcdist.reporting.toml_text import toml_value

SOURCES: Final = ("device", "matmul", "node", "level", "storage", "failures", "site", "fit")
KEYS: Final = {"flops": ITEM_BYTES, "matmul": ITEM_BYTES, "sources": SOURCES}  # of tables whose values are alike
FOLDER: Final = Path(__file__).parents[1] / "clusters"
ASSUMPTION: Final = "assumption"  # a source that has this word is told as a flag of each plan


def names() -> tuple[str, ...]:
    """Return the clusters that come with hpcdist."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def read(name_or_path: str) -> Cluster:
    """Return the cluster of a shipped name or of a file.

    Raises ConfigurationError, which names file and field, and StorageError for a file that cannot be read.
    """
    path = _path_of(name_or_path)
    if "\0" in name_or_path:
        raise ConfigurationError(f"the cluster {name_or_path!r} is no path of a file")
    return of_tree(regular.settings(path, "the cluster"), str(path))


def of_tree(tree: Mapping[str, Any], place: str) -> Cluster:
    """Return the cluster of a parsed file; ``place`` is what errors call it. Raises ConfigurationError."""
    try:
        cluster: Cluster = _read(Cluster, tree, "")
        hardware.validate(cluster)
        return cluster
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from None


def assumptions(cluster: Cluster) -> tuple[str, ...]:
    """Return what of the cluster's numbers is assumed and not measured or specified, for the flags of a plan.

    Of each source those parts, between semicolons, that say so.
    """
    return tuple(
        f"{section}: {part.strip()}"
        for section, source in cluster.sources.items()
        for part in source.split(";")
        if ASSUMPTION in part.lower()
    )


def dump(cluster: Cluster) -> str:
    """Return the TOML of ``cluster``; `read` of it is equal to it."""
    return "\n".join(_dumped(cluster, "")) + "\n"


def _path_of(name_or_path: str) -> Path:
    if os.sep in name_or_path or name_or_path.endswith(".toml"):
        return Path(name_or_path).expanduser()
    if name_or_path not in names():
        near = nearest(name_or_path, names())
        raise ConfigurationError(
            f"there is no cluster {name_or_path!r}; {f'the nearest is {near!r}; ' if near else ''}known are "
            f"{', '.join(names())}, and any file FILE.toml"
        )
    return FOLDER / f"{name_or_path}.toml"


class FileField(NamedTuple):
    """Field of a class: its ``name``, its type without bounds, what it is in a file, and its default if it has one."""

    name: str
    type: Any
    quantity: QuantityField
    default: Any = dataclasses.MISSING

    @property
    def of(self) -> Any:
        """The type of the values of a table or a list; the type itself for others."""
        return get_args(self.type)[-1 if self.is_mapping else 0] if self.is_mapping or self.is_list else self.type

    @property
    def is_mapping(self) -> bool:
        """Whether it is a table whose values are alike."""
        return get_origin(self.type) is Mapping

    @property
    def is_list(self) -> bool:
        """Whether it is a list, of numbers or of tables."""
        return get_origin(self.type) is tuple

    @property
    def is_leaf(self) -> bool:
        """Whether it stands in a line of its own, and not in tables."""
        return not self.is_mapping and not dataclasses.is_dataclass(self.of)


@cache
def fields_of(kind: Any) -> tuple[FileField, ...]:
    """Return the fields of a class of `hpcdist.planner.cluster.hardware`."""
    result = []
    hints = get_type_hints(kind, include_extras=True)
    for item in dataclasses.fields(kind):
        hint, quantity = hints[item.name], QuantityField(item.name)
        if get_origin(hint) is Annotated:
            hint, quantity = get_args(hint)
        default = {} if item.default_factory is dict else item.default
        result.append(FileField(item.name, hint, quantity, default))
    return tuple(result)


def _read(kind: Any, tree: Mapping[str, Any], place: str) -> Any:
    """Return the object of a table; ``place`` is what comes before the names of its fields."""
    fields = fields_of(kind)
    _known(tree, [field.quantity.key for field in fields], place)
    return kind(
        **{
            field.name: _field_value(field, tree, place)
            for field in fields
            if field.default is dataclasses.MISSING or field.quantity.key in tree
        }
    )


def _field_value(field: FileField, tree: Mapping[str, Any], place: str) -> Any:
    """Return what ``tree`` has for a field. Raises ConfigurationError."""
    key = field.quantity.key
    where = f"{place}{key}"
    if field.is_leaf:
        if key not in tree:
            example = hardware.EXAMPLES.get(field.quantity.kind)
            raise ConfigurationError(f"{where} is missing" + (f"; expected for example {example}" if example else ""))
        raw = tree[key]
        if not field.is_list:
            return _leaf(raw, field.quantity, where)
        if not isinstance(raw, list) or not raw:
            raise ConfigurationError(f"{where} is {raw!r}; expected a list of one number or more")
        return tuple(_leaf(number, field.quantity, f"{where}[{index}]") for index, number in enumerate(raw))
    if tree.get(key, []) == [] and field.default is dataclasses.MISSING:
        section = f"[[{where}]] is missing: at least one is needed" if field.is_list else f"[{where}] is missing"
        raise ConfigurationError(f"the section {section}")
    table = tree[key]
    if field.is_list:
        if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
            raise ConfigurationError(f"{where} is {table!r}; expected sections [[{where}]]")
        return tuple(_read(field.of, row, f"{key} {number}: ") for number, row in enumerate(table, 1))
    if not isinstance(table, dict):
        raise ConfigurationError(f"{where} is {table!r}; expected a section [{where}]")
    if not field.is_mapping:
        return _read(field.type, table, f"{where}.")
    _known(table, KEYS[key], f"{where}.")
    values = [FileField(name, field.of, field.quantity._replace(key=name)) for name in table]
    return {value.name: _field_value(value, table, f"{where}.") for value in values}


def _leaf(raw: Any, quantity: QuantityField, where: str) -> Any:
    """Return a value in base units. Raises ConfigurationError."""
    kind = quantity.kind
    plain = {"text": str, "count": int, "number": float}.get(kind)
    try:
        value: Any = msgspec.convert(raw, plain or str)
        value = value if plain else hardware.parse(value, kind)
    except msgspec.ValidationError:
        expected = "a text" if kind == "text" else f"a {kind} without quotes or unit"
        if plain is None:
            raise ConfigurationError(
                f"{where} is {raw!r}, without a unit; expected a text such as {hardware.EXAMPLES[kind]}"
            ) from None
        raise ConfigurationError(f"{where} is {raw!r}; expected {expected}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    if kind == "text" or quantity.low <= value <= quantity.high or (quantity.zero and value == 0):
        return value
    low, high = (f"{end:g}" if plain else hardware.rough(end, kind) for end in (quantity.low, quantity.high))
    or_zero = ", or 0" if quantity.zero and quantity.low > 0 else ""
    raise ConfigurationError(
        f"{where} of {raw} is not plausible; expected {low} to {high}{or_zero}: is it in another unit?"
    )


def _known(tree: Mapping[str, Any], known: Collection[str], place: str) -> None:
    for key in tree:
        if key not in known:
            raise ConfigurationError(f"unknown field {place}{key}; {suggestion(key, known)}")


def _dumped(part: Any, header: str) -> Iterator[str]:
    """Yield the lines of an object: its own, and then the tables in it, whose names begin with ``header``."""
    tables = []
    for field in fields_of(part.__class__):
        value = getattr(part, field.name)
        if not field.is_leaf:
            tables.append((field, value))
        elif value is not None and (field.default is dataclasses.MISSING or value != field.default):
            yield f"{field.quantity.key} = {_literal(field, value)}"
    for field, value in tables:
        name = header + field.quantity.key
        if field.is_list:
            for row in value:
                yield from ("", f"[[{name}]]", *_dumped(row, f"{name}."))
        elif not field.is_mapping:
            yield from ("", f"[{name}]", *_dumped(value, f"{name}."))
        elif dataclasses.is_dataclass(field.of):
            for key, row in value.items():
                yield from ("", f"[{name}.{key}]", *_dumped(row, f"{name}.{key}."))
        elif value:
            of = FileField(field.name, field.of, field.quantity)
            yield from ("", f"[{name}]", *(f"{key} = {_literal(of, row)}" for key, row in value.items()))


def _literal(field: FileField, value: Any) -> str:
    """Return a value as TOML; a number of numpy would not be TOML."""
    if field.is_list:
        return f"[{', '.join(_literal(field._replace(type=field.of), number) for number in value)}]"
    kind = field.quantity.kind
    if kind in ("count", "number"):
        return repr(int(value) if kind == "count" else float(value))
    return toml_value(value if kind == "text" else hardware.text(value, kind))
