"""`hpcdist bench`: what configurations cost, measured one after the other."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcdist.arrays.sizes import counted
from hpcdist.cli import bench_checkpoint, bench_collectives, bench_data, bench_pipeline
from hpcdist.cli.bench_trials import Recipes, check_alone, remove_leftovers, run
from hpcdist.errors import FAILURE, OK, REQUEUE

if TYPE_CHECKING:  # late at run time: --help must not load h5py
    from hpcdist.bench.series import Item


@click.group()
def command() -> None:
    """Measure configurations of a training, its exchanges, pipeline schedules, collective operations, checkpoints."""


command.add_command(bench_collectives.command)
command.add_command(bench_data.command)
command.add_command(bench_pipeline.command)
command.add_command(bench_checkpoint.command)


@command.command()
@click.argument("sweep_file", metavar="SWEEP.toml", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("results.h5"),
    help="HDF5 file that the results are appended to.",
)
@click.option("--limit-s", type=click.FloatRange(min=1.0), default=600.0, help="Seconds that a trial may take.")
@click.option(
    "--budget-s",
    type=click.FloatRange(min=1.0),
    help="Seconds after which a trial under way is ended; what is left waits for the next call.",
)
@click.option("--retry-failed", is_flag=True, help="Run trials again that are recorded as failed.")
@click.option("--anonymous", is_flag=True, help="Leave the names of hosts out of the results.")
@click.option("--dry-run", is_flag=True, help="Print the trials and the command of each, and start nothing.")
def sweep(
    sweep_file: Path,
    output: Path,
    limit_s: float,
    budget_s: float | None,
    retry_failed: bool,
    anonymous: bool,
    dry_run: bool,
) -> int:
    """Train every configuration of SWEEP.toml on every number of ranks, and keep what each step took.

    Trials that OUTPUT holds already are not run again, so the same command goes on after an end of any kind. The run
    directory of a trial lies beside OUTPUT while it is needed, and so does OUTPUT.lock, which keeps other sweeps from
    OUTPUT. `hpcdist report OUTPUT` shows the table.

    Exit code 0 when all trials are recorded as ok, 1 when any failed (the sweep goes on all the same), 75 when some are
    left for the next call: the budget was spent, or SIGTERM, SIGHUP or SIGUSR1 came.
    """
    from hpcdist.bench import results, series
    from hpcdist.bench import sweep as sweeps

    check_alone()
    wanted = sweeps.read(sweep_file)
    trials = sweeps.expand(wanted, Recipes(wanted))
    results.check_place(output)
    if dry_run:
        _show(series.plan(trials, wanted.repeats, output, retry_failed))
        return OK
    with results.locked(output):
        remove_leftovers(output)
        items = series.plan(trials, wanted.repeats, output, retry_failed)
        tally = run(items, output, series.Limits(limit_s, budget_s or float("inf")), anonymous)
    again = "; --retry-failed runs the failed again" if tally.failed else ""
    click.echo(f"{tally.ok} ok, {tally.failed} failed, {tally.left} left; `hpcdist report {output}`{again}", err=True)
    return REQUEUE if tally.left else FAILURE if tally.failed else OK


def _show(items: "list[Item]") -> None:
    """Print the trials in their order, and below the command of each."""
    from hpcdist.bench import trial

    for number, item in enumerate(items, 1):
        state = f"recorded: {item.status}" if item.status else "to run"
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in item.trial.settings.items())
        where = f"{item.trial.id} {item.trial.name} on {counted(item.trial.ranks, 'rank')}, repeat {item.repeat + 1}"
        click.echo(f"[{number}/{len(items)}] {where} ({state}): {settings}")
    for ranks in sorted({item.trial.ranks for item in items}):
        click.echo(shlex.join(trial.command(ranks, Path("RECIPE"), Path("RUN_DIR"))))
