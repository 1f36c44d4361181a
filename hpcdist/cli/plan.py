"""`hpcdist plan`: memory, time, energy and failures of a training, before anything is started. Needs no MPI, no GPU."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from hpcdist.cli import plan_options
from hpcdist.cli.lazy import LazyGroup
from hpcdist.cli.plan_options_layout import layout as layout_options
from hpcdist.cli.plan_sections import SectionedCommand
from hpcdist.errors import FAILURE, ConfigurationError, MissingCapabilityError

if TYPE_CHECKING:
    from hpcdist.cli.plan_subject import Subject
    from hpcdist.planner.cluster.hardware import Cluster
    from hpcdist.planner.estimate import PlanEstimate

Answer = TypeVar("Answer")

CALIBRATE: Final = "calibrate"
# Where each command is, and what the overview says of it.
COMMANDS: Final = {
    "search": ("hpcdist.cli.plan_search:command", "Find the best layouts for a number of devices."),
    "compare": ("hpcdist.cli.plan_compare:command", "Put several layouts, or clusters, side by side."),
    "clusters": ("hpcdist.cli.plan_lists:clusters", "List the clusters that are known, or show one."),
    "models": ("hpcdist.cli.plan_lists:models", "List the models that are known, or show one."),
    CALIBRATE: ("hpcdist.cli.plan_calibrate:command", "Measure the machine at hand, for a cluster of its own."),
}


EXAMPLES: Final = """\b
Examples:
  hpcdist plan recipe.toml --cluster h100-hgx --devices 64
  hpcdist plan --model gpt3-175b --cluster a100-selene --tensor 8 --pipeline 16 --data 6 --batch 1536
"""


class PlanGroup(LazyGroup):
    """A command that plans one layout, with commands of its own: a first word that names one is that one."""

    allow_interspersed_args = True
    allow_extra_args = False
    lazy = COMMANDS

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context of the command that ``args`` begin with, or of the plan itself."""
        args = list(args)
        if f"--{CALIBRATE}" in args:
            args.remove(f"--{CALIBRATE}")
            args.insert(0, CALIBRATE)
        if not args or args[0] not in self.lazy:
            return super().make_context(info_name, args, parent, **extra)
        outer = click.Context(click.Group(self.name), info_name=info_name, parent=parent)  # its usage has no RECIPE
        command = self.get_command(outer, args[0])
        assert command is not None
        return command.make_context(args[0], args[1:], outer, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options of the plan itself."""
        return click.Command.parse_args(self, ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Plan."""
        return click.Command.invoke(self, ctx)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return what stands behind the name in the usage."""
        return click.Command.collect_usage_pieces(self, ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by section, then the commands."""
        SectionedCommand.format_options(self, ctx, formatter)  # type: ignore[arg-type]
        self.format_commands(ctx, formatter)


def _first_words(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the commands that may stand in the place of a recipe, and files."""
    found = [CompletionItem(name) for name in COMMANDS if name.startswith(incomplete)]
    return [*found, CompletionItem(incomplete, type="file")]


@click.command("plan", cls=PlanGroup, epilog=EXAMPLES)
@click.argument("recipe", type=click.Path(dir_okay=False, path_type=Path), required=False, shell_complete=_first_words)
@plan_options.cluster
@plan_options.subject
@layout_options
@click.option("--simulate/--no-simulate", default=True, help="Time a pipeline by the simulator of schedules.")
@plan_options.plot
@plan_options.as_json
def command(
    recipe: Path | None,
    cluster: str | None,
    overrides: tuple[str, ...],
    simulate: bool,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Say whether the training of RECIPE, or of a model in numbers, fits a cluster, how long it takes, what it costs.

    Nothing is started, and neither MPI nor a GPU is needed. Without options of the layout, that of the recipe is
    planned; those that are given take its place. Without a recipe and a model it is the default recipe, which
    `hpcdist train` trains. `--calibrate` is `hpcdist plan calibrate`. A training that does not fit into the memory ends
    with exit code 1.
    """
    from hpcdist.cli.plan_subject import cluster as read
    from hpcdist.cli.plan_subject import subject, with_kernels
    from hpcdist.planner.report import text

    checked_plot(plot)
    on = read(cluster)
    found = with_kernels(subject(recipe, overrides, options), on)
    answer = planned(found, on, simulate=simulate)
    if plot is not None:
        draw(answer, found, on, plot)
    if as_json:
        from hpcdist.cli.plan_json import jsonable

        click.echo(json.dumps(jsonable(answer, found.description, on)))
    else:
        click.echo(text.text(answer, found.description, on))
    if not answer.memory.fits:
        click.get_current_context().exit(FAILURE)


def planned(found: "Subject", cluster: "Cluster", *, simulate: bool = False) -> "PlanEstimate":
    """Return the plan, with the notes among its flags. Raises ConfigurationError for a layout that cannot be.

    One that does not fit into the memory can be: the plan tells what is too much. ``simulate``: run the passes of a
    pipeline one by one, where that is possible here.
    """
    from hpcdist.planner.limits import checks
    from hpcdist.planner.plan import plan
    from hpcdist.planner.report import caveats

    description, layout, batch = found.description, found.layout, found.global_batch
    wrong = [one.text for one in checks.shape_problems(description, layout, cluster, batch)]
    if wrong:
        raise ConfigurationError(f"this layout cannot be: {'; '.join(wrong)}")
    answer, notes = simulated(
        lambda runs: plan(description, layout, cluster, batch, found.steps, simulate=runs),
        wanted=simulate and layout.pipeline > 1,
    )
    flags = (*answer.flags, *caveats.layout_caveats(answer), *notes, *found.notes, *caveats.assumption_line(cluster))
    return dataclasses.replace(answer, flags=caveats.ordered(flags, [layout]))


def simulated(make: Callable[[bool], Answer], *, wanted: bool) -> tuple[Answer, tuple[str, ...]]:
    """Return ``make(wanted)``, or where the simulator cannot be loaded what closed forms give, and a note of it."""
    try:
        return make(wanted), ()
    except ImportError as error:
        if not wanted:
            raise
        return make(False), (f"pipelines are planned by closed forms: the simulator cannot be loaded ({error})",)


def checked_plot(file: Path | None) -> None:
    """Raise before anything is planned where ``file`` cannot be drawn."""
    if file is not None:
        from hpcdist.planner.report import plot

        plot.check(file)


def draw(answer: "PlanEstimate", found: "Subject", cluster: "Cluster", file: Path) -> None:
    """Draw memory and timeline into ``file``. Raises MissingCapabilityError, StorageError, UsageError."""
    from hpcdist.planner.report import plot
    from hpcdist.planner.report.timeline import timeline

    try:
        steps = timeline(found.description, found.layout, cluster, found.global_batch)
    except ImportError as error:
        raise MissingCapabilityError(f"--plot {file} needs the simulator, which cannot be loaded: {error}") from error
    plot.draw(answer, steps, found.description.name, cluster, file)
