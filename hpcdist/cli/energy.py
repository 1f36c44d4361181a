"""`hpcdist energy`: what of this machine's energy can be measured, what it is now, and what a run has used."""

import json
import os
from pathlib import Path
from typing import Any, Final

import click

from hpcdist.cli.lazy import LazyGroup
from hpcdist.energy.config import PM_COUNTERS, POWERCAP

# name -> (where its click command is, what the overview says of it)
COMMANDS: Final = {
    "sources": ("hpcdist.cli.energy:sources", "List the energy counters of this machine."),
    "watch": ("hpcdist.cli.energy_watch:command", "Show watts now, or the joules of a command."),
    "report": ("hpcdist.cli.energy_report:command", "Account for the energy of a run."),
}


class EnergyGroup(LazyGroup):
    """The sub-commands of energy, in the order in which they are needed."""

    lazy = COMMANDS


@click.group(cls=EnergyGroup)
def command() -> None:
    """Energy: its sources on this machine, watts now, joules of runs."""


@click.command()
@click.option(
    "--powercap",
    default=POWERCAP,
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where Linux shows RAPL, as energy.powercap in a recipe.",
)
@click.option(
    "--pm-counters",
    default=PM_COUNTERS,
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where a Cray shows its counters, as energy.pm_counters in a recipe.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def sources(powercap: Path, pm_counters: Path, as_json: bool) -> None:
    """List the energy counters that a training could read here, and why the others cannot be read."""
    from hpcdist.energy.config import EnergyConfig
    from hpcdist.energy.sources.discovery import survey  # late: --help must not load numpy

    rows = survey(EnergyConfig(powercap=str(powercap), pm_counters=str(pm_counters)), os.environ)
    if as_json:
        click.echo(json.dumps({"readable": any(row["readable"] for row in rows), "sources": rows}))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        first, *more = _said(row)
        click.echo(f"{row['kind']:5} {row['name']:{width}}  {first}")
        for line in more:
            click.echo(f"{'':5} {'':{width}}  {line}")


def _said(row: dict[str, Any]) -> list[str]:
    if not row["readable"]:
        return [f"not measured: {row['reason']}"]
    if "model" not in row:
        return ["readable"]
    use = "this environment holds it" if row["held"] else "counted when a rank computes on it (run.device = 'gpu')"
    lines = [f"readable, {row['model']}; {use}"]
    lines += [row["note"]] if row["note"] else []
    lines.append(f"power: {row['power']}" if row["power"] else "it tells no power")
    if row["sensor"] is not None:
        update_s, window_s, source = row["sensor"]
        lines.append(f"its sensor looks {window_s * 1e3:g} ms of every {update_s * 1e3:g} ms ({source})")
    return lines
