"""`hpcdist run`: one command on N ranks, on a workstation or inside a batch job."""

import os
import shlex
import sys
import sysconfig
import tempfile
from pathlib import Path

import click

import hpcdist
from hpcdist.cli.main import COMMANDS
from hpcdist.comm import launcher, mpirun, supervisor
from hpcdist.comm.failfast import FAILURE_DIR
from hpcdist.errors import OK, UsageError


@click.command(
    "run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, no_args_is_help=True
)
@click.option("-n", "--ranks", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option("--ranks-per-node", type=click.IntRange(min=1), help="Ranks on each node.  [default: the launcher's]")
@click.option("--mpi-args", default="", help="Further options of mpirun, in one string; they win over ours.")
@click.option("--grace", default=30.0, type=click.FloatRange(min=0.0), help="Seconds the ranks have to save and stop.")
@click.option("--dry-run", is_flag=True, help="Print the command line and start nothing.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    ranks: int, ranks_per_node: int | None, mpi_args: str, grace: float, dry_run: bool, command: tuple[str, ...]
) -> int:
    """Start the hpcdist COMMAND on several ranks, e.g. `hpcdist run -n 2 train recipe.toml`.

    The mpirun is that of this Python's environment, else the first on PATH. Ctrl-C, SIGTERM and SIGUSR1 reach the
    ranks, which save and stop at the next step (exit code 130, or 75 for the scheduler to start them again); a second
    Ctrl-C, or the end of the grace, kills them. The first failure of a rank is shown last.
    """
    _check(command)
    options = mpi_options(mpi_args)
    found = mpirun.find()
    settings = {**mpirun.settings(found), **importable()}
    program = [sys.executable, "-P", "-m", "hpcdist", *command]
    extra = [*mpirun.per_node(found, ranks_per_node), *options]
    if dry_run:
        line = mpirun.command(found, ranks, program, settings, extra)
        click.echo(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), shlex.join(line)]))
        return OK
    with tempfile.TemporaryDirectory(prefix="hpcdist-run-") as folder:
        settings |= {FAILURE_DIR: folder, supervisor.LAUNCH_DIR: folder}
        line = mpirun.command(found, ranks, program, settings, extra)
        code = supervisor.supervise(line, {**os.environ, **settings}, Path(folder), grace)
        if code != OK:
            _show_first_failure(Path(folder))
    return code


def mpi_options(text: str) -> list[str]:
    """Return the options in ``text``, which is quoted as for a shell. Raises UsageError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--mpi-args {text!r}: {error}; quote it as for a shell, e.g. --mpi-args '-x NAME'") from error


def _check(command: tuple[str, ...]) -> None:
    """Refuse what would fail on every rank at once."""
    known = ", ".join(name for name in COMMANDS if name not in ("run", "submit", "bench", "compare"))
    # A sweep starts ranks itself; the other benchmarks are measured by ranks.
    if command[0] not in known.split(", ") and command[:2] not in (("bench", "collectives"), ("bench", "pipeline")):
        raise click.UsageError(
            f"{command[0]!r} is no command to run on ranks; known: {known}, bench collectives, bench pipeline"
        )
    said = launcher.announced()
    if said is not None and said.size > 1:  # one rank is an interactive shell: srun --pty bash
        raise UsageError(
            f"this process is already one of {said.size} ranks of {said.launcher}; "
            f"start `hpcdist {command[0]}` there, without `run`"
        )


def outside_python() -> str | None:
    """Return the folder that holds hpcdist, be it a clone; None where this Python finds it by itself."""
    home = str(Path(hpcdist.__file__).resolve().parents[1])
    installed = {str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("purelib", "platlib")}
    return None if home in installed else home


def importable() -> dict[str, str]:
    """Return what the ranks need to import the same hpcdist as this process."""
    home, rest = outside_python(), os.environ.get("PYTHONPATH")
    if home is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join([home, rest] if rest else [home])}


def _show_first_failure(folder: Path) -> None:
    """Repeat the failure of the rank that failed first: after the launcher's words and the echoes of the others."""
    failures = sorted(folder.glob("rank-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if failures:
        others = f" (of {len(failures)} that failed)" if len(failures) > 1 else ""
        click.echo(f"\nhpcdist run: the first failure{others}:\n{failures[0].read_text()}", err=True)
