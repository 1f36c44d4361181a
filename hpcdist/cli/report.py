"""``hpcdist report``: what a run did, or a sweep found."""

import json
from pathlib import Path
from typing import Final

import click

from hpcdist.errors import StorageError, UsageError

METRICS_FILE: Final = "metrics.h5"  # of a run directory
_WHAT: Final = "give the directory of a training (its --out), or the results of a benchmark (its --output)"


@click.command("report")
@click.argument("place", metavar="RUN_DIR|RESULTS.h5", type=click.Path(path_type=Path))
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves into this file (.png, .pdf)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
@click.option("--markdown", is_flag=True, help="Print the table of a sweep as Markdown.")
def report(place: Path, plot: Path | None, as_json: bool, markdown: bool) -> None:
    """Show loss, times and bytes of the training in RUN_DIR, or the table of the benchmark in RESULTS.h5.

    Either may be under way.
    """
    if as_json and markdown:
        raise UsageError("--json and --markdown are two ways to print the same; choose one")
    if not place.exists():
        raise StorageError(f"{place}: there is no such directory or file; {_WHAT}")
    if place.name == METRICS_FILE and place.is_file():
        raise UsageError(f"{place} is one file of a run; give its directory: hpcdist report {place.parent}")
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


def _run(run_dir: Path, plot: Path | None, as_json: bool) -> None:
    from hpcdist.telemetry import report as reports  # late: --help must not load h5py

    found = reports.report(run_dir)
    click.echo(json.dumps(reports.jsonable(found)) if as_json else reports.text(found))
    if plot is not None:
        reports.plot(found, plot)


def _is_collectives(path: Path) -> bool:
    from hpcdist.bench import collectives_file
    from hpcdist.hdf5 import files

    with files.open_read(path) as file:
        return bool(file.attrs.get("schema") == collectives_file.SCHEMA)


def _collectives(path: Path, plot: Path | None, as_json: bool, markdown: bool) -> None:
    from hpcdist.bench import collectives_file
    from hpcdist.bench import collectives_report as reports

    if markdown:
        raise UsageError("--markdown prints the table of a sweep; leave it out for one of collectives")
    found = collectives_file.read(path)
    table = reports.rows(found.configurations)
    if as_json:
        click.echo(json.dumps(reports.jsonable(found)))
    else:
        click.echo("\n".join([reports.text(table), "", *reports.notes(table)]))
    if plot is not None:
        reports.plot(table, plot)


def _sweep(path: Path, plot: Path | None, as_json: bool, markdown: bool) -> None:
    from hpcdist.bench import report as reports

    found = reports.read(path)
    if as_json:
        click.echo(json.dumps(reports.jsonable(path, found)))
    else:
        click.echo(reports.markdown(found) if markdown else reports.text(path, found))
    if plot is not None:
        reports.plot(found, plot)
