"""HTML pages: of one run, and of a table with a plot. A page is one file without scripts or external resources."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hpcdist import __version__
from hpcdist.reporting import atomic, plotting, regular
from hpcdist.reporting.plotting import Chart
from hpcdist.reporting.template import Templates, templates
from hpcdist.reporting.units import counted, format_bytes, format_duration, format_joules, format_time
from hpcdist.telemetry.metrics import run_figures
from hpcdist.telemetry.page import chart_series, resource_charts, run_data, step_charts
from hpcdist.telemetry.page.energy_data import finite_number
from hpcdist.telemetry.page.history import FAILED, FINISHED, KILLED
from hpcdist.telemetry.page.run_data import ExternalData, RunData

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")
CURE: Final = "choose another file"
LEADING: Final = 3  # number of figures that are drawn large: the losses and the speed
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
    return templates(Path(__file__).parent, {"counted": counted, "capital": _capital}, html=True)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _render(template: str, **values: Any) -> str:
    # U+FFFD replaces characters that HTML forbids or that reverse the text.
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = _templates().get_template(template).render(version=__version__, made=made, **values)
    return _CONTROL.sub("\ufffd", page)


def make_page(data: RunData) -> str:
    """Return the HTML page of the run ``data``. Raises MissingCapabilityError if matplotlib is missing."""
    plotting.require_matplotlib()
    charts = step_charts.charts(data) | resource_charts.charts(data)
    settings = [(row.key, row.value, row.default) for row in data.external.settings]
    return _render(
        "page.html.j2",
        data=data,
        charts={section: [chart for chart in group if chart.svg] for section, group in charts.items()},
        run_dir=str(data.run_dir.absolute()),
        manner=STATE_CLASSES.get(data.state.kind, "wait"),
        sentence=sentence(data),
        facts=page_facts(data),
        figures=run_figures.measured(data),
        leading=LEADING,
        unknown=", ".join(run_figures.RUN.unknown(data)) if data.run is not None else "",
        zeros=run_figures.zero_counters(data),
        phases=list(_phases(data)),
        operations=_operations(data),
        checkpoints=[
            (c.name, "" if c.step < 0 else f"{c.step:,}", c.state, _moment(c.written_utc), format_bytes(c.nbytes),
             c.reason)
            for c in data.external.checkpoints
        ],
        events=[("" if e.step is None else f"{e.step:,}", e.time, e.kind, e.text) for e in data.events],
        jobs=[(f"{job.time:%Y-%m-%d %H:%M:%S}", job.job, job.event, ", ".join(_words(job.values)))
              for job in data.state.jobs],
        changed=[row for row in settings if row[1] != row[2]],
        unchanged=[row[:2] for row in settings if row[1] == row[2]],
        environment=[
            (n, data.attributes[key]) for n, key in PROVENANCE.items() if data.attributes.get(key) not in (None, "")
        ],
        missing=_missing(data, [chart for group in charts.values() for chart in group]),
    )  # fmt: skip


def sentence(data: RunData) -> str:
    """Return a sentence about the model, the data and the result of a run, or "" if no step was completed."""
    if data.run is None:
        return ""
    values = {title: value for title, value, _ in run_figures.measured(data)}
    parameters, path = finite_number(data.attributes.get("parameters")), data.setting("data.path")
    source = "the source code of Python" if path == "" and data.loss_unit else path
    model = f"The {data.setting('model.kind') or 'trained'} model"
    model += f" with {int(parameters):,} parameters" if parameters else ""
    model += f", trained on {source}," if source else ""
    losses = [f"a {title} of {values[title]}" for title in ("validation loss", "training loss") if title in values]
    speed = f" at {values['speed']}" if "speed" in values else ""
    size = f"{counted(data.figures['steps'], 'step')} on {counted(data.world, 'rank')}"
    return f"{model} reached {losses[0]} after {size}{speed}." if losses else f"{model} made {size}{speed}."


def _phases(data: RunData) -> Iterator[tuple[str, str, str]]:
    for phase in sorted(data.energy.phases, key=lambda phase: -phase.seconds):
        yield phase.name, format_duration(phase.seconds), format_joules(phase.joules)
        for part in sorted(data.energy.parts, key=lambda part: -part.seconds) if phase.name == "training" else ():
            yield f"of it {part.name}", format_duration(part.seconds), format_joules(part.joules)


def _operations(data: RunData) -> list[tuple[str, ...]]:
    seconds = chart_series.observed_by_label(data, "collective_seconds_total")
    moved, rates = (chart_series.observed_by_label(data, f"collective_bytes_{of}") for of in ("total", "per_second"))
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


def _missing(data: RunData, charts: Sequence[Chart]) -> dict[str, str]:
    names = {"all figures and curves": data.reason} if data.run is None else run_figures.RUN.unknown(data)
    missing = [*names.items(), *((f"chart {chart.title}", chart.reason) for chart in charts if not chart.svg)]
    by_reason: dict[str, list[str]] = {}
    for name, reason in missing:
        by_reason.setdefault(reason, []).append(name)
    return {reason: ", ".join(names) for reason, names in by_reason.items()}


def page_facts(data: RunData) -> list[tuple[str, str]]:
    """Return a list of (name, text) pairs that describe the job of a run: times, size, strategy and version."""
    state, attributes = data.state, data.attributes
    lasted = sum(max(0.0, start.seen - start.began) for start in state.starts)
    version, commit = (str(attributes.get(name, "")) for name in ("hpcdist_version", "git_commit"))
    if commit and not commit.startswith("unknown"):
        version += f" ({commit[:10]}{'+changes' if commit.endswith('+changes') else ''})"
    parameters = finite_number(attributes.get("parameters"))
    facts: list[tuple[str, Any]] = [
        ("Began", attributes.get("created_utc") if state.began is None else format_time(state.began)),
        ("Last sign of life", None if state.seen is None else format_time(state.seen)),
        ("Time of all starts", format_duration(lasted) if state.starts else None),
        ("Ranks", f"{data.world:,}" if data.world else None),
        ("Nodes", attributes.get("nodes") or len(data.hosts) or None),
        (
            "Strategy",
            attributes.get("architecture") or attributes.get("strategy") or data.setting("parallel.strategy"),
        ),
        ("Site", attributes.get("site") or attributes.get("slurm_job_partition")),
        ("Job", attributes.get("slurm_job_id")),
        ("Parameters", f"{int(parameters):,}" if parameters else None),
        ("MPI", str(attributes.get("mpi_library", "")).partition(", ")[0]),
        ("Version", version.strip()),
    ]
    return [(name, str(value)) for name, value in facts if value not in (None, "")]


def write_page(run_dir: str | Path, file: str | Path, external: ExternalData | None = None) -> None:
    """Write the HTML page of the run in ``run_dir``, with ``external`` data, to ``file``. Raises StorageError."""
    plotting.require_matplotlib()
    with regular.damage(run_dir, regular.FIGURES):
        data = run_data.read(Path(run_dir), external)
    atomic.save(Path(file), make_page(data).encode(errors="replace"), CURE)


def write_table_page(
    file: Path, title: str, rows: Sequence[Sequence[str]], notes: Sequence[str], svg: str, alt: str
) -> None:
    """Write an HTML page with a table and a plot to ``file``. Raises StorageError.

    ``rows``: rows of the table, headings first. ``notes``: text lines below the table. ``svg``: the plot. ``alt``: text
    alternative of the plot.
    """
    chart = Chart("plot", "", svg, alt=alt, wide=True)
    page = _render("table.html.j2", title=title, rows=rows, notes=notes, chart=chart)
    atomic.save(file, page.encode(errors="replace"), CURE)
