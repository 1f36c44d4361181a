"""Trainings as trials of a sweep: recipes, run directories, options of `hpcdist run`, and signals.

Used by `bench sweep`, `submit --array`, and the study `benchmarks/power`. SIGTERM, SIGHUP and SIGUSR1 stop the running
trial; the recorded results remain.
"""

import glob
import os
import re
import shlex
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from hpcdist.cli.bench import skeleton
from hpcdist.errors import UsageError
from hpcdist.reporting.units import counted

if TYPE_CHECKING:  # late at run time: --help must not load h5py
    from hpcdist.bench.sweep.definition import ResolvedTrial, Sweep, SweepTrial
    from hpcdist.bench.sweep.series import Measure, SeriesItem, SeriesLimits, SweepTally
    from hpcdist.bench.sweep.trial import Command, TrialOutcome
    from hpcdist.training.recipe.settings import Settings

# Options of `hpcdist run` that a sweep sets itself, and the error message for each.
_REFUSED_RUN_OPTIONS: Final = {
    "ranks": "the sweep file sets the number of ranks; leave -n out",
    "grace": "--limit-s and --budget-s limit the time of a trial; leave --grace out",
    "dry_run": "use --dry-run of this command",
    "out": "each trial has its own run directory; leave --out out",
    "resume": "a trial always starts at step 0; leave --resume out",
}
_TRIAL_INFIX: Final = ".trial-"  # run directory of a trial: <output>.trial-<suffix of tempfile>


def check_alone() -> None:
    """Raise UsageError if a launcher started this process as one of several ranks."""
    from hpcdist.comm.launch import environment

    launched = environment.launch_environment()
    if launched is not None and launched.size > 1:
        started = f"{launched.launcher} started {launched.size} ranks of this command"
        raise UsageError(f"{started}, but a sweep starts the ranks of its trials; start the sweep as one process")


@dataclass(frozen=True)
class SweepRecipes:
    """Recipes of the trials of ``sweep``. Variables in ``environment`` (None: os.environ) override recipe keys."""

    sweep: "Sweep"
    environment: Mapping[str, str] | None = None

    def convert(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._settings(settings).values

    def resolve(self, settings: Mapping[str, Any], ranks: int | None = None) -> "ResolvedTrial":
        from hpcdist.bench.sweep.definition import ResolvedTrial
        from hpcdist.training.recipe import recipe as recipes
        from hpcdist.training.recipe.requirements import degrees_equation

        base = self.sweep.recipe
        inline = base if isinstance(base, Path) else self._settings(base)
        recipe = recipes.load(inline, self._settings(settings), self.environment).recipe
        if ranks is not None:
            degrees_equation(recipe, ranks)
        return ResolvedTrial(recipes.dump(recipe), recipes.flat(recipe))

    def _settings(self, tree: Mapping[str, Any]) -> "Settings":
        from hpcdist.training.recipe import recipe as recipes
        from hpcdist.training.recipe import settings

        path = self.sweep.path
        return settings.table(tree, f"sweep {path}", recipes.known_keys(), path.parent)


def _remove_leftovers(output: Path) -> None:
    # The caller holds the lock of ``output``. Only directories of killed sweeps are removed.
    prefix = str(output.absolute()) + _TRIAL_INFIX
    for folder in glob.glob(glob.escape(prefix) + "*"):
        has_suffix = re.fullmatch(r"[a-z0-9_]{8}", folder.removeprefix(prefix))
        if has_suffix and os.path.isdir(folder) and not os.path.islink(folder):
            shutil.rmtree(folder, ignore_errors=True)  # ranks of a killed sweep may still write files


def run_options(ranks_per_node: int | None, text: str) -> list[str]:
    """Return a list of options of `hpcdist run`: the words in ``text`` (value of --run-args), and ``ranks_per_node``.

    Raises UsageError for words that are not options of `hpcdist run`.
    """
    from hpcdist.cli.run import command as run_command

    place = f"--run-args {text!r}"
    try:
        words = shlex.split(text)
        command = run_command.make_context("run", ["-n", "1", *words, "train"]).params["command"]  # as for a trial
        parsed = run_command.make_context("run", [*words], resilient_parsing=True)
    except (ValueError, click.UsageError) as error:
        message = error.format_message() if isinstance(error, click.UsageError) else str(error)
        raise UsageError(f"{place}: {message.rstrip('.')}; quote options of `hpcdist run` as for a shell") from error
    if command != ("train",):
        raise UsageError(f"{place}: {command[0]!r} is not an option of `hpcdist run`; see `hpcdist run --help`")
    for name, message in _REFUSED_RUN_OPTIONS.items():
        if parsed.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{place}: {message}")
    if ranks_per_node is None:
        return words
    if parsed.get_parameter_source("ranks_per_node") is ParameterSource.COMMANDLINE:
        raise UsageError(f"{place} sets --ranks-per-node, but --ranks-per-node {ranks_per_node} is given too; keep one")
    return [*words, "--ranks-per-node", str(ranks_per_node)]


def run_series(
    output: Path,
    plan: "Callable[[], list[SeriesItem]]",
    limits: "SeriesLimits",
    anonymous: bool,
    command_line: "Command",
    attributes: Mapping[str, str] | None = None,
    wrap: "Callable[[Measure], Measure]" = lambda measure: measure,
) -> "SweepTally":
    """Run the trials in the list ``plan()``, append the results to the file ``output``, and return the numbers of runs.

    ``anonymous``: omit host names from the results. ``command_line``: function that returns the command line of a
    trial. ``attributes``: further attributes of a new file. ``wrap``: decorator of the function that runs a trial.
    """
    from hpcdist.bench.sweep import results, series, trial
    from hpcdist.telemetry.provenance import provenance

    environment, hosts, origin = _environment(), [socket.gethostname()], provenance(anonymous=anonymous)
    origin |= attributes or {}

    def measure(chosen_trial: "SweepTrial", limit_s: float) -> "TrialOutcome":
        # Next to the results, which all nodes of a job can read; /tmp may be local to a node.
        with tempfile.TemporaryDirectory(prefix=output.name + _TRIAL_INFIX, dir=output.absolute().parent) as folder:
            outcome = trial.run(chosen_trial, Path(folder), limit_s, command_line, environment)
        return series.anonymous(outcome, hosts) if anonymous else outcome

    def stop(number: int, frame: object) -> None:
        raise series.SweepStopped

    with results.locked(output):
        _remove_leftovers(output)
        items = plan()
        stop_signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        watched = [number for number in stop_signals if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
        before = {number: signal.signal(number, stop) for number in watched}
        try:
            return series.run(items, output, wrap(measure), limits, origin, skeleton.print_progress)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def tally_line(tally: "SweepTally", ending: str = "") -> str:
    """Return a line with the numbers of ok, failed and missing runs in ``tally``, followed by the text ``ending``."""
    hint = "; --retry-failed runs failed trials again" if tally.failed else ""
    return f"{tally.ok} ok, {tally.failed} failed, {tally.left} left{ending}{hint}"


def item_line(item: "SeriesItem") -> str:
    """Return a line of text about the planned run ``item``: trial, ranks, repeat, and recorded status, if any."""
    state = f"recorded: {item.status}" if item.status else "to run"
    ranks = counted(item.trial.ranks, "rank")
    return f"{item.trial.id} {item.trial.name} on {ranks}, repeat {item.repeat + 1} ({state})"


def _environment() -> dict[str, str]:
    # Without variables that would change the recipe of the trial or end it early.
    from hpcdist.comm.launch.environment import python_path_variables
    from hpcdist.constants import SETTINGS_PREFIX
    from hpcdist.training.run.stop_requests import JOB_END

    variables = {**os.environ, **python_path_variables()}
    # At the end of the job, the sweep gets the signal and does not record the interrupted trial.
    return {
        name: value for name, value in variables.items() if not name.startswith(SETTINGS_PREFIX) and name != JOB_END
    }
