"""HTML document of a run: one file without scripts, whose content security policy forbids to fetch anything.

`write_page` reads the run, draws the charts and writes the file, all of it or nothing. The style sheet serves screens
of any width, light and dark themes, and paper. The sections of text and tables are here: checkpoints, events, text
sample, recipe, environment, measurement.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hpcdist import __version__
from hpcdist.errors import StorageError
from hpcdist.reporting import atomic, regular
from hpcdist.reporting.units import counted, format_bytes
from hpcdist.telemetry.page import key_figures, run_data
from hpcdist.telemetry.page.charts import over_steps, resources, style
from hpcdist.telemetry.page.charts import series as common
from hpcdist.telemetry.page.charts.style import Chart, Markup, folded, joined, name_value_list, table, tag
from hpcdist.telemetry.page.history import FAILED, FINISHED, KILLED, format_duration
from hpcdist.telemetry.page.key_figures import KeyFigure, format_joules, not_measured
from hpcdist.telemetry.page.run_data import ExternalData, PageData, RecipeSetting

MAX_ROWS: Final = 60  # rows of a table that are shown at once; the others are folded
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
    """Return the table of time and bytes of each collective and message since the last start."""
    seconds = common.observed_by_label(data, "collective_seconds_total")
    moved, rates = (common.observed_by_label(data, f"collective_bytes_{of}") for of in ("total", "per_second"))
    rows = [
        (
            name,
            format_duration(float(series.value[-1])),
            format_bytes(round(float(moved[name].value[-1]))) if name in moved else "not known",
            f"{format_bytes(round(float(rates[name].value[-1])))}/s" if name in rates else "not known",
        )
        for name, series in sorted(seconds.items(), key=lambda pair: -float(pair[1].value[-1]))
    ]
    if not rows:
        return Markup("")
    heads = ("Operation", "Time, mean over ranks", "Bytes, all ranks", "Bytes over time")
    caption = tag("p", "Of the last start; waiting for others is part of the time.", class_="under")
    return joined([tag("h3", "Messages and collectives"), caption, table(heads, rows, (1, 2, 3))])


def checkpoints(data: PageData) -> Markup:
    """Return the table of checkpoints."""
    rows = [
        (
            checkpoint.name,
            f"{checkpoint.step:,}" if checkpoint.step >= 0 else "",
            checkpoint.state,
            _moment(checkpoint.written_utc),
            format_bytes(checkpoint.nbytes),
            checkpoint.reason,
        )
        for checkpoint in data.beside.checkpoints
    ]
    if not rows:
        return tag("p", data.beside.checkpoints_reason, class_="absent")
    return _long(("Name", "Step", "State", "Written", "Size", "Remark"), rows, (1, 4))


def events(data: PageData) -> Markup:
    """Return the table of incidents, and that of the batch jobs of the run."""
    rows = [
        ("" if incident.step is None else f"{incident.step:,}", incident.time, incident.kind, incident.text)
        for incident in data.events
    ]
    parts = [_long(("Step", "Time", "What", "Words"), rows, (0,)) if rows else tag("p", "Nothing is noted.")]
    jobs = [(_moment(job.time), job.job, job.event, ", ".join(_words(job.values))) for job in data.state.jobs]
    if jobs:
        parts += [tag("h3", "Batch jobs"), _long(("Time", "Job", "What", "Words"), jobs, ())]
    return joined(parts)


def _moment(text: str) -> str:
    """Return a time of a file to the second, without zone."""
    return text.replace("T", " ")[:19]


def _words(values: Mapping[str, Any]) -> Iterator[str]:
    for key in ("scheduler", "site", "restart", "code", "word", "how"):
        if values.get(key) not in (None, ""):
            yield f"{key} {values[key]}"


def text_sample(data: PageData) -> Markup:
    """Return the text sample of the model, with the prompt in bold."""
    sample = data.beside.sample
    if not sample.text:
        return tag("p", f"No sample: {sample.reason}", class_="absent")
    prompt = sample.prompt if sample.text.startswith(sample.prompt) else ""
    words = [tag("p", "Drawn from the newest checkpoint. Bold: the prompt.")]
    return joined([*words, tag("pre", tag("b", prompt), sample.text.removeprefix(prompt))])


def configuration(data: PageData) -> Markup:
    """Return the recipe, the keys that differ from their defaults first."""
    settings = data.beside.settings
    if not settings:
        return tag("p", data.beside.settings_reason or "The directory has no recipe.", class_="absent")
    other = [_row(setting) for setting in settings if setting.value != setting.default]
    same = [_row(setting)[:2] for setting in settings if setting.value == setting.default]
    parts: list[object] = [tag("h3", f"Other than the defaults ({len(other)})")]
    parts.append(table(("Key", "Value", "Default"), other) if other else tag("p", "Everything is the default."))
    parts.append(folded(f"{counted(len(same), 'key')} as by default", table(("Key", "Value"), same)))
    return joined(parts)


def _row(setting: RecipeSetting) -> tuple[object, ...]:
    return tag("code", setting.key), tag("code", setting.value), tag("code", setting.default)


def environment(data: PageData) -> Markup:
    """Return the environment of the run: versions, machine, job and nodes."""
    attributes = data.attributes
    rows: list[tuple[str, object]] = [
        (name, attributes[key]) for name, key in PROVENANCE if attributes.get(key) not in (None, "")
    ]
    if not rows:
        return tag("p", "The run did not come so far as to write down its environment.", class_="absent")
    names = ", ".join(data.hosts)
    if data.hosts and len(data.hosts) <= 8:
        rows.append(("Nodes", names))
    many = folded(f"Nodes ({len(data.hosts)})", tag("p", names)) if len(data.hosts) > 8 else ""
    return joined([name_value_list(rows), many])


def measurement(data: PageData, figures: Sequence[KeyFigure], charts: Sequence[Chart]) -> Markup:
    """Return the methods of measurement, and the list of what is missing with the reasons."""
    rows = [tag("li", tag("strong", name), f": {text}") for name, text in METHODS]
    parts: list[object] = [tag("ul", *rows), tag("h3", "Not measured, and why")]
    missing = [(figure.name, figure.note) for figure in not_measured(figures)]
    missing += [(chart.title, chart.reason) for chart in charts if not chart.svg]
    if data.run is None:
        missing = [("All figures and curves", data.reason), *missing]
    by_reason: dict[str, list[str]] = {}
    for name, reason in dict.fromkeys(missing):
        by_reason.setdefault(reason, []).append(name)
    lines = [tag("li", tag("strong", ", ".join(dict.fromkeys(names))), f": {why}") for why, names in by_reason.items()]
    parts.append(tag("ul", *lines) if lines else tag("p", "Everything on this page was measured."))
    return joined(parts)


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


STYLE: Final = """
:root { color-scheme: light dark;
  --ink: #1a1c1f; --muted: #5b6169; --grid: #dfe2e6; --paper: #ffffff; --panel: #f6f7f9; --accent: #0b5cad;
  --good: #1b7f4b; --bad: #b3261e; --wait: #8a5a00;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #e69f00; --c5: #56b4e9; --c6: #8c6d46;
  --c7: #7f8790 }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e6e8eb; --muted: #a2a9b2; --grid: #343a42; --paper: #15181c; --panel: #1d2126; --accent: #7db7ee;
  --good: #63c995; --bad: #f28b82; --wait: #e3b35f;
  --c0: #4a9fd8; --c1: #ef7d32; --c2: #2fbf94; --c3: #e09cc2; --c4: #f0b43c; --c5: #8ccbf2; --c6: #b8966a;
  --c7: #9aa3ad } }
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial,
  sans-serif }
main, header, footer { max-width: 1240px; margin: 0 auto; padding: 0 24px }
header { padding-top: 28px }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere }
h2 { font-size: 20px; margin: 40px 0 10px; padding-top: 8px; border-top: 1px solid var(--grid) }
h3 { font-size: 15px; margin: 0 0 4px }
p { margin: 6px 0; max-width: 76ch }
a { color: var(--accent) }
code, pre, .code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;
  font-size: 13px }
.under { color: var(--muted); overflow-wrap: anywhere }
.state { display: inline-block; padding: 1px 10px; border-radius: 10px; border: 1px solid; font-size: 14px;
  font-weight: 600;
  vertical-align: 3px; margin-left: 10px; white-space: nowrap }
.good { color: var(--good) } .bad { color: var(--bad) } .wait { color: var(--wait) }
nav { position: sticky; top: 0; z-index: 1; background: var(--paper); margin-top: 14px; padding: 8px 0;
  border-bottom: 1px solid var(--grid); overflow-x: auto; white-space: nowrap }
nav ol { list-style: none; display: flex; gap: 18px; margin: 0; padding: 0; font-size: 14px }
nav a { text-decoration: none }
section { scroll-margin-top: 44px }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(215px, 1fr)); gap: 10px; margin: 14px 0;
  padding: 0 }
.figures > div { background: var(--panel); border-radius: 6px; padding: 10px 13px; min-width: 0 }
.figures dt { color: var(--muted); font-size: 13px }
.figures dd { margin: 0; overflow-wrap: anywhere }
.figures .value { font-size: 20px; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums;
  display: block }
.figures .none { color: var(--muted); font-weight: 500; font-size: 16px }
.figures .note { color: var(--muted); font-size: 12.5px; line-height: 1.4; display: block }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: 22px 26px }
figure { margin: 0; min-width: 0; break-inside: avoid }
figure.wide { grid-column: 1 / -1 }
.chart { overflow-x: auto }
.chart svg { display: block; width: 100%; height: auto }
.chart svg * { stroke-linejoin: round }
.chart svg text { font-family: inherit }
figcaption { color: var(--muted); font-size: 13px; max-width: 100ch }
.absent { background: var(--panel); border-radius: 6px; color: var(--muted); padding: 12px 14px; font-size: 13.5px;
  margin: 0;
  max-width: none; overflow-wrap: anywhere }
.scroll { overflow-x: auto; margin: 8px 0 }
table { border-collapse: collapse; font-size: 13.5px; min-width: 40% }
th { text-align: left; color: var(--muted); font-weight: 600; border-bottom: 1px solid var(--muted) }
th, td { padding: 4px 18px 4px 0; vertical-align: top }
td { border-bottom: 1px solid var(--grid); overflow-wrap: break-word; max-width: 70ch }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
dl { margin: 8px 0; display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 2px 28px }
header dl { grid-template-columns: repeat(auto-fill, minmax(185px, 1fr)) }
.charts + h3, .scroll + h3 { margin-top: 22px }
dl > div { min-width: 0 } dt { color: var(--muted); font-size: 13px } dd { margin: 0 0 6px; overflow-wrap: anywhere }
pre { background: var(--panel); border-radius: 6px; padding: 12px 14px; white-space: pre-wrap;
  overflow-wrap: anywhere;
  max-height: 460px; overflow-y: auto; margin: 8px 0 }
pre b { color: var(--accent); font-weight: 600 }
details { margin: 8px 0 } summary { cursor: pointer; color: var(--accent) }
li { margin: 3px 0; overflow-wrap: anywhere }
footer { color: var(--muted); font-size: 13px; margin: 44px auto 40px; padding-top: 10px;
  border-top: 1px solid var(--grid) }
@media screen and (max-width: 860px) {
  main, header, footer { padding-left: 14px; padding-right: 14px }
  .charts { grid-template-columns: minmax(0, 1fr) }
  .chart svg text { font-size: 9px !important } figure.wide .chart svg { min-width: 700px }
  figure.wide .chart svg text { font-size: 9px !important }
  .figures { grid-template-columns: repeat(auto-fill, minmax(158px, 1fr)) }
  .state { margin-left: 0 } dl { grid-template-columns: minmax(0, 1fr) } }
@media print {
  :root { color-scheme: light; --ink: #000; --muted: #444; --grid: #ccc; --paper: #fff; --panel: #f4f4f4;
  --accent: #000;
    --good: #1b7f4b; --bad: #b3261e; --wait: #8a5a00; --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7;
    --c4: #e69f00; --c5: #56b4e9; --c6: #8c6d46; --c7: #7f8790 }
  body { font-size: 10.5pt } nav { display: none } main, header, footer { max-width: none; padding: 0 }
  h2 { break-after: avoid } .figures > div { break-inside: avoid; border: 1px solid var(--grid) }
  .figures { grid-template-columns: repeat(4, minmax(0, 1fr)) } pre { max-height: none }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact } }
""".strip()


POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STATE_CLASSES: Final = {FINISHED: "good", FAILED: "bad", KILLED: "bad"}


def render_page(data: PageData, charts: Mapping[str, Sequence[Chart]]) -> str:
    """Return the page of ``data``; ``charts`` by section: learning, speed, step, resources, energy."""
    figures = key_figures.figures(data)
    all_charts = [chart for own in charts.values() for chart in own]
    sections: list[tuple[str, str, Callable[[], object]]] = [
        ("summary", "Summary", lambda: _summary(data, figures)),
        ("learning", "Learning", lambda: _charts(charts["learning"])),
        ("speed", "Speed", lambda: _charts(charts["speed"])),
        ("step", "One step", lambda: _charts(charts["step"])),
        ("resources", "Memory and bytes", lambda: _memory(data, charts["resources"])),
        ("energy", "Energy", lambda: joined([_charts(charts["energy"]), phases(data)])),
        ("checkpoints", "Checkpoints", lambda: checkpoints(data)),
        ("events", "Events", lambda: events(data)),
        ("text", "Text sample", lambda: text_sample(data)),
        ("recipe", "Recipe", lambda: configuration(data)),
        ("environment", "Environment", lambda: environment(data)),
        ("measurement", "How it was measured", lambda: measurement(data, figures, all_charts)),
    ]
    links = [tag("li", tag("a", title, href=f"#{key}")) for key, title, _ in sections]
    contents = tag("nav", tag("ol", *links), aria_label="Contents")
    body = [_header(data), tag("main", contents, *(_section(*section) for section in sections)), _footer(data)]
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=f"hpcdist {__version__}"),
        tag("title", f"{data.name}: {data.state.kind}"),
        tag("style", Markup(STYLE)),
    ]
    return "<!DOCTYPE html>\n" + tag("html", tag("head", *head), "\n", tag("body", *body), lang="en") + "\n"


def _header(data: PageData) -> Markup:
    manner = STATE_CLASSES.get(data.state.kind, "wait")
    title = tag("h1", data.name, " ", tag("span", data.state.kind, class_=f"state {manner}"))
    under = [tag("p", str(data.run_dir.absolute()), class_="under code")]
    if data.state.detail:
        under.append(tag("p", data.state.detail, class_=manner))
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in key_figures.page_facts(data)]
    return tag("header", title, *under, tag("dl", *facts) if facts else "")


def _section(key: str, title: str, content: Callable[[], object]) -> Markup:
    return tag("section", tag("h2", title, id=f"{key}-title"), content(), id=key, aria_labelledby=f"{key}-title")


def _summary(data: PageData, figures: Sequence[KeyFigure]) -> Markup:
    if data.run is None:
        return tag("p", f"No figures: {data.reason}.", class_="absent")
    return tag("dl", *(_figure(figure) for figure in figures), class_="figures")


def _memory(data: PageData, charts: Sequence[Chart]) -> Markup:
    return joined([_charts(charts), operations(data)])


def _figure(figure: KeyFigure) -> Markup:
    known = figure.value is not None
    value = tag("span", figure.value if known else key_figures.NOT_MEASURED, class_="value" if known else "value none")
    note = tag("span", figure.note, class_="note") if figure.note else ""
    return tag("div", tag("dt", figure.name), tag("dd", value, note))


def _charts(charts: Sequence[Chart]) -> Markup:
    return tag("div", *(_chart(chart) for chart in charts), class_="charts")


def _chart(chart: Chart) -> Markup:
    manner = "wide" if chart.wide else None
    heading = tag("h3", chart.title)
    if not chart.svg:
        return tag("figure", heading, tag("p", f"Not drawn: {chart.reason}", class_="absent"), class_=manner)
    # One picture with words of its own: its texts alone would be read as loose numbers.
    opening = str(tag("svg", role="img", aria_label=chart.alt)).removesuffix("></svg>")
    drawing = Markup(chart.svg.replace("<svg", opening, 1))
    caption = tag("figcaption", chart.caption) if chart.caption.strip() else ""
    return tag("figure", heading, tag("div", drawing, class_="chart", tabindex="0"), caption, class_=manner)


def _footer(data: PageData) -> Markup:
    created = datetime.fromtimestamp(data.made_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC")
    words = f"Made {created} by hpcdist {__version__}. One file: it loads nothing from elsewhere and runs no script."
    return tag("footer", words)


def make_page(data: PageData) -> str:
    """Return the page of ``data``. Raises MissingCapabilityError without matplotlib."""
    style.require_matplotlib()
    charts = {
        "learning": over_steps.learning_charts(data),
        "speed": over_steps.speed_charts(data),
        "step": [over_steps.step_chart(data)],
        "resources": resources.resource_charts(data),
        "energy": resources.energy_charts(data),
    }
    return render_page(data, charts)


def write_page(run_dir: str | Path, file: str | Path, beside: ExternalData | None = None) -> None:
    """Write the page of the run in ``run_dir`` into ``file``: all of it or nothing.

    The run may be under way. Raises StorageError where ``run_dir`` holds no run, or ``file`` cannot be written, and
    MissingCapabilityError without matplotlib.
    """
    style.require_matplotlib()
    with regular.damage(run_dir, regular.FIGURES):
        data = run_data.read(Path(run_dir), beside)
    text = make_page(data).encode("utf-8", errors="replace")
    file = Path(file)
    try:
        atomic.write(file, text)
    except OSError as error:
        raise StorageError(f"{file}: cannot be written: {error.strerror or error}") from error
