"""The ``hpcdist`` command: the table ``COMMANDS`` of sub-commands, and `main`, which maps errors to exit codes."""

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

# name -> ("module:attribute" of the click command, its line in the overview), in the order in which users need them
COMMANDS: Final = {
    "help": ("hpcdist.cli.help:command", "Show a page of the documentation, or a key of a recipe."),
    "plan": ("hpcdist.cli.plan.group:command", "Predict time, memory and cost of a training before it is started."),
    "diagnose": ("hpcdist.cli.plan.diagnose:command", "Rank the causes why a training is slower than its plan."),
    "run": ("hpcdist.cli.run:command", "Start a command on N ranks with this environment's mpirun."),
    "submit": ("hpcdist.cli.submit.command:command", "Submit the training of a recipe as a batch job."),
    "jobs": ("hpcdist.cli.jobs:command", "Show, cancel and account for batch jobs, and read their logs."),
    "train": ("hpcdist.cli.train:train", "Train the model of a recipe."),
    "grow": ("hpcdist.cli.train:grow", "Add ranks to a running training."),
    "evaluate": ("hpcdist.cli.train:evaluate", "Print the validation loss of a trained model."),
    "sample": ("hpcdist.cli.train:sample", "Print text from a trained model."),
    "runs": ("hpcdist.cli.runs.inspect:runs", "List runs: state, steps, loss, speed, age."),
    "report": ("hpcdist.cli.runs.report:report", "Print or plot the measurements of runs or of a sweep."),
    "bench": ("hpcdist.cli.bench.group:command", "Measure many configurations, or collective operations."),
    "compare": ("hpcdist.cli.bench.group:compare", "Compare two runs, or check a benchmark for regressions."),
    "tune": ("hpcdist.cli.tune:tune", "Measure which allreduce is fastest here."),
    "schedule": ("hpcdist.cli.plan.schedule:command", "Show the cost of pipeline schedules, and draw them."),
    "checkpoint": ("hpcdist.cli.runs.checkpoint:command", "List, verify, export and import checkpoints."),
    "data": ("hpcdist.cli.runs.data:command", "Tokenize files, show token directories, train tokenizers."),
    "trace": ("hpcdist.cli.runs.inspect:trace", "Write the timeline of a run for Perfetto, and show waiting times."),
    "hang": ("hpcdist.cli.runs.inspect:hang", "Name the rank and source line at which a run hangs."),
    "config": ("hpcdist.cli.train:config", "Show all values of a recipe, and the source of each value."),
    "energy": ("hpcdist.cli.energy:command", "List the energy meters here, and show the energy of runs."),
    "site": ("hpcdist.cli.site:command", "Show site profiles; write modulefiles and wheelhouses."),
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
    """Run the command line ``arguments``, or sys.argv if None. Exit with an exit code from `hpcdist.errors`."""
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
        standard_streams.tolerate()  # do not let Python flush the broken stream again at exit
        code = FAILURE  # the reader closed the pipe
        if not isinstance(error, BrokenPipeError):
            click.echo(f"Error: standard output cannot be written: {error.strerror}", err=True)
            code = STORAGE
    if code:
        exit_file.write_exit_code(code)  # `comm.failfast` does this once a job has started
    sys.exit(code)


def _print_error(text: str) -> None:
    launched = environment.launch_environment()
    rank = launched.rank or 0 if launched is not None else 0
    if rank:
        time.sleep(failfast.GIVE_WAY_S)  # rank 0 likely prints the same error, and then the launcher ends this rank
    with suppress(OSError):
        # `hpcdist run` prints the error after the launcher has ended.
        if launched is not None and failfast.write_for_launcher(rank, text):
            return
    click.echo(text, nl=False, err=True)


def _colour() -> bool | None:
    # False: no colours. None: colours on a terminal only.
    launched = environment.launch_environment()
    is_unknown_launcher = launched is not None and launched.size > 1 and exit_file.LAUNCH_DIR not in os.environ
    return False if is_unknown_launcher or os.environ.get("NO_COLOR") else None


def _invoke(arguments: Sequence[str] | None) -> int:
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
