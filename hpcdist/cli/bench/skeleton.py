"""Common parts of the `hpcdist bench` commands: options, start of the ranks, provenance, and output of rank 0.

A command that measures on several ranks gets their number from `world`. A single process starts the ranks with
`start_ranks`. A rank calls `begin`, which checks the output files before the measurement.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.common import FILE, check_plot, stacked
from hpcdist.errors import UsageError

if TYPE_CHECKING:  # late at run time: --help must load neither h5py nor MPI
    from hpcdist.comm.start import Session


def count_option(*names: str, help: str, default: int | None = None, least: int = 1) -> Any:  # noqa: A002
    """Return a decorator that adds an option with an integer value. ``least``: smallest valid value."""
    return click.option(*names, type=click.IntRange(min=least), default=default, help=help)


def output_options(file: str, plot: str) -> Any:
    """Decorator that adds --output (help text ``file``), --plot (help text ``plot``), --json and --anonymous."""
    return stacked(
        click.option("-o", "--output", type=FILE, help=file),
        click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object."),
        click.option("--plot", type=FILE, help=f"{plot} (.png, .pdf, .svg)."),
        click.option("--anonymous", is_flag=True, help="Leave host names out of the results."),
    )


_SECONDS: Final = click.FloatRange(min=1.0)
limit_option = click.option("--limit-s", type=_SECONDS, default=600.0, help="Time limit of a trial in seconds.")
budget_option = click.option(
    "--budget-s", type=_SECONDS, help="Time limit of this call in seconds; the next call continues with the rest."
)
ranks_per_node_option = count_option("--ranks-per-node", help="Ranks on each node.  [default: the launcher's]")
retry_option = click.option("--retry-failed", is_flag=True, help="Run failed trials again.")
list_option = click.option("--list", "list_only", is_flag=True, help="Print the possible choices; start nothing.")
run_args_option = click.option(
    "--run-args", default="", help="More options for the `hpcdist run` of each trial, in one string."
)


@dataclass(frozen=True)
class Outputs:
    """Values of --output (``file``), --json, --plot and --anonymous. A path is None if the option is missing."""

    file: Path | None
    as_json: bool
    plot: Path | None
    anonymous: bool

    @classmethod
    def of(cls, options: dict[str, Any]) -> "Outputs":
        """Remove --output, --json, --plot and --anonymous from the dict ``options``, and return their values."""
        return cls(*(options.pop(name) for name in ("output", "as_json", "plot", "anonymous")))

    def check(self) -> None:
        """Raise an HpcdistError now, before a measurement, if the output file or the plot cannot be written later."""
        if self.file is not None:
            from hpcdist.hdf5 import files

            files.check_place(self.file)
        check_plot(self.plot)

    def show(self, values: Callable[[], Any], text: Callable[[], str], plot: Callable[[Path], object]) -> None:
        """Print ``values()`` as JSON if --json is set, else ``text()``. Call ``plot(path)`` if --plot is set. Local."""
        click.echo(json.dumps(values()) if self.as_json else text())
        if self.plot is not None:
            plot(self.plot)


def print_progress(line: str) -> None:
    """Print ``line`` to stderr."""
    click.echo(line, err=True)


def chosen(option: str, names: Sequence[str], choices: Iterable[str], context: str = "") -> tuple[str, ...]:
    """Return a tuple of the ``names`` given to ``option``, in the order of ``choices``.

    Raises UsageError for a name that is not in ``choices``. ``context``: text that follows "unknown" in the error.
    """
    valid = list(choices)
    for name in names:
        if name not in valid:
            shown = [repr(word) for word in valid] if any("," in word for word in valid) else valid
            raise UsageError(f"{option} {name!r} is unknown{context}; choose from {', '.join(shown)}")
    return tuple(name for name in valid if name in names)


def world(ranks: int | None, default: int) -> tuple[int, bool]:
    """Return (number of ranks to use, True if a launcher has started these ranks). Raises UsageError.

    ``ranks``: value of --ranks, or None. ``default``: number of ranks without --ranks and without a launcher.
    """
    from hpcdist.comm.launch import environment

    launched = environment.launch_environment()
    size = launched.size if launched is not None and launched.size > 1 else None
    if size is not None and ranks not in (None, size):
        raise UsageError(f"--ranks {ranks}, but the launcher started {size} ranks; leave --ranks out")
    return size or ranks or default, size is not None


def rank_arguments(call: click.Context) -> list[str]:
    """Return the options of the click context ``call`` as command-line words, without --ranks."""
    line: list[str] = []
    for option in call.command.params:
        value = call.params[option.name or ""]
        if option.name == "ranks" or value is None or value is False:
            continue
        if isinstance(option, click.Option) and option.is_flag:
            line.append(option.opts[-1])
        else:
            for item in value if option.multiple else (value,):
                line += [option.opts[-1], str(item)]
    return line


def start_ranks(ranks: int, call: click.Context, *options: str) -> int:
    """Run the command of the click context ``call`` on ``ranks`` ranks by `hpcdist run`. Return the exit code."""
    from hpcdist.cli import run

    line = ["-n", str(ranks), *options, "--grace", "5", "bench", str(call.command.name), *rank_arguments(call)]
    code: int = run.command.main(args=line, prog_name="hpcdist run", standalone_mode=False)
    return code


def begin(check: Callable[[], object]) -> "Session":
    """Start MPI, call ``check()`` on rank 0, and return the session. Collective over all ranks.

    If ``check`` raises an HpcdistError, all ranks raise this error.
    """
    from hpcdist.bench import output_file
    from hpcdist.comm import start

    session = start.start()
    output_file.check_on_all_ranks(session.comm, check)
    return session


def origin(session: "Session", anonymous: bool, **more: Any) -> dict[str, Any]:
    """Return a dict of the versions and machines that made the results on rank 0, and {} elsewhere. Collective.

    ``anonymous``: omit host names. ``**more``: further entries of the dict.
    """
    from hpcdist.telemetry.provenance import provenance

    places = session.comm.allgather_object((session.place.host, ",".join(map(str, session.place.cores))))
    if session.comm.rank:
        return {}
    hosts = list(dict.fromkeys(host for host, _ in places))
    common = provenance(mpi_library=session.library, hosts=hosts, anonymous=anonymous)
    return {**common, "cores_of_rank": [cores for _, cores in places], **more}
