"""`hpcdist submit`: submit the training of a recipe as a batch job, or print its job script."""

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

PROGRAM: Final = "hpcdist.program"  # key in click's context.meta of the words after --


def estimate_lines(planned: "PlannedJob", cluster: str | None) -> list[str]:
    """Return text lines with the estimated time and memory of ``planned`` on ``cluster``, or with an error text."""
    if planned.recipe is None:
        return [f"no estimate: --cluster {cluster} only works for the training of one recipe"] if cluster else []
    named = cluster or planned.site.cluster
    if not named:  # no cluster is known
        return []
    try:
        return _estimate_lines(planned.job, planned.recipe, named)
    except Exception as error:  # noqa: BLE001 - no error of an estimate may prevent the submission
        return [f"no estimate: {error}"]


def _estimate_lines(job: "BatchJob", recipe: "Recipe", named: str) -> list[str]:
    from hpcdist.planner.cluster import toml_file
    from hpcdist.planner.report.text import one_line
    from hpcdist.training.use_cases.plan import plan_of_subject, subject_of_recipe, with_published_kernels

    on = _part_of_nodes(toml_file.read(named), job.ranks_per_node)
    answer = plan_of_subject(
        with_published_kernels(subject_of_recipe(recipe, job.name, {"devices": job.ranks}), on), on
    )
    lines = [f"estimate: {one_line(answer, on)}"]
    limit_s = None if job.walltime is None else walltime_s(job.walltime) - job.signal_s
    if limit_s is not None and 0 < limit_s < answer.run.wall_s:
        lines.append(f"estimate: {math.ceil(answer.run.wall_s / limit_s)} consecutive jobs of {job.walltime} needed")
    if not answer.memory.fits:
        where = f"--cluster {named} --devices {job.ranks}"
        lines.append(
            "warning: by this estimate the training runs out of device memory; `hpcdist plan RECIPE "
            f"{where}` shows the memory use, and `hpcdist plan search RECIPE {where}` finds layouts that fit"
        )
    return lines


def _part_of_nodes(cluster: "Cluster", devices: int) -> "Cluster":
    node = cluster.node
    if devices >= node.devices:
        return cluster
    share = devices / node.devices
    levels: list[LinkLevel] = []
    for level in cluster.levels:
        if 0 < level.devices < devices and devices % level.devices:
            continue  # the job's devices would be spread unevenly over this level
        linked = min(level.devices, devices) if level.devices <= node.devices else round(level.devices * share)
        if level.devices == 0 or linked > (levels[-1].devices if levels else 1):
            levels.append(replace(level, devices=linked))
    hosts = {name: getattr(node, name) * share for name in ("host_w", "network_w", "host_memory_bytes")}
    return replace(
        cluster,
        devices=cluster.nodes * devices,
        node=replace(node, devices=devices, **hosts),
        levels=tuple(levels) or cluster.levels[-1:],
    )


class SubmitCommand(click.Command):
    """Click command that treats the words after "--" as the command line of a program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own_args = args[: args.index("--")] if "--" in args else args
        ctx.meta[PROGRAM] = tuple(args[len(own_args) + 1 :])
        return super().parse_args(ctx, own_args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- PROGRAM ...]"]


@click.command("submit", cls=SubmitCommand)
@recipe_argument
@click.option("--site", metavar="NAME|FILE", help="Site profile; see `hpcdist site list`.  [default: detected]")
@click.option("--nodes", type=COUNT, required=True, help="Number of nodes.")
@click.option("--ranks-per-node", type=COUNT, default=1, help="Ranks per node.")
@click.option("--cpus-per-task", type=COUNT, default=1, help="Cores and threads per rank.")
@click.option("--gpus-per-node", type=click.IntRange(min=0), help="GPUs per node.  [default: one per rank, if any]")
@click.option("--time", "walltime", metavar="WALLTIME", help="D-HH:MM:SS, HH:MM:SS or minutes.  [default: the site's]")
@click.option("--partition", help="Slurm partition or PBS queue.  [default: the site's]")
@click.option("--account", help="Account to charge.  [default: yours]")
@click.option("--qos", help="Quality of service (QOS).  [default: the site's]")
@click.option("--constraint", help="Required node features.  [default: the site's]")
@click.option("--mem", metavar="SIZE", help="Memory per node in MiB, or e.g. 200G; 0: all.  [default: the site's]")
@click.option("--job-name", "name", default="hpcdist", help="Job name.")
@click.option("--signal-seconds", "signal_s", default=120, help="Save and stop this many seconds before the walltime.")
@click.option("--out", type=DIRECTORY, help="Run directory.  [default: runs/JOB_NAME-RUN_ID]")
@set_option
@click.option("--chain", "links", default=1, type=COUNT, help="Number of consecutive jobs that continue the run.")
@click.option(
    "--restarts",
    default=0,
    type=click.IntRange(min=0),
    help="Maximum restarts from the newest checkpoint within the job after failures.",
)
@click.option(
    "--spare-nodes", default=0, type=click.IntRange(min=0), help="Extra nodes that replace failed ones (--restarts)."
)
@click.option(
    "--survive",
    type=click.Choice(["none", *SURVIVE_MODES]),
    default="none",
    help="Continue after rank failures without the dead ranks (shrink), or with new ranks (replace); Open MPI 5 only.",
)
@click.option(
    "--most-fruitless",
    default=3,
    type=click.IntRange(min=0),
    help="Stop after this many consecutive starts without a new checkpoint; 0: never.",
)
@click.option("--check/--no-check", default=True, help="Run `hpcdist doctor --job` on the nodes before training.")
@click.option("--stage-data", is_flag=True, help="Copy data.path to local storage of each node before training.")
@click.option(
    "--stage-environment",
    "environment",
    type=FILE,
    metavar="TAR",
    help="Archive of a Python environment (with bin/python) to unpack on each node and use.",
)
@click.option("--warmup", is_flag=True, help="Compile the kernels on each node before training.")
@click.option("--container", metavar="IMAGE", help="Container image to run the ranks in.  [default: the site's]")
@click.option("--carbon", type=FILE, metavar="CSV", help="Carbon forecast: start the job when intensity is lowest.")
@click.option("--deadline", metavar="TIME", help="With --carbon: latest end of the job.")
@click.option("--within", metavar="DURATION", help="With --carbon: latest end from now, e.g. 24h, 2d, 1-12:00:00.")
@click.option("--power", "power_w", type=float, metavar="W", help="With --carbon: job power, to print emissions.")
@kinds.kind_options
@click.option("--mpi-args", default="", help="Additional launcher options, in one string.")
@click.option("--sbatch-arg", "sbatch_args", multiple=True, help="Additional sbatch option, e.g. --switches=1.")
@click.option(
    "--cluster",
    metavar="NAME|FILE",
    help="Cluster for a time estimate; see `hpcdist plan clusters`.  [default: the site's, if any]",
)
@click.option("--tasks", type=COUNT, help="Run PROGRAM as a job array with this many tasks (HPCDIST_TASK).")
@click.option("--dry-run", is_flag=True, help="Print the job script without submitting; needs no scheduler.")
def command(
    recipe: Path | None, overrides: tuple[str, ...], cluster: str | None, dry_run: bool, **options: Any
) -> None:
    """Submit the training of RECIPE (TOML) or of the default recipe, or a PROGRAM. Print the job number.

    The job runs in this directory with this environment and Python. Before the walltime ends, the job saves, stops and
    is requeued until all steps are done. With --chain, several jobs are submitted. Each job continues the run of the
    previous job. The recipe is copied into the run directory, so later changes to the file have no effect.

    Submitting the same recipe again continues the same run from its newest checkpoint. If a job of that run waits or
    runs, its number is printed and nothing is submitted. If the recipe sets no checkpoint interval, the job uses Daly's
    optimum from the node failure rate of the cluster, or an interval from the walltime. If the training fails, the job
    ends with the training's exit code, unless --restarts is given.

    A PROGRAM (`-- python train.py`) is started on all ranks. Its hpcdist.training.pytorch.Training resumes from its
    checkpoints. Regular saves need checkpoint.every_steps or checkpoint.mtbf_s. Instead of --set, export
    HPCDIST_SET__SECTION__KEY. The same command in the same directory continues the same run. With --tasks N, each of
    the N tasks of a job array has its own run.

    --array submits a sweep, --bench a benchmark, and --server-nodes a training with nodes for parameter servers. See
    `hpcdist help cluster`.
    """
    from hpcdist.batch import submission
    from hpcdist.training.use_cases import batch_job as plan

    all_options = options | {"cluster": cluster}
    planned = kinds.planned_job(recipe, overrides, all_options, click.get_current_context().meta[PROGRAM])
    for line in (*planned.notes, *estimate_lines(planned, cluster)):
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
            job_texts = ", ".join(f"{number} ({state})" for number, state in present.items())
            click.echo(f"nothing submitted: {planned.job.run_dir} already has the job {job_texts}", err=True)
            click.echo("\n".join(present))
            return
        for submitted in submission.submit(links, planned.site, Path.cwd()):
            click.echo(f"log {submitted.log}, run directory {planned.job.run_dir}", err=True)
            click.echo(submitted.number)
