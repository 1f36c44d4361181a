"""Print the checks of `hpcdist doctor` as lines or as one JSON object, and compute the exit code."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import click

from hpcdist.comm.doctor.mpi_library import FAIL, OK, WARN, Check
from hpcdist.errors import FAILURE

COLOURS: Final = {OK: "green", WARN: "yellow", FAIL: "red"}


def exit_code(checks: Sequence[Check]) -> int:
    """Return exit code 1 if any of the results ``checks`` is a failure, else 0."""
    return FAILURE if any(check.status == FAIL for check in checks) else 0


def show(checks: Sequence[Check], as_json: bool, **more: Any) -> None:
    """Print the results ``checks``. ``as_json``: print JSON, with the keyword arguments ``**more`` added."""
    if as_json:
        click.echo(json.dumps({"ok": exit_code(checks) == 0, **more, "checks": [asdict(check) for check in checks]}))
        return
    width = max(len(check.name) for check in checks)
    for check in checks:
        status = click.style(f"{check.status:4}", fg=COLOURS[check.status])
        click.echo(f"{status}  {check.name:{width}}  {check.found}")
        if check.cure:
            click.echo(f"{'':6}{'':{width}}  -> {check.cure}")
