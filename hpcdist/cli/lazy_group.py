"""Click groups whose commands are imported when they are called, so that ``--help`` is instant.

The groups `main`, `plan` and `energy` are made of it: a table says for each name where its command is
("module:attribute") and what the overview says of it.
"""

import importlib
from collections.abc import Mapping

import click


class LazyGroup(click.Group):
    """A group that knows the names and one-liners of its commands, and imports only the one that is called.

    ``lazy`` says for each name where its click command is, "module:attribute", and what the overview says of it.
    """

    lazy: Mapping[str, tuple[str, str]]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of ``lazy``."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None for an unknown name."""
        if cmd_name not in self.lazy:
            return None
        module, _, attribute = self.lazy[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the overview without importing a command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.lazy.items()])
