"""Plots with matplotlib, which is imported late: checks before the computation, saving, style, SVG and Gantt charts.

Choose colours that differ in brightness, so that greyscale prints stay readable. The palette is colour-blind safe
(Okabe and Ito, "Color Universal Design", 2008). In an SVG of an HTML page, colours become CSS variables, so that the
page can change them for dark themes and paper.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.reporting.atomic import check_folder
from hpcdist.reporting.units import short_number

EDGED: Final = 3000  # with more bars, edge lines would hide the bars


def require_matplotlib() -> Any:
    """Return the module ``matplotlib.figure``. Raises MissingCapabilityError without matplotlib."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MissingCapabilityError(f"plots need matplotlib; run pip install 'hpcdist[analysis]' ({error})") from error
    return matplotlib.figure


def check_plot(file: Path) -> Any:
    """Return the module ``matplotlib.figure`` if a plot can be saved as ``file``. Raises HpcdistError otherwise."""
    figure = require_matplotlib()
    formats = figure.Figure().canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in formats:
        raise UsageError(
            f"the plot {file} cannot be saved; choose a file name extension from {', '.join(sorted(formats))}"
        )
    check_folder(file)
    return figure


def save(figure: Any, file: str | Path) -> None:
    """Write the matplotlib ``figure`` to ``file``. The suffix selects the format. Raises UsageError, StorageError."""
    try:
        figure.savefig(file, dpi=120)
    except ValueError as error:  # a suffix that matplotlib does not support
        raise UsageError(f"the plot {file} cannot be saved: {error}; choose another file name extension") from error
    except OSError as error:
        raise StorageError(f"the plot {file} cannot be written: {error.strerror}; choose another path") from error


@contextmanager
def drawing(file: Path, width: float, height: float) -> Iterator[Any]:
    """Context manager that yields a new figure of ``width`` x ``height`` inches, and then saves it as ``file``."""
    figure = check_plot(file).Figure(figsize=(width, height), layout="constrained")
    yield figure
    save(figure, file)


class GanttBar(NamedTuple):
    """Bar of a Gantt chart in row number ``row``, from ``begin`` to ``end``. ``label`` is drawn only if it fits."""

    row: int
    begin: float
    end: float
    kind: str
    label: str = ""


class GanttStyle(NamedTuple):
    """Style of one kind of bar. A bar in row y extends from y + ``low`` to y + ``low`` + ``height``."""

    colour: str
    low: float = -0.38
    height: float = 0.76
    alpha: float = 1.0


def draw_gantt(
    axes: Any,
    bars: Sequence[GanttBar],
    styles: Mapping[str, GanttStyle],
    *,
    edge: str = "white",
    character: float = 0.0,  # width of a label character on the time axis; 0: no labels
    font: Mapping[str, Any] | None = None,
) -> list[str]:
    """Draw ``bars`` on ``axes``. ``styles``: {kind of bar: style}. Return the drawn kinds, ordered as in ``styles``."""
    spans: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for bar in bars:
        spans.setdefault((bar.kind, bar.row), []).append((bar.begin, bar.end - bar.begin))
    width = 0.3 if len(bars) <= EDGED else 0.0
    for (kind, row), widths in spans.items():
        colour, low, height, alpha = styles[kind]
        axes.broken_barh(widths, (row + low, height), facecolor=colour, edgecolor=edge, linewidth=width, alpha=alpha)
    for bar in bars if character else ():
        if bar.label and bar.end - bar.begin > character * (len(bar.label) + 0.2):
            colour, low, height, _ = styles[bar.kind]
            text_style = {"ha": "center", "va": "center", "color": readable_on(colour), **(font or {})}
            axes.text((bar.begin + bar.end) / 2, bar.row + low + height / 2, bar.label, **text_style)
    kinds = {kind for kind, _ in spans}
    return [kind for kind in styles if kind in kinds]


def label_rows(axes: Any, rows: Sequence[str], max_labels: int | None = None) -> None:
    """Label the y axis of a Gantt chart with ``rows``, top to bottom. ``max_labels``: label at most this many rows."""
    count = len(rows)
    shown = count if max_labels is None else min(count, max_labels)
    named = [position * (count - 1) // max(1, shown - 1) for position in range(shown)]
    axes.set_ylim(count - 0.45, -0.55)
    axes.set_yticks(named, [rows[row] for row in named], fontsize=8)
    axes.tick_params(axis="y", length=0)


def kind_handles(kinds: Iterable[str], styles: Mapping[str, GanttStyle], meanings: Mapping[str, str]) -> list[Any]:
    """Return a legend handle for each of ``kinds``. ``styles``: {kind: style}. ``meanings``: {kind: legend text}."""
    from matplotlib.patches import Patch

    return [Patch(facecolor=styles[kind].colour, label=meanings.get(kind, kind)) for kind in kinds]


def readable_on(colour: str) -> str:
    """Return "black" or "white": the more readable text colour on the background ``colour`` (#rrggbb)."""
    red, green, blue = (int(colour[offset : offset + 2], 16) for offset in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


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
    """Chart of an HTML page, with alternative text ``alt``. If ``svg`` is empty, ``reason`` is shown instead."""

    key: str
    title: str
    svg: str = ""
    caption: str = ""
    alt: str = ""
    reason: str = ""
    wide: bool = False


@contextmanager
def chart_style() -> Iterator[None]:
    """Context manager that gives the charts drawn in its block the style of the HTML pages."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        yield


def draw_svg(key: str, draw: Callable[[Any], None], size: tuple[float, float] = NARROW) -> str:
    """Return the SVG element that ``draw(axes)`` draws. ``key``: prefix of ids. ``size``: (width, height) in inches."""
    return figure_svg(key, lambda figure: draw(figure.subplots()), size)


def figure_svg(key: str, draw: Callable[[Any], None], size: tuple[float, float]) -> str:
    """Return the SVG element that ``draw(figure)`` draws. ``key``: prefix of ids. ``size``: (width, height), inches."""
    matplotlib = require_matplotlib()
    text = io.StringIO()
    with chart_style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the reader's font may have the glyph
        figure = matplotlib.Figure(figsize=size, layout="constrained")
        draw(figure)
        unmarked = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=unmarked)
    return embed_svg(text.getvalue(), key)


def embed_svg(text: str, key: str) -> str:
    """Return ``text``, an SVG file written by matplotlib, as an element for HTML pages. ``key``: prefix of its ids."""
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
    """Format the tick labels of the matplotlib ``axis`` like 2,000 and 1.5 M."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def legend(axes: Any, columns: int = 4) -> None:
    """Draw a legend of at most ``columns`` columns above ``axes``. Without labelled items, draw nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        rows = -(-len(handles) // columns)
        axes.legend(handles, labels, ncols=columns, loc="lower left", bbox_to_anchor=(0.0, 1.0 + 0.01 * rows))


def robust_upper_limit(values: Any, share: float = 98.0) -> float | None:
    """Return an axis limit 15 % above percentile ``share`` of ``values``, or None if the limit is not positive."""
    import numpy as np

    finite = values[np.isfinite(values)]
    if not finite.size:
        return None
    top = float(np.percentile(finite, share))
    return max(top * 1.15, 1e-300) if top > 0 else None
