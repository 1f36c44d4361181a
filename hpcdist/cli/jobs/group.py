"""The group `hpcdist jobs`, which imports only the command that is called.

A job waits for these commands on all of its nodes, so they load neither MPI nor HDF5. Without a command it is
`status`; a misspelt command is answered with the nearest known.
"""

import difflib
import importlib
from typing import Final

import click

# name -> what the overview says of it; each is of that name in the module hpcdist.cli.jobs.<name>
COMMANDS: Final = {
    "status": "Show how jobs are.",
    "log": "Show what a job has printed.",
    "cancel": "Let jobs save and end, or end them at once.",
    "report": "Account for a job: steps, time, restarts, energy.",
    "begin": "For the script of a job: may it train?",
    "end": "For the script of a job: does it go on?",
}
_MODULES: Final = {"end": "begin"}


class JobsGroup(click.Group):
    """A group that imports only the command that is called: a job waits for them on all of its nodes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order in which a user needs them."""
        return list(COMMANDS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words after `hpcdist jobs`; without a command they are those of `status`."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["status", *args]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None for an unknown name. Raises click.UsageError where one is near."""
        if cmd_name not in COMMANDS:
            for nearest in difflib.get_close_matches(cmd_name, COMMANDS, 1):
                ctx.fail(f"there is no command {cmd_name!r}; the nearest known is {nearest!r}")
            return None
        module = importlib.import_module(f"hpcdist.cli.jobs.{_MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the overview without importing a command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=JobsGroup)
def command() -> None:
    """Look at the jobs that `hpcdist submit` has made, read their logs, cancel and account for them.

    Without a command it is `hpcdist jobs status`. A job is named by its number, or by the directory of its run.
    """
