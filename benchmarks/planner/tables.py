"""Published tables in `published/*.toml`, as recipes for the planner.

A file has a [table] (title, source, confirmations, assumptions, cluster), a [common] model and layout, and a [[row]]
for each line: role, different model or layout keys, and published numbers as printed. Roles: calibration (constants
were chosen with the row), shared (a stage or block of the same run is a calibration row, so the row is counted
separately), test, and extra (shown but not counted; the row has the reason). ``predicted`` records a prediction
that was committed before the published number.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import TransformerShape

FOLDER: Final = Path(__file__).parent / "published"
ROLES: Final = ("calibration", "shared", "test", "extra")
PRINTED: Final = ("zero_table1", "zero_bubble_table5")  # files with special formats and without rows to plan


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table: the training to plan, and the published numbers as printed."""

    table: str
    name: str
    role: str
    kind: str  # throughput, layer
    cluster: str
    shape: TransformerShape
    layout: ParallelLayout
    global_batch: int
    published: Mapping[str, str]
    base: ParallelLayout | None = None  # reference layout of a speedup
    series: str = ""  # name of a strong-scaling series
    note: str = ""
    network: str = ""  # bandwidth of a device between nodes, if it differs from the cluster's


@dataclass(frozen=True, kw_only=True)
class Table:
    key: str
    title: str
    source: str
    confirmed: tuple[str, ...]
    assumed: tuple[str, ...]
    unmodelled: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    tree: Mapping[str, Any] = field(default_factory=dict)


def tables(folder: Path = FOLDER) -> dict[str, Table]:
    """Read all tables, by file name without suffix. Raises ValueError for a file with another format."""
    return {path.stem: _table(path) for path in sorted(folder.glob("*.toml"))}


def unit_of(printed: str) -> float:
    """Return the value of the last printed digit: 0.1 for "41.3"."""
    return 10.0 ** -len(printed.partition(".")[2])


def _table(path: Path) -> Table:
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    header, common = tree["table"], tree.get("common", {})
    rows = () if path.stem in PRINTED else tuple(_row(path.stem, header, common, row) for row in tree["row"])
    names = [row.name for row in rows]
    if len(set(names)) != len(names):
        raise ValueError(f"{path}: rows have the same name")
    return Table(
        key=path.stem,
        title=header["title"],
        source=header["source"],
        confirmed=tuple(header["confirmed"]),
        assumed=tuple(header["assumed"]),
        unmodelled=tuple(header.get("unmodelled", ())),
        rows=rows,
        tree=tree,
    )


def _row(key: str, header: Mapping[str, Any], common: Mapping[str, Any], row: Mapping[str, Any]) -> Row:
    if row["role"] not in ROLES:
        raise ValueError(f"{key}: {row['name']}: role {row['role']!r}; choose one of {', '.join(ROLES)}")
    layout = {**common["layout"], **row.get("layout", {})}
    return Row(
        table=key,
        name=row["name"],
        role=row["role"],
        kind=header["kind"],
        cluster=header["cluster"],
        shape=TransformerShape(**{**common["model"], **row.get("model", {})}),
        layout=ParallelLayout(**layout),
        global_batch=row.get("global_batch", common.get("global_batch", 0)),
        published=row["published"],
        base=ParallelLayout(**{**layout, **row["base"]}) if "base" in row else None,
        series=row.get("series", ""),
        note=row.get("note", ""),
        network=header.get("network", ""),
    )
