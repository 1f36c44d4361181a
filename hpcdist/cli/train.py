"""`hpcdist train`: the ranks of a job run this; `hpcdist run -n N train` starts them on a workstation."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hpcdist.training.recipe import Recipe


@click.command()
@click.argument("recipe", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a recipe key, e.g. run.steps=50."
)
@click.option("--out", type=click.Path(path_type=Path), help="Run directory.  [default: runs/<UTC>-<strategy>]")
@click.option(
    "--resume",
    type=click.Choice(["auto", "never"]),
    default="never",
    help="auto: go on from the newest valid checkpoint in --out, or start where there is none.",
)
@click.option(
    "--init-from",
    type=click.Path(path_type=Path),
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
def command(out: Path | None, resume: str, time_limit: str | None, as_json: bool, **options: Any) -> None:
    """Train the model of RECIPE (TOML), or of the default recipe, on every rank that the launcher started.

    Without a launcher it trains in this process alone.
    """
    from hpcdist.training import entry

    recipe, limit_s = recipe_of(options), limit_of(time_limit)
    entry.train(recipe, out, resume, as_json, limit_s)


def recipe_of(options: Mapping[str, Any]) -> "Recipe":
    """Return the recipe that the options of `train` describe (local). Raises ConfigurationError and UsageError."""
    from hpcdist.training import recipe as recipes

    overrides: tuple[str, ...] = options["overrides"]
    if options["init_from"] is not None:
        overrides = (*overrides, f"run.init_from={options['init_from'].absolute()}")
    if options["allow_partial"]:
        overrides = (*overrides, "run.allow_partial=true")
    return recipes.load(options["recipe"], overrides).recipe


def limit_of(walltime: str | None) -> int | None:
    """Return the seconds of --time-limit. Raises UsageError."""
    from hpcdist.batch.job import walltime_s

    return None if walltime is None else walltime_s(walltime, "--time-limit")
