"""`hpcdist plan compare`: several layouts, on one or several clusters, side by side."""

import json
import shlex
from pathlib import Path
from typing import Any, Final

import click

from hpcdist.cli import plan_options
from hpcdist.cli.plan_options_layout import LAYOUT_OPTIONS
from hpcdist.cli.plan_options_layout import layout as layout_options
from hpcdist.cli.plan_sections import WHERE, Sectioned, SectionedCommand
from hpcdist.errors import UsageError

EXAMPLES: Final = """\b
Examples:
  hpcdist plan compare recipe.toml --cluster h100-hgx --devices 64 --layout zero=1 --layout 'tensor=8 zero=3'
  hpcdist plan compare recipe.toml --cluster a100-selene --cluster h100-hgx --devices 64
"""
_SIZES: Final = ("devices", "batch")  # what a layout may say beside the options that lay out


@click.command("compare", cls=SectionedCommand, epilog=EXAMPLES)
@plan_options.recipe
@plan_options.clusters
@click.option(
    "--layout",
    "layouts",
    cls=Sectioned,
    section=WHERE,
    multiple=True,
    metavar="'KEY=VALUE ...'",
    help="One layout: options of the layout without their dashes, also devices= and batch=; may be given again.",
)
@plan_options.subject
@layout_options
@plan_options.as_json
def command(
    recipe: Path | None,
    clusters: tuple[str, ...],
    layouts: tuple[str, ...],
    overrides: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Plan RECIPE, or a model in numbers, once for each --layout and --cluster, and show all of them in a table.

    Options of the layout hold for each --layout that does not say otherwise.
    """
    from hpcdist.cli.plan import planned
    from hpcdist.cli.plan_json import jsonable
    from hpcdist.cli.plan_subject import cluster as read
    from hpcdist.cli.plan_subject import subject
    from hpcdist.planner.text_table import compared
    from hpcdist.planner.text_units import wrapped

    if max(1, len(clusters)) * max(1, len(layouts)) < 2:
        raise UsageError("one layout on one cluster compares with nothing; give --layout or --cluster twice")
    places = [read(named) for named in clusters or (None,)]
    said = [options | _read(text) for text in layouts] or [options]
    found = [(text, subject(recipe, overrides, each)) for text, each in zip(layouts or ("",), said, strict=True)]
    plans = [(on, text, one, planned(one, on)) for on in places for text, one in found]
    if as_json:
        click.echo(
            json.dumps([jsonable(answer, one.description, on) | {"said": text} for on, text, one, answer in plans])
        )
        return
    click.echo(f"{found[0][1].description.name}, {plans[0][3].parameters:,} parameters")
    click.echo("\n".join(compared([(on.name, answer) for on, _, _, answer in plans])))
    flags: dict[str, None] = {}
    for on, _, _, answer in plans:
        flags |= dict.fromkeys(f"note: {on.name}: {flag}" for flag in answer.flags)
    for flag in flags:
        click.echo("\n".join(wrapped(flag)))


@click.command("layout")
@layout_options
@click.option("--devices", type=click.IntRange(min=1))
@click.option("--batch", type=click.IntRange(min=1))
def _options(**options: Any) -> None:
    """Take what a --layout may say; parsed, and never run."""


def _read(text: str) -> dict[str, Any]:
    """Return the options that a --layout says, by name. Raises UsageError."""
    words = []
    for word in shlex.split(text.replace(",", " ")):
        key, sign, value = word.partition("=")
        words.append(f"--{key.replace('_', '-')}" + (f"={value}" if sign else ""))
    try:
        context = _options.make_context("layout", words)
    except click.UsageError as error:
        raise UsageError(f"--layout {text!r}: {error.format_message()}") from error
    found = {name: context.params[name] for name in (*LAYOUT_OPTIONS, *_SIZES)}
    return {name: value for name, value in found.items() if value is not None}
