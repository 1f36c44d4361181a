"""Run trainings as trials of a sweep: recipes, run directories, command lines, signals.

Shared by `bench sweep`, `bench data`, `bench power` and `submit --array`. Each trial has a temporary run directory
beside the results, where all nodes of a job see it, and an environment in which no HPCDIST_SET variable can change its
recipe. A signal that asks for an end stops the trial under way and keeps the results.
"""

import functools
import glob
import os
import re
import shlex
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from hpcdist.errors import FAILURE, OK, REQUEUE, UsageError
from hpcdist.reporting.units import counted

if TYPE_CHECKING:  # late at run time: --help must not load h5py
    from hpcdist.bench.sweep.definition import ResolvedTrial, Sweep, SweepTrial
    from hpcdist.bench.sweep.series import Measure, SeriesItem, SeriesLimits, SweepTally
    from hpcdist.bench.sweep.trial import Command, TrialOutcome
    from hpcdist.training.recipe.settings import Settings

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Options of `hpcdist run` that a sweep sets for each trial.
_REFUSED_RUN_OPTIONS: Final = {
    "ranks": "the sweep file says on how many ranks a trial runs; leave -n out",
    "grace": "a trial is stopped by --limit-s and --budget-s; leave --grace out",
    "dry_run": "use --dry-run of this command",
    "out": "each trial has a run directory of its own; leave --out out",
    "resume": "a trial begins anew; leave --resume out",
}
_TRIAL_INFIX: Final = ".trial-"  # in the name of a run directory beside the results
_TEMPFILE_SUFFIX: Final = re.compile(r"[a-z0-9_]{8}")  # what tempfile puts behind it


def check_alone() -> None:
    """Raise UsageError where this process is one of several ranks."""
    from hpcdist.comm.launch import environment

    launched = environment.launch_environment()
    if launched is not None and launched.size > 1:
        raise UsageError(
            f"this process is one of {launched.size} ranks of {launched.launcher}, and a sweep starts ranks itself; "
            "run it as one process"
        )


@dataclass(frozen=True)
class SweepRecipes:
    """Recipes for `hpcdist.bench.sweep.definition`; settings of a trial override the base recipe, as `--set` does."""

    wanted: "Sweep"
    environment: Mapping[str, str] | None = None  # None: that of this process

    def convert(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of ``settings`` in the types of a recipe."""
        return self._settings(settings).values

    def resolve(self, settings: Mapping[str, Any], ranks: int | None = None) -> "ResolvedTrial":
        """Return the recipe of ``settings`` over the base recipe; with ``ranks`` it can be trained on so many."""
        from hpcdist.bench.sweep.definition import ResolvedTrial
        from hpcdist.training.recipe import recipe as recipes
        from hpcdist.training.recipe.requirements import degrees_equation

        base = self.wanted.recipe
        inline = base if isinstance(base, Path) else self._settings(base)
        recipe = recipes.load(inline, self._settings(settings), self.environment).recipe
        if ranks is not None:
            degrees_equation(recipe, ranks)
        return ResolvedTrial(recipes.dump(recipe), recipes.flat(recipe))

    def _settings(self, tree: Mapping[str, Any]) -> "Settings":
        from hpcdist.training.recipe import recipe as recipes
        from hpcdist.training.recipe import settings

        path = self.wanted.path
        return settings.table(tree, f"sweep {path}", recipes.known_keys(), path.parent)


def remove_leftovers(output: Path) -> None:
    """Remove the run directories of trials whose sweep was killed; the lock says that nobody else's are among them."""
    prefix = str(output.absolute()) + _TRIAL_INFIX
    for folder in glob.glob(glob.escape(prefix) + "*"):
        if (
            _TEMPFILE_SUFFIX.fullmatch(folder.removeprefix(prefix))
            and os.path.isdir(folder)
            and not os.path.islink(folder)
        ):
            shutil.rmtree(folder, ignore_errors=True)  # ranks of a sweep killed just now may still be in it


def trial_command(ranks_per_node: int | None, run_args: str) -> "Command":
    """Return what makes the command line of a trial; see `run_options`."""
    from hpcdist.bench.sweep import trial

    options = run_options(ranks_per_node, run_args)
    return functools.partial(trial.command, options=options) if options else trial.command


def run_options(ranks_per_node: int | None, text: str) -> list[str]:
    """Return the options of `hpcdist run` in ``text`` (quoted as for a shell), and the ranks on each node.

    Raises UsageError here for what would fail with every trial.
    """
    from hpcdist.cli.run import command as of_run

    place = f"--run-args {text!r}"
    try:
        words = shlex.split(text)
        command = of_run.make_context("run", ["-n", "1", *words, "train"]).params["command"]  # as for a trial
        parsed = of_run.make_context("run", [*words], resilient_parsing=True)
    except (ValueError, click.UsageError) as error:
        message = error.format_message() if isinstance(error, click.UsageError) else str(error)
        raise UsageError(f"{place}: {message.rstrip('.')}; quote options of `hpcdist run` as for a shell") from error
    if command != ("train",):
        raise UsageError(f"{place}: {command[0]!r} is no option of `hpcdist run`; see `hpcdist run --help`")
    for name, cure in _REFUSED_RUN_OPTIONS.items():
        if parsed.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{place}: {cure}")
    if ranks_per_node is None:
        return words
    if parsed.get_parameter_source("ranks_per_node") is ParameterSource.COMMANDLINE:
        raise UsageError(f"{place} and --ranks-per-node {ranks_per_node} say the same; leave one of them out")
    return [*words, "--ranks-per-node", str(ranks_per_node)]


def run_series(
    output: Path,
    plan: "Callable[[], list[SeriesItem]]",
    limits: "SeriesLimits",
    anonymous: bool,
    line: "Command",
    attributes: Mapping[str, str] | None = None,
    line_for: "Callable[[SweepTrial], Command] | None" = None,
    around: "Callable[[Sequence[SeriesItem], Measure], Measure] | None" = None,
) -> "SweepTally":
    """Run what ``plan`` says by the command ``line``, under signals that ask to end, and lock ``output``.

    Each trial has files in a directory of its own. A new results file has ``attributes`` beside the provenance.
    ``line_for`` a trial is its own command, in place of ``line``; ``around`` wraps what measures a trial in what a
    sweep does before and after it.
    """
    from hpcdist.bench.sweep import results, series, trial
    from hpcdist.telemetry.provenance import provenance

    environment, hosts, origin = _environment(), [socket.gethostname()], provenance(anonymous=anonymous)
    origin |= attributes or {}

    def measure(of: "SweepTrial", limit_s: float) -> "TrialOutcome":
        # Beside the results, where all nodes of a job can see it; /tmp may be a node's own.
        with tempfile.TemporaryDirectory(prefix=output.name + _TRIAL_INFIX, dir=output.absolute().parent) as folder:
            own = line if line_for is None else line_for(of)
            outcome = trial.run(of, Path(folder), limit_s, own, environment)
        return series.anonymous(outcome, hosts) if anonymous else outcome

    with results.locked(output):
        remove_leftovers(output)
        items = plan()
        watched = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
        before = {number: signal.signal(number, _stop) for number in watched}
        try:
            say = functools.partial(click.echo, err=True)
            wrapped = measure if around is None else around(items, measure)
            return series.run(items, output, wrapped, limits, origin, say)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def tally_line(tally: "SweepTally", where: str = "") -> str:
    """Return the numbers of trials in words."""
    hint = "; --retry-failed runs the failed again" if tally.failed else ""
    return f"{tally.ok} ok, {tally.failed} failed, {tally.left} left{where}{hint}"


def item_line(item: "SeriesItem") -> str:
    """Return a repeat of a trial in words, and whether it is to be run."""
    state = f"recorded: {item.status}" if item.status else "to run"
    place = f"{item.trial.name} on {counted(item.trial.ranks, 'rank')}, repeat {item.repeat + 1}"
    return f"{item.trial.id} {place} ({state})"


def exit_code(tally: "SweepTally", failed: bool) -> int:
    """Return the exit code of a sweep; ``failed`` says whether any trial counts as such."""
    return REQUEUE if tally.left else FAILURE if failed else OK


def _stop(number: int, frame: object) -> None:
    from hpcdist.bench.sweep.series import SweepStopped

    raise SweepStopped


def _environment() -> dict[str, str]:
    """Return the environment of a trial: its recipe is complete, and no variable may change it, nor end it early."""
    from hpcdist.comm.launch.environment import python_path_variables
    from hpcdist.training.recipe.settings import PREFIX
    from hpcdist.training.run.stop_requests import JOB_END

    variables = {
        name: value for name, value in {**os.environ, **python_path_variables()}.items() if not name.startswith(PREFIX)
    }
    variables.pop(JOB_END, None)  # whoever runs it hears of the end of the job, and does not count what was cut short
    return variables
