"""`hpcdist site wheelhouse`: hpcdist and all it needs as files, for a machine without a network."""

from pathlib import Path
from typing import Any

import click


@click.command("wheelhouse")
@click.option(
    "--output", required=True, metavar="DIR", type=click.Path(file_okay=False, path_type=Path), help="A new folder."
)
@click.option("--extra", "extras", multiple=True, metavar="NAME", help="Extra of hpcdist, e.g. cuda12x; repeatable.")
@click.option(
    "--requirement",
    "requirements",
    multiple=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Further requirements, or versions that the site fixes, as pip reads them; repeatable.",
)
@click.option("--platform", default="", metavar="TAG", help="Another machine: manylinux_2_28_x86_64 (glibc 2.28).")
@click.option("--python-version", default="", metavar="3.N", help="Another Python.  [default: this one]")
@click.option(
    "--wheel",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Wheel of hpcdist itself.  [default: built from the clone, of this hpcdist or this directory]",
)
@click.option("--with-mpi4py-source", "mpi4py_source", is_flag=True, help="Also what builds mpi4py on the site's MPI.")
def command(**order: Any) -> None:
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
    found = wheelhouse.collect(wheelhouse.WheelhouseOrder(**order))
    click.echo(f"{counted(found.files, 'file')}, {format_bytes(found.nbytes)}", err=True)
    if order["mpi4py_source"]:
        click.echo(f'mpi4py: MPICC="cc -shared" {found.folder}/install.sh VENV builds it on the MPI there', err=True)
    else:
        click.echo(
            "mpi4py: this is its wheel, which opens the MPI it finds at run time (MPICH's ABI or Open MPI). To build "
            'it on the MPI of the site (MPICC="cc -shared"), collect again with --with-mpi4py-source',
            err=True,
        )
    click.echo(found.folder)
