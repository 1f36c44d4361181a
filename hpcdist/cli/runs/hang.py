"""`hpcdist hang`: find the first rank that diverged from the others, by the flight recorder of a run."""

import json
from pathlib import Path

import click

from hpcdist.cli.common import existing_run_argument, json_option
from hpcdist.comm.record.flight_recorder import RecordedEvent
from hpcdist.errors import FAILURE, OK
from hpcdist.reporting import regular
from hpcdist.reporting.jsonable import jsonable
from hpcdist.reporting.table import aligned
from hpcdist.telemetry.hang import Finding, HangReport, RankState, analyse, load

MAX_RANKS = 32  # rows of the printed table


@click.command("hang")
@existing_run_argument
@click.option("--patience", default=10.0, show_default=True, help="Seconds after which a waiting rank counts as hung.")
@json_option
@click.pass_context
def command(context: click.Context, run_dir: Path, patience: float, as_json: bool) -> None:
    """Name the first rank of RUN_DIR whose operations differ from the other ranks', with operation and source line.

    Reads the flight recorder of every rank, during a hang or after the run died. Exit code 1 if a problem is found,
    else 0.
    """
    damaged: dict[int, str] = {}
    with regular.damage(run_dir, regular.FIGURES):
        report = analyse(load(run_dir, damaged), patience, damaged=damaged)
        figures = {"wrong": bool(report.findings), **jsonable(report)}
        text = json.dumps(figures) if as_json else render(report)
    click.echo(text)
    context.exit(FAILURE if report.findings else OK)


def render(report: HangReport) -> str:
    """Return the report as text: the findings, then one line per rank."""
    lines = [] if report.findings else ["no problem found: no rank waits for another"]
    for number, finding in enumerate(report.findings):
        lines.append(("" if number == 0 else "also: ") + _sentence(finding))
    # Ranks with findings are listed first if the table cannot hold all ranks.
    named = {rank for finding in report.findings for rank in finding.ranks}
    shown = sorted(
        sorted(report.ranks, key=lambda rank: rank.rank not in named)[:MAX_RANKS], key=lambda rank: rank.rank
    )
    lines += ["", *aligned([("rank", "state", "operation"), *map(_row, shown)], left=(1, 2))]
    if len(shown) < len(report.ranks):
        lines.append(f"and {len(report.ranks) - len(shown)} more ranks; --json lists them")
    return "\n".join(lines)


def _sentence(finding: Finding) -> str:
    ranks = f"{'rank' if len(finding.ranks) == 1 else 'ranks'} {', '.join(map(str, finding.ranks))}"
    at = f"\n    at: {finding.event}" if finding.event is not None else ""
    return f"{finding.kind.upper()}: {ranks} {finding.text}{at}"


def _row(rank: RankState) -> tuple[str, str, str]:
    note = f" [{rank.note}]" if rank.note else ""
    return str(rank.rank), rank.state, f"{_where(rank.last, rank.waiting_s)}{note}"


def _where(last: RecordedEvent | None, waiting_s: float | None) -> str:
    if last is None:
        return "none yet"
    return f"after {last}" if waiting_s is None else f"{waiting_s:.1f} s in {last}"
