"""``hpcdist report``: what a run did, or a sweep found."""

import json
from pathlib import Path
from typing import Final

import click

from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting import regular
from hpcdist.reporting.units import format_bytes

METRICS_FILE: Final = "metrics.h5"  # of a run directory
_WHAT: Final = "give the directory of a training (its --out), or the results of a benchmark (its --output)"


@click.command("report")
@click.argument("place", metavar="RUN_DIR|RESULTS.h5", type=click.Path(path_type=Path))
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves into this file (.png, .pdf)."
)
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Write all of it as a page that needs no network."
)
@click.option("--no-sample", is_flag=True, help="The page: no text from the model.")
@click.option("--sample-prompt", default="def ", help="The page: text that the model continues.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
@click.option("--markdown", is_flag=True, help="Print the table of a sweep as Markdown.")
def report(
    place: Path,
    plot: Path | None,
    html: Path | None,
    no_sample: bool,
    sample_prompt: str,
    as_json: bool,
    markdown: bool,
) -> None:
    """Show loss, times and bytes of the training in RUN_DIR, or the table of the benchmark in RESULTS.h5.

    Either may be under way. --html makes one file to send to others: charts, figures, a step's timeline, recipe,
    environment and a text sample of the model.
    """
    _check(place, html, no_sample, sample_prompt)
    if as_json and markdown:
        raise UsageError("--json and --markdown are two ways to print the same; choose one")
    if not place.exists():
        raise StorageError(f"{place}: there is no such directory or file; {_WHAT}")
    if place.name == METRICS_FILE and place.is_file():
        raise UsageError(f"{place} is one file of a run; give its directory: hpcdist report {place.parent}")
    if html is not None:
        _page(place, html, None if no_sample else sample_prompt, as_json)
        if not (as_json or plot):
            return
    if place.is_file() and _is_collectives(place):
        _collectives(place, plot, as_json, markdown)
    elif place.is_file():
        _sweep(place, plot, as_json, markdown)
    elif markdown:
        raise UsageError(f"--markdown prints the table of a sweep; {place} is not a results file")
    else:
        _run(place, plot, as_json)
    if plot is not None and not (as_json or markdown):
        click.echo(f"\nplot       {plot}")


def _check(place: Path, html: Path | None, no_sample: bool, prompt: str) -> None:
    """Refuse options that would have no effect."""
    said = click.get_current_context().get_parameter_source("sample_prompt")
    prompted = said is not None and said.name == "COMMANDLINE"
    if html is None and (no_sample or prompted):
        raise UsageError("--no-sample and --sample-prompt are of the page; add --html FILE")
    if no_sample and prompted:
        raise UsageError("--no-sample and --sample-prompt contradict each other; choose one")
    if not prompt:
        raise UsageError("--sample-prompt is empty; give at least one character, or --no-sample")
    if html is not None and place.is_file():
        raise UsageError(f"--html makes the page of a run; {place} is a file of results: use --plot or --markdown")


def _page(run_dir: Path, file: Path, prompt: str | None, quiet: bool) -> None:
    from hpcdist.cli import report_page  # late: --help must not load numpy

    report_page.write(run_dir, file, sample=prompt is not None, prompt=prompt or "")
    if not quiet:
        click.echo(f"page       {file}, {format_bytes(file.stat().st_size)}")


def _run(run_dir: Path, plot: Path | None, as_json: bool) -> None:
    from hpcdist.telemetry import report as reports  # late: --help must not load h5py

    with regular.damage(run_dir, regular.FIGURES):
        found = reports.report(run_dir)
        text = json.dumps(reports.jsonable(found)) if as_json else reports.text(found)
    click.echo(text)
    if plot is not None:
        with regular.damage(run_dir, regular.FIGURES):
            reports.plot(found, plot)


def _is_collectives(path: Path) -> bool:
    from hpcdist.bench.collectives import results
    from hpcdist.hdf5 import files

    with files.open_read(path) as file:
        return bool(file.attrs.get("schema") == results.SCHEMA)


def _collectives(path: Path, plot: Path | None, as_json: bool, markdown: bool) -> None:
    from hpcdist.bench.collectives import report as reports
    from hpcdist.bench.collectives import results

    if markdown:
        raise UsageError("--markdown prints the table of a sweep; leave it out for one of collectives")
    found = results.read(path)
    table = reports.rows(found.configurations)
    if as_json:
        click.echo(json.dumps(reports.jsonable(found)))
    else:
        click.echo("\n".join([reports.text(table), "", *reports.notes(table)]))
    if plot is not None:
        reports.plot(table, plot)


def _sweep(path: Path, plot: Path | None, as_json: bool, markdown: bool) -> None:
    from hpcdist.bench.sweep import report as reports

    found = reports.read(path)
    if as_json:
        click.echo(json.dumps(reports.jsonable(path, found)))
    else:
        click.echo(reports.markdown(found) if markdown else reports.text(path, found))
    if plot is not None:
        reports.plot(found, plot)
