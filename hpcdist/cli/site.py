"""`hpcdist site`: profiles of sites, and what an administrator needs to install hpcdist at one."""

import json
from dataclasses import asdict

import click

from hpcdist.cli.site_modulefile import command as modulefile
from hpcdist.cli.site_wheelhouse import command as wheelhouse
from hpcdist.errors import HpcdistError


@click.group("site")
def command() -> None:
    """Show profiles of sites; make modulefiles and wheelhouses."""


@command.command("list")
def profiles() -> None:
    """List the profiles there are, and the folder of those that do not come with hpcdist.

    They are looked for in $XDG_CONFIG_HOME/hpcdist/sites, the folders of $HPCDIST_SITE_PATH, /etc/hpcdist/sites, and
    among those of hpcdist; the first of a name counts.
    """
    from hpcdist.batch.sites import search

    found, shipped = search.names(), search.folders()[-1]
    width = max(len(name) for name in found)
    for name, path in sorted(found.items()):
        try:
            said = search.load(name).description or str(path)
        except HpcdistError as error:  # the others can be used all the same
            said = f"cannot be used: {error}"
        if path.parent != shipped:
            said += f" [{path.parent}]"
        click.echo(f"{name:{width}}  {said}")


@command.command("show")
@click.argument("named", metavar="[NAME|FILE]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(named: str | None, as_json: bool) -> None:
    """Print a profile with all its fields; without a name, the one that `hpcdist submit` would choose."""
    from hpcdist.batch.sites import search

    site = search.load_selected(named)
    if as_json:
        click.echo(json.dumps(asdict(site)))
        return
    click.echo(f"# {site.name}: {site.description}\n# {site.proven}\n# from {site.origin}")
    click.echo(f"cluster = {json.dumps(site.cluster)}")
    for name, table in asdict(site).items():
        for key, value in table.items() if isinstance(table, dict) else ():
            click.echo(f"{name}.{key} = {json.dumps(value)}")


command.add_command(modulefile)
command.add_command(wheelhouse)
