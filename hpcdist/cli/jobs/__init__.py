"""The `hpcdist jobs` commands: status, log, cancel and report for people; begin and end for job scripts.

They load neither MPI nor HDF5, because they run on login nodes and at every start of a job. Start reading with `lookup`
and `begin` (whether a start trains and is requeued).
"""

from typing import Final

import click

from hpcdist.cli.common import LazyGroup

# name -> ("module:attribute" of the click command, its line in the overview), in the order in which users need them
COMMANDS: Final = {
    "status": ("hpcdist.cli.jobs.show:status", "Show the state of jobs."),
    "log": ("hpcdist.cli.jobs.show:log", "Print the log of a job."),
    "cancel": ("hpcdist.cli.jobs.cancel:cancel", "Let jobs save and end, or end them at once."),
    "report": ("hpcdist.cli.jobs.report:report", "Account for a job: steps, time, restarts, energy."),
    "begin": ("hpcdist.cli.jobs.begin:begin", "For job scripts: decide whether the job trains."),
    "end": ("hpcdist.cli.jobs.begin:end", "For job scripts: decide whether the job is requeued."),
}


class JobsGroup(LazyGroup):
    """Click group that runs the command `status` if no command is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["status", *args]
        return super().parse_args(ctx, args)


@click.group(cls=JobsGroup, lazy=COMMANDS)
def command() -> None:
    """Show the jobs of `hpcdist submit`, print their logs, cancel them, and report their use of resources.

    The default command is `status`. Name a job by its number or by its run directory.
    """
