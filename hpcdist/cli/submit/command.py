"""`hpcdist submit`: submit the training of a recipe as a job of the site, or print its script.

Light, for login nodes: neither MPI nor HDF5 is loaded. Where the cluster is known it prints an estimate of the planner
in a line or two; a job is never held up by what cannot be planned.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.batch.job import walltime_s
from hpcdist.cli.common import COUNT, DIRECTORY, FILE, recipe_argument, set_option
from hpcdist.cli.submit import kinds
from hpcdist.comm.launch.exit_file import SURVIVE_MODES

if TYPE_CHECKING:
    from hpcdist.batch.job import BatchJob
    from hpcdist.planner.cluster.hardware import Cluster, LinkLevel
    from hpcdist.training.recipe.recipe import Recipe
    from hpcdist.training.use_cases.batch_job import PlannedJob

PROGRAM: Final = "hpcdist.program"  # key of the words behind -- in the context of click


def estimate_lines(planned: "PlannedJob", cluster: str | None) -> list[str]:
    """Return the estimate of a training, in a line or two; nothing where no cluster is known (local).

    ``cluster`` is what was asked for, else that of the profile is taken. Never raises: a job is not held up by what
    cannot be planned, and the reason is told in the place of the estimate.
    """
    if planned.recipe is None:
        return [f"no estimate: --cluster {cluster} is for the training of one recipe"] if cluster else []
    named = cluster or planned.site.cluster
    if not named:
        return []
    try:
        return _estimate_lines(planned.job, planned.recipe, named)
    except Exception as error:  # noqa: BLE001 - whatever it is, the job is submitted all the same
        return [f"no estimate: {error}"]


def _estimate_lines(job: "BatchJob", recipe: "Recipe", named: str) -> list[str]:
    from hpcdist.planner.cluster import toml_file
    from hpcdist.planner.report.text import one_line
    from hpcdist.training.use_cases.plan import plan_of_subject
    from hpcdist.training.use_cases.plan_subject import subject_of_recipe, with_published_kernels

    on = _part_of_nodes(toml_file.read(named), job.ranks_per_node)
    answer = plan_of_subject(
        with_published_kernels(subject_of_recipe(recipe, job.name, {"devices": job.ranks}), on), on
    )
    lines = [f"estimate: {one_line(answer, on)}"]
    limit_s = None if job.walltime is None else walltime_s(job.walltime) - job.signal_s
    if limit_s is not None and 0 < limit_s < answer.run.wall_s:
        lines.append(f"estimate: that is {math.ceil(answer.run.wall_s / limit_s)} jobs of {job.walltime} after another")
    if not answer.memory.fits:
        where = f"--cluster {named} --devices {job.ranks}"
        lines.append(
            "warning: by this estimate the training ends for lack of memory on a device; `hpcdist plan RECIPE "
            f"{where}` says what takes it, and `hpcdist plan search RECIPE {where}` what would fit"
        )
    return lines


def _part_of_nodes(cluster: "Cluster", devices: int) -> "Cluster":
    """Return ``cluster`` with nodes of the ``devices`` that a job has of each; all of them where it has as many.

    The other devices of a node are other jobs': links within it join those of the job alone, and of the power and the
    memory of the host the job has its share.
    """
    node = cluster.node
    if devices >= node.devices:
        return cluster
    share = devices / node.devices
    levels: list[LinkLevel] = []
    for level in cluster.levels:
        if 0 < level.devices < devices and devices % level.devices:
            continue  # it would cut the job's part of a node unevenly
        joined = min(level.devices, devices) if level.devices <= node.devices else round(level.devices * share)
        if level.devices == 0 or joined > (levels[-1].devices if levels else 1):
            levels.append(replace(level, devices=joined))
    hosts = {name: getattr(node, name) * share for name in ("host_w", "network_w", "host_memory_bytes")}
    return replace(
        cluster,
        devices=cluster.nodes * devices,
        node=replace(node, devices=devices, **hosts),
        levels=tuple(levels) or cluster.levels[-1:],
    )


class SubmitCommand(click.Command):
    """Command that keeps the words behind -- apart: the command line of a program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words before --, and keep those behind it in the context."""
        own = args[: args.index("--")] if "--" in args else args
        ctx.meta[PROGRAM] = tuple(args[len(own) + 1 :])
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the words of the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- PROGRAM ...]"]


@click.command("submit", cls=SubmitCommand)
@recipe_argument
@click.option("--site", metavar="NAME|FILE", help="Profile of the site; see `hpcdist site list`.  [default: found out]")
@click.option("--nodes", type=COUNT, required=True, help="Number of nodes.")
@click.option("--ranks-per-node", type=COUNT, default=1, help="Ranks on each of them.")
@click.option("--cpus-per-task", type=COUNT, default=1, help="Cores, and threads, of each rank.")
@click.option("--gpus-per-node", type=click.IntRange(min=0), help="GPUs of a node.  [default: one a rank, if any]")
@click.option("--time", "walltime", metavar="WALLTIME", help="D-HH:MM:SS, HH:MM:SS or minutes.  [default: the site's]")
@click.option("--partition", help="Partition, or queue, of the cluster.  [default: the site's]")
@click.option("--account", help="Account that pays.  [default: yours]")
@click.option("--qos", help="Quality of service.  [default: the site's]")
@click.option("--constraint", help="Features that the nodes must have.  [default: the site's]")
@click.option("--mem", metavar="SIZE", help="Memory of each node: MiB, or 200G; 0: all.  [default: the site's]")
@click.option("--job-name", "name", default="hpcdist", help="Name in the queue.")
@click.option("--signal-seconds", "signal_s", default=120, help="How long before the walltime the job saves and stops.")
@click.option("--out", type=DIRECTORY, help="Run directory.  [default: runs/<job name>-<id of the run>]")
@set_option
@click.option("--chain", "links", default=1, type=COUNT, help="Jobs that go on with one another.")
@click.option(
    "--restarts",
    default=0,
    type=click.IntRange(min=0),
    help="How often a start that fails is repeated, in the same job, from the newest checkpoint.",
)
@click.option(
    "--spare-nodes", default=0, type=click.IntRange(min=0), help="Nodes more, for --restarts when others have failed."
)
@click.option(
    "--survive",
    type=click.Choice(["none", *SURVIVE_MODES]),
    default="none",
    help="Outlive dead ranks: with fewer, or with new ones in their place (the mpirun of an Open MPI 5).",
)
@click.option("--most-fruitless", default=3, type=click.IntRange(min=0), help="Starts in a row that save nothing new.")
@click.option("--check/--no-check", default=True, help="Let `hpcdist doctor --job` look at the nodes before.")
@click.option("--stage-data", is_flag=True, help="Copy data.path to each node before.")
@click.option(
    "--stage-environment",
    "environment",
    type=FILE,
    metavar="TAR",
    help="Unpack a Python environment on each node before, and use it: an archive that has bin/python.",
)
@click.option("--warmup", is_flag=True, help="Compile the kernels on each node before.")
@click.option("--container", metavar="IMAGE", help="Run the ranks in this image.  [default: the site's]")
@click.option("--carbon", type=FILE, metavar="CSV", help="Carbon forecast: begin when it is lowest.")
@click.option("--deadline", metavar="TIME", help="With --carbon: when the job must have ended.")
@click.option("--within", metavar="DURATION", help="The same, from now on: 24h, 2d, 1-12:00:00.")
@click.option("--power", "power_w", type=float, metavar="W", help="With --carbon: power of the whole job, for grams.")
@kinds.kind_options
@click.option("--mpi-args", default="", help="Further options of the launcher, in one string.")
@click.option("--sbatch-arg", "sbatch_args", multiple=True, help="Further option of sbatch, e.g. --switches=1.")
@click.option(
    "--cluster",
    metavar="NAME|FILE",
    help="Show an estimate: see `hpcdist plan clusters`.  [default: the site's, if any]",
)
@click.option("--tasks", type=COUNT, help="A job array of so many runs of PROGRAM: see HPCDIST_TASK.")
@click.option("--dry-run", is_flag=True, help="Print the script and submit nothing; needs no scheduler.")
def command(
    recipe: Path | None, overrides: tuple[str, ...], cluster: str | None, dry_run: bool, **options: Any
) -> None:
    """Submit the training of RECIPE (TOML), or of the default recipe, or a PROGRAM, and print the number of the job.

    The profile of the site says how: see `hpcdist help cluster`. Before the walltime ends the job saves, stops and is
    requeued, until all steps are done; with --chain the next job goes on instead. It runs in this directory, with this
    environment and this Python. Every start trains the recipe as it is now: a copy with all of its values is written
    into the run directory, where the script finds it, and the file may change. A script that --dry-run prints has that
    copy at its end, and writes it itself.

    The same recipe is the same run: submitted again, it goes on from its newest checkpoint, and while a job of it waits
    or runs, the number of that job is printed and nothing submitted. Where the recipe says nothing of when to save,
    the job saves at the interval of Daly, by how often nodes of the cluster fail or by the walltime.

    A start that fails ends the job, with its exit code, unless --restarts says otherwise; see `hpcdist run --help` for
    when it is not repeated.

    A PROGRAM, as `-- python train.py`, is started on all ranks: what its hpcdist.training.pytorch.Training saves, the
    next start goes on from. It says itself when to save (checkpoint.every_steps among its keys); in the place of --set
    export HPCDIST_SET__SECTION__KEY. The same command in the same directory is the same run; with --tasks N it is N of
    them.

    With --array the job is a sweep, one trial a task, and a second job merges what they found; with --bench it is a
    benchmark, and with --server-nodes a training with nodes of a second kind. See `hpcdist help cluster` for each.
    """
    from hpcdist.batch import submission
    from hpcdist.training.use_cases import batch_job as plan

    all_options = options | {"cluster": cluster}
    planned = kinds.planned_job(recipe, overrides, all_options, click.get_current_context().meta[PROGRAM])
    for line in (*planned.told, *estimate_lines(planned, cluster)):
        click.echo(line, err=True)
    links = submission.chain(planned.job, planned.site)
    if dry_run:
        for line in (*planned.hidden, *planned.missing):
            click.echo(f"warning: {line}", err=True)
        for job, text in links:
            click.echo(submission.script_with_input(job, text), nl=False)
        return
    plan.check_packages(planned)
    plan.check_visible(planned)
    with submission.exclusive(planned.job.run_dir):
        present = submission.unfinished_states(planned.job.run_dir)
        if present:
            known = ", ".join(f"{number} ({state})" for number, state in present.items())
            click.echo(f"nothing submitted: the run {planned.job.run_dir} has the job {known}", err=True)
            click.echo("\n".join(present))
            return
        for submitted in submission.submit(links, planned.site, Path.cwd()):
            click.echo(f"log {submitted.log}, run directory {planned.job.run_dir}", err=True)
            click.echo(submitted.number)
