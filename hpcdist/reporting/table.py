"""Text tables: columns as wide as they need to be, or Markdown; a figure that is not there is a dash.

A table is a list of rows of texts, the head first (`rows_of` makes it of records); `aligned` and `markdown` are its two
forms, `spaced` puts an empty line between groups of rows.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, TypeVar

MISSING: Final = "-"
Record = TypeVar("Record")
Columns = Sequence[tuple[str, Callable[[Record], str]]]  # title, and the text of a record


def text_of(value: float | None, form: str, unit: float = 1.0) -> str:
    """Return ``value`` in multiples of ``unit``, formatted as ``form`` says; `MISSING` for None."""
    return MISSING if value is None else format(value / unit, form)


def rows_of(columns: Columns[Record], records: Iterable[Record]) -> list[list[str]]:
    """Return the head and a row for each record."""
    return [[title for title, _ in columns], *([text(record) for _, text in columns] for record in records)]


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a table: the columns ``left`` (negative: from the last) to the left, others to the right."""
    count = len(rows[0])
    widths = [max(len(row[column]) for row in rows) for column in range(count)]
    signs = ["<" if column in left or column - count in left else ">" for column in range(count)]
    return [
        "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True)).rstrip()
        for row in rows
    ]


def spaced(lines: Sequence[str], groups: Sequence[object]) -> list[str]:
    """Return a head and its ``lines``, with an empty line where the group of a row is not that of the row before."""
    shown = [lines[0]]
    for at, line in enumerate(lines[1:]):
        if at and groups[at] != groups[at - 1]:
            shown.append("")
        shown.append(line)
    return shown


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown: the first and the last column to the left, others to the right."""
    head, *body = rows
    marks = ["---", *["---:"] * (len(head) - 2), "---"]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in body]
    return ["| " + " | ".join(row) + " |" for row in (head, marks, *escaped)]
