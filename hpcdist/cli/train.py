"""Commands of one training: `hpcdist train`, `grow`, `evaluate` and `sample`, and `hpcdist config show` of its recipe.

`train`: every rank of a job runs it; `hpcdist run -n N train` starts them on a workstation. `grow`: a training that
was started with --survive takes in more ranks. `evaluate` prints the validation loss of a run's newest checkpoint,
`sample` text from a trained model. All imports of the training are late.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcdist.cli.common import (
    COUNT,
    PATH,
    existing_run_argument,
    json_option,
    recipe_argument,
    run_dir_argument,
    set_option,
)
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.reporting import atomic

if TYPE_CHECKING:
    from hpcdist.training.recipe.recipe import Recipe


@click.command()
@recipe_argument
@set_option
@click.option("--out", type=PATH, help="Run directory.  [default: runs/<UTC>-<strategy>]")
@click.option(
    "--resume",
    type=click.Choice(["auto", "never"]),
    default="never",
    help="auto: go on from the newest valid checkpoint in --out, or start where there is none.",
)
@click.option(
    "--init-from",
    type=PATH,
    help="Begin with the parameters of a checkpoint, or of a run's newest, in any layout: run.init_from.",
)
@click.option(
    "--allow-partial",
    is_flag=True,
    help="With --init-from: draw tensors that it lacks, that are damaged, or of another shape; each is named.",
)
@click.option(
    "--time-limit",
    metavar="WALLTIME",
    help="Save and stop in time, with exit code 75: D-HH:MM:SS, HH:MM:SS or minutes.  [default: the job's, in Slurm]",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the summary as one JSON object on the last line of stdout."
)
@click.option("-v", "--verbose", is_flag=True, help="Print the selected algorithms and the proof of the step, too.")
def train(out: Path | None, resume: str, time_limit: str | None, as_json: bool, verbose: bool, **options: Any) -> None:
    """Train the model of RECIPE (TOML), or of the default recipe, on every rank that the launcher started.

    Without a launcher it trains in this process alone.
    """
    from hpcdist.training.run import entry_point

    recipe, limit_s = recipe_from_options(options), time_limit_s(time_limit)
    entry_point.train(recipe, out, resume, as_json, limit_s, verbose)


def recipe_from_options(options: Mapping[str, Any]) -> "Recipe":
    """Return the recipe that the options of `train` describe (local). Raises ConfigurationError and UsageError."""
    from hpcdist.training.recipe import recipe as recipes

    overrides: tuple[str, ...] = options["overrides"]
    if options["init_from"] is not None:
        overrides = (*overrides, f"run.init_from={options['init_from'].absolute()}")
    if options["allow_partial"]:
        overrides = (*overrides, "run.allow_partial=true")
    return recipes.load(options["recipe"], overrides).recipe


def time_limit_s(walltime: str | None) -> int | None:
    """Return the seconds of --time-limit. Raises UsageError."""
    from hpcdist.batch.job import walltime_s

    return None if walltime is None else walltime_s(walltime, "--time-limit")


@click.command("grow")
@run_dir_argument
@click.argument("ranks", type=COUNT)
def grow(run_dir: Path, ranks: int) -> None:
    """Let RANKS more ranks join the training in RUN_DIR after its next step.

    It must have been started by `hpcdist run --survive`. Its launcher starts them, on the machines that it has; the
    global batch stays what it is, so each rank has less to do. Another call before they have come takes the place of
    the first.
    """
    from hpcdist.training.run.stop_requests import GROW_FILE

    check_can_grow(run_dir)
    atomic.save(run_dir / GROW_FILE, f"{ranks}\n")
    click.echo(f"asked for {ranks} more: {run_dir / GROW_FILE} is there until they have come", err=True)


def check_can_grow(run_dir: Path) -> None:
    """Raise ConfigurationError where no training runs in ``run_dir`` that takes in ranks, StorageError if unknown."""
    from hpcdist.checkpoint.lock import LOCK_FILE
    from hpcdist.training.run import start_record
    from hpcdist.training.run_directory import RECIPE_FILE

    if not (run_dir / RECIPE_FILE).exists():
        raise ConfigurationError(f"{run_dir} holds no run of hpcdist; give the --out of the training")
    record = run_dir / start_record.STARTS_FILE
    try:
        starts = start_record.read_starts(record)
    except (OSError, ValueError) as error:
        raise StorageError(f"{record} cannot be read, which says whether the training can grow: {error}") from error
    if not starts or starts[-1].end or not (run_dir / LOCK_FILE).exists():
        raise ConfigurationError(
            f"nothing trains in {run_dir} now; start it with that many ranks: hpcdist run -n RANKS train ... --resume "
            "auto"
        )
    if not starts[-1].survives:
        raise ConfigurationError(
            f"the training in {run_dir} has a fixed number of ranks; stop it (touch {run_dir}/stop), and start it with "
            "more, or with `hpcdist run --survive`"
        )


@click.command()
@existing_run_argument
@click.option("--trust", is_flag=True, help="Execute the model.factory of the run's recipe, whoever wrote it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout.")
def evaluate(run_dir: Path, trust: bool, as_json: bool) -> None:
    """Print the validation loss of the newest checkpoint in RUN_DIR; under a launcher the ranks share the work.

    A model that its recipe imports (model.kind = 'import') is made by code: it is executed where the file is the one
    that you trained it with, and else with --trust alone.
    """
    from hpcdist.errors import OK
    from hpcdist.models.config import loss_unit
    from hpcdist.training.inference import InspectionSession

    with InspectionSession(run_dir) as look:
        trained = look.load(trust)
        figures = {"steps": trained.steps, "val_loss": trained.validation_loss()}
        unit = loss_unit(trained.recipe.model.kind, trained.model.tokens_per_sample)
    if look.session.comm.rank == 0:
        loss = f"{figures['val_loss']:.4f} {unit}".rstrip()
        click.echo(f"val_loss {loss} after {figures['steps']} steps", err=as_json)
        if as_json:
            click.echo(json.dumps(figures))
    look.session.leave(OK)


@click.command()
@existing_run_argument
@click.option("--prompt", default="def ", help="Text to continue.")
@click.option("--tokens", default=400, type=COUNT, help="How many bytes to write.")
@click.option("--temperature", default=0.8, type=click.FloatRange(min=0.0), help="0 takes the likeliest byte.")
@click.option("--top-k", default=0, type=click.IntRange(min=0), help="Keep the k likeliest bytes only; 0 keeps all.")
@click.option("--seed", default=0, type=click.IntRange(min=0), help="Seed of the draws.")
def sample(run_dir: Path, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> None:
    """Print text that the model in RUN_DIR writes. It must be a gpt on bytes (model.vocabulary 256)."""
    from hpcdist.training import inference

    try:
        for part in inference.sample(run_dir, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed):
            sys.stdout.write(part)
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has seen enough; the interpreter must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group("config")
def config() -> None:
    """Recipes: their keys, values and origins."""


@config.command()
@recipe_argument
@set_option
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@json_option
def show(recipe: Path | None, overrides: tuple[str, ...], origin: bool, as_json: bool) -> None:
    """Print RECIPE (TOML), or the default recipe, as a run resolves it: valid TOML with every key."""
    from hpcdist.training.recipe import recipe as recipes

    resolved = recipes.load(recipe, overrides)
    if as_json:
        click.echo(json.dumps({"recipe": recipes.flat(resolved.recipe), "origin": dict(resolved.origin)}))
    elif not origin:
        click.echo(recipes.dump(resolved.recipe), nl=False)
    else:
        click.echo(_with_origins(recipes.dump(resolved.recipe), list(resolved.origin.values())), nl=False)


def _with_origins(text: str, origins: list[str]) -> str:
    """Return ``text`` with the origin of each key as a comment behind it."""
    width = max(len(line) for line in text.splitlines())
    places = iter(origins)
    lines = [f"{line:<{width}}  # {next(places)}" if " = " in line else line for line in text.splitlines()]
    return "\n".join(lines) + "\n"
