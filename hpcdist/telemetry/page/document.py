"""HTML document of a run: one file, no script, nothing from elsewhere.

Its policy forbids the browser to fetch anything.

`write_page` reads the run, draws the charts and writes the file, all of it or nothing. The style sheet serves screens
of any width, in the light and in the dark, and paper.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hpcdist import __version__
from hpcdist.errors import StorageError
from hpcdist.reporting import atomic, regular
from hpcdist.telemetry.page import key_figures, run_data, text_sections
from hpcdist.telemetry.page.charts import over_steps, resources, style
from hpcdist.telemetry.page.charts.style import Chart, Markup, joined, tag
from hpcdist.telemetry.page.history import FAILED, FINISHED, KILLED
from hpcdist.telemetry.page.key_figures import KeyFigure
from hpcdist.telemetry.page.run_data import ExternalData, PageData

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
    found = key_figures.figures(data)
    all_charts = [chart for own in charts.values() for chart in own]
    sections: list[tuple[str, str, Callable[[], object]]] = [
        ("summary", "Summary", lambda: _summary(data, found)),
        ("learning", "Learning", lambda: _charts(charts["learning"])),
        ("speed", "Speed", lambda: _charts(charts["speed"])),
        ("step", "One step", lambda: _charts(charts["step"])),
        ("resources", "Memory and bytes", lambda: _memory(data, charts["resources"])),
        ("energy", "Energy", lambda: joined([_charts(charts["energy"]), text_sections.phases(data)])),
        ("checkpoints", "Checkpoints", lambda: text_sections.checkpoints(data)),
        ("events", "Events", lambda: text_sections.events(data)),
        ("text", "Text sample", lambda: text_sections.text_sample(data)),
        ("recipe", "Recipe", lambda: text_sections.configuration(data)),
        ("environment", "Environment", lambda: text_sections.environment(data)),
        ("measurement", "How it was measured", lambda: text_sections.measurement(data, found, all_charts)),
    ]
    links = [tag("li", tag("a", title, href=f"#{key}")) for key, title, _ in sections]
    contents = tag("nav", tag("ol", *links), aria_label="Contents")
    body = [_header(data), tag("main", contents, *(_section(*one) for one in sections)), _footer(data)]
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


def _summary(data: PageData, found: Sequence[KeyFigure]) -> Markup:
    if data.run is None:
        return tag("p", f"No figures: {data.reason}.", class_="absent")
    return tag("dl", *(_figure(figure) for figure in found), class_="figures")


def _memory(data: PageData, charts: Sequence[Chart]) -> Markup:
    return joined([_charts(charts), text_sections.operations(data)])


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
    made = datetime.fromtimestamp(data.made_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC")
    words = f"Made {made} by hpcdist {__version__}. One file: it loads nothing from elsewhere and runs no script."
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
