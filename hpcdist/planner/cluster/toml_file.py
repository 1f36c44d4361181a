"""TOML files of clusters: read, check and write them. Quantities are texts with units, such as "80 GiB".

`read` accepts the name of a shipped cluster (folder `clusters/`) or a path. A field that is missing, unknown, of the
wrong dimension or out of bounds is an error, which names the file and the field. The classes in
`hpcdist.planner.cluster.hardware` declare the key, the dimension and the bounds of each field.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from hpcdist.errors import ConfigurationError
from hpcdist.planner.cluster import hardware
from hpcdist.planner.cluster.hardware import ITEM_BYTES, Cluster, QuantityField
from hpcdist.reporting import regular
from hpcdist.reporting.nearest import nearest
from hpcdist.reporting.schema import Field, TableFormat, toml_value

SOURCES: Final = ("device", "matmul", "node", "level", "storage", "failures", "site", "fit")
FOLDER: Final = Path(__file__).parents[1] / "clusters"
ASSUMPTION: Final = "assumption"  # each plan lists the sources that contain this word


def names() -> tuple[str, ...]:
    """Return the names of the clusters that come with hpcdist."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def read(name_or_path: str) -> Cluster:
    """Read a shipped cluster by name, or a cluster file by path. Raises ConfigurationError or StorageError."""
    path = _path_of(name_or_path)
    if "\0" in name_or_path:
        raise ConfigurationError(f"the cluster {name_or_path!r} is not a valid path of a file; correct the path")
    return of_tree(regular.settings(path, "the cluster"), str(path))


def of_tree(tree: Mapping[str, Any], file_name: str) -> Cluster:
    """Return the cluster in the parsed TOML ``tree``. ``file_name``: file to name in a ConfigurationError."""
    try:
        cluster: Cluster = _TABLES.read(Cluster, tree)
        hardware.validate(cluster)
        return cluster
    except ConfigurationError as error:
        raise ConfigurationError(f"{file_name}: {error}") from None


def assumptions(cluster: Cluster) -> tuple[str, ...]:
    """Return the assumptions in the cluster file, as texts "SECTION: ASSUMPTION"."""
    return tuple(
        f"{section}: {part.strip()}"
        for section, source in cluster.sources.items()
        for part in source.split(";")
        if ASSUMPTION in part.lower()
    )


def dump(cluster: Cluster) -> str:
    """Return the text of a cluster file, in TOML, that describes ``cluster``."""
    return "\n".join(_TABLES.lines(cluster)) + "\n"


def _path_of(name_or_path: str) -> Path:
    if os.sep in name_or_path or name_or_path.endswith(".toml"):
        return Path(name_or_path).expanduser()
    if name_or_path not in names():
        near = nearest(name_or_path, names())
        raise ConfigurationError(
            f"there is no cluster {name_or_path!r}; {f'the nearest is {near!r}; ' if near else ''}choose one of "
            f"{', '.join(names())}, or the path of a file FILE.toml"
        )
    return FOLDER / f"{name_or_path}.toml"


def _leaf(raw: Any, field: Field, where: str) -> Any:
    quantity = field.key or QuantityField(field.name)
    if raw is None:
        example = hardware.EXAMPLES.get(quantity.kind)
        raise ConfigurationError(f"{where} is missing" + (f"; expected for example {example}" if example else ""))
    if not field.is_list:
        return _base_value(raw, quantity, where)
    if not isinstance(raw, list) or not raw:
        raise ConfigurationError(f"{where} is {raw!r}; expected a list with at least one value")
    return tuple(_base_value(number, quantity, f"{where}[{index}]") for index, number in enumerate(raw))


def _base_value(raw: Any, quantity: QuantityField, where: str) -> Any:
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
        f"{where} of {raw} is not plausible; expected {low} to {high}{or_zero}; check the unit of the value"
    )


def _literal(value: Any, field: Field) -> str:
    if field.is_list:
        return f"[{', '.join(_literal(number, field._replace(type=field.item)) for number in value)}]"
    kind = field.key.kind if field.key else "text"
    if kind in ("count", "number"):
        return repr(int(value) if kind == "count" else float(value))  # a NumPy number is not valid TOML
    return toml_value(value if kind == "text" else hardware.text(value, kind))


_TABLES: Final = TableFormat(_leaf, _literal, {"flops": ITEM_BYTES, "matmul": ITEM_BYTES, "sources": SOURCES})
