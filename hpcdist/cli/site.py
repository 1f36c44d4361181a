"""`hpcdist site`: show site profiles; write modulefiles, wheelhouses and monitoring files. Runs on login nodes."""

import json
from pathlib import Path
from typing import Any

import click

from hpcdist.cli.common import DIRECTORY, EXISTING_FILE, FILE, json_option
from hpcdist.errors import HpcdistError, UsageError
from hpcdist.reporting.jsonable import jsonable
from hpcdist.reporting.schema import toml_lines
from hpcdist.reporting.table import aligned


@click.group("site")
def command() -> None:
    """Show site profiles; write modulefiles, wheelhouses, and files for Prometheus and Grafana."""


@command.command("modulefile")
@click.option(
    "--kind",
    type=click.Choice(["lua", "tcl", "both"]),
    default="both",
    help="Module system: lua for Lmod, tcl for Environment Modules (and Lmod).",
)
@click.option(
    "--prefix",
    type=DIRECTORY,
    help="hpcdist installation: a virtual environment, a `pip install --target` folder or a clone.  "
    "[default: this installation]",
)
@click.option(
    "--in-place",
    is_flag=True,
    help="Instead of --prefix: let the modulefile locate hpcdist relative to itself, so that the tree can be moved.",
)
@click.option("--mpi", default="", metavar="MODULE", help="MPI module to load: the MPI that mpi4py was built with.")
@click.option("--depends-on", multiple=True, metavar="MODULE", help="Other module to load, e.g. cuda/12.4; repeatable.")
@click.option(
    "--setenv",
    multiple=True,
    metavar="NAME=VALUE",
    help="Environment variable that the module sets, e.g. HPCDIST_SITE=NAME; repeatable.",
)
@click.option(
    "--environment", is_flag=True, help="Put every command of the environment on PATH (python3, pip, mpirun, ...)."
)
@click.option(
    "--output",
    type=DIRECTORY,
    help="Folder of MODULEPATH; writes hpcdist/VERSION and hpcdist/VERSION.lua into it.  [default: print]",
)
@click.option("--force", is_flag=True, help="Overwrite existing files with different content.")
def modulefile(
    kind: str,
    prefix: Path | None,
    in_place: bool,
    setenv: tuple[str, ...],
    output: Path | None,
    force: bool,
    **choices: Any,
) -> None:
    """Write modulefiles for an installation of hpcdist: HPCDIST_ROOT, PATH, MPI module, bash completion and help.

    --kind selects the module system. With --in-place the modulefile locates hpcdist relative to itself. --setenv adds
    environment variables. By default a folder with only the command hpcdist is added to PATH. The flag --environment
    instead adds all commands of the environment, which then take precedence over commands of the same name. Prints the
    modulefiles, or with --output the paths of the written files.
    """
    from hpcdist import __version__
    from hpcdist.batch import modulefile

    if in_place and prefix is not None:
        raise UsageError("--in-place and --prefix exclude each other; choose one")
    if force and output is None:
        raise UsageError("--force overwrites files, so it needs --output DIR")
    installation = None if in_place else modulefile.find_installation(prefix or modulefile.running_installation())
    if installation and not choices["environment"]:
        installation.check_alone()
    chosen = modulefile.Modulefile(installation=installation, variables=parse_variables(setenv), **choices)
    version = installation.version if installation else __version__
    texts = {
        kind_of_file: modulefile.render(kind_of_file, chosen)
        for kind_of_file in modulefile.KINDS
        if kind in (kind_of_file, "both")
    }
    if output is None:
        for kind_of_file, text in texts.items():
            if len(texts) > 1:
                click.echo(f"==> {modulefile.NAME}/{version}{modulefile.KINDS[kind_of_file]} <==")
            click.echo(text, nl=False)
        return
    for path in modulefile.write(output, version, texts, force=force):
        click.echo(path)


def parse_variables(texts: tuple[str, ...]) -> dict[str, str]:
    """Parse texts NAME=VALUE into a dict. Raises UsageError for another format or a repeated name."""
    variables: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--setenv {text}: expected NAME=VALUE, for example HPCDIST_TUNING=off")
        if name in variables:
            raise UsageError(f"--setenv {name} is given twice, with {variables[name]!r} and {value!r}; keep one")
        variables[name] = value
    return variables


@command.command("wheelhouse")
@click.option("--output", required=True, metavar="DIR", type=DIRECTORY, help="New folder to write the wheelhouse into.")
@click.option("--extra", "extras", multiple=True, metavar="NAME", help="Extra of hpcdist, e.g. cuda12x; repeatable.")
@click.option(
    "--requirement",
    "requirements",
    multiple=True,
    metavar="FILE",
    type=EXISTING_FILE,
    help="Requirements file with further packages or pinned versions, as pip reads it; repeatable.",
)
@click.option(
    "--platform", default="", metavar="TAG", help="Platform tag of the target machine, e.g. manylinux_2_28_x86_64."
)
@click.option(
    "--python-version", default="", metavar="3.N", help="Python version of the target machine.  [default: this one]"
)
@click.option(
    "--wheel",
    metavar="FILE",
    type=FILE,
    help="Wheel of hpcdist to include.  [default: build it from the clone]",
)
@click.option(
    "--with-mpi4py-source", "mpi4py_source", is_flag=True, help="Add what is needed to build mpi4py for the site's MPI."
)
def wheelhouse(**order: Any) -> None:
    """Collect the wheels of hpcdist and its dependencies in DIR, with SHA-256 hashes and an install script.

    On a machine without a network, `DIR/install.sh VENV` creates a virtual environment with hpcdist.

    The pip of this Python downloads the wheels, with its settings (PIP_INDEX_URL, proxies). Environment markers that
    name a Python version are evaluated for this Python, even with --python-version.
    """
    from hpcdist.batch import wheelhouse
    from hpcdist.reporting.units import counted, format_bytes

    order["output"] = order["output"].absolute()
    if order["wheel"] is not None:
        order["wheel"] = order["wheel"].absolute()
    collected = wheelhouse.collect(wheelhouse.WheelhouseOrder(**order))
    click.echo(f"{counted(collected.files, 'file')}, {format_bytes(collected.nbytes)}", err=True)
    note = f"`MPICC=mpicc {collected.folder}/install.sh VENV` builds it for the site's MPI (on a Cray MPICC=cc)"
    if not order["mpi4py_source"]:
        note = (
            "included as a wheel, which opens the MPI it finds at run time (MPICH's ABI or Open MPI). To build it for "
            "the site's MPI (MPICC=mpicc), collect again with --with-mpi4py-source"
        )
    click.echo(f"mpi4py: {note}", err=True)
    click.echo(collected.folder)


@command.command("monitoring")
@click.option("--output", required=True, metavar="DIR", type=DIRECTORY, help="Folder to write the files into.")
@click.option("--force", is_flag=True, help="Overwrite existing files with different content.")
def monitoring(output: Path, force: bool) -> None:
    """Write a Grafana dashboard, Prometheus rules, alerts and scrape configuration, and a README. Prints the paths."""
    from hpcdist.batch import job
    from hpcdist.reporting import regular

    shipped = sorted(job.folder("monitoring").iterdir())
    files = {output / file.name: file.read_text(encoding="utf-8") for file in shipped}
    regular.save_all(files, force=force)
    for path in files:
        click.echo(path)


@command.command("list")
def profiles() -> None:
    """List the site profiles. For profiles that do not come with hpcdist, also print their folder.

    Search order: $XDG_CONFIG_HOME/hpcdist/sites, the folders of $HPCDIST_SITE_PATH, /etc/hpcdist/sites, and the
    profiles shipped with hpcdist. If several profiles have the same name, the first is used.
    """
    from hpcdist.batch import site_search

    paths, shipped = site_search.names(), site_search.shipped_folders()
    rows = []
    for name, path in sorted(paths.items()):
        try:
            text = site_search.load(name).description or str(path)
        except HpcdistError as error:  # a damaged profile does not keep the others from being listed
            text = f"cannot be used: {error}"
        if path.parent not in shipped:
            text += f" [{path.parent}]"
        rows.append((name, text))
    click.echo("\n".join(aligned(rows, left=(0, 1))))


@command.command("show")
@click.argument("named", metavar="[NAME|FILE]", required=False)
@json_option
def show(named: str | None, as_json: bool) -> None:
    """Print all fields of a site profile. Without a name, print the profile that `hpcdist submit` would choose."""
    from hpcdist.batch import site_search

    site = site_search.load_selected(named)
    if as_json:
        click.echo(json.dumps(jsonable(site)))
        return
    click.echo(f"# {site.name}: {site.description}\n# {site.proven}\n# from {site.origin}")
    click.echo("\n".join(toml_lines({"cluster": site.cluster})))
    for name, table in jsonable(site).items():
        for line in toml_lines(table) if isinstance(table, dict) else ():
            click.echo(f"{name}.{line}")
