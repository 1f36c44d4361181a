"""The group `hpcdist bench`, and `bench sweep`: measure configurations one after the other."""

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcdist.cli.bench import checkpoint, collectives, data, pipeline, skeleton, step
from hpcdist.cli.bench.power import command as power_command
from hpcdist.cli.bench.skeleton import file_option
from hpcdist.cli.bench.trials import (
    SweepRecipes,
    check_alone,
    exit_code,
    item_line,
    run_series,
    tally_line,
    trial_command,
)
from hpcdist.cli.common import FILE, PATH
from hpcdist.errors import FAILURE, OK, UsageError

if TYPE_CHECKING:  # late at run time: --help must not load h5py
    from hpcdist.bench.sweep.series import SeriesItem
    from hpcdist.bench.sweep.trial import Command


@click.command("merge")
@file_option("-o", "--output", required=True, help="HDF5 file that the results are put into; it keeps what it has.")
@click.option("--mixed", is_flag=True, help="Take trials of different commits of hpcdist.")
@click.argument("parts", metavar="FILE...", nargs=-1, required=True, type=FILE)
def merge(output: Path, mixed: bool, parts: tuple[Path, ...]) -> None:
    """Put the results FILEs of one sweep into OUTPUT, as if one `hpcdist bench sweep` had measured all of it.

    Of two tries of a trial a good one counts, and of two failed ones the later; two good ones that differ are refused.
    In what versions and machines the files differ is said on stderr. The same command again changes nothing.
    """
    from hpcdist.bench.sweep import merge, results

    results.check_place(output)
    with results.locked(output):
        merged = merge.merge(output, parts, mixed=mixed)
    for difference in merged.differences:
        skeleton.print_progress(f"hpcdist bench merge: the trials differ in {difference}")
    skeleton.print_progress(f"{merged.ok} ok, {merged.failed} failed; `hpcdist report {output}`")


def _threshold(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """Return "5%", "5 %" or "0.05" as 0.05."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", value)
    if match is None:
        raise click.BadParameter(f"{value!r}: expected a share such as 5% or 0.05")
    return float(match[1]) / (100 if match[2] else 1)


@click.command("compare")
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
@click.option("--threshold", callback=_threshold, default="5%", help="Slowdown that is still tolerated.")
@click.option(
    "--confidence", type=click.FloatRange(0.5, 1.0, max_open=True), default=0.95, help="Of the intervals of ratios."
)
@click.option("--resamples", type=click.IntRange(min=100), default=2000, help="Draws of the bootstrap.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the draws: the same seed, the same intervals.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as one JSON object.")
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
def compare(before: Path, after: Path, as_json: bool, markdown: bool, **rule_options: Any) -> int:
    """Say what of AFTER is slower or faster than in BEFORE: two results of `hpcdist bench collectives`, or of a sweep.

    Two run directories are put beside each other: their figures, with ratios, and the keys of their recipes that
    differ; the exit code is 0.

    The ratio is that of the medians of the slowest rank's times, with a bootstrap interval over the iterations; the
    largest slowdown comes first. What only one of the files has is listed.

    Exit codes, for CI: 0 when nothing is slower beyond the threshold with its whole interval, 1 when something is, or
    gives a wrong result in AFTER, 2 for usage (also files that have nothing in common, or too few iterations for any
    verdict), 74 for a file that cannot be read.
    """
    if before.is_dir() and after.is_dir():
        _compare_runs(before, after, as_json)
        return OK
    from hpcdist.bench import compare as comparing  # late: --help must not load h5py

    if as_json and markdown:
        raise UsageError("--json and --markdown are two ways to print the same; choose one")
    rule = comparing.CompareRule(**rule_options)
    comparison = comparing.compare(before, after, rule)
    if as_json:
        click.echo(json.dumps(comparing.jsonable(comparison, rule)))
    else:
        click.echo(comparing.markdown(comparison) if markdown else comparing.text(comparison))
    judged, total = len(comparison.judged), sum(not change.reference for change in comparison.changes)
    if not judged:
        raise UsageError(
            f"none of {total} configurations that both files have has a verdict, which takes {comparing.LEAST} "
            "iterations a side; measure more (--iterations, --seconds)"
        )
    wrong = sum(change.verdict == comparing.WRONG for change in comparison.regressions)
    counts = f"{wrong} wrong in the second, {total - judged} without a verdict"
    slower = len(comparison.regressions) - wrong
    click.echo(f"{slower} of {total} slower by more than {100 * rule.threshold:g} %, {counts}", err=True)
    return FAILURE if comparison.regressions else OK


@click.group()
def command() -> None:
    """Measure configurations of a training, its steps, power, exchanges, pipelines, collectives, checkpoints."""


for _module in (collectives, data, pipeline, checkpoint, power_command, step):
    command.add_command(_module.command)
command.add_command(merge)


@command.command()
@click.argument("sweep_file", metavar="SWEEP.toml", type=FILE)
@file_option("-o", "--output", default=Path("results.h5"), help="HDF5 file that the results are appended to.")
@click.option("--trial", "wanted", metavar="TRIAL", help="Run this one alone: its number from 0, its id or its name.")
@skeleton.limit_option
@skeleton.budget_option
@skeleton.ranks_per_node_option
@skeleton.run_args_option
@skeleton.retry_option
@click.option("--anonymous", is_flag=True, help="Leave the names of hosts out of the results.")
@click.option("--dry-run", is_flag=True, help="Print the trials and the command of each, and start nothing.")
@click.option("--list", "listing", is_flag=True, help="Print number, id, ranks and name of the trials, and no more.")
@click.option("--json", "as_json", is_flag=True, help="With --list: one JSON object.")
def sweep(
    sweep_file: Path, output: Path, wanted: str | None, listing: bool, as_json: bool, dry_run: bool, **options: Any
) -> int:
    """Train every configuration of SWEEP.toml on every number of ranks, and keep what each step took.

    Trials that OUTPUT holds already are not run again, so the same command goes on after an end of any kind. The run
    directory of a trial lies beside OUTPUT while it is needed, and so does OUTPUT.lock, which keeps other sweeps from
    OUTPUT. `hpcdist report OUTPUT` shows the table. The tasks of a job array run one --trial each, with an OUTPUT of
    its own, and `hpcdist bench merge` makes one of them.

    Exit code 0 when all trials are recorded as ok, 1 when any failed (the sweep goes on all the same), 75 when some are
    left for the next call: the budget was spent, or SIGTERM, SIGHUP or SIGUSR1 came.
    """
    if as_json and not listing:
        raise UsageError("--json prints what --list does; add --list, or see `hpcdist report --json` for results")
    check_alone()
    from hpcdist.bench.sweep import definition

    measured = definition.read(sweep_file)
    trials = definition.expand(measured, SweepRecipes(measured))
    only = None if wanted is None else definition.trial_position(trials, wanted, str(sweep_file))
    if listing:  # needs neither MPI nor HDF5
        rows = definition.trial_rows(trials, measured)
        rows = rows if only is None else [rows[only]]
        click.echo(json.dumps({"sweep": str(sweep_file), "trials": rows}) if as_json else definition.trial_table(rows))
        return OK
    from hpcdist.bench.sweep import results, series

    line = trial_command(options["ranks_per_node"], options["run_args"])
    results.check_place(output)

    def plan() -> "list[SeriesItem]":
        return series.plan(trials, measured.repeats, output, options["retry_failed"], only)

    if dry_run:
        _show(plan(), line)
        return OK
    limits = series.SeriesLimits(options["limit_s"], options["budget_s"] or float("inf"))
    tally = run_series(output, plan, limits, options["anonymous"], line)
    skeleton.print_progress(tally_line(tally, f"; `hpcdist report {output}`"))
    return exit_code(tally, tally.failed > 0)


def _show(items: "list[SeriesItem]", line: "Command") -> None:
    """Print the trials in their order, and below the command of each."""
    for number, item in enumerate(items, 1):
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in item.trial.settings.items())
        click.echo(f"[{number}/{len(items)}] {item_line(item)}: {settings}")
    for ranks in sorted({item.trial.ranks for item in items}):
        click.echo(shlex.join(line(ranks, Path("RECIPE"), Path("RUN_DIR"))))


def _has_effect(key: str, kind: str) -> bool:
    from hpcdist.models.config import applies

    section, _, name = key.partition(".")
    return section != "model" or applies(name, kind)


def _compare_runs(before: Path, after: Path, as_json: bool) -> None:
    """Print the figures of two runs next to each other, and the recipe keys that differ."""
    from hpcdist.cli.runs.report import read_runs
    from hpcdist.reporting.rules import written
    from hpcdist.reporting.table import MISSING
    from hpcdist.telemetry import side_by_side
    from hpcdist.training.recipe import recipe as recipes

    runs = read_runs((before, after))
    keys = [recipes.flat(recipes.load_stored(path / "recipe.toml")) for path in (before, after)]
    shown = [  # a key without effect has no value to compare
        {key: written(value) for key, value in each.items() if _has_effect(key, each["model.kind"])} for each in keys
    ]
    names = dict.fromkeys((*shown[0], *shown[1]))
    pairs = {key: (shown[0].get(key, MISSING), shown[1].get(key, MISSING)) for key in names}
    differ = {key: (old, new) for key, (old, new) in pairs.items() if old != new}
    if as_json:
        click.echo(json.dumps({"figures": side_by_side.comparison(*runs), "recipe": differ}))
    else:
        click.echo(side_by_side.comparison_text(runs[0], runs[1], differ))
