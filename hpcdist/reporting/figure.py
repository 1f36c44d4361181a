"""Pictures by matplotlib: a new figure that is saved, and a check of its file before anything is measured for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.reporting.atomic import check_folder


def check_plot(file: Path) -> Any:
    """Return matplotlib's module of figures, if it is there and can write a file of this name and place (local).

    Raises MissingCapabilityError, UsageError, StorageError.
    """
    try:
        import matplotlib.figure as figures
    except ImportError as error:
        raise MissingCapabilityError(f"plots need matplotlib: pip install 'hpcdist[analysis]' ({error})") from error
    known = figures.Figure().canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in known:
        raise UsageError(f"{file}: matplotlib writes no such files; choose an ending from {', '.join(sorted(known))}")
    check_folder(file)
    return figures


@contextmanager
def drawing(file: Path, width: float, height: float, dpi: int = 120) -> Iterator[Any]:
    """Yield a new figure, of so many inches, which is saved as ``file`` when the block ends well.

    Raises what `check_plot` raises, and StorageError when the file cannot be written.
    """
    figure = check_plot(file).Figure(figsize=(width, height), layout="constrained")
    yield figure
    try:
        figure.savefig(file, dpi=dpi)
    except OSError as error:
        raise StorageError(f"{file}: cannot be written: {error.strerror}") from error
