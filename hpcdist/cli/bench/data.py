"""`hpcdist bench data`: every exchange of gradients on the same model, calm and with stragglers."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.errors import FAILURE, OK, REQUEUE, ConfigurationError, UsageError

if TYPE_CHECKING:  # late at run time: --help must not load h5py
    from hpcdist.bench.sweep.definition import SweepTrial
    from hpcdist.bench.sweep.results import SweepResults
    from hpcdist.bench.sweep.series import SweepTally
    from hpcdist.bench.sweep.trial import Command
    from hpcdist.cli.bench.trials import SweepRecipes

_SHARED_SETTINGS: Final = {"checkpoint.every_steps": 0}
_WITHOUT_RECIPE: Final = {"communication.algorithm": "ring", "run.validation_samples": 128}  # so that bytes are counted


@click.command("data")
@click.option("-n", "--ranks", type=click.IntRange(min=1), default=2, help="Number of ranks.")
@click.option(
    "--recipe",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Model, data and batch.  [default: the default model, reduced by the ring so that bytes are counted]",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a recipe key for all.")
@click.option("--steps", type=click.IntRange(min=2), default=60, help="Steps of each training.")
@click.option(
    "--contender", "chosen", multiple=True, help="Measure these only; may be repeated.  [default: all that run here]"
)
@click.option("--list", "list_only", is_flag=True, help="Print the contenders and what each sets, and start nothing.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="Trainings of each, taking turns.")
@click.option(
    "--scenario",
    type=click.Choice(["calm", "stragglers", "both"]),
    default="both",
    help="Without stragglers, with them, or both.",
)
@click.option("--slow-rank", "slow", multiple=True, type=int, default=(0,), help="Straggler; may be repeated.")
@click.option("--slow-factor", type=float, default=3.0, help="How many times longer its computing takes.")
@click.option("--slow-probability", type=float, default=1.0, help="That one of its steps is slow.")
@click.option("--limit-s", type=click.FloatRange(min=1.0), default=600.0, help="Seconds that a training may take.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="HDF5 file for every step of every rank; what it holds already is not measured again.",
)
@click.option("--run-args", default="", help="Further options of the `hpcdist run` of each training, in one string.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as one JSON object.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the losses (.png, .pdf, .svg).")
@click.option("--anonymous", is_flag=True, help="Leave the names of hosts out of the results.")
def command(
    ranks: int,
    recipe: Path | None,
    overrides: tuple[str, ...],
    steps: int,
    chosen: tuple[str, ...],
    list_only: bool,
    repeats: int,
    scenario: str,
    slow: tuple[int, ...],
    slow_factor: float,
    slow_probability: float,
    limit_s: float,
    output: Path | None,
    run_args: str,
    as_json: bool,
    plot: Path | None,
    anonymous: bool,
) -> int:
    """Train one model by every exchange, in turns, and compare speed, bytes, memory and loss.

    A contender that this version or so many ranks refuse is left out, and the table says why. The loss is told after
    equal steps, and after equal time: when the fastest was done. A dedicated server computes nothing, so its contender
    has a worker less on as many ranks.

    Exit code 0 when every training was well, 1 when any failed, 75 when SIGTERM, SIGHUP or SIGUSR1 stopped it: with
    --output the same command goes on.
    """
    from hpcdist.bench.data import report
    from hpcdist.cli.bench.trials import check_alone, trial_command

    contenders = _chosen(chosen)
    if list_only:
        for name, settings in contenders.items():
            click.echo(f"{name}: {' '.join(f'{key}={json.dumps(value)}' for key, value in settings.items())}")
        return OK
    check_alone()
    line = trial_command(None, run_args)
    scenarios: dict[str, dict[str, Any]] = {} if scenario == report.STRAGGLERS else {report.CALM: {}}
    if scenario != report.CALM:
        _check_stragglers(ranks, slow, slow_factor, slow_probability)
        scenarios[report.STRAGGLERS] = report.stragglers(slow, slow_factor, slow_probability)
    recipes = _recipes(recipe, ranks, repeats)
    base = dict(_SHARED_SETTINGS) if recipe is not None else {**_SHARED_SETTINGS, **_WITHOUT_RECIPE}
    request = report.ExchangeRequest(ranks, {**base, "run.steps": steps, **_typed(overrides)}, contenders, scenarios)
    trials, left_out = report.expand(request, recipes)
    if not trials:
        raise UsageError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    if plot is not None:
        from hpcdist.bench.collectives.report import check_plot

        check_plot(plot)
    with tempfile.TemporaryDirectory(prefix="hpcdist-bench-data-") as folder:
        path = output or Path(folder) / "results.h5"
        tally, sweep = _measure(trials, path, repeats, limit_s, anonymous, left_out, line)
        failed = _show(sweep, left_out, as_json, plot)
    return REQUEUE if tally.left else FAILURE if failed else OK


def _chosen(names: tuple[str, ...]) -> Mapping[str, Mapping[str, Any]]:
    from hpcdist.bench.data.report import CONTENDERS  # late: --help of all of `bench` must load neither numpy nor h5py

    for name in names:
        if name not in CONTENDERS:
            raise UsageError(f"--contender {name!r} is unknown; choose from: {'; '.join(CONTENDERS)}")
    return {name: CONTENDERS[name] for name in CONTENDERS if not names or name in names}


def _check_stragglers(ranks: int, slow: tuple[int, ...], factor: float, probability: float) -> None:
    """Raise UsageError for what no contender can be run with, once for all."""
    from hpcdist.training.chaos.config import ChaosConfig

    try:
        chaos = ChaosConfig(slow_ranks=slow, slow_factor=factor, slow_probability=probability)
        chaos.check_world(ranks, ranks)
    except ConfigurationError as error:
        raise UsageError(f"--slow-rank, --slow-factor or --slow-probability: {error}") from None


def _recipes(recipe: Path | None, ranks: int, repeats: int) -> "SweepRecipes":
    from hpcdist.bench.sweep.definition import Sweep
    from hpcdist.cli.bench.trials import SweepRecipes

    base: Path | dict[str, Any] = {} if recipe is None else recipe
    return SweepRecipes(Sweep(Path("bench data"), (ranks,), repeats, base, {}, (), ()))


def _typed(overrides: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the values of ``overrides`` by key."""
    from hpcdist.training.recipe import recipe as recipes
    from hpcdist.training.recipe import settings

    return settings.overrides(overrides, recipes.defaults()).values


def _measure(
    trials: "list[SweepTrial]",
    path: Path,
    repeats: int,
    limit_s: float,
    anonymous: bool,
    left_out: Mapping[str, str],
    line: "Command",
) -> "tuple[SweepTally, SweepResults]":
    """Run what ``path`` does not hold yet; return the tally, and the results of these trials."""
    from hpcdist.bench.sweep import results, series
    from hpcdist.cli.bench.trials import remove_leftovers, run_trials

    results.check_place(path)
    with results.locked(path):
        remove_leftovers(path)
        items = series.plan(trials, repeats, path, retry_failed=False)
        attributes = {"left_out": json.dumps(dict(left_out))}
        tally = run_trials(items, path, series.SeriesLimits(limit_s), anonymous, line, attributes)
    recorded = results.read(path)
    ids = {trial.id for trial in trials}
    return tally, results.SweepResults(
        recorded.provenance,
        tuple(configuration for configuration in recorded.configurations if configuration.id in ids),
    )


def _show(sweep: "SweepResults", left_out: Mapping[str, str], as_json: bool, plot: Path | None) -> bool:
    """Print the table, and draw it; whether any training failed that was not refused."""
    from hpcdist.bench.data import report as reports

    table = reports.rows(sweep)
    if as_json:
        click.echo(json.dumps(reports.jsonable(table, left_out, sweep.provenance)))
    else:
        click.echo(reports.text(table, left_out))
    if plot is not None:
        reports.plot(sweep, plot)
    return any(row.failed and not row.refused for row in table)
