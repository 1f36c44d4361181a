"""The page of a run: its figures, charts and words in one HTML file that needs nothing else."""

from pathlib import Path

from hpcdist.errors import StorageError
from hpcdist.reporting import atomic, regular
from hpcdist.telemetry import page_charts, page_data, page_draw, page_html, page_picture, page_resources
from hpcdist.telemetry.page_data import Beside, PageData


def make(data: PageData) -> str:
    """Return the page of ``data``. Raises MissingCapabilityError without matplotlib."""
    page_draw.needed()
    charts = {
        "learning": page_charts.learning(data),
        "speed": page_charts.speed(data),
        "step": [page_picture.timeline(data)],
        "resources": page_resources.resources(data),
        "energy": page_resources.energy(data),
    }
    return page_html.page(data, charts)


def write(run_dir: str | Path, file: str | Path, beside: Beside | None = None) -> None:
    """Write the page of the run in ``run_dir`` into ``file``: all of it or nothing.

    The run may be under way. Raises StorageError where ``run_dir`` holds no run, or ``file`` cannot be written, and
    MissingCapabilityError without matplotlib.
    """
    page_draw.needed()
    with regular.damage(run_dir, regular.FIGURES):
        data = page_data.read(Path(run_dir), beside)
    text = make(data).encode("utf-8", errors="replace")
    file = Path(file)
    try:
        atomic.write(file, text)
    except OSError as error:
        raise StorageError(f"{file}: cannot be written: {error.strerror or error}") from error
