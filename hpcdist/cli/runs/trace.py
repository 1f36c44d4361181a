"""`hpcdist trace`: write the timeline of all ranks in one file for Perfetto, and say who waited for whom."""

import json
import re
from pathlib import Path

import click

from hpcdist import __version__
from hpcdist.cli.common import FILE, Parsed, check_plot, existing_run_argument, json_option
from hpcdist.errors import StorageError
from hpcdist.reporting import regular


def _range_of(text: str, sign: str, digits: int) -> range:
    """Return the numbers from A to B of A``sign``B, or A alone; an empty range for another text."""
    ends = re.fullmatch(rf"(\d{{1,{digits}}})(?:{sign}(\d{{1,{digits}}}))?", text)
    return range(int(ends[1]), int(ends[2] or ends[1]) + 1) if ends else range(0)


def _steps(text: str) -> range:
    """Return the steps of --steps: a range with both of its ends, or one step."""
    if steps := _range_of(text, ":", 18):
        return steps
    raise ValueError(f"{text!r} are no steps; give the first and the last, as 100:120, or one")


def _ranks(text: str) -> tuple[int, ...]:
    """Return the ranks of --ranks, numbers and ranges with commas, ascending."""
    parts = [_range_of(part.strip(), "-", 7) for part in text.split(",")]
    if all(parts):
        return tuple(sorted(set().union(*parts)))
    raise ValueError(f"{text!r} are no ranks; give numbers and ranges, as 0-3,7")


@click.command("trace")
@existing_run_argument
@click.option("-o", "--output", type=FILE, help="Write the trace (.json or .json.gz).")
@click.option(
    "--steps", type=Parsed("A:B", _steps), help="Which steps; the last 20 that all ranks have, where none are given."
)
@click.option("--ranks", type=Parsed("0-3,7", _ranks), help="Which ranks to show; all, where none are given.")
@json_option
@click.option("--plot", type=FILE, help="Draw the step of middle length (.png, .pdf, .svg).")
def command(
    run_dir: Path,
    output: Path | None,
    steps: range | None,
    ranks: tuple[int, ...] | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Show what decided the time of the steps of RUN_DIR, and write a timeline of all ranks.

    The trace opens in https://ui.perfetto.dev and chrome://tracing. The clocks of the nodes are put right, also where
    they are hours apart. The run may be under way, or dead.
    """
    from hpcdist.telemetry.trace import chrome, summary
    from hpcdist.telemetry.trace import plot as trace_plot

    check_plot(plot)
    if output is not None and not output.absolute().parent.is_dir():
        raise StorageError(f"{output}: cannot be written: there is no folder {output.absolute().parent}")
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
    """Return versions of this hpcdist, and of what made the run where its metrics tell."""
    from hpcdist.telemetry.metrics import step_metrics

    about = {"hpcdist": __version__}
    path = run_dir / "metrics.h5"
    if path.exists():
        try:
            attributes = step_metrics.read(path).attributes
        except StorageError:
            return about  # steps and messages are in other files, and `hpcdist report` says what is wrong with this one
        keys = ("hpcdist_version", "git_commit", "mpi_library", "numpy_version", "python_version", "strategy")
        about |= {f"run_{key}": str(attributes[key]) for key in keys if key in attributes}
    return about
