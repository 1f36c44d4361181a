"""``hpcdist report``: what a run did."""

import json
from pathlib import Path

import click


@click.command("report")
@click.argument("run_dir", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves into this file (.png, .pdf)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def report(run_dir: Path, plot: Path | None, as_json: bool) -> None:
    """Show loss, times and bytes of the training in RUN_DIR, which may be under way."""
    from hpcdist.telemetry import report as reports  # late: --help must not load h5py

    found = reports.report(run_dir)
    if as_json:
        click.echo(json.dumps(reports.jsonable(found)))
    else:
        click.echo(reports.text(found))
    if plot is not None:
        reports.plot(found, plot)
        if not as_json:
            click.echo(f"\nplot       {plot}")
