"""`hpcdist checkpoint stripe`: how a directory of checkpoints is spread over the servers of its file system."""

import json
from pathlib import Path

import click

from hpcdist.errors import OK, STORAGE


def _bytes(context: click.Context, parameter: click.Parameter, value: str) -> int:
    from hpcdist.reporting.units import parse_bytes

    try:
        return parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command("stripe")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--bytes", "nbytes", callback=_bytes, default="1G", help="Size of a checkpoint, e.g. 500M or 40G.")
@click.option("--writers", type=click.IntRange(min=1), default=1, help="How many write at once.")
@click.option("--set", "wish", default="auto", metavar="OPTIONS", help="As checkpoint.stripe: auto, none, or options.")
@click.option("--plan", "plan_only", is_flag=True, help="Print what would be done, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def stripe(directory: Path, nbytes: int, writers: int, wish: str, plan_only: bool, as_json: bool) -> int:
    """Stripe DIR for checkpoints of a given size: on Lustre with lfs setstripe, on BeeGFS with its own tool.

    Files that are made in DIR later follow it. A training does the same before its first save. Elsewhere there is
    nothing to do, which is said.

    Exit code 0 when it is done, or nothing is to be done, 74 when the tool fails.
    """
    from hpcdist.checkpoint import stripe as stripes

    found = stripes.plan(directory, nbytes, writers, wish)
    failure = ""
    if not plan_only and found.command:
        directory.mkdir(parents=True, exist_ok=True)
        failure = stripes.apply(found)
    if as_json:
        figures = {"file_system": found.system.kind, "mount": found.system.mount, "command": list(found.command)}
        click.echo(json.dumps({**figures, "why": found.why, "failure": failure, "done": bool(not plan_only)}))
    else:
        click.echo(found.text or "nothing to do")
        click.echo(f"{found.why}{f'; failed: {failure}' if failure else ''}", err=True)
    return STORAGE if failure else OK
