"""Options of `hpcdist plan` that stand under headings of their own in the help."""

import math
from collections.abc import Callable
from typing import Any, Final

import click

Command = Callable[..., Any]

MODEL: Final = "Model in numbers"
LAYOUT: Final = "Layout"
WHERE: Final = "Cluster and run"


class Sectioned(click.Option):
    """An option that stands under a heading of its own in the help."""

    def __init__(self, *args: Any, section: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help has its options by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, those without a section last."""
        found: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                found.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for section in sorted(found, key=lambda name: name == "Options"):
            with formatter.section(section):
                formatter.write_dl(found[section])


class Number(click.FloatRange):
    """A number in a range; infinity and what is no number are in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number. Fails, as a usage error, for one that is not finite, or beyond the range."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no finite number.", param, ctx)
        return found


def count(*names: str, section: str, text: str, least: int = 1, **settings: Any) -> Callable[[Command], Command]:
    """Return an option that is a whole number, ``least`` or more."""
    return click.option(
        *names,
        cls=Sectioned,
        section=section,
        type=click.IntRange(min=least),
        metavar="N",
        help=text,
        show_default=False,
        **settings,
    )


def choice(*names: str, section: str, of: tuple[str, ...], text: str) -> Callable[[Command], Command]:
    """Return an option that is one ``of`` some words."""
    return click.option(*names, cls=Sectioned, section=section, type=click.Choice(of), help=text, show_default=False)
