"""Plots with matplotlib, which is imported late: checks before the computation, saving, and Gantt charts.

Choose colours that differ in brightness, so that greyscale prints stay readable.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.reporting.atomic import check_folder

EDGED: Final = 3000  # with more bars, edge lines would hide the bars


def require_matplotlib() -> Any:
    """Return the module ``matplotlib.figure``. Raises MissingCapabilityError without matplotlib."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MissingCapabilityError(f"plots need matplotlib: pip install 'hpcdist[analysis]' ({error})") from error
    return matplotlib.figure


def check_plot(file: Path) -> Any:
    """Check that a plot can be saved as ``file``, and return the module ``matplotlib.figure``.

    Raises MissingCapabilityError without matplotlib, UsageError for a wrong suffix, StorageError without access.
    """
    figure = require_matplotlib()
    formats = figure.Figure().canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in formats:
        raise UsageError(
            f"the plot {file} cannot be saved; choose a file name extension from {', '.join(sorted(formats))}"
        )
    check_folder(file)
    return figure


def save(figure: Any, file: str | Path) -> None:
    """Write ``figure`` to ``file``. The suffix selects the format. Raises UsageError, StorageError."""
    try:
        figure.savefig(file, dpi=120)
    except ValueError as error:  # a suffix that matplotlib does not support
        raise UsageError(f"the plot {file} cannot be saved: {error}; choose another file name extension") from error
    except OSError as error:
        raise StorageError(f"the plot {file} cannot be written: {error.strerror}; choose another path") from error


@contextmanager
def drawing(file: Path, width: float, height: float) -> Iterator[Any]:
    """Yield a new figure of ``width`` x ``height`` inches. After the ``with`` block, save it as ``file``."""
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
    """Style of one kind of bar. In row y, a bar extends from y + ``low`` to y + ``low`` + ``height`` on the y axis."""

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
    """Draw ``bars`` on ``axes``, later bars on top. Return the drawn kinds of bars, in the order of ``styles``.

    ``styles``: style of each kind.
    """
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


def label_rows(axes: Any, rows: Sequence[str], most: int | None = None) -> None:
    """Set up the y axis of a Gantt chart: the first row at the top, with at most ``most`` of the names ``rows``."""
    count = len(rows)
    shown = count if most is None else min(count, most)
    named = [position * (count - 1) // max(1, shown - 1) for position in range(shown)]
    axes.set_ylim(count - 0.45, -0.55)
    axes.set_yticks(named, [rows[row] for row in named], fontsize=8)
    axes.tick_params(axis="y", length=0)


def kind_handles(kinds: Iterable[str], styles: Mapping[str, GanttStyle], meanings: Mapping[str, str]) -> list[Any]:
    """Return one legend handle per kind of bar in ``kinds``. ``meanings``: dict from kind to legend text."""
    from matplotlib.patches import Patch

    return [Patch(facecolor=styles[kind].colour, label=meanings.get(kind, kind)) for kind in kinds]


def readable_on(colour: str) -> str:
    """Return "black" or "white", whichever is readable on background ``colour`` (#rrggbb), by luma of ITU-R BT.601."""
    red, green, blue = (int(colour[offset : offset + 2], 16) for offset in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"
