"""HTML elements of a page. All text is escaped; what is markup already says so by its type."""

import html
import re
from collections.abc import Iterable, Sequence
from typing import Final

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")
_VOID: Final = frozenset({"meta", "br", "col"})


class Markup(str):
    """Markup that this module has made, or a drawing: it is not escaped again."""

    __slots__ = ()


def escaped(text: object) -> Markup:
    """Return ``text`` so that it is nothing but text: `Markup` stays as it is."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(printable(str(text)), quote=True))


def printable(text: str) -> str:
    """Return ``text`` with a sign in the place of characters that no page may hold, or that turn its direction."""
    return _CONTROL.sub("\ufffd", text)


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element. Names of attributes lose a last "_", and other "_" become "-"; None leaves one out."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{joined(children)}</{name}>")


def joined(parts: Iterable[object], between: str = "") -> Markup:
    """Return ``parts`` one after the other."""
    return Markup(escaped(between).join(escaped(part) for part in parts))


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], numbers: Iterable[int] = ()) -> Markup:
    """Return a table that scrolls by itself where it is too wide; columns ``numbers`` stand to the right."""
    right = frozenset(numbers)

    def cells(kind: str, row: Sequence[object]) -> Markup:
        scope = "col" if kind == "th" else None
        return joined(
            tag(kind, cell, class_="number" if at in right else None, scope=scope) for at, cell in enumerate(row)
        )

    head = tag("thead", tag("tr", cells("th", heads)))
    body = tag("tbody", *(tag("tr", cells("td", row)) for row in rows))
    return tag("div", tag("table", head, body), class_="scroll", tabindex="0")


def name_value_list(rows: Iterable[tuple[object, object]]) -> Markup:
    """Return a list of names and what they stand for."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in rows))


def folded(summary: str, *children: object) -> Markup:
    """Return something long that is open only on demand."""
    return tag("details", tag("summary", summary), *children)
