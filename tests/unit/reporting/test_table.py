"""Figures: one definition gives the cell of a table, JSON value, CSV column, and reason of a missing value."""

import csv
import io
from types import SimpleNamespace

from hpcdist.reporting.table import Catalogue, Figure

TABLE = Catalogue(
    Figure("name", lambda row: row.name, title="configuration"),
    Figure("step_s", lambda row: row.step_s, ".1f", 1e-3, title="step ms", reason=lambda row: row.reason),
    Figure("size", lambda row: row.size, lambda value, row: f"{value} {row.unit}", reason=lambda row: row.reason),
)
ROWS = [
    SimpleNamespace(name="a | b", step_s=0.5, size=3, unit="B", reason=""),
    SimpleNamespace(name="c", step_s=None, size=None, unit="B", reason="no clock"),
    SimpleNamespace(name="d", step_s=None, size=1, unit="KiB", reason="no clock"),
    SimpleNamespace(name="e", step_s=None, size=None, unit="B", reason=""),
]


def test_text_table_has_a_dash_and_each_reason_once():
    lines = TABLE.aligned(ROWS, left=(0, 2))
    assert lines[:4] == [
        "configuration  step ms  size",
        "a | b            500.0  3 B",
        "c                    -  -",
        "d                    -  1 KiB",
    ]
    assert lines[5:] == ["", "no step ms of c, d: no clock", "no size of c: no clock"]


def test_reason_of_all_records_names_no_record():
    assert TABLE.missing(ROWS[1:2]) == ["no step ms, size: no clock"]
    assert TABLE.unknown(ROWS[1]) == {"step ms": "no clock", "size": "no clock"} and TABLE.unknown(ROWS[3]) == {}


def test_markdown_escapes_bars():
    lines = TABLE.markdown(ROWS[:2])
    assert lines[0] == "| configuration | step ms | size |" and lines[2] == "| a \\| b | 500.0 | 3 B |"
    assert lines[-1] == "\nno step ms, size of c: no clock"


def test_json_and_csv_have_unscaled_values_by_name():
    assert TABLE.jsonable(ROWS[:2])[0] == {"name": "a | b", "step_s": 0.5, "size": 3}
    rows = list(csv.DictReader(io.StringIO(TABLE.csv(ROWS[:2]))))
    assert rows[0]["step_s"] == "0.5" and rows[1] == {"name": "c", "step_s": "", "size": ""}
