"""`hpcdist config show`: print the recipe that a run would use, and the origin of each value."""

import json
from pathlib import Path

import click

from hpcdist.cli.common import json_option, recipe_argument, set_option


@click.group()
def command() -> None:
    """Recipes: their keys, values and origins."""


@command.command()
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
