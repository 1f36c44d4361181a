"""A page as HTML: one file, no script, nothing from elsewhere; its policy forbids the browser to fetch anything."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from hpcdist import __version__
from hpcdist.telemetry import page_figures, page_sections
from hpcdist.telemetry.page_data import PageData
from hpcdist.telemetry.page_draw import Chart
from hpcdist.telemetry.page_figures import Figure
from hpcdist.telemetry.page_markup import Markup, joined, tag
from hpcdist.telemetry.page_state import FAILED, FINISHED, KILLED
from hpcdist.telemetry.page_style import STYLE

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
MANNER: Final = {FINISHED: "good", FAILED: "bad", KILLED: "bad"}


def page(data: PageData, charts: Mapping[str, Sequence[Chart]]) -> str:
    """Return the page of ``data``; ``charts`` by section: learning, speed, step, resources, energy."""
    found = page_figures.figures(data)
    all_charts = [chart for own in charts.values() for chart in own]
    sections: list[tuple[str, str, Callable[[], object]]] = [
        ("summary", "Summary", lambda: _summary(data, found)),
        ("learning", "Learning", lambda: _charts(charts["learning"])),
        ("speed", "Speed", lambda: _charts(charts["speed"])),
        ("step", "One step", lambda: _charts(charts["step"])),
        ("resources", "Memory and bytes", lambda: _memory(data, charts["resources"])),
        ("energy", "Energy", lambda: joined([_charts(charts["energy"]), page_sections.phases(data)])),
        ("checkpoints", "Checkpoints", lambda: page_sections.checkpoints(data)),
        ("events", "Events", lambda: page_sections.events(data)),
        ("text", "Text sample", lambda: page_sections.sample(data)),
        ("recipe", "Recipe", lambda: page_sections.configuration(data)),
        ("environment", "Environment", lambda: page_sections.environment(data)),
        ("measurement", "How it was measured", lambda: page_sections.measurement(data, found, all_charts)),
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
    manner = MANNER.get(data.state.kind, "wait")
    title = tag("h1", data.name, " ", tag("span", data.state.kind, class_=f"state {manner}"))
    under = [tag("p", str(data.run_dir.absolute()), class_="under code")]
    if data.state.detail:
        under.append(tag("p", data.state.detail, class_=manner))
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in page_figures.facts(data)]
    return tag("header", title, *under, tag("dl", *facts) if facts else "")


def _section(key: str, title: str, content: Callable[[], object]) -> Markup:
    return tag("section", tag("h2", title, id=f"{key}-title"), content(), id=key, aria_labelledby=f"{key}-title")


def _summary(data: PageData, found: Sequence[Figure]) -> Markup:
    if data.run is None:
        return tag("p", f"No figures: {data.reason}.", class_="absent")
    return tag("dl", *(_figure(figure) for figure in found), class_="figures")


def _memory(data: PageData, charts: Sequence[Chart]) -> Markup:
    return joined([_charts(charts), page_sections.operations(data)])


def _figure(figure: Figure) -> Markup:
    known = figure.value is not None
    value = tag("span", figure.value if known else page_figures.NOT_MEASURED, class_="value" if known else "value none")
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
