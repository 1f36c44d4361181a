"""`hpcdist energy`: what of this machine's energy can be measured."""

import json
import os
from pathlib import Path
from typing import Any

import click

from hpcdist.energy.config import POWERCAP


@click.group()
def command() -> None:
    """Energy: its sources on this machine."""


@command.command()
@click.option(
    "--powercap",
    default=POWERCAP,
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where Linux shows RAPL, as energy.powercap in a recipe.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def sources(powercap: Path, as_json: bool) -> None:
    """List the energy counters that a training could read here, and why the others cannot be read."""
    from hpcdist.energy.sources import survey  # late: --help must not load numpy

    rows = survey(powercap, os.environ)
    if as_json:
        click.echo(json.dumps({"readable": any(row["readable"] for row in rows), "sources": rows}))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        click.echo(f"{row['kind']:5} {row['name']:{width}}  {_said(row)}")


def _said(row: dict[str, Any]) -> str:
    if not row["readable"]:
        return f"not measured: {row['reason']}"
    if "model" not in row:
        return "readable"
    use = "this environment holds it" if row["held"] else "counted when a rank computes on it (run.device = 'gpu')"
    return f"readable, {row['model']}; {use}"
