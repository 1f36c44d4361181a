"""Text sections of a page, words and tables: checkpoints, events, text, recipe, environment, measurement."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hpcdist.reporting.units import counted, format_bytes
from hpcdist.telemetry.page.charts import series as common
from hpcdist.telemetry.page.charts.style import Chart, Markup, folded, joined, name_value_list, table, tag
from hpcdist.telemetry.page.history import format_duration
from hpcdist.telemetry.page.key_figures import KeyFigure, format_joules, not_measured
from hpcdist.telemetry.page.run_data import PageData, RecipeSetting

MAX_ROWS: Final = 60  # rows of a table that are there at once; the others are folded
PROVENANCE: Final = (
    ("Platform", "platform"),
    ("Processor", "processor"),
    ("Cores of a process", "cores"),
    ("MPI", "mpi_library"),
    ("hpcdist", "hpcdist_version"),
    ("Commit", "git_commit"),
    ("Python", "python_version"),
    ("numpy", "numpy_version"),
    ("mpi4py", "mpi4py_version"),
    ("h5py", "h5py_version"),
    ("numba", "numba_version"),
    ("Slurm job", "slurm_job_id"),
    ("Partition", "slurm_job_partition"),
    ("Chaos on purpose", "chaos"),
)


def phases(data: PageData) -> Markup:
    """Return the table of time and energy by phase over all starts."""
    rows = []
    for phase in sorted(data.energy.phases, key=lambda phase: -phase.seconds):
        rows.append((phase.name, format_duration(phase.seconds), format_joules(phase.joules)))
        parts = sorted(data.energy.parts, key=lambda part: -part.seconds) if phase.name == "training" else ()
        rows += [(f"of it {part.name}", format_duration(part.seconds), format_joules(part.joules)) for part in parts]
    if not rows:
        return Markup("")
    label = tag("p", data.energy.label, class_="under") if data.energy.label else ""
    return joined([tag("h3", "By phase, all starts together"), label, table(("Phase", "Time", "Energy"), rows, (1, 2))])


def operations(data: PageData) -> Markup:
    """Return the table of what went into each operation, since the last start."""
    seconds = common.observed_by_label(data, "collective_seconds_total")
    moved, rates = (common.observed_by_label(data, f"collective_bytes_{of}") for of in ("total", "per_second"))
    rows = [
        (
            name,
            format_duration(float(one.value[-1])),
            format_bytes(round(float(moved[name].value[-1]))) if name in moved else "not known",
            f"{format_bytes(round(float(rates[name].value[-1])))}/s" if name in rates else "not known",
        )
        for name, one in sorted(seconds.items(), key=lambda pair: -float(pair[1].value[-1]))
    ]
    if not rows:
        return Markup("")
    heads = ("Operation", "Time, mean over ranks", "Bytes, all ranks", "Bytes over time")
    said = tag("p", "Of the last start; waiting for others is part of the time.", class_="under")
    return joined([tag("h3", "Messages and collectives"), said, table(heads, rows, (1, 2, 3))])


def checkpoints(data: PageData) -> Markup:
    """Return the table of checkpoints."""
    rows = [
        (
            one.name,
            f"{one.step:,}" if one.step >= 0 else "",
            one.state,
            _moment(one.written_utc),
            format_bytes(one.nbytes),
            one.reason,
        )
        for one in data.beside.checkpoints
    ]
    if not rows:
        return tag("p", data.beside.checkpoints_reason, class_="absent")
    return _long(("Name", "Step", "State", "Written", "Size", "Remark"), rows, (1, 4))


def events(data: PageData) -> Markup:
    """Return what happened, and the batch jobs of the run."""
    rows = [("" if one.step is None else f"{one.step:,}", one.time, one.kind, one.text) for one in data.events]
    found = [_long(("Step", "Time", "What", "Words"), rows, (0,)) if rows else tag("p", "Nothing is noted.")]
    jobs = [(_moment(job.time), job.job, job.event, ", ".join(_words(job.values))) for job in data.state.jobs]
    if jobs:
        found += [tag("h3", "Batch jobs"), _long(("Time", "Job", "What", "Words"), jobs, ())]
    return joined(found)


def _moment(text: str) -> str:
    """Return a time as a file has it, without what nobody reads."""
    return text.replace("T", " ")[:19]


def _words(values: Mapping[str, Any]) -> Iterator[str]:
    for key in ("scheduler", "site", "restart", "code", "word", "how"):
        if values.get(key) not in (None, ""):
            yield f"{key} {values[key]}"


def text_sample(data: PageData) -> Markup:
    """Return text from the model, the prompt set off."""
    found = data.beside.sample
    if not found.text:
        return tag("p", f"No sample: {found.reason}", class_="absent")
    prompt = found.prompt if found.text.startswith(found.prompt) else ""
    words = [tag("p", "Drawn from the newest checkpoint. Bold: the prompt.")]
    return joined([*words, tag("pre", tag("b", prompt), found.text.removeprefix(prompt))])


def configuration(data: PageData) -> Markup:
    """Return the recipe: what differs from the defaults first."""
    settings = data.beside.settings
    if not settings:
        return tag("p", data.beside.settings_reason or "The directory has no recipe.", class_="absent")
    other = [_row(one) for one in settings if one.value != one.default]
    same = [_row(one)[:2] for one in settings if one.value == one.default]
    found: list[object] = [tag("h3", f"Other than the defaults ({len(other)})")]
    found.append(table(("Key", "Value", "Default"), other) if other else tag("p", "Everything is the default."))
    found.append(folded(f"{counted(len(same), 'key')} as by default", table(("Key", "Value"), same)))
    return joined(found)


def _row(one: RecipeSetting) -> tuple[object, ...]:
    return tag("code", one.key), tag("code", one.value), tag("code", one.default)


def environment(data: PageData) -> Markup:
    """Return what the run was made with."""
    told = data.attributes
    rows: list[tuple[str, object]] = [(name, told[key]) for name, key in PROVENANCE if told.get(key) not in (None, "")]
    if not rows:
        return tag("p", "The run did not come so far as to write down its environment.", class_="absent")
    names = ", ".join(data.hosts)
    if data.hosts and len(data.hosts) <= 8:
        rows.append(("Nodes", names))
    many = folded(f"Nodes ({len(data.hosts)})", tag("p", names)) if len(data.hosts) > 8 else ""
    return joined([name_value_list(rows), many])


def measurement(data: PageData, figures: Sequence[KeyFigure], charts: Sequence[Chart]) -> Markup:
    """Return how figures came about, and what is missing and why."""
    rows = [tag("li", tag("strong", name), f": {text}") for name, text in METHODS]
    found: list[object] = [tag("ul", *rows), tag("h3", "Not measured, and why")]
    missing = [(one.name, one.note) for one in not_measured(figures)]
    missing += [(chart.title, chart.reason) for chart in charts if not chart.svg]
    if data.run is None:
        missing = [("All figures and curves", data.reason), *missing]
    by_reason: dict[str, list[str]] = {}
    for name, reason in dict.fromkeys(missing):
        by_reason.setdefault(reason, []).append(name)
    lines = [tag("li", tag("strong", ", ".join(dict.fromkeys(names))), f": {why}") for why, names in by_reason.items()]
    found.append(tag("ul", *lines) if lines else tag("p", "Everything on this page was measured."))
    return joined(found)


METHODS: Final = (
    (
        "Losses",
        "means over the global batch of each step, in nats a token; validation over the same windows each time.",
    ),
    (
        "Entropies",
        "of the n-grams of the training split, in nats a byte: what a table of counts over this text reaches.",
    ),
    (
        "Times",
        (
            "by the monotonic clock of each rank. A step is as long as its slowest rank, from the end of the one "
            "before; medians, shares and speed leave out the first step of each start, which compiles and allocates."
        ),
    ),
    (
        "Communication",
        (
            "time in messages and collectives that nothing hid, waiting for other ranks included. Overlap is the share "
            "of the time of reductions for which no rank waited."
        ),
    ),
    ("Straggler score", "median compute time of the slowest rank over that of the median rank; waiting is not in it."),
    ("Bytes", "payload of messages as sent by a rank. Collectives of the MPI library itself do not tell theirs."),
    ("Memory", "arrays that the program accounts for, by category; a process is its proportional set size at the end."),
    (
        "Energy",
        (
            "differences of hardware counters over all starts of the run, requeues and repeated steps included; each "
            "device once, whoever shares it. Emissions are energy times PUE times the intensity that the recipe names."
        ),
    ),
    (
        "Large runs",
        (
            "figures of ranks over time come from rows spread evenly over the run, and lines are drawn with the "
            "highest and lowest point of each part: spikes stay visible."
        ),
    ),
)


def _long(heads: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[int]) -> Markup:
    """Return a table whose later rows are folded."""
    first = table(heads, rows[:MAX_ROWS], numbers)
    if len(rows) <= MAX_ROWS:
        return first
    return joined([first, folded(f"{len(rows) - MAX_ROWS} more", table(heads, rows[MAX_ROWS:], numbers))])
