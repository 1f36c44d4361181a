"""Style of charts as SVG in the page.

Colours become CSS variables, so that the page can change them for dark themes and paper. The palette is colour-blind
safe (Okabe and Ito, "Color Universal Design", 2008).
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from hpcdist.reporting.units import short_number

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return ``text`` with U+FFFD in place of characters that HTML forbids or that change the text direction."""
    return _CONTROL.sub("\ufffd", text)


NARROW: Final = (6.2, 3.1)  # inches: half of the page width
WIDE: Final = (12.6, 3.4)  # inches: the full page width
BLUE, RED, GREEN, SKY = "#0072b2", "#d55e00", "#009e73", "#56b4e9"
ORANGE, PINK, GREY, BROWN = "#e69f00", "#cc79a7", "#7f8790", "#8c6d46"
CYCLE: Final = (BLUE, RED, GREEN, PINK, ORANGE, SKY, BROWN, GREY)
STROKES: Final = ("-", "--", "-.", ":")
INK, MUTED, GRID, PAPER = "#1a1c1f", "#5b6169", "#dfe2e6", "#fefefe"
VARIABLES: Final = {colour: f"--c{index}" for index, colour in enumerate(CYCLE)} | {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    PAPER: "--paper",
}
PHASE_COLOURS: Final = {
    "compute": BLUE,
    "communication": RED,
    "update": GREEN,
    "data": PINK,
    "checkpoint": SKY,
    "validation": ORANGE,
    "other": GREY,
    "rest": GREY,
}
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hpcdist",
    "text.parse_math": False,  # names may contain a "$" that is not a formula
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.limits": (-4, 6),
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.3,
    "lines.solid_capstyle": "butt",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 1.6,
    "legend.borderaxespad": 0.2,
    "legend.columnspacing": 1.2,
    "path.simplify": False,  # lines are already decimated without losing extremes
    "image.composite_image": True,
}
_STYLE_OF: Final = re.compile(r'style="[^"<>]*"')
_PLACES: Final = re.compile(r' (?:d|x|y|width|height|transform|points)="[^"<>]*"')
_FONT: Final = re.compile(r"font(?:-family)?: ?[^;\"]*sans-serif;? ?")


@dataclass(frozen=True)
class Chart:
    """Chart of the page, with the text alternative ``alt``. If ``svg`` is empty, ``reason`` explains the absence."""

    key: str
    title: str
    svg: str = ""
    caption: str = ""
    alt: str = ""
    reason: str = ""
    wide: bool = False


@contextmanager
def chart_style() -> Iterator[None]:
    """Context manager that gives charts drawn in its block the common style."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        yield


def draw_svg(key: str, draw: Callable[[Any], None], size: tuple[float, float] = NARROW) -> str:
    """Return the drawing by ``draw(axes)`` as an SVG element of ``size`` inches. Its element ids begin with ``key``."""
    from matplotlib.figure import Figure

    text = io.StringIO()
    with chart_style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the reader's font may have the glyph
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        unmarked = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=unmarked)
    return embed_svg(text.getvalue(), key)


def embed_svg(text: str, key: str) -> str:
    """Return the matplotlib SVG file ``text`` as an HTML element without fixed size. Its ids begin with ``key``."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", text, count=1)
    text = re.sub(r'\bid="([^"<>]*)"', rf'id="{key}-\1"', text)
    text = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\1{key}-", text)
    text = _STYLE_OF.sub(lambda match: _coloured(match[0]), text)
    # A hundredth of a point is less than a pixel. Texts are not changed.
    text = _PLACES.sub(lambda match: re.sub(r"(\d+\.\d{2})\d+", r"\1", match[0]), text)
    text = re.sub(r" transform=\"rotate\(-0 [^\"]*\"", "", text)
    return re.sub(r"\s*\n\s*", " ", text).strip()


def _coloured(text: str) -> str:
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return _FONT.sub("", text)


def format_thousands(axis: Any) -> None:
    """Format the tick labels of ``axis`` like 2,000 and 1.5 M."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def legend(axes: Any, columns: int = 4) -> None:
    """Draw a legend of at most ``columns`` columns above ``axes``, unless nothing is labelled."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        rows = -(-len(handles) // columns)
        axes.legend(handles, labels, ncols=columns, loc="lower left", bbox_to_anchor=(0.0, 1.0 + 0.01 * rows))


def robust_upper_limit(values: Any, share: float = 98.0) -> float | None:
    """Return an axis limit 15 % above the percentile ``share`` of ``values``, or None if it is not positive."""
    import numpy as np

    finite = values[np.isfinite(values)]
    if not finite.size:
        return None
    top = float(np.percentile(finite, share))
    return max(top * 1.15, 1e-300) if top > 0 else None
