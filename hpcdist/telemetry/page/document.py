"""HTML document of a run: one file without scripts or external resources."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hpcdist import __version__
from hpcdist.errors import StorageError
from hpcdist.reporting import atomic, plotting, regular
from hpcdist.reporting.template import Templates, templates
from hpcdist.reporting.units import counted, format_bytes, format_duration, format_joules
from hpcdist.telemetry.page import key_figures, run_data
from hpcdist.telemetry.page.charts import over_steps, resources, series, style
from hpcdist.telemetry.page.charts.style import Chart
from hpcdist.telemetry.page.history import FAILED, FINISHED, KILLED
from hpcdist.telemetry.page.key_figures import KeyFigure
from hpcdist.telemetry.page.run_data import ExternalData, PageData

STATE_CLASSES: Final = {FINISHED: "good", FAILED: "bad", KILLED: "bad"}
PROVENANCE: Final = {
    "Platform": "platform",
    "Processor": "processor",
    "Cores of a process": "cores",
    "MPI": "mpi_library",
    "hpcdist": "hpcdist_version",
    "Commit": "git_commit",
    "Python": "python_version",
    "numpy": "numpy_version",
    "mpi4py": "mpi4py_version",
    "h5py": "h5py_version",
    "numba": "numba_version",
    "Slurm job": "slurm_job_id",
    "Partition": "slurm_job_partition",
    "Chaos on purpose": "chaos",
}


@functools.cache
def _templates() -> Templates:
    return templates(Path(__file__).parent, {"counted": counted}, html=True)


def make_page(data: PageData) -> str:
    """Return the HTML page of the run ``data``. Raises MissingCapabilityError if matplotlib is missing."""
    plotting.require_matplotlib()
    charts = over_steps.charts(data) | resources.charts(data)
    settings = [(row.key, row.value, row.default) for row in data.external.settings]
    attributes, key_figures_of_run = data.attributes, key_figures.figures(data)
    page = _templates().get_template("page.html.j2").render(
        data=data,
        charts=charts,
        version=__version__,
        made=datetime.fromtimestamp(data.made_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        run_dir=str(data.run_dir.absolute()),
        manner=STATE_CLASSES.get(data.state.kind, "wait"),
        facts=key_figures.page_facts(data),
        figures=key_figures_of_run,
        phases=list(_phases(data)),
        operations=_operations(data),
        checkpoints=[
            (c.name, "" if c.step < 0 else f"{c.step:,}", c.state, _moment(c.written_utc), format_bytes(c.nbytes),
             c.reason)
            for c in data.external.checkpoints
        ],
        events=[("" if e.step is None else f"{e.step:,}", e.time, e.kind, e.text) for e in data.events],
        jobs=[(_moment(job.time), job.job, job.event, ", ".join(_words(job.values))) for job in data.state.jobs],
        changed=[row for row in settings if row[1] != row[2]],
        unchanged=[row[:2] for row in settings if row[1] == row[2]],
        environment=[(n, attributes[key]) for n, key in PROVENANCE.items() if attributes.get(key) not in (None, "")],
        missing=_missing(data, key_figures_of_run, [chart for group in charts.values() for chart in group]),
    )  # fmt: skip
    return style.printable(page)


def _phases(data: PageData) -> Iterator[tuple[str, str, str]]:
    for phase in sorted(data.energy.phases, key=lambda phase: -phase.seconds):
        yield phase.name, format_duration(phase.seconds), format_joules(phase.joules)
        for part in sorted(data.energy.parts, key=lambda part: -part.seconds) if phase.name == "training" else ():
            yield f"of it {part.name}", format_duration(part.seconds), format_joules(part.joules)


def _operations(data: PageData) -> list[tuple[str, ...]]:
    seconds = series.observed_by_label(data, "collective_seconds_total")
    moved, rates = (series.observed_by_label(data, f"collective_bytes_{of}") for of in ("total", "per_second"))
    return [
        (
            name,
            format_duration(float(observed.value[-1])),
            format_bytes(round(float(moved[name].value[-1]))) if name in moved else "not known",
            f"{format_bytes(round(float(rates[name].value[-1])))}/s" if name in rates else "not known",
        )
        for name, observed in sorted(seconds.items(), key=lambda pair: -float(pair[1].value[-1]))
    ]


def _moment(text: str) -> str:
    return text.replace("T", " ")[:19]


def _words(values: Mapping[str, Any]) -> Iterator[str]:
    for key in ("scheduler", "site", "restart", "code", "word", "how"):
        if values.get(key) not in (None, ""):
            yield f"{key} {values[key]}"


def _missing(data: PageData, shown: Sequence[KeyFigure], charts: Sequence[Chart]) -> dict[str, str]:
    missing = [("All figures and curves", data.reason)] if data.run is None else []
    missing += [(figure.name, figure.note) for figure in shown if figure.value is None]
    missing += [(chart.title, chart.reason) for chart in charts if not chart.svg]
    by_reason: dict[str, list[str]] = {}
    for name, reason in dict.fromkeys(missing):
        by_reason.setdefault(reason, []).append(name)
    return {reason: ", ".join(dict.fromkeys(names)) for reason, names in by_reason.items()}


def write_page(run_dir: str | Path, file: str | Path, external: ExternalData | None = None) -> None:
    """Write the page of the run in ``run_dir``, which may be running, to ``file`` atomically. Raises StorageError.

    ``external`` holds data that this package cannot read itself (see `ExternalData`).
    """
    plotting.require_matplotlib()
    with regular.damage(run_dir, regular.FIGURES):
        data = run_data.read(Path(run_dir), external)
    text = make_page(data).encode("utf-8", errors="replace")
    file = Path(file)
    try:
        atomic.write(file, text)
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror or error}; choose another file") from error
