"""`hpcdist train`: the ranks of a job run this; `hpcdist run -n N train` starts them on a workstation."""

from pathlib import Path

import click


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
def command(
    recipe: Path | None,
    overrides: tuple[str, ...],
    out: Path | None,
    resume: str,
    init_from: Path | None,
    allow_partial: bool,
    time_limit: str | None,
    as_json: bool,
) -> None:
    """Train the model of RECIPE (TOML), or of the default recipe, on every rank that the launcher started.

    Without a launcher it trains in this process alone.
    """
    from hpcdist.batch.job import walltime_s
    from hpcdist.training import entry
    from hpcdist.training import recipe as recipes

    if init_from is not None:
        overrides = (*overrides, f"run.init_from={init_from.absolute()}")
    if allow_partial:
        overrides = (*overrides, "run.allow_partial=true")
    limit_s = None if time_limit is None else walltime_s(time_limit, "--time-limit")
    entry.train(recipes.load(recipe, overrides).recipe, out, resume, as_json, limit_s)
