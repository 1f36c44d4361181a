"""`hpcdist bench`: what configurations cost, measured one after the other."""

import functools
import glob
import json
import os
import re
import shlex
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli import bench_collectives
from hpcdist.errors import FAILURE, OK, REQUEUE, UsageError

if TYPE_CHECKING:  # late at run time: --help must not load h5py
    from hpcdist.bench.series import Item, Limits, Tally
    from hpcdist.bench.sweep import Resolved, Sweep, Trial
    from hpcdist.bench.trial import Outcome
    from hpcdist.training.settings import Settings

_ASKS_FOR_AN_END: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_OF_A_TRIAL: Final = ".trial-"  # in the name of a run directory beside the results
_RANDOM: Final = re.compile(r"[a-z0-9_]{8}")  # what tempfile puts behind it


@click.group()
def command() -> None:
    """Measure configurations of a training, or collective operations."""


command.add_command(bench_collectives.command)


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

    _check_alone()
    wanted = sweeps.read(sweep_file)
    trials = sweeps.expand(wanted, Recipes(wanted))
    results.check_place(output)
    if dry_run:
        _show(series.plan(trials, wanted.repeats, output, retry_failed))
        return OK
    with results.locked(output):
        _remove_leftovers(output)
        items = series.plan(trials, wanted.repeats, output, retry_failed)
        tally = _run(items, output, series.Limits(limit_s, budget_s or float("inf")), anonymous)
    again = "; --retry-failed runs the failed again" if tally.failed else ""
    click.echo(f"{tally.ok} ok, {tally.failed} failed, {tally.left} left; `hpcdist report {output}`{again}", err=True)
    return REQUEUE if tally.left else FAILURE if tally.failed else OK


def _check_alone() -> None:
    from hpcdist.comm import launcher

    said = launcher.announced()
    if said is not None and said.size > 1:
        raise UsageError(
            f"this process is one of {said.size} ranks of {said.launcher}, and a sweep starts ranks itself; run it "
            "as one process"
        )


@dataclass(frozen=True)
class Recipes:
    """What `hpcdist.bench.sweep` asks for; the settings of a trial go over the base recipe, as those of `--set` do."""

    wanted: "Sweep"

    def convert(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of ``settings`` in the types of a recipe."""
        return self._settings(settings).values

    def resolve(self, settings: Mapping[str, Any], ranks: int | None = None) -> "Resolved":
        """Return the recipe of ``settings`` over the base recipe; with ``ranks`` it can be trained on so many."""
        from hpcdist.bench.sweep import Resolved
        from hpcdist.cli.degrees import equation
        from hpcdist.training import recipe as recipes

        base = self.wanted.recipe
        inline = base if isinstance(base, Path) else self._settings(base)
        recipe = recipes.load(inline, self._settings(settings)).recipe
        if ranks is not None:
            equation(recipe, ranks)
        return Resolved(recipes.dump(recipe), recipes.flat(recipe))

    def _settings(self, tree: Mapping[str, Any]) -> "Settings":
        from hpcdist.training import recipe as recipes
        from hpcdist.training import settings

        path = self.wanted.path
        return settings.table(tree, f"sweep {path}", recipes.defaults(), path.parent)


def _remove_leftovers(output: Path) -> None:
    """Remove the run directories of trials whose sweep was killed; the lock says that nobody else's are among them."""
    prefix = str(output.absolute()) + _OF_A_TRIAL
    for found in glob.glob(glob.escape(prefix) + "*"):
        if _RANDOM.fullmatch(found.removeprefix(prefix)) and os.path.isdir(found) and not os.path.islink(found):
            shutil.rmtree(found, ignore_errors=True)  # ranks of a sweep killed just now may still be in it


def _run(items: "list[Item]", output: Path, limits: "Limits", anonymous: bool) -> "Tally":
    """Run the items, each with files in a directory of its own, under signals that ask for an end."""
    from hpcdist.bench import series, trial
    from hpcdist.telemetry.provenance import provenance

    environment, hosts, origin = _environment(), [socket.gethostname()], provenance(anonymous=anonymous)
    watched = [number for number in _ASKS_FOR_AN_END if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, _stop) for number in watched}

    def measure(of: "Trial", limit_s: float) -> "Outcome":
        # Beside the results, where all nodes of a job can see it; /tmp may be a node's own.
        with tempfile.TemporaryDirectory(prefix=output.name + _OF_A_TRIAL, dir=output.absolute().parent) as folder:
            outcome = trial.run(of, Path(folder), limit_s, trial.command, environment)
        return series.anonymous(outcome, hosts) if anonymous else outcome

    try:
        say = functools.partial(click.echo, err=True)
        return series.run(items, output, measure, limits, origin, say)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: object) -> None:
    from hpcdist.bench.series import Stopped

    raise Stopped


def _environment() -> dict[str, str]:
    """Return the environment of a trial: its recipe is complete, and no variable may change it."""
    from hpcdist.cli.run import importable
    from hpcdist.training.settings import PREFIX

    return {name: value for name, value in {**os.environ, **importable()}.items() if not name.startswith(PREFIX)}


def _show(items: "list[Item]") -> None:
    """Print the trials in their order, and below the command of each."""
    from hpcdist.bench import trial

    for number, item in enumerate(items, 1):
        state = f"recorded: {item.status}" if item.status else "to run"
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in item.trial.settings.items())
        where = f"{item.trial.id} {item.trial.name} on {item.trial.ranks} ranks, repeat {item.repeat + 1}"
        click.echo(f"[{number}/{len(items)}] {where} ({state}): {settings}")
    for ranks in sorted({item.trial.ranks for item in items}):
        click.echo(shlex.join(trial.command(ranks, Path("RECIPE"), Path("RUN_DIR"))))
