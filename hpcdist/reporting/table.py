"""Text tables with aligned columns, or in Markdown. A missing figure is a dash.

A table is a list of rows of texts, the head first.
"""

from collections.abc import Collection, Sequence
from typing import Final

MISSING: Final = "-"


def text_of(value: float | None, form: str, unit: float = 1.0) -> str:
    """Return ``value`` divided by ``unit`` as text in the format ``form``. A ``value`` of None becomes "-"."""
    return MISSING if value is None else format(value / unit, form)


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Format rows as lines of text. ``left`` holds the indices of left-aligned columns; others are right-aligned."""
    count = len(rows[0])
    widths = [max(len(row[column]) for row in rows) for column in range(count)]
    signs = ["<" if column in left or column - count in left else ">" for column in range(count)]
    return [
        "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True)).rstrip()
        for row in rows
    ]


def spaced(lines: Sequence[str], groups: Sequence[object]) -> list[str]:
    """Insert an empty line into a text table wherever ``groups`` changes. Return the new lines.

    ``lines``: the head, then the rows. ``groups``: group of each row.
    """
    shown = [lines[0]]
    for at, line in enumerate(lines[1:]):
        if at and groups[at] != groups[at - 1]:
            shown.append("")
        shown.append(line)
    return shown


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format ``rows``, the head first, as lines of a Markdown table. The first and last column are left-aligned."""
    head, *body = rows
    marks = ["---", *["---:"] * (len(head) - 2), "---"]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in body]
    return ["| " + " | ".join(row) + " |" for row in (head, marks, *escaped)]
