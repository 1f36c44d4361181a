"""`hpcdist bench power`: time against energy, over power limits, clocks, ranks, threads or a recipe key.

Limits are set around each trial and restored afterwards, also by --restore after a kill (the journal of
`energy.power_limits`).
"""

import functools
import math
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.bench import skeleton
from hpcdist.cli.bench.power import axes as power_axes
from hpcdist.cli.bench.power.axes import CPU, GPU, LimitedDevices, check_energy_is_measured
from hpcdist.cli.bench.skeleton import Outputs, count_option
from hpcdist.cli.bench.trials import check_alone, exit_code, item_line, run_options, run_series, tally_line
from hpcdist.cli.common import FILE, check_plot
from hpcdist.errors import MISSING_CAPABILITY, OK, MissingCapabilityError, UsageError

if TYPE_CHECKING:  # late at run time: --help must not load h5py
    from hpcdist.bench.sweep.definition import SweepTrial
    from hpcdist.bench.sweep.series import Measure, SeriesItem
    from hpcdist.bench.sweep.trial import Command, TrialOutcome

OBJECTIVES: Final = ("energy", "edp", "ed2p", "time")


@click.command("power")
@click.argument("recipe", metavar="[RECIPE]", type=FILE, required=False)
@count_option("-n", "--ranks", help="Ranks of each trial.  [default: 1]")
@click.option("--limits", metavar="W,W,...", help="Power limits of each device, in watts.")
@click.option("--clocks", metavar="MHZ,...", help="Frequencies at which the clocks of GPUs are locked.")
@click.option("--on", type=click.Choice([GPU, CPU]), help="Whose --limits.  [default: gpu where the trials hold any]")
@click.option(
    "--sweep", "sweeps", multiple=True, metavar="KEY=V1,V2", help="Values of a recipe key, or of ranks or threads."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a recipe key in all trials.")
@click.option("--change-limits", is_flag=True, help="Really change limits and clocks; nothing does without it.")
@click.option("--restore", is_flag=True, help="Put back the limits that a killed sweep has left on this machine.")
@click.option("--show", is_flag=True, help="Show the results in OUTPUT, and measure nothing.")
@click.option(
    "--dry-run", is_flag=True, help="Print devices, what they take, and the trials; change and start nothing."
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Trials of each configuration."
)
@click.option("--warmup/--no-warmup", default=True, help="Train once before the first trial, which is not kept.")
@count_option("--seed", least=0, help="Of the order of the trials.  [default: a new one, kept]")
@click.option(
    "--objective", type=click.Choice(OBJECTIVES), default="edp", show_default=True, help="What is to be small."
)
@click.option("--max-slowdown", type=float, metavar="FACTOR", help="Recommend nothing that takes longer, e.g. 1.1.")
@skeleton.output_options(
    "HDF5 file that the results are appended to.",
    "Draw time against energy",
    default=Path("power.h5"),
    hides="hosts and devices",
)
@skeleton.limit_option
@skeleton.budget_option
@skeleton.ranks_per_node_option
@skeleton.run_args_option
@skeleton.retry_option
def command(**options: Any) -> int:
    """Train RECIPE under each power limit or clock, or with each value of a key, and tell which takes least energy.

    Every configuration is trained --repeats times, in random and alternating order after a warm-up; beside those under
    limits there is always one as the devices were found. OUTPUT keeps time, joules and loss of each trial, and the same
    command goes on where it was ended. Shown are all of them, the Pareto front of time against energy, and the one that
    the --objective chooses, if its gain is beyond the noise.

    Limits are changed with --change-limits only, for the time of a trial, and put back however it ends; after a SIGKILL
    by `hpcdist bench power --restore`. Permission is asked for before the first trial. What needs none is --sweep,
    as in `hpcdist bench power r.toml --sweep threads=1,2,4`.

    Exit code 0 when all trials are recorded as ok, 1 when any failed, 69 where limits cannot be changed, 75 when some
    are left for the next call.
    """
    power_axes.check_options(options)
    if options["restore"]:
        from hpcdist.energy.power_limits import apply, journal

        return OK if apply.put_back(journal.directory(), click.echo) else MISSING_CAPABILITY
    from hpcdist.bench.power import pareto

    outputs = Outputs.of(options)
    pareto.recommend([], options["objective"], options["max_slowdown"])  # refuses, before anything is measured
    check_plot(outputs.plot)
    if options["show"]:
        _report(outputs, options)
        return OK
    check_alone()
    return _sweep(options, outputs)


def _sweep(options: dict[str, Any], outputs: Outputs) -> int:
    """Measure what the ``options`` say, show it, and return the exit code."""
    from hpcdist.bench.power import pareto
    from hpcdist.bench.sweep import results, series

    output = outputs.file
    assert output is not None, "it has a default"
    axes = power_axes.sweep_axes(options)
    recipes = power_axes.PowerRecipes(options["recipe"], options["overrides"])
    base = recipes.resolve({}, None)
    check_energy_is_measured(base)
    trials = pareto.expand(axes, lambda settings, ranks: recipes.text(settings, ranks))
    line_for = _trial_commands(options, axes.threads)
    results.check_place(output)
    with LimitedDevices(axes, base, options["on"]) as devices:
        names = devices.names(outputs.anonymous)
        seed, attributes = _provenance_of_sweep(output, options["seed"], devices.kind, names, base.energy.sources)

        def plan() -> "list[SeriesItem]":
            return pareto.plan(trials, options["repeats"], output, options["retry_failed"], seed)

        if options["dry_run"]:
            _show(plan(), devices, line_for)
            return OK
        if devices.kind:
            if not options["change_limits"]:
                raise UsageError(_refusal(axes, devices))
            devices.permitted()
        limits = series.SeriesLimits(options["limit_s"], options["budget_s"] or float("inf"))
        around = functools.partial(_with_limits, devices, options["warmup"])
        line = line_for(trials[0])
        tally = run_series(output, plan, limits, outputs.anonymous, line, attributes, line_for, around)
    skeleton.print_progress(tally_line(tally, f", in {output}"))
    _report(outputs, options)
    return exit_code(tally, tally.failed > 0)


def _refusal(axes: Any, devices: LimitedDevices) -> str:
    values = [f"{value:g} W" for value in axes.limits_w] + [f"{value:g} MHz" for value in axes.clocks_mhz]
    return (
        f"this would set {', '.join(values)} in turn on {devices.names(False)}, and put back what is there now; "
        "nothing was changed: add --change-limits to do it, or --dry-run to see the plan"
    )


def _trial_commands(options: dict[str, Any], threads: Sequence[int]) -> "Callable[[SweepTrial], Command]":
    """Return what makes the command of a trial."""
    from hpcdist.bench.power import pareto
    from hpcdist.bench.sweep import trial

    words = run_options(options["ranks_per_node"], options["run_args"])
    if threads and any(word.startswith("--cpus-per-task") for word in words):
        raise UsageError("--run-args and --sweep threads=... both say --cpus-per-task; leave one of them out")

    def line_for(of: "SweepTrial") -> "Command":
        own = of.settings.get(pareto.THREADS)
        more = [] if own is None else ["--cpus-per-task", str(own)]
        return functools.partial(trial.command, options=[*words, *more])

    return line_for


def _provenance_of_sweep(
    output: Path, wanted: int | None, kind: str, names: str, sources: str
) -> tuple[int, dict[str, str]]:
    """Return the seed of the order, and what the results file says of the sweep.

    Raises UsageError where the file there is not of such a sweep, or one of other devices.
    """
    from hpcdist.bench.power import report
    from hpcdist.bench.sweep import results

    seed = int.from_bytes(os.urandom(4), "little") if wanted is None else wanted
    if output.exists():
        known = results.read(output).provenance
        if report.SEED not in known:
            raise UsageError(f"{output} holds the results of another benchmark; choose another --output")
        before = known.get(report.DEVICES, "")
        if names and before and before != names:
            raise UsageError(f"{output} was measured on {before}, and this is {names}; choose another --output")
        if wanted is None:
            seed = int(known[report.SEED])
    attributes = {report.SEED: str(seed), report.DEVICES: names, report.LIMITED: kind}
    declared = {report.DECLARED: "declared"} if sources == "declared" else {}
    return seed, {**attributes, **declared}


def _with_limits(devices: LimitedDevices, warmup: bool, items: "Sequence[SeriesItem]", measure: "Measure") -> "Measure":
    """Return ``measure`` with the limits of a trial set around it, after a warm-up before the first of all."""
    from hpcdist.bench.power import pareto
    from hpcdist.bench.sweep.trial import FAILED, OK, TrialOutcome

    left = [warmup and any(not item.status for item in items)]

    def measured(of: "SweepTrial", limit_s: float) -> "TrialOutcome":
        if left.pop() if left else False:
            outcome = measure(of, limit_s)
            failure = f", FAILED, {outcome.reason}" if outcome.reason else ""
            skeleton.print_progress(f"warm-up: {outcome.wall_s:.1f} s{failure}")
        limit_w, clock_mhz = pareto.limits_of(of)
        with ExitStack() as stack:
            try:
                in_force = stack.enter_context(devices.limited(limit_w, clock_mhz))
            except MissingCapabilityError as error:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                return TrialOutcome(FAILED, now, 0.0, 0, f"its limits could not be set: {error}")
            outcome = measure(of, limit_s)
            after = devices.in_force()
        if outcome.status != OK:
            return outcome
        trouble = _invalid_reason(outcome, in_force, after) if devices.kind else ""
        if trouble:
            return replace(outcome, status=FAILED, reason=trouble, summary={}, samples={})
        figures = {**pareto.figures(outcome), "in_force_w": in_force}
        figures |= {name: of.settings.get(name) for name in (pareto.LIMIT, pareto.CLOCK, pareto.THREADS)}
        return replace(outcome, summary={**outcome.summary, pareto.GROUP: figures})

    return measured


def _invalid_reason(outcome: "TrialOutcome", before: float | None, after: float | None) -> str:
    """Return why the figures of a trial under a limit mean nothing; "" where they do."""
    if before is not None and after is not None and not math.isclose(before, after, abs_tol=0.5):
        return f"somebody has changed the limit while it ran, from {before:g} W to {after:g} W"
    nodes = {source.get("node") for source in outcome.summary.get("energy_sources", ())}
    if len(nodes) > 1:
        return f"it ran on {len(nodes)} nodes, and the limits were those of this one"
    return ""


def _show(items: "Sequence[SeriesItem]", devices: LimitedDevices, line_for: "Callable[[SweepTrial], Command]") -> None:
    """Print devices and trials in their order, and the commands."""
    for described in devices.described():
        click.echo(described)
    for number, item in enumerate(items, 1):
        click.echo(f"[{number}/{len(items)}] {item_line(item)}")
    lines = [shlex.join(line_for(item.trial)(item.trial.ranks, Path("RECIPE"), Path("RUN_DIR"))) for item in items]
    for line in dict.fromkeys(lines):
        click.echo(line)


def _report(outputs: Outputs, options: dict[str, Any]) -> None:
    """Print, and draw, what the results say."""
    from hpcdist.bench.power import plot, report
    from hpcdist.bench.sweep import results

    assert outputs.file is not None, "it has a default"
    summary = report.report(results.read(outputs.file), options["objective"], options["max_slowdown"])
    path = outputs.file
    outputs.show(
        lambda: report.jsonable(summary), lambda: report.text(path, summary), lambda file: plot.plot(summary, file)
    )
    if outputs.plot is not None and not outputs.as_json:
        click.echo(f"plot: {outputs.plot}")
