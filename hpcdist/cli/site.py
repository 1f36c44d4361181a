"""`hpcdist site`: profiles of sites, and modulefiles and wheelhouses for administrators.

`list` and `show` print profiles; `modulefile` writes what an administrator puts on MODULEPATH; `wheelhouse` collects
hpcdist and its dependencies as files, for a machine without a network; `monitoring` writes the files for Prometheus and
Grafana. Light: it runs on login nodes.
"""

import json
from pathlib import Path
from typing import Any

import click

from hpcdist.cli.common import DIRECTORY, EXISTING_FILE, FILE, json_option
from hpcdist.errors import HpcdistError, UsageError
from hpcdist.reporting.jsonable import jsonable
from hpcdist.reporting.table import aligned
from hpcdist.reporting.toml_text import toml_lines


@click.command("modulefile")
@click.option(
    "--kind",
    type=click.Choice(["lua", "tcl", "both"]),
    default="both",
    help="lua for Lmod, tcl for Environment Modules (and Lmod).",
)
@click.option(
    "--prefix",
    type=DIRECTORY,
    help="Where hpcdist is: an environment, a folder of `pip install --target`, a clone.  [default: this installation]",
)
@click.option(
    "--in-place", is_flag=True, help="Write, instead of --prefix, one that finds hpcdist from where it lies itself."
)
@click.option("--mpi", default="", metavar="MODULE", help="Module of the MPI that mpi4py was built for.")
@click.option("--depends-on", multiple=True, metavar="MODULE", help="Further module to load with it, e.g. cuda/12.4.")
@click.option(
    "--setenv",
    multiple=True,
    metavar="NAME=VALUE",
    help="Variable to set while it is loaded, e.g. HPCDIST_SITE or NUMBA_CACHE_DIR; VALUE is taken as it is.",
)
@click.option(
    "--environment", is_flag=True, help="Show all commands of its environment, python3, pip and mpirun among them."
)
@click.option(
    "--output",
    type=DIRECTORY,
    help="Folder of MODULEPATH; the files are hpcdist/VERSION and hpcdist/VERSION.lua in it.  [default: print]",
)
@click.option("--force", is_flag=True, help="Replace files of another content.")
def modulefile(
    kind: str,
    prefix: Path | None,
    in_place: bool,
    setenv: tuple[str, ...],
    output: Path | None,
    force: bool,
    **choices: Any,
) -> None:
    """Write modulefiles for an installation of hpcdist: HPCDIST_ROOT, PATH, its MPI, completion for bash, help.

    PATH gets a folder with the command hpcdist alone, which knows its own Python and mpirun; with --environment all
    commands of its environment, which then hide others of their names.

    A load is refused with the reason when the installation is gone, an unload brings back what was before. The paths
    of the files are printed.
    """
    from hpcdist import __version__
    from hpcdist.batch.packaging import modulefile

    if in_place and prefix is not None:
        raise UsageError("--in-place looks from where the modulefile lies: leave out --prefix, or --in-place")
    if force and output is None:
        raise UsageError("--force replaces files: name their folder, --output DIR")
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
    """Return the variables in texts NAME=VALUE; a name may be there once. Raises UsageError."""
    variables: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--setenv {text}: expected NAME=VALUE, for example HPCDIST_TUNING=off")
        if name in variables:
            raise UsageError(f"--setenv {name}: is there twice, {variables[name]!r} and {value!r}; keep one")
        variables[name] = value
    return variables


@click.command("wheelhouse")
@click.option("--output", required=True, metavar="DIR", type=DIRECTORY, help="A new folder.")
@click.option("--extra", "extras", multiple=True, metavar="NAME", help="Extra of hpcdist, e.g. cuda12x; repeatable.")
@click.option(
    "--requirement",
    "requirements",
    multiple=True,
    metavar="FILE",
    type=EXISTING_FILE,
    help="Further requirements, or versions that the site fixes, as pip reads them; repeatable.",
)
@click.option("--platform", default="", metavar="TAG", help="Another machine: manylinux_2_28_x86_64 (glibc 2.28).")
@click.option("--python-version", default="", metavar="3.N", help="Another Python.  [default: this one]")
@click.option(
    "--wheel",
    metavar="FILE",
    type=FILE,
    help="Wheel of hpcdist itself.  [default: built from the clone, of this hpcdist or this directory]",
)
@click.option("--with-mpi4py-source", "mpi4py_source", is_flag=True, help="Also what builds mpi4py on the site's MPI.")
def wheelhouse(**order: Any) -> None:
    """Collect hpcdist's wheel and those of all it needs in DIR, with their SHA-256 and a script that installs them.

    On the machine without a network `DIR/install.sh VENV` makes a virtual environment of them, or by hand:

    pip install --no-index --find-links DIR --require-hashes -r DIR/requirements.txt

    pip of this Python downloads; its settings (PIP_INDEX_URL, proxies) apply. Markers of the requirements that name a
    Python version are read for this Python, also with --python-version: that is pip's way.
    """
    from hpcdist.batch.packaging import wheelhouse
    from hpcdist.reporting.units import counted, format_bytes

    order["output"] = order["output"].absolute()
    if order["wheel"] is not None:
        order["wheel"] = order["wheel"].absolute()
    collected = wheelhouse.collect(wheelhouse.WheelhouseOrder(**order))
    click.echo(f"{counted(collected.files, 'file')}, {format_bytes(collected.nbytes)}", err=True)
    built = f"MPICC=mpicc {collected.folder}/install.sh VENV builds it on the MPI there (on a Cray MPICC=cc)"
    if not order["mpi4py_source"]:
        built = (
            "this is its wheel, which opens the MPI it finds at run time (MPICH's ABI or Open MPI). To build it on the "
            "MPI of the site (MPICC=mpicc), collect again with --with-mpi4py-source"
        )
    click.echo(f"mpi4py: {built}", err=True)
    click.echo(collected.folder)


@click.command("monitoring")
@click.option("--output", required=True, metavar="DIR", type=DIRECTORY, help="Folder to write the files into.")
@click.option("--force", is_flag=True, help="Replace files of another content.")
def monitoring(output: Path, force: bool) -> None:
    """Write the Grafana dashboard, the Prometheus rules, alerts and scrape configuration, and their README.

    The paths of the files are printed.
    """
    from hpcdist.batch import job
    from hpcdist.reporting import regular

    shipped = sorted(job.folder("monitoring").iterdir())
    files = {output / file.name: file.read_text(encoding="utf-8") for file in shipped}
    regular.save_all(files, force=force)
    for path in files:
        click.echo(path)


@click.group("site")
def command() -> None:
    """Show profiles of sites; write modulefiles, wheelhouses, and files for Prometheus and Grafana."""


@command.command("list")
def profiles() -> None:
    """List the profiles there are, and the folder of those that do not come with hpcdist.

    They are looked for in $XDG_CONFIG_HOME/hpcdist/sites, the folders of $HPCDIST_SITE_PATH, /etc/hpcdist/sites, and
    among those of hpcdist; the first of a name counts.
    """
    from hpcdist.batch.sites import search

    paths, shipped = search.names(), search.shipped_folders()
    rows = []
    for name, path in sorted(paths.items()):
        try:
            text = search.load(name).description or str(path)
        except HpcdistError as error:  # the others can be used all the same
            text = f"cannot be used: {error}"
        if path.parent not in shipped:
            text += f" [{path.parent}]"
        rows.append((name, text))
    click.echo("\n".join(aligned(rows, left=(0, 1))))


@command.command("show")
@click.argument("named", metavar="[NAME|FILE]", required=False)
@json_option
def show(named: str | None, as_json: bool) -> None:
    """Print a profile with all its fields; without a name, the one that `hpcdist submit` would choose."""
    from hpcdist.batch.sites import search

    site = search.load_selected(named)
    if as_json:
        click.echo(json.dumps(jsonable(site)))
        return
    click.echo(f"# {site.name}: {site.description}\n# {site.proven}\n# from {site.origin}")
    click.echo("\n".join(toml_lines({"cluster": site.cluster})))
    for name, table in jsonable(site).items():
        for line in toml_lines(table) if isinstance(table, dict) else ():
            click.echo(f"{name}.{line}")


command.add_command(modulefile)
command.add_command(wheelhouse)
command.add_command(monitoring)
