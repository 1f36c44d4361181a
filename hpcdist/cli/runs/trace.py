"""`hpcdist trace`: write the timeline of all ranks for Perfetto, and print which ranks waited for which."""

import json
import re
from pathlib import Path

import click

from hpcdist import __version__
from hpcdist.cli.common import FILE, Parsed, check_plot, existing_run_argument, json_option
from hpcdist.constants import METRICS_FILE
from hpcdist.errors import StorageError
from hpcdist.reporting import regular


def _range_of(text: str, sign: str, digits: int) -> range:
    # "A" or "A<sign>B", B included. Invalid text or too many digits: an empty range.
    ends = re.fullmatch(rf"(\d{{1,{digits}}})(?:{sign}(\d{{1,{digits}}}))?", text)
    return range(int(ends[1]), int(ends[2] or ends[1]) + 1) if ends else range(0)


def _steps(text: str) -> range:
    if steps := _range_of(text, ":", 18):
        return steps
    raise ValueError(f"{text!r} is not a range of steps; give FIRST:LAST, e.g. 100:120, or one step number")


def _ranks(text: str) -> tuple[int, ...]:
    parts = [_range_of(part.strip(), "-", 7) for part in text.split(",")]
    if all(parts):
        return tuple(sorted(set().union(*parts)))
    raise ValueError(f"{text!r} is not a list of ranks; give rank numbers and ranges, e.g. 0-3,7")


@click.command("trace")
@existing_run_argument
@click.option("-o", "--output", type=FILE, help="File to write the trace to (.json or .json.gz).")
@click.option("--steps", type=Parsed("A:B", _steps), help="Steps to show.  [default: the last 20 that all ranks have]")
@click.option("--ranks", type=Parsed("0-3,7", _ranks), help="Ranks to show.  [default: all]")
@json_option
@click.option("--plot", type=FILE, help="Draw a step of median length (.png, .pdf, .svg).")
def command(
    run_dir: Path,
    output: Path | None,
    steps: range | None,
    ranks: tuple[int, ...] | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Show which operations determined the step times of RUN_DIR, and write a timeline of all ranks.

    Open the trace in https://ui.perfetto.dev or chrome://tracing. Clock differences between nodes are corrected. The
    run may still be running, or have died.
    """
    from hpcdist.telemetry.trace import chrome, summary
    from hpcdist.telemetry.trace import plot as trace_plot

    check_plot(plot)
    if output is not None and not output.absolute().parent.is_dir():
        raise StorageError(
            f"{output} cannot be written: create the folder {output.absolute().parent}, which is missing"
        )
    with regular.damage(run_dir, regular.FIGURES):
        trace = summary.collect(run_dir, steps, ranks)
        figures = summary.figures(trace)
        written = chrome.write(trace, output, _header(run_dir)) if output is not None else 0
    if as_json:
        click.echo(json.dumps(figures | {"output": None if output is None else str(output), "events": written}))
    else:
        click.echo(summary.format_text(figures))
        if output is not None:
            click.echo(f"trace          {output}: {written} events, for https://ui.perfetto.dev or chrome://tracing")
    if plot is not None:
        step = trace_plot.draw(trace, plot)
        if not as_json:
            click.echo(f"plot           {plot}: step {step}")


def _header(run_dir: Path) -> dict[str, str]:
    from hpcdist.telemetry.metrics import step_metrics

    about = {"hpcdist": __version__}
    path = run_dir / METRICS_FILE
    if path.exists():
        try:
            attributes = step_metrics.read(path).attributes
        except StorageError:
            return about  # the trace uses other files; `hpcdist report` describes the damage of this file
        keys = ("hpcdist_version", "git_commit", "mpi_library", "numpy_version", "python_version", "strategy")
        about |= {f"run_{key}": str(attributes[key]) for key in keys if key in attributes}
    return about
