"""Pictures by matplotlib, which is loaded late: checks before anything is computed, the saver, and Gantt charts.

`check_plot` comes before the work that a picture needs, `save` after it. `draw_gantt` draws what the rows (ranks,
stages) did over time. Colours that differ in brightness as well as in hue can be told apart in greyscale.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.reporting.atomic import check_folder

EDGED: Final = 3000  # bars, beyond which lines between them would hide them


def require_matplotlib() -> Any:
    """Return matplotlib's module of figures. Raises MissingCapabilityError without matplotlib (local)."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MissingCapabilityError(f"plots need matplotlib: pip install 'hpcdist[analysis]' ({error})") from error
    return matplotlib.figure


def check_plot(file: Path) -> Any:
    """Return matplotlib's module of figures, if it is there and can write a file of this name and place (local).

    Raises MissingCapabilityError, UsageError, StorageError.
    """
    figure = require_matplotlib()
    known = figure.Figure().canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in known:
        raise UsageError(f"{file}: matplotlib writes no such files; choose an ending from {', '.join(sorted(known))}")
    check_folder(file)
    return figure


def save(figure: Any, file: str | Path) -> None:
    """Write ``figure`` into ``file``, whose ending names the format. Raises UsageError, StorageError."""
    try:
        figure.savefig(file, dpi=120)
    except ValueError as error:  # an ending that matplotlib does not know
        raise UsageError(f"{file}: {error}") from error
    except OSError as error:
        raise StorageError(f"{file}: cannot be written: {error.strerror}") from error


@contextmanager
def drawing(file: Path, width: float, height: float) -> Iterator[Any]:
    """Yield a new figure, of so many inches, which is saved as ``file`` when the block ends well.

    Raises what `check_plot` and `save` raise.
    """
    figure = check_plot(file).Figure(figsize=(width, height), layout="constrained")
    yield figure
    save(figure, file)


class GanttBar(NamedTuple):
    """Bar of ``row`` from ``begin`` to ``end`` on the axis of time; ``label`` is written where there is room."""

    row: int
    begin: float
    end: float
    kind: str
    label: str = ""


class GanttStyle(NamedTuple):
    """Style of the bars of a kind: ``low`` and ``height`` in the lane of a row, whose middle is 0."""

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
    character: float = 0.0,
    font: Mapping[str, Any] | None = None,
) -> list[str]:
    """Draw ``bars``, later ones over earlier ones, and return their kinds in the order of ``styles``.

    ``character`` is the time that one character of a label takes at the size of ``font``; 0: no labels.
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
            place = {"ha": "center", "va": "center", "color": readable_on(colour), **(font or {})}
            axes.text((bar.begin + bar.end) / 2, bar.row + low + height / 2, bar.label, **place)
    kinds = {kind for kind, _ in spans}
    return [kind for kind in styles if kind in kinds]


def label_rows(axes: Any, rows: Sequence[str], most: int | None = None) -> None:
    """Give each row of a Gantt chart its lane, from the top, and its name; at most ``most`` evenly chosen names."""
    count = len(rows)
    shown = count if most is None else min(count, most)
    named = [place * (count - 1) // max(1, shown - 1) for place in range(shown)]
    axes.set_ylim(count - 0.45, -0.55)
    axes.set_yticks(named, [rows[row] for row in named], fontsize=8)
    axes.tick_params(axis="y", length=0)


def kind_handles(kinds: Iterable[str], styles: Mapping[str, GanttStyle], meanings: Mapping[str, str]) -> list[Any]:
    """Return the handles of a legend of ``kinds``, each with its meaning."""
    from matplotlib.patches import Patch

    return [Patch(facecolor=styles[kind].colour, label=meanings.get(kind, kind)) for kind in kinds]


def readable_on(colour: str) -> str:
    """Return black or white, whichever can be read on ``colour`` (weights of luma: ITU-R BT.601)."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"
