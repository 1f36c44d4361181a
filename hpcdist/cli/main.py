"""The ``hpcdist`` command: a table of sub-commands that are imported when they are called.

``COMMANDS`` has the module, attribute and one-liner of each command. `main` turns errors of hpcdist into messages and
exit codes: before a job has started an error is one message of rank 0, afterwards it ends the job (`comm` failfast).
"""

import io
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NoReturn

import click

from hpcdist import __version__
from hpcdist.cli.common import LazyGroup
from hpcdist.comm.failure import exits, failfast
from hpcdist.comm.launch import environment, exit_file, standard_streams
from hpcdist.errors import FAILURE, INTERRUPTED, STORAGE, HpcdistError

# name -> (where its click command is, what the overview says of it), in the order in which a user needs them
COMMANDS: Final = {
    "help": ("hpcdist.cli.help:command", "Show a page of the documentation, or a key of a recipe."),
    "plan": ("hpcdist.cli.plan.group:command", "Say what a training needs of a cluster before it is started."),
    "run": ("hpcdist.cli.run:command", "Start a command on N ranks with this environment's mpirun."),
    "submit": ("hpcdist.cli.submit.command:command", "Submit the training of a recipe as a batch job."),
    "jobs": ("hpcdist.cli.jobs.group:command", "Look at jobs, read their logs, cancel and account for them."),
    "train": ("hpcdist.cli.train:train", "Train the model of a recipe."),
    "grow": ("hpcdist.cli.train:grow", "Let more ranks join a training that runs."),
    "evaluate": ("hpcdist.cli.train:evaluate", "Print the validation loss of a trained model."),
    "sample": ("hpcdist.cli.train:sample", "Print text from a trained model."),
    "runs": ("hpcdist.cli.runs.listing:command", "List runs: state, steps, loss, speed, age."),
    "report": ("hpcdist.cli.runs.report:report", "Print, or plot, what runs or a sweep measured."),
    "bench": ("hpcdist.cli.bench.group:command", "Measure many configurations, or collective operations."),
    "compare": ("hpcdist.cli.bench.group:compare", "Compare two runs, or tell whether a benchmark became slower."),
    "tune": ("hpcdist.cli.tune:tune", "Measure which allreduce is fastest here."),
    "schedule": ("hpcdist.cli.plan.schedule:command", "Show what pipeline schedules cost, and draw them."),
    "checkpoint": ("hpcdist.cli.runs.checkpoint:command", "List, verify, export and import what runs have saved."),
    "trace": ("hpcdist.cli.runs.trace:command", "Write the timeline of a run for Perfetto; who waited for whom."),
    "hang": ("hpcdist.cli.runs.hang:command", "Name the rank and the line at which a run came apart."),
    "config": ("hpcdist.cli.train:config", "Show a recipe as it will run, and where each value comes from."),
    "energy": ("hpcdist.cli.energy.group:command", "Show what energy can be measured, and what runs used."),
    "site": ("hpcdist.cli.site:command", "Show profiles of sites; make modulefiles, wheelhouses."),
    "doctor": ("hpcdist.cli.doctor.command:command", "Check MPI, launcher, GPU, HDF5 and this machine."),
    "warmup": ("hpcdist.cli.tune:warmup", "Compile the kernels into a cache."),
}


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
    epilog="Exit codes: 0 ok, 1 failure, 2 usage, 69 missing capability, 74 storage, 75 saved and wants a requeue, "
    "78 bad configuration, 130 interrupted.",
)
@click.version_option(__version__, "-V", "--version", prog_name="hpcdist")
def group() -> None:
    """MPI-native distributed training."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code (see `hpcdist.errors`).

    Before a job has started, an error of ours is one message. Afterwards it takes the job with it (`comm.failfast`).
    """
    standard_streams.protect()
    environment.provide_home()
    environment.drop_empty()
    try:
        code = failfast.guarded(lambda: _invoke(arguments))
    except HpcdistError as error:
        _print_error(f"Error: {error}\n")
        code = error.exit_code
    except MemoryError as error:
        _print_error(f"Error: {''.join(exits.error_lines(error))}\n")
        code = FAILURE
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OSError as error:
        if error is not standard_streams.failure():
            raise
        standard_streams.tolerate()  # it is not tried again at the end of Python
        code = FAILURE  # whoever reads has seen enough
        if not isinstance(error, BrokenPipeError):
            click.echo(f"Error: standard output cannot be written: {error.strerror}", err=True)
            code = STORAGE
    if code:
        exit_file.write_exit_code(code)  # as `comm.failfast` does once a job has started
    sys.exit(code)


def _print_error(text: str) -> None:
    """Tell what has ended this process before a job has started: `hpcdist run` shows it after its launcher's words.

    Another rank than 0 lets that one speak first: it most likely has the same to say, and when it has left, the
    launcher ends the others.
    """
    launched = environment.launch_environment()
    rank = launched.rank or 0 if launched is not None else 0
    if rank:
        time.sleep(failfast.GIVE_WAY_S)
    with suppress(OSError):
        if launched is not None and failfast.write_for_launcher(rank, text):
            return
    click.echo(text, nl=False, err=True)


def _colour() -> bool | None:
    """Return False where colours are not wanted, None where the terminal decides.

    Open MPI's mpirun shows its ranks a terminal, whatever its output is: what that is `hpcdist run` knows alone.
    """
    launched = environment.launch_environment()
    unknown = launched is not None and launched.size > 1 and exit_file.LAUNCH_DIR not in os.environ
    return False if unknown or os.environ.get("NO_COLOR") else None


def _invoke(arguments: Sequence[str] | None) -> int:
    """Return the exit code of the command; usage errors are shown here."""
    try:
        value = group.main(args=arguments, prog_name="hpcdist", standalone_mode=False, color=_colour())
        sys.stdout.flush()
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        _print_error(shown.getvalue())
        return error.exit_code
    except click.Abort as error:  # how click reports a Ctrl-C
        raise KeyboardInterrupt from error
    return value if isinstance(value, int) else 0
