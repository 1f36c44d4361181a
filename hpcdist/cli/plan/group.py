"""The group `hpcdist plan`: one layout; several layouts or clusters (`compare`); lists of clusters and models."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
from click.shell_completion import CompletionItem

from hpcdist.cli.common import COUNT, FILE, LazyGroup, check_plot, json_option, recipe_argument
from hpcdist.cli.plan.options import (
    CALIBRATE,
    CLUSTER_SECTION,
    COMMANDS,
    SectionedCommand,
    cluster_option,
    clusters_option,
    layout_options,
    option_words,
    plot_option,
    section_option,
    subject_options,
)
from hpcdist.errors import FAILURE, ConfigurationError, MissingCapabilityError, UsageError
from hpcdist.reporting.jsonable import jsonable
from hpcdist.reporting.nearest import nearest
from hpcdist.reporting.table import aligned

if TYPE_CHECKING:
    from hpcdist.planner.cluster.hardware import Cluster
    from hpcdist.planner.estimate import PlanEstimate
    from hpcdist.training.use_cases.plan import PlanSubject


@click.command("clusters")
@click.argument("named", metavar="[NAME|FILE]", required=False)
@json_option
def clusters(named: str | None, as_json: bool) -> None:
    """List the clusters that come with hpcdist, or print one as TOML, for example as a template for your cluster.

    The argument is the name of a listed cluster, or a cluster file. The file is also checked.
    """
    from hpcdist.planner.cluster import toml_file
    from hpcdist.planner.kernels import KERNELS

    if named is not None:
        cluster = toml_file.read(named)
        click.echo(json.dumps(jsonable(cluster)) if as_json else toml_file.dump(cluster), nl=as_json)
        return
    shipped = [toml_file.read(name) for name in toml_file.names()]
    if as_json:
        click.echo(json.dumps([{"name": item.name, "about": item.about, "devices": item.devices} for item in shipped]))
        return
    steps = {item.name: sum(kernels.fit(item.device.name).rows for kernels in KERNELS.values()) for item in shipped}
    rows = [
        (
            item.name,
            f"{item.devices:,}",
            f"x {item.device.name}, {item.node.devices} a node: {item.about}; {steps[item.name]} published steps",
        )
        for item in shipped
    ]
    click.echo("\n".join(aligned(rows, left=(0, -1))))


@click.command("models")
@click.argument("named", metavar="[NAME]", required=False)
@json_option
def models(named: str | None, as_json: bool) -> None:
    """List the model names that --model accepts, or print the sizes of one of these models."""
    from hpcdist.planner.model import transformer
    from hpcdist.planner.model.transformer import describe

    shapes = {name: transformer.named(name) for name in ([named] if named is not None else transformer.names())}
    rows = {
        name: {**dataclasses.asdict(shape), "parameters": describe(shape, name).parameters}
        for name, shape in shapes.items()
    }
    if as_json:
        click.echo(json.dumps(rows[named] if named is not None else rows))
    elif named is not None:
        from hpcdist.reporting.schema import toml_lines

        click.echo("\n".join(toml_lines(rows[named])))
    else:
        from hpcdist.planner.report.quantities import large_count

        shown = "{layers} layers x {hidden}, {heads} heads, context {context:,}, vocabulary {vocabulary:,}"
        cells = [(name, large_count(row["parameters"], 4), shown.format_map(row)) for name, row in rows.items()]
        click.echo("\n".join(aligned(cells, left=(0, -1))))


EXAMPLES: Final = """\b
Examples:
  hpcdist plan recipe.toml --cluster h100-hgx --devices 64
  hpcdist plan --model gpt3-175b --cluster a100-selene --tensor 8 --pipeline 16 --data 6 --batch 1536
"""


class PlanGroup(LazyGroup):
    """Click command that plans one layout, unless the first argument names a sub-command."""

    allow_interspersed_args = True
    allow_extra_args = False

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context of the sub-command that ``args[0]`` names, or else of `hpcdist plan` itself."""
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
        return click.Command.parse_args(self, ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        return click.Command.invoke(self, ctx)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return click.Command.collect_usage_pieces(self, ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        SectionedCommand.format_options(self, ctx, formatter)  # type: ignore[arg-type]
        self.format_commands(ctx, formatter)


def _complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    commands = [CompletionItem(name) for name in COMMANDS if name.startswith(incomplete)]
    return [*commands, CompletionItem(incomplete, type="file")]


@click.command("plan", cls=PlanGroup, lazy=COMMANDS, epilog=EXAMPLES)
@click.argument("recipe", type=FILE, required=False, shell_complete=_complete_recipe)
@cluster_option
@subject_options
@layout_options
@click.option("--simulate/--no-simulate", default=True, help="Simulate the pipeline schedule to predict its time.")
@click.option("--explain", is_flag=True, help="Print all details of the plan, not only the summary of six lines.")
@plot_option
@json_option
def command(
    recipe: Path | None,
    cluster: str | None,
    overrides: tuple[str, ...],
    simulate: bool,
    explain: bool,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict memory use, time and cost of the training of RECIPE, or of a model given by its sizes, on a cluster.

    Neither MPI nor a GPU is needed. --set and layout options replace the layout of the recipe. Without RECIPE and
    --model, the default recipe is planned. Without a recipe, GPUs compute in bfloat16 unless --set precision.mode is
    given. Exit code 1: the training does not fit into memory.
    """
    from hpcdist.planner.report import text
    from hpcdist.training.use_cases.plan import plan_of_subject, read_cluster, subject_from_options
    from hpcdist.training.use_cases.plan_advice import smallest_change

    check_plot(plot)
    if recipe is not None and not recipe.exists() and (near := nearest(str(recipe), COMMANDS)):
        raise UsageError(
            f"recipe {str(recipe)!r} does not exist and is not a command; did you mean `hpcdist plan {near}`?"
        )
    on = read_cluster(cluster)
    subject = subject_from_options(recipe, overrides, options, on)
    answer = plan_of_subject(subject, on, simulate=simulate)
    if plot is not None:
        draw_plot(answer, subject, on, plot)
    if as_json:
        from hpcdist.planner.report.quantities import estimate_json

        click.echo(json.dumps(estimate_json(answer, subject.description, on)))
    else:
        click.echo((text.text if explain else text.summary)(answer, subject.description, on))
    if not answer.memory.fits:
        changed = smallest_change(subject, on)
        if changed and not as_json:
            values = {**options, **changed, "cluster": cluster, "overrides": overrides}
            if "strategy" in changed:
                values["zero"] = None
            used = [option for option in command.params if isinstance(option, click.Option)]
            words = [word for option in used for word in option_words(option, values)]
            line = shlex.join(["hpcdist", "plan", *([] if recipe is None else [str(recipe)]), *words])
            click.echo(f"this fits: {line}")
        click.get_current_context().exit(FAILURE)


def draw_plot(answer: "PlanEstimate", subject: "PlanSubject", cluster: "Cluster", file: Path) -> None:
    """Draw memory use and step timeline of ``answer``, the plan for ``subject``, to ``file``. Raises HpcdistError."""
    from hpcdist.planner.report import plot
    from hpcdist.planner.report.plot import timeline

    try:
        steps = timeline(subject.description, subject.layout, cluster, subject.global_batch)
    except ImportError as error:
        raise MissingCapabilityError(
            f"--plot {file} needs the simulator, which failed to load: {error}; omit --plot"
        ) from error
    plot.draw(answer, steps, subject.description.name, cluster, file)


COMPARE_EXAMPLES: Final = """\b
Examples:
  hpcdist plan compare recipe.toml --cluster h100-hgx --devices 64 --layout zero=1 --layout 'tensor=8 zero=3'
  hpcdist plan compare recipe.toml --cluster a100-selene --cluster h100-hgx --devices 64
"""


@click.command("compare", cls=SectionedCommand, epilog=COMPARE_EXAMPLES)
@recipe_argument
@clusters_option
@section_option(
    CLUSTER_SECTION,
    "--layout",
    "layouts",
    multiple=True,
    metavar="'KEY=VALUE ...'",
    help="Layout as KEY=VALUE pairs: recipe keys, or layout options without dashes, devices and batch; repeatable.",
)
@subject_options
@layout_options
@json_option
def compare(
    recipe: Path | None,
    clusters: tuple[str, ...],
    layouts: tuple[str, ...],
    overrides: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Plan a model once for each --layout and --cluster, and print all plans in a table.

    The model comes from RECIPE, from --model, or from options such as --layers and --hidden. Layout options given
    outside of --layout apply to every --layout that does not set the same options.
    """
    from hpcdist.training.use_cases.plan import read_cluster

    if max(1, len(clusters)) * max(1, len(layouts)) < 2:
        raise UsageError("nothing to compare: only one layout on one cluster; give --layout or --cluster twice")
    places = [read_cluster(named) for named in clusters or (None,)]
    variants = [(text, *_parse_layout(text)) for text in layouts] or [("", (), {})]
    plans = [
        _plan(recipe, (*overrides, *keys), options | values, on, text)
        for on in places
        for text, keys, values in variants
    ]
    if all(isinstance(plan.answer, str) for plan in plans):
        raise ConfigurationError("; ".join(dict.fromkeys(str(plan.answer) for plan in plans)))
    click.echo(json.dumps([_jsonable(plan) for plan in plans]) if as_json else _report_text(plans))
    if not any(not isinstance(plan.answer, str) and plan.answer.memory.fits for plan in plans):
        click.get_current_context().exit(FAILURE)


class _ComparedPlan(NamedTuple):
    subject: "PlanSubject"
    cluster: "Cluster"
    layout_text: str  # value of --layout
    answer: "PlanEstimate | str"  # the estimate, or the reason why no plan is possible


def _plan(
    recipe: Path | None, overrides: tuple[str, ...], options: dict[str, Any], on: "Cluster", text: str
) -> _ComparedPlan:
    from hpcdist.training.use_cases.plan import plan_of_subject, subject_from_options

    subject = subject_from_options(recipe, overrides, options, on)
    try:
        return _ComparedPlan(subject, on, text, plan_of_subject(subject, on, simulate=True))
    except ConfigurationError as error:
        return _ComparedPlan(subject, on, text, str(error))


def _jsonable(plan: _ComparedPlan) -> dict[str, Any]:
    from hpcdist.planner.report.quantities import estimate_json

    if isinstance(plan.answer, str):
        return {"cluster": plan.cluster.name, "said": plan.layout_text, "impossible": plan.answer}
    return estimate_json(plan.answer, plan.subject.description, plan.cluster) | {
        "said": plan.layout_text,
        "impossible": None,
    }


def _report_text(plans: list[_ComparedPlan]) -> str:
    from hpcdist.planner.report.quantities import wrapped
    from hpcdist.planner.report.table import by_row, capped_rows, comparison_table

    possible = [(plan.cluster.name, plan.answer) for plan in plans if not isinstance(plan.answer, str)]
    first = possible[0][1]
    lines = [
        *capped_rows([answer for _, answer in possible]),
        f"{plans[0].subject.description.name}, {first.parameters:,} parameters",
        *comparison_table(possible),
    ]
    for plan in plans:
        if isinstance(plan.answer, str):
            lines += wrapped(f"left out: {plan.layout_text or 'the layout'} on {plan.cluster.name}: {plan.answer}")
    answers = [answer for _, answer in possible]
    for flag in by_row([answer.flags for answer in answers], layouts=[answer.layout for answer in answers]):
        lines += wrapped(f"note: {flag}")
    return "\n".join(lines)


@click.command("layout")
@layout_options
@click.option("--devices", type=COUNT)
@click.option("--batch")
def _options(**options: Any) -> None:
    """Declare the options that --layout accepts, for click. This function is never called."""


def _parse_layout(text: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    # Returns the recipe keys and the options in the value of --layout.
    keys, words = [], []
    for word in shlex.split(text.replace(",", " ")):
        name, sign, value = word.partition("=")
        if "." in name:
            keys.append(word)
        else:
            words.append(f"--{name.replace('_', '-')}" + (f"={value}" if sign else ""))
    try:
        context = _options.make_context("layout", words)
    except click.UsageError as error:
        raise UsageError(f"--layout {text!r} is invalid: {error.format_message()}") from error
    return tuple(keys), {name: value for name, value in context.params.items() if value is not None}
