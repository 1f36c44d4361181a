"""`hpcdist bench data`: every exchange of gradients on the same model, calm and with stragglers."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.bench import skeleton
from hpcdist.cli.bench.skeleton import Outputs, count_option, file_option
from hpcdist.cli.bench.trials import SweepRecipes, check_alone, exit_code, run_series, trial_command
from hpcdist.cli.common import check_plot
from hpcdist.errors import OK, ConfigurationError, UsageError

if TYPE_CHECKING:  # late at run time: --help must not load h5py
    from hpcdist.bench.data.request import ExchangeRequest
    from hpcdist.bench.sweep.definition import SweepTrial

_SHARED_SETTINGS: Final = {"checkpoint.every_steps": 0}
_WITHOUT_RECIPE: Final = {"communication.algorithm": "ring", "run.validation_samples": 128}  # so that bytes are counted


@click.command("data")
@count_option("-n", "--ranks", default=2, help="Number of ranks.")
@file_option(
    "--recipe",
    help="Model, data and batch.  [default: the default model, reduced by the ring so that bytes are counted]",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a recipe key for all.")
@count_option("--steps", least=2, default=60, help="Steps of each training.")
@click.option(
    "--contender", "names", multiple=True, help="Measure these only; may be repeated.  [default: all that run here]"
)
@click.option("--list", "list_only", is_flag=True, help="Print the contenders and what each sets, and start nothing.")
@count_option("--repeats", default=3, help="Trainings of each, taking turns.")
@click.option(
    "--scenario",
    type=click.Choice(["calm", "stragglers", "both"]),
    default="both",
    help="Without stragglers, with them, or both.",
)
@click.option("--slow-rank", "slow", multiple=True, type=int, default=(0,), help="Straggler; may be repeated.")
@click.option("--slow-factor", type=float, default=3.0, help="How many times longer its computing takes.")
@click.option("--slow-probability", type=float, default=1.0, help="That one of its steps is slow.")
@skeleton.limit_option
@skeleton.output_options(
    "HDF5 file for every step of every rank; what it holds already is not measured again.", "Draw the losses"
)
@skeleton.run_args_option
def command(names: tuple[str, ...], list_only: bool, **options: Any) -> int:
    """Train one model by every exchange, in turns, and compare speed, bytes, memory and loss.

    A contender that this version or so many ranks refuse is left out, and the table says why. The loss is told after
    equal steps, and after equal time: when the fastest was done. A dedicated server computes nothing, so its contender
    has a worker less on as many ranks.

    Exit code 0 when every training was well, 1 when any failed, 75 when SIGTERM, SIGHUP or SIGUSR1 stopped it: with
    --output the same command goes on.
    """
    from hpcdist.bench.data.request import CONTENDERS, expand
    from hpcdist.bench.sweep.definition import Sweep

    chosen = skeleton.chosen("--contender", names, CONTENDERS) or CONTENDERS
    contenders = {name: CONTENDERS[name] for name in chosen}
    if list_only:
        for name, settings in contenders.items():
            click.echo(f"{name}: {' '.join(f'{key}={json.dumps(value)}' for key, value in settings.items())}")
        return OK
    check_alone()
    outputs, recipe = Outputs.of(options), options["recipe"]
    request = _request(contenders, options)
    sweep = Sweep(Path("bench data"), (request.ranks,), options["repeats"], recipe or {}, {}, (), ())
    trials, left_out = expand(request, SweepRecipes(sweep))
    if not trials:
        raise UsageError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    check_plot(outputs.plot)
    return _measure(trials, left_out, options, outputs)


def _request(contenders: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]) -> "ExchangeRequest":
    """Return what is compared. Raises UsageError for stragglers that cannot be, ConfigurationError for wrong keys."""
    from hpcdist.bench.data import request
    from hpcdist.training.recipe import recipe as recipes
    from hpcdist.training.recipe import settings

    ranks, scenario = options["ranks"], options["scenario"]
    scenarios: dict[str, dict[str, Any]] = {} if scenario == request.STRAGGLERS else {request.CALM: {}}
    if scenario != request.CALM:
        slow = options["slow"], options["slow_factor"], options["slow_probability"]
        _check_stragglers(ranks, *slow)
        scenarios[request.STRAGGLERS] = request.stragglers(*slow)
    base = _SHARED_SETTINGS if options["recipe"] is not None else {**_SHARED_SETTINGS, **_WITHOUT_RECIPE}
    own = settings.overrides(options["overrides"], recipes.known_keys()).values
    return request.ExchangeRequest(ranks, {**base, "run.steps": options["steps"], **own}, contenders, scenarios)


def _check_stragglers(ranks: int, slow: tuple[int, ...], factor: float, probability: float) -> None:
    """Raise UsageError for what no contender can be run with, once for all."""
    from hpcdist.training.chaos.config import ChaosConfig

    try:
        chaos = ChaosConfig(slow_ranks=slow, slow_factor=factor, slow_probability=probability)
        chaos.check_world(ranks, ranks)
    except ConfigurationError as error:
        raise UsageError(f"--slow-rank, --slow-factor or --slow-probability: {error}") from None


def _measure(
    trials: "list[SweepTrial]", left_out: Mapping[str, str], options: Mapping[str, Any], outputs: Outputs
) -> int:
    """Run what the output does not hold yet, and show the results of these ``trials``; return the exit code."""
    from hpcdist.bench.data import report
    from hpcdist.bench.sweep import results, series

    with tempfile.TemporaryDirectory(prefix="hpcdist-bench-data-") as folder:
        path = outputs.file or Path(folder) / "results.h5"
        results.check_place(path)
        tally = run_series(
            path,
            lambda: series.plan(trials, options["repeats"], path, retry_failed=False),
            series.SeriesLimits(options["limit_s"]),
            outputs.anonymous,
            trial_command(None, options["run_args"]),
            {"left_out": json.dumps(dict(left_out))},
        )
        recorded, ids = results.read(path), {trial.id for trial in trials}
    own = tuple(configuration for configuration in recorded.configurations if configuration.id in ids)
    sweep = results.SweepResults(recorded.provenance, own)
    table = report.rows(sweep)
    outputs.show(
        lambda: report.jsonable(table, left_out, sweep.provenance),
        lambda: report.text(table, left_out),
        lambda file: report.plot(sweep, file),
    )
    return exit_code(tally, any(row.failed and not row.refused for row in table))
