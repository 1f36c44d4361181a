"""TOML files of clusters: read, check and write them; quantities are texts with units.

`read` takes the name of a shipped cluster (`clusters/`) or any path. Nothing is guessed: a field that is missing,
unknown, of the wrong dimension or out of bounds is refused with the names of the file and of the field. The table of
fields says for each its key, its dimension and its bounds. The bounds are wide: a number outside of them belongs to
no hardware that exists, so its unit is wrong.
"""

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.planner.cluster import hardware
from hpcdist.planner.cluster.hardware import (
    ITEM_BYTES,
    Cluster,
    ClusterNode,
    ClusterSite,
    ClusterStorage,
    Device,
    EfficiencyCurve,
    FailureRates,
    LinkLevel,
    MeasuredFit,
)
from hpcdist.reporting import regular


class QuantityField(NamedTuple):
    """``key`` in the file is ``attribute`` of the section's class.

    ``kind``: a dimension of `hpcdist.planner.cluster.hardware`, or "count", "number", "text". Bounds include their
    ends,
    in base units; with ``zero`` 0 is allowed below them, too.
    """

    key: str
    attribute: str
    kind: str
    low: float = 0.0
    high: float = float("inf")
    required: bool = True
    zero: bool = False


YEAR_S: Final = 365.25 * 86400.0

TOP: Final = (
    QuantityField("name", "name", "text"),
    QuantityField("about", "about", "text"),
    QuantityField("devices", "devices", "count", 1, 1e7),
    QuantityField("calibrated", "calibrated", "text", required=False),
)
DEVICE: Final = (
    QuantityField("name", "name", "text"),
    QuantityField("memory", "memory_bytes", "bytes", 64e6, 64e12),
    QuantityField("memory_bandwidth", "memory_bytes_per_s", "bandwidth", 100e6, 1e15),
    QuantityField("memory_share", "memory_share", "number", 0.01, 1, required=False),
    QuantityField("attention_share", "attention_share", "number", 0.001, 1, required=False),
    QuantityField("kernel", "kernel_s", "time", 1e-9, 10e-3, required=False, zero=True),
    QuantityField("reserved", "reserved_bytes", "bytes", 0, 1e12, required=False, zero=True),
    QuantityField("idle", "idle_w", "power", 0, 5e3, required=False, zero=True),
    QuantityField("peak", "peak_w", "power", 0.1, 20e3, required=False, zero=True),
    QuantityField("best_mfu", "best_mfu", "number", 0.01, 1, required=False, zero=True),
)
FLOPS_BOUNDS: Final = (100e6, 1e18)
LEVEL: Final = (
    QuantityField("name", "name", "text"),
    QuantityField("devices", "devices", "count", 2, 1e7, zero=True),
    QuantityField("latency", "latency_s", "time", 10e-9, 100e-3),
    QuantityField("bandwidth", "bytes_per_s", "bandwidth", 1e6, 100e12),
    QuantityField("alone_bandwidth", "alone_bytes_per_s", "bandwidth", 1e6, 100e12, required=False, zero=True),
)
NODE: Final = (
    QuantityField("devices", "devices", "count", 1, 1024),
    QuantityField("host", "host_w", "power", 1, 100e3, required=False, zero=True),
    QuantityField("network", "network_w", "power", 1, 100e3, required=False, zero=True),
    QuantityField("host_memory", "host_memory_bytes", "bytes", 64e6, 1e15, required=False, zero=True),
)
STORAGE: Final = (
    QuantityField("write", "write_bytes_per_s", "bandwidth", 1e6, 1e15),
    QuantityField("read", "read_bytes_per_s", "bandwidth", 1e6, 1e15),
    QuantityField("node_write", "node_write_bytes_per_s", "bandwidth", 1e6, 1e13),
    QuantityField("node_read", "node_read_bytes_per_s", "bandwidth", 1e6, 1e13),
)
FAILURES: Final = (
    QuantityField("node_mtbf", "node_mtbf_s", "time", 3600, 1000 * YEAR_S),
    QuantityField("restart", "restart_s", "time", 1, 86400),
)
SITE: Final = (
    QuantityField("pue", "pue", "number", 1, 5, required=False),
    QuantityField("carbon", "carbon_g_per_kwh", "carbon", 0, 2000, required=False, zero=True),
    QuantityField("carbon_source", "carbon_source", "text", required=False),
    QuantityField("device_hour_price", "device_hour_price", "number", 0, 1000, required=False, zero=True),
    QuantityField("kwh_price", "kwh_price", "number", 0, 1000, required=False, zero=True),
    QuantityField("currency", "currency", "text", required=False),
)
CURVE: Final = (  # lists, one number for each point
    QuantityField("sizes", "sizes", "number", 1, 1e6),
    QuantityField("shares", "shares", "number", 1e-6, 1),
)
FIT: Final = (
    QuantityField("operation", "operation", "text"),
    QuantityField("ranks", "ranks", "count", 1, 1e7),
    QuantityField("algorithm", "algorithm", "text", required=False),
    QuantityField("level", "level", "text", required=False),
    QuantityField("library", "library", "text", required=False),
    QuantityField("from", "from_bytes", "bytes", 0, 1e15, required=False, zero=True),
    QuantityField("error", "error", "number", 0, 1e9, required=False, zero=True),
)
PIECES: Final = (  # of a fit: lists, one number for each piece
    QuantityField("until", "until_bytes", "bytes", 1, 1e15),
    QuantityField("latency", "latency_s", "time", 1e-9, 10, zero=True),
    QuantityField("slowness", "s_per_byte", "slowness", 1e-15, 1e-3, zero=True),
)
OPERATIONS: Final = ("allreduce", "reduce_scatter", "all_gather", "message")
SECTIONS: Final = ("device", "node", "level", "storage", "failures", "site", "fit", "sources")
SOURCES: Final = ("device", "matmul", "node", "level", "storage", "failures", "site", "fit")


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
    try:
        tree = regular.toml(path)
    except OSError as error:
        raise StorageError(f"the cluster {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # also an integer of 5,000 digits, a thousand brackets
        raise ConfigurationError(f"{path} is no TOML: {error}") from None
    return of_tree(tree, str(path))


def of_tree(tree: Mapping[str, Any], place: str) -> Cluster:
    """Return the cluster of a parsed file; ``place`` is what errors call it. Raises ConfigurationError."""
    try:
        return _cluster(tree)
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
    lines = [*_dumped(TOP, cluster), "", "[device]", *_dumped(DEVICE, cluster.device)]
    lines += ["", "[device.flops]"]
    lines += [f"{kind} = {_quoted(hardware.text(value, 'flops'))}" for kind, value in cluster.device.peak_flops.items()]
    for kind, curve in cluster.device.matmul.items():
        lines += ["", f"[device.matmul.{kind}]"]
        lines += [f"{key} = {[float(number) for number in getattr(curve, key)]}" for key in ("sizes", "shares")]
    lines += ["", "[node]", *_dumped(NODE, cluster.node)]
    for level in cluster.levels:
        lines += ["", "[[level]]", *_dumped(LEVEL, level)]
    lines += ["", "[storage]", *_dumped(STORAGE, cluster.storage)]
    lines += ["", "[failures]", *_dumped(FAILURES, cluster.failures)]
    lines += ["", "[site]", *_dumped(SITE, cluster.site)]
    for fit in cluster.fits:
        lines += ["", "[[fit]]", *_dumped(FIT, fit)]
        lines += [_dumped_list(piece.key, getattr(fit, piece.attribute), piece.kind) for piece in PIECES]
    if cluster.sources:
        lines += ["", "[sources]", *(f"{section} = {_quoted(source)}" for section, source in cluster.sources.items())]
    return "\n".join(lines) + "\n"


def _path_of(name_or_path: str) -> Path:
    if os.sep in name_or_path or name_or_path.endswith(".toml"):
        return Path(name_or_path).expanduser()
    if name_or_path not in names():
        close = difflib.get_close_matches(name_or_path, names(), 1)
        nearest = f"the nearest is {close[0]!r}; " if close else ""
        raise ConfigurationError(
            f"there is no cluster {name_or_path!r}; {nearest}known are {', '.join(names())}, and any file FILE.toml"
        )
    return FOLDER / f"{name_or_path}.toml"


def _cluster(tree: Mapping[str, Any]) -> Cluster:
    _known(tree, [*(field.key for field in TOP), *SECTIONS], "")
    top = _section(tree, TOP, "", beside=SECTIONS)
    levels = tuple(
        LinkLevel(**_section(level, LEVEL, f"level {place + 1}: "))
        for place, level in enumerate(_tables(tree, "level", required=True))
    )
    cluster = Cluster(
        **top,
        device=_device(_table(tree, "device")),
        node=ClusterNode(**_section(_table(tree, "node"), NODE, "node.")),
        levels=levels,
        storage=ClusterStorage(**_section(_table(tree, "storage"), STORAGE, "storage.")),
        failures=FailureRates(**_section(_table(tree, "failures"), FAILURES, "failures.")),
        site=ClusterSite(**_section(_table(tree, "site", required=False), SITE, "site.")),
        fits=tuple(_fit(fit, f"fit {place + 1}: ") for place, fit in enumerate(_tables(tree, "fit"))),
        sources=_sources(_table(tree, "sources", required=False)),
    )
    hardware.validate(cluster)
    return cluster


def _device(tree: Mapping[str, Any]) -> Device:
    values = _section(tree, DEVICE, "device.", beside=("flops", "matmul"))
    flops, matmul = _table(tree, "flops", "device."), _table(tree, "matmul", "device.")
    low, high = FLOPS_BOUNDS
    for place, table in (("device.flops.", flops), ("device.matmul.", matmul)):
        _known(table, ITEM_BYTES, place)
    peak = {
        kind: _value(QuantityField(kind, kind, "flops", low, high), raw, "device.flops.") for kind, raw in flops.items()
    }
    curves = {}
    for kind in matmul:
        place = f"device.matmul.{kind}."
        curve = _table(matmul, kind, "device.matmul.")
        _known(curve, [field.key for field in CURVE], place)
        curves[kind] = EfficiencyCurve(**{field.attribute: _numbers(curve, field, place) for field in CURVE})
    return Device(**values, peak_flops=peak, matmul=curves)


def _fit(tree: Mapping[str, Any], place: str) -> MeasuredFit:
    values = _section(tree, FIT, place, beside=[piece.key for piece in PIECES])
    if values["operation"] not in OPERATIONS:
        raise ConfigurationError(f"{place}operation {values['operation']!r} is none of {', '.join(OPERATIONS)}")
    for piece in PIECES:
        values[piece.attribute] = _numbers(tree, piece, place)
    return MeasuredFit(**values)


def _sources(tree: Mapping[str, Any]) -> dict[str, str]:
    _known(tree, SOURCES, "sources.")
    return {key: _value(QuantityField(key, key, "text"), source, "sources.") for key, source in tree.items()}


def _section(
    tree: Mapping[str, Any], known: Sequence[QuantityField], place: str, beside: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the attributes of a section's class; ``beside`` are keys of the table that are read elsewhere."""
    _known(tree, [*(field.key for field in known), *beside], place)
    attributes = {}
    for field in known:
        if field.required:
            _present(tree, field.key, place, field)
        if field.key in tree:
            attributes[field.attribute] = _value(field, tree[field.key], place)
    return attributes


def _value(field: QuantityField, raw: Any, place: str) -> Any:
    """Return a field's value in base units. Raises ConfigurationError."""
    where = f"{place}{field.key}"
    if field.kind == "text":
        if not isinstance(raw, str):
            raise ConfigurationError(f"{where} is {raw!r}; expected a text")
        return raw
    plain = field.kind in ("count", "number")
    if plain:
        kinds = (int,) if field.kind == "count" else (int, float)
        if not isinstance(raw, kinds) or isinstance(raw, bool):
            raise ConfigurationError(f"{where} is {raw!r}; expected a {field.kind} without quotes or unit")
        value = raw if field.kind == "count" else float(raw)
    else:
        if not isinstance(raw, str):
            raise ConfigurationError(
                f"{where} is {raw!r}, without a unit; expected a text such as {hardware.EXAMPLES[field.kind]}"
            )
        try:
            value = hardware.parse(raw, field.kind)
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from None
    if not (field.low <= value <= field.high or (field.zero and value == 0)):
        low, high = (f"{end:g}" if plain else hardware.rough(end, field.kind) for end in (field.low, field.high))
        or_zero = ", or 0" if field.zero and field.low > 0 else ""
        raise ConfigurationError(
            f"{where} of {raw} is not plausible; expected {low} to {high}{or_zero}: is it in another unit?"
        )
    return value


def _numbers(tree: Mapping[str, Any], field: QuantityField, place: str) -> tuple[float, ...]:
    numbers = _present(tree, field.key, place)
    if not isinstance(numbers, list) or not numbers:
        raise ConfigurationError(f"{place}{field.key} is {numbers!r}; expected a list of one number or more")
    return tuple(
        _value(field._replace(key=f"{field.key}[{index}]"), number, place) for index, number in enumerate(numbers)
    )


def _table(tree: Mapping[str, Any], key: str, place: str = "", required: bool = True) -> Mapping[str, Any]:
    if required and key not in tree:
        raise ConfigurationError(f"the section [{place}{key}] is missing")
    table = tree.get(key, {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{place}{key} is {table!r}; expected a section [{place}{key}]")
    return table


def _tables(tree: Mapping[str, Any], key: str, required: bool = False) -> list[Mapping[str, Any]]:
    tables = tree.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigurationError(f"{key} is {tables!r}; expected sections [[{key}]]")
    if required and not tables:
        raise ConfigurationError(f"the section [[{key}]] is missing: at least one level of links")
    return tables


def _present(tree: Mapping[str, Any], key: str, place: str, field: QuantityField | None = None) -> Any:
    if key not in tree:
        example = hardware.EXAMPLES.get(field.kind, "") if field else ""
        raise ConfigurationError(f"{place}{key} is missing" + (f"; expected for example {example}" if example else ""))
    return tree[key]


def _known(tree: Mapping[str, Any], known: Iterable[str], place: str) -> None:
    known = list(known)
    for key in tree:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            nearest = f"the nearest is {close[0]!r}" if close else f"known are {', '.join(known)}"
            raise ConfigurationError(f"unknown field {place}{key}; {nearest}")


def _dumped(known: Sequence[QuantityField], part: Any) -> list[str]:
    defaults = {field.name: field.default for field in dataclasses.fields(part)}
    lines = []
    for field in known:
        value = getattr(part, field.attribute)
        if value is None or (not field.required and value == defaults[field.attribute]):
            continue
        if field.kind == "text":
            literal = _quoted(value)
        elif field.kind in ("count", "number"):  # a number of numpy would not be TOML
            literal = repr(int(value) if field.kind == "count" else float(value))
        else:
            literal = _quoted(hardware.text(value, field.kind))
        lines.append(f"{field.key} = {literal}")
    return lines


def _dumped_list(key: str, values: Sequence[float], kind: str) -> str:
    return f"{key} = [{', '.join(_quoted(hardware.text(value, kind)) for value in values)}]"


def _quoted(text: str) -> str:
    """Return a basic string of TOML 1.0."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    body = "".join(
        escapes.get(letter) or (letter if letter >= " " and letter != "\x7f" else f"\\u{ord(letter):04x}")
        for letter in text
    )
    return f'"{body}"'
