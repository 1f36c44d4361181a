"""`hpcdist submit`: a recipe becomes a job of Slurm. Light, for login nodes: neither MPI nor HDF5 is loaded."""

import sys
from pathlib import Path
from typing import Any

import click


@click.command("submit")
@click.argument("recipe", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option("--nodes", type=click.IntRange(min=1), required=True, help="Number of nodes.")
@click.option("--ranks-per-node", type=click.IntRange(min=1), default=1, help="Ranks on each of them.")
@click.option("--cpus-per-task", type=click.IntRange(min=1), default=1, help="Cores, and threads, of each rank.")
@click.option("--time", "walltime", metavar="WALLTIME", help="D-HH:MM:SS, HH:MM:SS or minutes.  [default: the site's]")
@click.option("--partition", help="Partition of the cluster.  [default: the site's]")
@click.option("--account", help="Account that pays.  [default: yours]")
@click.option("--job-name", "name", default="hpcdist", help="Name in the queue.")
@click.option("--signal-seconds", "signal_s", default=120, help="How long before the walltime the job saves and stops.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Run directory.  [default: runs/slurm-<job number>]"
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a recipe key, e.g. run.steps=50."
)
@click.option("--mpi-args", default="", help="Further options of mpirun, in one string.")
@click.option("--sbatch-arg", "sbatch_args", multiple=True, help="Further option of sbatch, e.g. --qos=debug.")
@click.option("--dry-run", is_flag=True, help="Print the script and submit nothing; needs no Slurm.")
def command(recipe: Path | None, overrides: tuple[str, ...], out: Path | None, dry_run: bool, **shape: Any) -> None:
    """Submit the training of RECIPE (TOML), or of the default recipe, to Slurm and print the number of the job.

    Before the walltime ends the job saves, stops and is requeued, until all steps are done: it goes on from its newest
    checkpoint. It runs in this directory, with this environment and this Python. Every start trains the recipe as it is
    now: the script holds all of its values, and the file may change. The job writes it to hpcdist-<job>.toml, beside
    its log.
    """
    from hpcdist.batch import script, slurm
    from hpcdist.batch.job import BatchJob
    from hpcdist.cli.degrees import equation
    from hpcdist.cli.run import mpi_options, outside_python
    from hpcdist.training import recipe as recipes

    mpi_options(shape["mpi_args"])  # raises here what it would on the node
    resolved = recipes.load(recipe, overrides).recipe
    job = BatchJob(
        recipe=recipes.dump(resolved),
        run_dir=out and out.absolute(),
        gpu=resolved.run.device == "gpu",
        python=sys.executable,
        python_path=outside_python(),
        **shape,
    )
    click.echo(f"{job.nodes} nodes x {job.ranks_per_node} ranks: {equation(resolved, job.ranks)}", err=True)
    text = script.render(job)
    if dry_run:
        click.echo(text, nl=False)
        return
    number = slurm.submit(text)
    click.echo(f"log hpcdist-{number}.out, run directory {job.run_dir or f'runs/slurm-{number}'}", err=True)
    click.echo(number)
