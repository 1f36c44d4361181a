"""`hpcdist plan clusters` and `hpcdist plan models`: what the planner knows by name."""

import dataclasses
import json

import click

from hpcdist.cli import plan_options


@click.command("clusters")
@click.argument("named", metavar="[NAME|FILE]", required=False)
@plan_options.as_json
def clusters(named: str | None, as_json: bool) -> None:
    """List the clusters that come with hpcdist, or print one as TOML: the start of a file of your own.

    A file is checked as it is read, so this tells as well whether one is right.
    """
    from hpcdist.cli.plan_json import finite
    from hpcdist.planner.cluster import toml_file

    if named is not None:
        found = toml_file.read(named)
        click.echo(json.dumps(finite(dataclasses.asdict(found))) if as_json else toml_file.dump(found), nl=as_json)
        return
    known = [toml_file.read(name) for name in toml_file.names()]
    if as_json:
        click.echo(json.dumps([{"name": one.name, "about": one.about, "devices": one.devices} for one in known]))
        return
    width = max(len(one.name) for one in known)
    for one in known:
        click.echo(f"{one.name:{width}}  {one.devices:>6,} x {one.device.name}, {one.node.devices} a node: {one.about}")


@click.command("models")
@click.argument("named", metavar="[NAME]", required=False)
@plan_options.as_json
def models(named: str | None, as_json: bool) -> None:
    """List the models that --model knows, or print the numbers of one, as the options of `hpcdist plan` take them."""
    from hpcdist.planner.model import published as known
    from hpcdist.planner.model.transformer import describe

    shapes = {name: known.named(name) for name in ([named] if named is not None else known.names())}
    rows = {
        name: {**dataclasses.asdict(shape), "parameters": describe(shape, name).parameters}
        for name, shape in shapes.items()
    }
    if as_json:
        click.echo(json.dumps(rows[named] if named is not None else rows))
    elif named is not None:
        for key, value in rows[named].items():
            click.echo(f"{key} = {str(value).lower() if isinstance(value, bool) else json.dumps(value)}")
    else:
        from hpcdist.planner.report.quantities import large_count

        width = max(len(name) for name in rows)
        for name, row in rows.items():
            click.echo(
                f"{name:{width}}  {large_count(row['parameters'], 4):>14}: {row['layers']} layers x {row['hidden']}, "
                f"{row['heads']} heads, context {row['context']:,}, vocabulary {row['vocabulary']:,}"
            )
