"""`hpcdist runs`: list the runs in a folder with their state and progress."""

import json
import time
from pathlib import Path
from typing import Any, Final

import click

from hpcdist.cli.common import DIRECTORY, json_option
from hpcdist.errors import HpcdistError, StorageError

DEFAULT: Final = "runs"
RUNNING, FAILED, NEW = "running", "failed", "no step yet"


@click.command("runs")
@click.argument("folder", type=DIRECTORY, default=DEFAULT)
@json_option
def command(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER, newest first: state, steps, loss, speed and age.

    States: running (a live process holds the lock), finished, stopped (saved on request, can be resumed), or failed.
    `hpcdist report RUN RUN` and `hpcdist compare RUN RUN` print more.
    """
    if not folder.is_dir():
        raise StorageError(f"the folder {folder} does not exist; runs are in {DEFAULT}/ unless --out was given")
    paths = [path for path in folder.iterdir() if (path / "recipe.toml").is_file()]
    rows = sorted((_row(path) for path in paths), key=lambda row: row["age_s"])
    if as_json:
        click.echo(json.dumps(rows))
        return
    from hpcdist.reporting.table import aligned, text_of
    from hpcdist.reporting.units import format_duration

    table = [("run", "state", "steps", "loss", "speed", "age")]
    for row in rows:
        steps, loss = f"{row['steps']} of {row['planned']}", text_of(row["loss"], ".4f")
        speed, age = text_of(row["tokens_per_s"], ",.0f"), format_duration(row["age_s"])
        speed += f" {row['speed_unit']}/s" if row["tokens_per_s"] is not None else ""
        table.append((row["run"], row["state"], steps, loss, speed, age))
    click.echo("\n".join(aligned(table, left=(0, 1))) if rows else f"{folder} contains no runs")


def _row(path: Path) -> dict[str, Any]:
    from hpcdist.telemetry import report as reports
    from hpcdist.training.recipe import recipe as recipes

    row: dict[str, Any] = {"run": path.name, "state": _state(path), "planned": None, "steps": 0}
    row |= {"loss": None, "tokens_per_s": None, "speed_unit": "tokens", "age_s": _age_s(path)}
    try:
        row["planned"] = recipes.load_stored(path / "recipe.toml").run.steps
        figures = reports.report(path).figures
        row |= {"steps": figures["steps"], "loss": figures["train_loss_mean"], "tokens_per_s": figures["tokens_per_s"]}
        row["speed_unit"] = figures.get("speed_unit") or "tokens"
    except HpcdistError:  # just started or damaged: reported by its state
        row["state"] = row["state"] or NEW
    return row


def _state(path: Path) -> str:
    from hpcdist.checkpoint.lock import LOCK_FILE, is_held
    from hpcdist.comm.record.run_journal import known_starts

    if is_held(path):
        return RUNNING
    if starts := known_starts(path):
        return starts[-1].end or FAILED
    return FAILED if (path / LOCK_FILE).exists() else NEW  # it died, or was refused, before its first step


def _age_s(path: Path) -> float:
    newest = max((item.stat().st_mtime for item in path.iterdir()), default=time.time())
    return max(0.0, time.time() - newest)
