"""Options, arguments, value types and the lazily importing group that several commands share."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import click

from hpcdist.reporting.nearest import nearest
from hpcdist.reporting.units import parse_bytes

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

PATH: Final = click.Path(path_type=Path)
FILE: Final = click.Path(dir_okay=False, path_type=Path)
EXISTING_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
DIRECTORY: Final = click.Path(file_okay=False, path_type=Path)
EXISTING_DIRECTORY: Final = click.Path(exists=True, file_okay=False, path_type=Path)
COUNT: Final = click.IntRange(min=1)

recipe_argument = click.argument("recipe", type=FILE, required=False)
run_dir_argument = click.argument("run_dir", type=PATH)
existing_run_argument = click.argument("run_dir", type=EXISTING_DIRECTORY)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a recipe key, e.g. run.steps=50."
)


tokenizer_option = click.option(
    "--tokenizer", type=click.Path(path_type=Path), help="tokenizer.json of the model, or its directory."
)
averaged_option = click.option(
    "--averaged", is_flag=True, help="Use the moving average of the parameters (optimizer.ema_decay)."
)


def stacked(*options: Decorator) -> Decorator:
    """Return a decorator that applies the click decorators ``*options`` to a command, in the order of the help text."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


class Parsed(click.ParamType):
    """Click parameter type that converts text by ``parse(text)``. ``name``: name of the type in the help text."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


BYTE_SIZE: Final = Parsed("size", parse_bytes)  # 4096, 16K, 1M, 2G


def check_plot(file: Path | None) -> None:
    """Raise MissingCapabilityError, UsageError or StorageError if a plot cannot be saved as ``file``."""
    if file is not None:
        from hpcdist.reporting import plotting

        plotting.check_plot(file)


class LazyGroup(click.Group):
    """Click group that imports a command on first use. ``lazy``: command name -> ("module:attribute", help line)."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command ``cmd_name``, or None. Raises click.UsageError if only a similar name exists."""
        if cmd_name not in self.lazy:
            near = nearest(cmd_name, self.lazy)
            if near is not None and not ctx.resilient_parsing:
                ctx.fail(f"there is no command {cmd_name!r}; did you mean {near!r}?")
            return None
        module, _, attribute = self.lazy[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.lazy.items()])
