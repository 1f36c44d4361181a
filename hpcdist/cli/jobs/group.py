"""The group `hpcdist jobs`: a job waits for its commands on all of its nodes, so they load neither MPI nor HDF5."""

from typing import Final

import click

from hpcdist.cli.common import LazyGroup

# name -> (where its click command is, what the overview says of it), in the order in which a user needs them
COMMANDS: Final = {
    "status": ("hpcdist.cli.jobs.status:status", "Show how jobs are."),
    "log": ("hpcdist.cli.jobs.log:log", "Show what a job has printed."),
    "cancel": ("hpcdist.cli.jobs.cancel:cancel", "Let jobs save and end, or end them at once."),
    "report": ("hpcdist.cli.jobs.report:report", "Account for a job: steps, time, restarts, energy."),
    "begin": ("hpcdist.cli.jobs.begin:begin", "For the script of a job: may it train?"),
    "end": ("hpcdist.cli.jobs.begin:end", "For the script of a job: does it go on?"),
}


class JobsGroup(LazyGroup):
    """Group whose command is `status` where none is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words after `hpcdist jobs`."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["status", *args]
        return super().parse_args(ctx, args)


@click.group(cls=JobsGroup, lazy=COMMANDS)
def command() -> None:
    """Look at the jobs that `hpcdist submit` has made, read their logs, cancel and account for them.

    Without a command it is `hpcdist jobs status`. A job is named by its number, or by the directory of its run.
    """
