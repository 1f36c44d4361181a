"""Rows of published tables in `published/*.toml`: read, checked, and put into the planner's own words.

A file has a [table] (title, source, what confirmed the numbers, what had to be assumed, cluster), a [common] model and
layout, and a [[row]] for each line of the table: a role, model and layout where they differ, and published numbers as
printed. Roles: calibration: constants were chosen with it; shared: a part of the same run calibrates, a stage or a
block of it, so it tests less than others and is counted apart; test; extra: shown, and why it does not count is told.
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
PRINTED: Final = ("zero_table1", "zero_bubble_table5")  # files of their own form: no rows to be planned


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table: what to plan, and what was published of it (numbers as printed)."""

    table: str
    name: str
    role: str
    kind: str  # throughput, layer
    cluster: str
    shape: TransformerShape
    layout: ParallelLayout
    global_batch: int
    published: Mapping[str, str]
    base: ParallelLayout | None = None  # of the speed-up
    series: str = ""  # rows of strong scaling
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A published table, and its rows."""

    key: str
    title: str
    source: str
    confirmed: tuple[str, ...]
    assumed: tuple[str, ...]
    unmodelled: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    tree: Mapping[str, Any] = field(default_factory=dict)


def tables(folder: Path = FOLDER) -> dict[str, Table]:
    """Return all tables by the name of their file. Raises ValueError for a file that is not of this form."""
    return {path.stem: _table(path) for path in sorted(folder.glob("*.toml"))}


def unit_of(printed: str) -> float:
    """Return the value of the last digit of a ``printed`` number: 0.1 for "41.3"."""
    return 10.0 ** -len(printed.partition(".")[2])


def _table(path: Path) -> Table:
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    told, common = tree["table"], tree.get("common", {})
    rows = () if path.stem in PRINTED else tuple(_row(path.stem, told, common, row) for row in tree["row"])
    names = [row.name for row in rows]
    if len(set(names)) != len(names):
        raise ValueError(f"{path}: rows have the same name")
    return Table(
        key=path.stem,
        title=told["title"],
        source=told["source"],
        confirmed=tuple(told["confirmed"]),
        assumed=tuple(told["assumed"]),
        unmodelled=tuple(told.get("unmodelled", ())),
        rows=rows,
        tree=tree,
    )


def _row(key: str, told: Mapping[str, Any], common: Mapping[str, Any], row: Mapping[str, Any]) -> Row:
    if row["role"] not in ROLES:
        raise ValueError(f"{key}: {row['name']}: role {row['role']!r}; choose one of {', '.join(ROLES)}")
    layout = {**common["layout"], **row.get("layout", {})}
    return Row(
        table=key,
        name=row["name"],
        role=row["role"],
        kind=told["kind"],
        cluster=told["cluster"],
        shape=TransformerShape(**{**common["model"], **row.get("model", {})}),
        layout=ParallelLayout(**layout),
        global_batch=row.get("global_batch", common.get("global_batch", 0)),
        published=row["published"],
        base=ParallelLayout(**{**layout, **row["base"]}) if "base" in row else None,
        series=row.get("series", ""),
        note=row.get("note", ""),
    )
