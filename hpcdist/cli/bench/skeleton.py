"""Skeleton of the `hpcdist bench` commands: shared options, places of results, ranks, and the report of rank 0.

A command that measures on ranks asks `world` how many there are, starts them by `start_ranks` where it is alone, and
else begins with `begin`, which refuses results that cannot be written before anything is measured. `Outputs` are the
options of `output_options`; it checks their places, and prints and draws. Exit codes are those of `hpcdist.errors`.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcdist.cli.common import FILE, check_plot, stacked
from hpcdist.errors import UsageError

if TYPE_CHECKING:  # late at run time: --help must load neither h5py nor MPI
    from hpcdist.comm.start import Session


def file_option(*names: str, **attributes: Any) -> Any:
    """Return the option of a file, which need not exist."""
    return click.option(*names, type=FILE, **attributes)


def count_option(*names: str, help: str, default: int | None = None, least: int = 1) -> Any:  # noqa: A002
    """Return the option of a whole number of at least ``least``."""
    return click.option(*names, type=click.IntRange(min=least), default=default, help=help)


def seconds_option(*names: str, help: str, default: float | None = None) -> Any:  # noqa: A002
    """Return the option of a time of at least a second."""
    return click.option(*names, type=click.FloatRange(min=1.0), default=default, help=help)


def output_options(file: str, plot: str = "", *, default: Path | None = None, hides: str = "hosts") -> Any:
    """Return a decorator of a command: --output, --json, --anonymous, and --plot where ``plot`` says what is drawn.

    ``file`` says what is written to the output, ``hides`` whose names --anonymous leaves out.
    """
    return stacked(
        file_option("-o", "--output", default=default, show_default=default is not None, help=file),
        click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object."),
        *([file_option("--plot", help=f"{plot} (.png, .pdf, .svg).")] if plot else []),
        click.option("--anonymous", is_flag=True, help=f"Leave the names of {hides} out of the results."),
    )


# Of sweeps.
limit_option = seconds_option("--limit-s", default=600.0, help="Seconds that a trial may take.")
budget_option = seconds_option(
    "--budget-s", help="Seconds after which a trial under way is ended; what is left waits for the next call."
)
ranks_per_node_option = count_option("--ranks-per-node", help="Ranks on each node.  [default: the launcher's]")
retry_option = click.option("--retry-failed", is_flag=True, help="Run trials again that are recorded as failed.")
list_option = click.option("--list", "list_only", is_flag=True, help="Print what can be measured, and start nothing.")
run_args_option = click.option(
    "--run-args", default="", help="Further options of the `hpcdist run` of each trial, in one string."
)


@dataclass(frozen=True)
class Outputs:
    """Destinations of the results: the values of `output_options`."""

    file: Path | None
    as_json: bool
    plot: Path | None
    anonymous: bool

    @classmethod
    def of(cls, options: dict[str, Any]) -> "Outputs":
        """Take them out of the ``options`` of a command."""
        return cls(options.pop("output"), options.pop("as_json"), options.pop("plot", None), options.pop("anonymous"))

    def check(self, read: Callable[[Path], object] | None = None) -> None:
        """Raise what is in the way of the files; one that is there is ``read``, where results are appended to it."""
        if self.file is not None:
            if read is not None and self.file.exists():
                read(self.file)
            else:
                from hpcdist.hdf5 import files

                files.check_place(self.file)
        check_plot(self.plot)

    def show(self, values: Callable[[], Any], text: Callable[[], str], plot: Callable[[Path], object]) -> None:
        """Print the ``values`` as JSON or the ``text``, and draw (local)."""
        click.echo(json.dumps(values()) if self.as_json else text())
        if self.plot is not None:
            plot(self.plot)


def print_progress(line: str) -> None:
    """Print a line on stderr."""
    click.echo(line, err=True)


def chosen(option: str, names: Sequence[str], known: Iterable[str], among: str = "") -> tuple[str, ...]:
    """Return those of ``known`` that are named, in their order. Raises UsageError for a name that is not known.

    ``among`` says in the message of what the known ones are.
    """
    valid = list(known)
    for name in names:
        if name not in valid:
            shown = [repr(word) for word in valid] if any("," in word for word in valid) else valid
            raise UsageError(f"{option} {name!r} is unknown{among}; choose from {', '.join(shown)}")
    return tuple(name for name in valid if name in names)


def world(ranks: int | None, default: int) -> tuple[int, bool]:
    """Return the number of ranks, and whether this process is one of them already. Raises UsageError for others."""
    from hpcdist.comm.launch import environment

    launched = environment.launch_environment()
    size = launched.size if launched is not None and launched.size > 1 else None
    if size is not None and ranks not in (None, size):
        raise UsageError(f"--ranks {ranks}, but this process is one of {size} ranks; leave --ranks out there")
    return size or ranks or default, size is not None


def rank_arguments(call: click.Context) -> list[str]:
    """Return the command line of ``call`` for each of the ranks, which know themselves how many they are."""
    line: list[str] = []
    for option in call.command.params:
        value = call.params[option.name or ""]
        if option.name == "ranks" or value in (None, False):
            continue
        if isinstance(option, click.Option) and option.is_flag:
            line.append(option.opts[-1])
        else:
            for item in value if option.multiple else (value,):
                line += [option.opts[-1], str(item)]
    return line


def start_ranks(ranks: int, call: click.Context, *options: str) -> int:
    """Run ``call`` on so many ranks, with further ``options`` of `hpcdist run`, and return their exit code."""
    from hpcdist.cli import run

    line = ["-n", str(ranks), *options, "--grace", "5", "bench", str(call.command.name), *rank_arguments(call)]
    code: int = run.command.main(args=line, prog_name="hpcdist run", standalone_mode=False)
    return code


def begin(check: Callable[[], object]) -> "Session":
    """Start this rank, and raise on all of them what ``check`` raises on rank 0. Collective over the world."""
    from hpcdist.bench import output_file
    from hpcdist.comm import start

    session = start.start()
    output_file.check_on_all_ranks(session.comm, check)
    return session


def origin(session: "Session", anonymous: bool, **more: Any) -> dict[str, Any]:
    """Return the provenance of results and ``more`` on rank 0, nothing elsewhere. Collective over the world."""
    from hpcdist.telemetry.provenance import provenance

    places = session.comm.allgather_object((session.place.host, ",".join(map(str, session.place.cores))))
    if session.comm.rank:
        return {}
    hosts = list(dict.fromkeys(host for host, _ in places))
    known = provenance(mpi_library=session.library, hosts=hosts, anonymous=anonymous)
    return {**known, "cores_of_rank": [cores for _, cores in places], **more}
