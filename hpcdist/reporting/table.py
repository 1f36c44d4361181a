"""Tables of texts, and figures of records: each figure is defined once, and rendered as text, Markdown, JSON and CSV.

A table is a list of rows of texts, the head first. A record is any object with measured values, such as a training run.
"""

import csv
import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from hpcdist.reporting.jsonable import jsonable

MISSING: Final = "-"


def text_of(value: float | None, form: str, unit: float = 1.0) -> str:
    """Format ``value`` / ``unit`` with the format specification ``form``. None becomes "-"."""
    return MISSING if value is None else format(value / unit, form)


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return ``rows`` as a list of aligned lines. ``left``: left-aligned columns. Other columns are right-aligned."""
    count = len(rows[0])
    widths = [max(len(row[column]) for row in rows) for column in range(count)]
    signs = ["<" if column in left or column - count in left else ">" for column in range(count)]
    return [
        "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True)).rstrip()
        for row in rows
    ]


def spaced(lines: Sequence[str], groups: Sequence[object]) -> list[str]:
    """Return ``lines``, a text table, with empty lines between groups. ``groups``: group of each line but the first."""
    shown = [lines[0]]
    for at, line in enumerate(lines[1:]):
        if at and groups[at] != groups[at - 1]:
            shown.append("")
        shown.append(line)
    return shown


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format ``rows``, lists of texts with the headings first, as the lines of a Markdown table."""
    head, *body = rows
    marks = ["---", *["---:"] * (len(head) - 2), "---"]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in body]
    return ["| " + " | ".join(row) + " |" for row in (head, marks, *escaped)]


Record = TypeVar("Record")


@dataclass(frozen=True)
class Figure(Generic[Record]):
    """Column of a table or report: a value of each record, such as the loss of a run."""

    name: str  # key in JSON and CSV
    value: Callable[[Record], Any]  # returns a number or text, or None if the figure is unknown
    form: str | Callable[[Any, Record], str] = ""  # format specification such as ".4f", or function that returns text
    scale: float | None = None  # divides a value before ``form`` is applied
    title: str = ""  # heading in a table, by default the name
    unit: str = ""  # UCUM code
    meaning: str = ""  # definition for readers
    reason: Callable[[Record], str] = lambda record: ""  # why the value is unknown; "": the figure does not apply

    def text(self, record: Record) -> str:
        """Return the formatted value of ``record``, or "-" if the value is unknown."""
        value = self.value(record)
        if value is None:
            return MISSING
        if callable(self.form):
            return self.form(value, record)
        return format(value if self.scale is None else value / self.scale, self.form)

    def why_unknown(self, record: Record) -> str:
        """Return the reason why the value of ``record`` is unknown, or "" if the record has no such value."""
        return self.reason(record)

    @property
    def heading(self) -> str:
        """Heading of the figure in a table."""
        return self.title or self.name


class Catalogue(Generic[Record]):
    """Table of ``figures``, one column per figure. ``name``: function that returns the name of a record."""

    def __init__(self, *figures: Figure[Record], name: Callable[[Record], str] | None = None) -> None:
        self.figures, self._name = figures, name or figures[0].text

    def rows(self, records: Sequence[Record]) -> list[list[str]]:
        """Return a row of headings, followed by one row of texts per record."""
        head = [figure.heading for figure in self.figures]
        return [head, *([figure.text(record) for figure in self.figures] for record in records)]

    def aligned(self, records: Sequence[Record], left: Collection[int] = (0,)) -> list[str]:
        """Return the lines of a text table, then the lines of `missing`. ``left``: indices of left-aligned columns."""
        notes = self.missing(records)
        return [*aligned(self.rows(records), left), *([""] if notes else []), *notes]

    def markdown(self, records: Sequence[Record]) -> list[str]:
        """Return the lines of a Markdown table with a row per record, followed by the lines of `missing`."""
        return [*markdown(self.rows(records)), *(f"\n{note}" for note in self.missing(records))]

    def jsonable(self, records: Sequence[Record]) -> list[dict[str, Any]]:
        """Return a list of dicts {figure name: JSON value}, one per record."""
        return [{figure.name: jsonable(figure.value(record)) for figure in self.figures} for record in records]

    def csv(self, records: Sequence[Record]) -> str:
        """Return CSV text: a line of names, then one line per record. Unknown values are empty."""
        return csv_text([figure.name for figure in self.figures], self.jsonable(records))

    def unknown(self, record: Record) -> dict[str, str]:
        """Return {heading of a figure: reason} for the figures whose value is unknown for ``record``."""
        without = [figure for figure in self.figures if figure.value(record) is None]
        return {figure.heading: reason for figure in without if (reason := figure.why_unknown(record))}

    def missing(self, records: Sequence[Record]) -> list[str]:
        """Return a list of lines, one per reason for unknown values. A line names the affected figures and records."""
        names: dict[tuple[str, str], list[str]] = {}
        for record in records:
            for heading, reason in self.unknown(record).items():
                names.setdefault((reason, heading), []).append(self._name(record))
        headings: dict[tuple[str, str], list[str]] = {}
        for (reason, heading), of in names.items():
            whose = f" of {', '.join(dict.fromkeys(of))}" if len(of) < len(records) else ""
            headings.setdefault((whose, reason), []).append(heading)
        return [f"no {', '.join(titles)}{whose}: {reason}" for (whose, reason), titles in headings.items()]


def csv_text(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """Return CSV text with the columns ``names``. ``rows``: dicts {name: value}. Missing values become empty cells."""
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
