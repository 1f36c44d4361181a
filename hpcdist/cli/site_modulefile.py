"""`hpcdist site modulefile`: what an administrator puts on MODULEPATH. Light, for login nodes."""

from pathlib import Path

import click

from hpcdist.errors import UsageError


@click.command("modulefile")
@click.option(
    "--kind",
    type=click.Choice(["lua", "tcl", "both"]),
    default="both",
    help="lua for Lmod, tcl for Environment Modules (and Lmod).",
)
@click.option(
    "--prefix",
    type=click.Path(file_okay=False, path_type=Path),
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
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of MODULEPATH; the files are hpcdist/VERSION and hpcdist/VERSION.lua in it.  [default: print]",
)
@click.option("--force", is_flag=True, help="Replace files of another content.")
def command(
    kind: str,
    prefix: Path | None,
    in_place: bool,
    mpi: str,
    depends_on: tuple[str, ...],
    setenv: tuple[str, ...],
    environment: bool,
    output: Path | None,
    force: bool,
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
    found = None if in_place else modulefile.find_installation(prefix or modulefile.running_installation())
    if found and not environment:
        found.check_alone()
    chosen = modulefile.Modulefile(
        installation=found,
        mpi=mpi,
        depends_on=depends_on,
        variables=variables(setenv),
        environment=environment,
    )
    version = found.version if found else __version__
    texts = {each: modulefile.render(each, chosen) for each in modulefile.KINDS if kind in (each, "both")}
    if output is None:
        for each, text in texts.items():
            if len(texts) > 1:
                click.echo(f"==> {modulefile.NAME}/{version}{modulefile.KINDS[each]} <==")
            click.echo(text, nl=False)
        return
    for path in modulefile.write(output, version, texts, force=force):
        click.echo(path)


def variables(texts: tuple[str, ...]) -> dict[str, str]:
    """Return the variables in texts NAME=VALUE; a name may be there once. Raises UsageError."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--setenv {text}: expected NAME=VALUE, for example HPCDIST_TUNING=off")
        if name in found:
            raise UsageError(f"--setenv {name}: is there twice, {found[name]!r} and {value!r}; keep one")
        found[name] = value
    return found
