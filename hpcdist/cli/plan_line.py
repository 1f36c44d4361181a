"""The command that plans one layout of a search again: `hpcdist plan` with every option that the layout needs."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.plan_layout import SERVED
from hpcdist.cli.plan_options_layout import LAYOUT_OPTIONS, RENAMED
from hpcdist.cli.plan_search import FIXED

if TYPE_CHECKING:
    from hpcdist.planner.layout import ParallelLayout

# Options of the layout that are written where the layout has another value than it would have without them.
_FIELDS: Final = tuple(name for name in LAYOUT_OPTIONS if name not in ("data", "microbatch", "zero"))
# Those that the layout without them has as they were given.
_GIVEN: Final = tuple(name for name in _FIELDS if name not in (*FIXED, "strategy"))
_COLOCATED: Final = "parameter_server.placement=colocated"


def line(
    path: Path | None,
    overrides: Sequence[str],
    options: Mapping[str, Any],
    base: "ParallelLayout",
    layout: "ParallelLayout",
    *,
    simulate: bool,
) -> str:
    """Return the command that plans ``layout``, which a search of these arguments and ``options`` has found.

    ``base`` is the layout that the command would plan without those options that a search may vary, ``simulate``
    whether the pipeline was simulated.
    """
    from hpcdist.cli.plan import command

    is_wider = layout.strategy == base.strategy == SERVED and base.servers > layout.servers == 0
    values = {
        **{name: value for name, value in options.items() if name not in (*LAYOUT_OPTIONS, "devices", "simulate")},
        **{name: options[name] for name in _GIVEN},
        **_changed(base, layout),
        "overrides": (*overrides, _COLOCATED) if is_wider else overrides,
        "simulate": None if simulate or layout.pipeline == 1 else False,
    }
    words = [word for one in command.params if isinstance(one, click.Option) for word in _words(one, values)]
    return shlex.join(["hpcdist", "plan", *([] if path is None else [str(path)]), *words])


def _changed(base: "ParallelLayout", layout: "ParallelLayout") -> dict[str, Any]:
    """Return the options that make ``layout`` of ``base``: the degree of data and the micro-batch in any case."""
    found: dict[str, Any] = {"data": layout.data, "microbatch": layout.microbatch}
    for name in _FIELDS:
        if layout.pipeline == 1 and name in ("schedule", "chunks"):
            continue  # which has no effect, and is refused
        field = RENAMED.get(name, name)
        if getattr(layout, field) != getattr(base, field):
            found[name] = getattr(layout, field)
    if not layout.servers:
        found.pop("servers", None)
    return found


def _words(option: click.Option, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield an option as it is written, or nothing where it has no value."""
    value = values.get(str(option.name))
    if value is None or value == ():
        return
    if isinstance(value, bool):
        yield from (option.opts if value else option.secondary_opts)[:1]
        return
    for one in value if isinstance(value, tuple) else (value,):
        yield option.opts[0]
        yield str(one)
