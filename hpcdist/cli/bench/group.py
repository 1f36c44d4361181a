"""The command group `hpcdist bench` with `bench sweep` and `bench merge`, and the command `hpcdist compare`."""

import functools
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.bench import collectives, skeleton, step
from hpcdist.cli.bench.trials import SweepRecipes, check_alone, item_line, run_options, run_series, tally_line
from hpcdist.cli.common import FILE, PATH
from hpcdist.constants import RECIPE_FILE
from hpcdist.errors import FAILURE, OK, REQUEUE, UsageError

if TYPE_CHECKING:  # late at run time: --help must not load h5py
    from hpcdist.bench.sweep.series import SeriesItem
    from hpcdist.bench.sweep.trial import Command


@click.command("merge")
@click.option("-o", "--output", type=FILE, required=True, help="HDF5 file, new or not, to add the results to.")
@click.option("--mixed", is_flag=True, help="Allow trials of different commits of hpcdist.")
@click.argument("parts", metavar="FILE...", nargs=-1, required=True, type=FILE)
def merge(output: Path, mixed: bool, parts: tuple[Path, ...]) -> None:
    """Merge the results FILEs of one sweep into OUTPUT, as if one `hpcdist bench sweep` had measured all trials.

    If several FILEs have results of the same run, a successful result replaces a failed result, and a later failed
    result replaces an earlier failed result. Two different successful results are an error. stderr lists the
    differences between versions and machines. Merging the same FILEs again changes nothing.
    """
    from hpcdist.bench.sweep import merge, results

    results.check_place(output)
    with results.locked(output):
        merged = merge.merge(output, parts, mixed=mixed)
    for difference in merged.differences:
        skeleton.print_progress(f"hpcdist bench merge: the trials differ in {difference}")
    skeleton.print_progress(f"{merged.ok} ok, {merged.failed} failed; `hpcdist report {output}`")


def _threshold(context: click.Context, parameter: click.Parameter, value: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", value)
    if match is None:
        raise click.BadParameter(f"{value!r}: expected a percentage or a fraction, such as 5% or 0.05")
    return float(match[1]) / (100 if match[2] else 1)


@click.command("compare")
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
@click.option("--threshold", callback=_threshold, default="5%", help="Tolerated slowdown, such as 5% or 0.05.")
@click.option(
    "--confidence", type=click.FloatRange(0.5, 1.0, max_open=True), default=0.95, help="Confidence of the intervals."
)
@click.option("--resamples", type=click.IntRange(min=100), default=2000, help="Number of bootstrap samples.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the bootstrap.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as one JSON object.")
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
def compare(before: Path, after: Path, as_json: bool, markdown: bool, **rule_options: Any) -> int:
    """Compare AFTER with BEFORE: two results files of `bench collectives` or `bench sweep`, or two run directories.

    For two run directories, print the results of both runs, ratios, and the recipe keys that differ. Exit code 0.

    For two results files, print ratios of the median times of the slowest ranks, with a bootstrap interval over the
    iterations. The largest slowdown comes first. Configurations in only one file are listed.

    Exit codes: 0 if no configuration is slower, 1 if the whole interval of a configuration is above the threshold or
    AFTER has a wrong result, 2 for usage errors (also if the files have nothing in common, or too few iterations
    for any verdict), 74 if a file cannot be read.
    """
    if as_json and markdown:
        raise UsageError("--json and --markdown select different output formats; choose one")
    if before.is_dir() and after.is_dir():
        _compare_runs(before, after, as_json, markdown)
        return OK
    from hpcdist.bench import compare as comparing  # late: --help must not load h5py

    rule = comparing.CompareRule(**rule_options)
    comparison = comparing.compare(before, after, rule)
    if as_json:
        click.echo(json.dumps(comparing.jsonable(comparison, rule)))
    else:
        click.echo(comparing.markdown(comparison) if markdown else comparing.text(comparison))
    judged, total = len(comparison.judged), sum(not change.reference for change in comparison.changes)
    if not judged:
        raise UsageError(
            f"none of {total} common configurations has a verdict, which needs {comparing.LEAST} iterations in each "
            "file; measure more iterations (--iterations, --seconds), or more steps of a sweep (run.steps)"
        )
    wrong = sum(change.verdict == comparing.WRONG for change in comparison.regressions)
    counts = f"{wrong} wrong in the second, {total - judged} without a verdict"
    slower = len(comparison.regressions) - wrong
    click.echo(f"{slower} of {total} slower by more than {100 * rule.threshold:g} %, {counts}", err=True)
    return FAILURE if comparison.regressions else OK


_CLONE: Final = "in a clone of the repository"
MOVED: Final = {  # command of an earlier version -> its successor
    "checkpoint": f"`python -m benchmarks checkpoint` or `background_saves` {_CLONE}",
    "data": "`hpcdist bench sweep strategies.toml`, with the file that `hpcdist help --examples DIRECTORY` writes",
    "pipeline": f"`python -m benchmarks pipelines` {_CLONE}",
    "power": f"`python -m benchmarks power` {_CLONE}",
}


class BenchGroup(click.Group):
    """Click group whose error message for a moved command names the replacement."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in MOVED:
            raise click.UsageError(f"`hpcdist bench {args[0]}` has moved; use {MOVED[args[0]]}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=BenchGroup)
def command() -> None:
    """Measure configurations of a training, training steps and collectives."""


for _module in (collectives, step):
    command.add_command(_module.command)
command.add_command(merge)


@command.command()
@click.argument("sweep_file", metavar="SWEEP.toml", type=FILE)
@click.option("-o", "--output", type=FILE, default=Path("results.h5"), help="HDF5 file to append the results to.")
@click.option("--trial", metavar="TRIAL", help="Run only this trial: its number from 0, its id or its name.")
@skeleton.limit_option
@skeleton.budget_option
@skeleton.ranks_per_node_option
@skeleton.run_args_option
@skeleton.retry_option
@click.option("--anonymous", is_flag=True, help="Leave host names out of the results.")
@click.option("--dry-run", is_flag=True, help="Print the trials and their commands; start nothing.")
@click.option("--list", "listing", is_flag=True, help="Print number, id, ranks and name of each trial; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --list: one JSON object.")
def sweep(
    sweep_file: Path, output: Path, trial: str | None, listing: bool, as_json: bool, dry_run: bool, **options: Any
) -> int:
    """Train every configuration of SWEEP.toml on every number of ranks, and record the time of each step.

    Trials with a result in OUTPUT do not run again, so the same command continues an interrupted sweep. During a sweep,
    the directory of OUTPUT also contains the run directory of the current trial, and OUTPUT.lock, which keeps other
    sweeps away. `hpcdist report OUTPUT` prints the table. A job array runs one --trial per task, each task with a
    separate OUTPUT, and `hpcdist bench merge` merges these files.

    Exit codes: 0 if all trials are recorded as ok, 1 if a trial failed (the others still run), 75 if trials are left
    for the next call because the budget is spent or SIGTERM, SIGHUP or SIGUSR1 arrived.
    """
    if as_json and not listing:
        raise UsageError("--json needs --list; add --list, or use `hpcdist report --json` for results")
    check_alone()
    from hpcdist.bench.sweep import definition

    definitions = definition.read(sweep_file)
    trials = definition.expand(definitions, SweepRecipes(definitions))
    only = None if trial is None else definition.trial_position(trials, trial, str(sweep_file))
    if listing:  # needs neither MPI nor HDF5
        rows = definition.trial_rows(trials, definitions)
        rows = rows if only is None else [rows[only]]
        click.echo(json.dumps({"sweep": str(sweep_file), "trials": rows}) if as_json else definition.trial_table(rows))
        return OK
    from hpcdist.bench.sweep import results, series
    from hpcdist.bench.sweep.trial import command as command_of

    line = functools.partial(command_of, options=run_options(options["ranks_per_node"], options["run_args"]))
    results.check_place(output)
    plan = functools.partial(series.plan, trials, definitions.repeats, output, options["retry_failed"], only)
    if dry_run:
        _show(plan(), line)
        return OK
    limits = series.SeriesLimits(options["limit_s"], options["budget_s"] or float("inf"))
    tally = run_series(output, plan, limits, options["anonymous"], line)
    skeleton.print_progress(tally_line(tally, f"; `hpcdist report {output}`"))
    return REQUEUE if tally.left else FAILURE if tally.failed else OK


def _show(items: "list[SeriesItem]", line: "Command") -> None:
    for number, item in enumerate(items, 1):
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in item.trial.settings.items())
        click.echo(f"[{number}/{len(items)}] {item_line(item)}: {settings}")
    lines = {item.trial.ranks: line(item.trial, Path("RECIPE"), Path("RUN_DIR")) for item in items}
    for ranks in sorted(lines):
        click.echo(shlex.join(lines[ranks]))


def _effective_keys(run_dir: Path) -> dict[str, str]:
    from hpcdist.models.config import applies
    from hpcdist.reporting.rules import written
    from hpcdist.training.recipe import recipe as recipes

    if not (run_dir / RECIPE_FILE).exists():  # the run of a script
        return {}
    values = recipes.flat(recipes.load_stored(run_dir / RECIPE_FILE))
    kind = values["model.kind"]
    return {
        key: written(value)
        for key, value in values.items()
        if not key.startswith("model.") or applies(key.removeprefix("model."), kind)
    }


def _compare_runs(before: Path, after: Path, as_json: bool, markdown: bool) -> None:
    from hpcdist.cli.runs.report import read_runs
    from hpcdist.reporting.table import MISSING
    from hpcdist.telemetry import report as reports

    runs = read_runs((before, after))
    first, second = (_effective_keys(path) for path in (before, after))
    pairs = {key: (first.get(key, MISSING), second.get(key, MISSING)) for key in first | second}
    differ = {key: (old, new) for key, (old, new) in pairs.items() if old != new}
    if as_json:
        click.echo(json.dumps({"figures": reports.comparison(*runs), "recipe": differ}))
    else:
        click.echo(reports.comparison_text(runs[0], runs[1], differ, as_markdown=markdown))
