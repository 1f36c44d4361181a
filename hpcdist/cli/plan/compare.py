"""`hpcdist plan compare`: plan several layouts, or one layout on several clusters, and print them in a table."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from hpcdist.cli.common import COUNT, json_option, recipe_argument
from hpcdist.cli.plan.options import (
    CLUSTER_SECTION,
    SectionedCommand,
    clusters_option,
    layout_options,
    section_option,
    subject_options,
)
from hpcdist.errors import FAILURE, ConfigurationError, UsageError

if TYPE_CHECKING:
    from hpcdist.planner.cluster.hardware import Cluster
    from hpcdist.planner.estimate import PlanEstimate
    from hpcdist.training.use_cases.plan import PlanSubject

EXAMPLES: Final = """\b
Examples:
  hpcdist plan compare recipe.toml --cluster h100-hgx --devices 64 --layout zero=1 --layout 'tensor=8 zero=3'
  hpcdist plan compare recipe.toml --cluster a100-selene --cluster h100-hgx --devices 64
"""


@click.command("compare", cls=SectionedCommand, epilog=EXAMPLES)
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
def command(
    recipe: Path | None,
    clusters: tuple[str, ...],
    layouts: tuple[str, ...],
    overrides: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Plan a model once for each --layout and --cluster, and print all plans in a table.

    The model comes from RECIPE, from --model, or from options such as --layers and --hidden. Layout options given
    outside of --layout apply to every --layout that does not set them.
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
    """Declare the options inside of --layout for click. The function is never called."""


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
