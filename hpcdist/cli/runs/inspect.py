"""Commands that look into runs: list them (`hpcdist runs`), trace their operations, and find the cause of a hang."""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from hpcdist import __version__
from hpcdist.cli.common import DIRECTORY, FILE, Parsed, check_plot, existing_run_argument, json_option
from hpcdist.comm.record.flight_recorder import RecordedEvent
from hpcdist.constants import METRICS_FILE, RECIPE_FILE
from hpcdist.errors import FAILURE, OK, HpcdistError, StorageError
from hpcdist.reporting import regular
from hpcdist.reporting.jsonable import jsonable
from hpcdist.reporting.table import aligned, text_of
from hpcdist.reporting.units import format_duration
from hpcdist.telemetry.hang import Finding, HangReport, RankState, analyse, load

DEFAULT: Final = "runs"
RUNNING, FAILED, NEW = "running", "failed", "no step yet"


@click.command("runs")
@click.argument("folder", type=DIRECTORY, default=DEFAULT)
@json_option
def runs(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER, newest first: state, steps, loss, speed and age.

    States: running (a live process holds the lock), finished, stopped (saved on request, can be resumed), or failed.
    `hpcdist report RUN RUN` and `hpcdist compare RUN RUN` print more.
    """
    if not folder.is_dir():
        raise StorageError(f"the folder {folder} does not exist; runs are in {DEFAULT}/ unless --out was given")
    paths = [path for path in folder.iterdir() if any((path / name).is_file() for name in (RECIPE_FILE, METRICS_FILE))]
    rows = sorted((_run_row(path) for path in paths), key=lambda row: row["age_s"])
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = [("run", "state", "steps", "loss", "speed", "age")]
    for row in rows:
        planned, loss = row["planned"], text_of(row["loss"], ".4f")
        steps = f"{row['steps']}" + (f" of {planned}" if planned is not None else "")
        speed, age = text_of(row["tokens_per_s"], ",.0f"), format_duration(row["age_s"])
        speed += f" {row['speed_unit']}/s" if row["tokens_per_s"] is not None else ""
        table.append((row["run"], row["state"], steps, loss, speed, age))
    click.echo("\n".join(aligned(table, left=(0, 1))) if rows else f"{folder} contains no runs")


def _run_row(path: Path) -> dict[str, Any]:
    from hpcdist.telemetry import report as reports
    from hpcdist.training.recipe import recipe as recipes

    row: dict[str, Any] = {"run": path.name, "state": _state(path), "planned": None, "steps": 0}
    row |= {"loss": None, "tokens_per_s": None, "speed_unit": "tokens", "age_s": _age_s(path)}
    try:
        if (path / RECIPE_FILE).is_file():  # not the run of a script
            row["planned"] = recipes.load_stored(path / RECIPE_FILE).run.steps
        run = reports.report(path)
        figures = run.figures
        row |= {"steps": figures["steps"], "loss": figures["train_loss_mean"], "tokens_per_s": figures["tokens_per_s"]}
        row["speed_unit"] = run.speed_unit
    except HpcdistError:  # just started or damaged: reported by its state
        row["state"] = row["state"] or NEW
    return row


def _state(path: Path) -> str:
    from hpcdist.checkpoint.lock import LOCK_FILE, is_held
    from hpcdist.comm.record.run_journal import known_starts
    from hpcdist.telemetry.page import history

    if is_held(path):
        return RUNNING
    if starts := known_starts(path):
        if not starts[-1].end and not (path / RECIPE_FILE).exists():  # a script holds no lock
            return RUNNING if history.read_state(path, time.time_ns()).kind == history.RUNNING else FAILED
        return starts[-1].end or FAILED
    return FAILED if (path / LOCK_FILE).exists() else NEW  # it died, or was refused, before its first step


def _age_s(path: Path) -> float:
    newest = max((item.stat().st_mtime for item in path.iterdir()), default=time.time())
    return max(0.0, time.time() - newest)


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
def trace(
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
    from hpcdist.telemetry.trace import output as trace_output
    from hpcdist.telemetry.trace import summary

    check_plot(plot)
    if output is not None and not output.absolute().parent.is_dir():
        raise StorageError(
            f"{output} cannot be written: create the folder {output.absolute().parent}, which is missing"
        )
    with regular.damage(run_dir, regular.FIGURES):
        steps_trace = summary.collect(run_dir, steps, ranks)
        figures = summary.figures(steps_trace)
        written = trace_output.write(steps_trace, output, _header(run_dir)) if output is not None else 0
    if as_json:
        click.echo(json.dumps(figures | {"output": None if output is None else str(output), "events": written}))
    else:
        click.echo(summary.format_text(figures))
        if output is not None:
            click.echo(f"trace          {output}: {written} events, for https://ui.perfetto.dev or chrome://tracing")
    if plot is not None:
        step = trace_output.draw(steps_trace, plot)
        if not as_json:
            click.echo(f"plot           {plot}: step {step}")


def _header(run_dir: Path) -> dict[str, str]:
    from hpcdist.telemetry.metrics import step_metrics

    about = {"hpcdist": __version__}
    path = run_dir / "metrics.h5"
    if path.exists():
        try:
            attributes = step_metrics.read(path).attributes
        except StorageError:
            return about  # the trace uses other files; `hpcdist report` describes the damage of this file
        keys = ("hpcdist_version", "git_commit", "mpi_library", "numpy_version", "python_version", "strategy")
        about |= {f"run_{key}": str(attributes[key]) for key in keys if key in attributes}
    return about


MAX_RANKS = 32  # rows of the printed table


@click.command("hang")
@existing_run_argument
@click.option("--patience", default=10.0, show_default=True, help="Seconds after which a waiting rank counts as hung.")
@json_option
@click.pass_context
def hang(context: click.Context, run_dir: Path, patience: float, as_json: bool) -> None:
    """Name the first rank of RUN_DIR that differs from the other ranks, with its operation and source line.

    Reads the flight recorder of every rank, during a hang or after the run died. Exit code 1 if a problem is found,
    else 0.
    """
    damaged: dict[int, str] = {}
    with regular.damage(run_dir, regular.FIGURES):
        report = analyse(load(run_dir, damaged), patience, unreadable=damaged)
        figures = {"wrong": bool(report.findings), **jsonable(report)}
        text = json.dumps(figures) if as_json else render(report)
    click.echo(text)
    context.exit(FAILURE if report.findings else OK)


def render(report: HangReport) -> str:
    """Return ``report``, the comparison of all ranks' flight recorders, as text: findings, then one line per rank."""
    lines = [] if report.findings else ["no problem found: no rank waits for another"]
    for number, finding in enumerate(report.findings):
        lines.append(("" if number == 0 else "also: ") + _sentence(finding, report.job_ranks))
    # Ranks with findings are listed first if the table cannot hold all ranks.
    named = {rank for finding in report.findings for rank in finding.ranks}
    shown = sorted(
        sorted(report.ranks, key=lambda rank: rank.rank not in named)[:MAX_RANKS], key=lambda rank: rank.rank
    )
    lines += ["", *aligned([("rank", "state", "operation"), *map(_rank_row, shown)], left=(1, 2))]
    if report.job_ranks:
        lines.append(f"this run is on {_listed(report.job_ranks)} of the job, in this order")
    if len(shown) < len(report.ranks):
        lines.append(f"and {len(report.ranks) - len(shown)} more ranks; --json lists them")
    return "\n".join(lines)


def _sentence(finding: Finding, job_ranks: Sequence[int]) -> str:
    ranks = _listed(finding.ranks)
    if job_ranks:
        ranks += f" ({_listed([job_ranks[rank] for rank in finding.ranks if rank < len(job_ranks)])} of the job)"
    lines = [f"{finding.kind.upper()}: {ranks} {finding.text}"]
    if finding.event is not None:
        lines.append(f"    at: {finding.event}")
        if finding.group:
            lines.append(f"    {finding.event.comm} has {_listed(finding.group)}")
    return "\n".join(lines)


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MAX_RANKS])) + " ..." * (len(ranks) > MAX_RANKS)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _rank_row(rank: RankState) -> tuple[str, str, str]:
    note = f" [{rank.note}]" if rank.note else ""
    return str(rank.rank), rank.state, f"{_where(rank.last, rank.waiting_s)}{note}"


def _where(last: RecordedEvent | None, waiting_s: float | None) -> str:
    if last is None:
        return "none yet"
    return f"after {last}" if waiting_s is None else f"{waiting_s:.1f} s in {last}"
