"""`hpcdist plan search`: the best layouts of a training on so many devices, and why they are."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli import plan_options
from hpcdist.cli.plan_options_layout import layout as layout_options
from hpcdist.cli.plan_sections import Sectioned, SectionedCommand
from hpcdist.errors import FAILURE, ConfigurationError, UsageError

if TYPE_CHECKING:
    from hpcdist.cli.plan_subject import Subject
    from hpcdist.planner.cluster.hardware import Cluster
    from hpcdist.planner.search.best_layouts import SearchResult
    from hpcdist.planner.search.space import SearchSpec

SEARCH: Final = "Search"
OBJECTIVES: Final = ("time", "energy", "cost", "energy-delay")
# Option of the layout -> the field of `Wanted` that has only its value, where it is given.
FIXED: Final = {
    "schedule": "schedules",
    "chunks": "chunks",
    "recompute": "recompute",
    "compression": "compressions",
    "tensor": "tensors",
    "pipeline": "pipelines",
    "context_ranks": "contexts",
    "expert_ranks": "experts",
    "microbatch": "microbatches",
    "sequence_parallel": "sequence_parallel",
}
_FOLLOWS: Final = ("data", "servers")


def _option(*names: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(*names, cls=Sectioned, section=SEARCH, **settings)


@click.command("search", cls=SectionedCommand)
@plan_options.recipe
@plan_options.cluster
@plan_options.subject
@_option(
    "--objective",
    type=click.Choice(OBJECTIVES),
    default="time",
    help="What is to be least: seconds, joules, price, or joules times seconds, of a step.",
)
@_option(
    "--memory", metavar="SIZE", help='What a device may use, as "70 GB" or "64 GiB".  [default: 95 % of all it has]'
)
@_option("--fewer", is_flag=True, help="A layout may leave devices unused.")
@_option("--runnable", is_flag=True, help="Only what this version of hpcdist runs itself.")
@_option("--distinct", is_flag=True, help="Each product of degrees once, with what is best on it.")
@_option("--first", type=click.IntRange(min=1), default=10, metavar="N", help="How many to show and explain.")
@_option("--simulate/--no-simulate", default=True, help="Time the finalists by the simulator of pipelines.")
@layout_options
@plan_options.plot
@plan_options.as_json
def command(
    recipe: Path | None,
    cluster: str | None,
    overrides: tuple[str, ...],
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the best layouts of RECIPE, or of a model in numbers, on --devices of a cluster, and explain them.

    What varies: data x pipeline x tensor x context devices, the stage of ZeRO, micro-batch, schedule and recomputation;
    an option of the layout that is given does not. Compression changes what is trained, and is tried where
    --compression names one. --plot draws the best. Where nothing fits the exit code is 1.
    """
    from hpcdist.cli.plan import checked_plot, draw, simulated
    from hpcdist.cli.plan_subject import cluster as read
    from hpcdist.cli.plan_subject import with_kernels
    from hpcdist.planner.report import caveats, text
    from hpcdist.planner.report.table import search_table
    from hpcdist.planner.search import best_layouts

    checked_plot(plot)
    on = read(cluster)
    found = _subject(recipe, overrides, options)
    if not options["runnable"]:  # else this toolkit's own kernels are what is asked for
        found = with_kernels(found, on, always=True)
    devices = options["devices"] or on.devices
    sought = _wanted(found, on, options)
    result, closed = simulated(
        lambda runs: best_layouts.search(
            found.description, on, devices, found.global_batch, dataclasses.replace(sought, simulate=runs)
        ),
        wanted=sought.simulate,
    )
    paid = {line for one in result.found for line in text.idle_devices_line(one.estimate.layout, on)}
    notes = (*closed, *sorted(paid), *found.notes, *caveats.assumption_line(on))
    kernels = found.layout.implementation if options["runnable"] and on.device.is_accelerator else found.kernels
    again = _again(result, recipe, overrides, options | {"cluster": cluster, "implementation": kernels}, found)
    if as_json:
        click.echo(json.dumps(_jsonable(result, found, on, notes) | {"again": again}))
    else:
        click.echo(search_table(result, notes, again))
    if plot is not None and result.found:
        best = result.found[0].estimate
        draw(best, dataclasses.replace(found, layout=best.layout), on, plot)
    if not result.found:
        click.get_current_context().exit(FAILURE)


def _subject(path: Path | None, overrides: tuple[str, ...], options: Mapping[str, Any]) -> "Subject":
    """Return what is to be laid out, with what never varies of its layout."""
    from hpcdist.cli.plan_layout import given
    from hpcdist.cli.plan_subject import subject

    for name in given(options, _FOLLOWS):
        raise UsageError(f"{name} is what a search finds; leave it out, and give --devices")
    varied = {*FIXED, "strategy", "zero", "devices"}
    return subject(path, overrides, {name: value for name, value in options.items() if name not in varied})


def _wanted(found: "Subject", cluster: "Cluster", options: Mapping[str, Any]) -> "SearchSpec":
    from hpcdist.cli.plan_layout import strategy_of
    from hpcdist.planner.search.space import SearchSpec

    values: dict[str, Any] = {field: (options[name],) for name, field in FIXED.items() if options.get(name) is not None}
    strategy = strategy_of(options, found.layout).get("strategy")
    if strategy is not None:
        values["strategies"] = (strategy,)
    if "compressions" not in values:  # that of a recipe stays as it is
        values["compressions"] = (found.layout.compression,)
    if options["memory"] is not None:
        values["memory_bytes"] = _memory(options["memory"], cluster)
    for name in ("objective", "fewer", "runnable", "distinct", "first", "simulate"):
        values[name] = options[name]
    base = dataclasses.replace(found.layout, data=1, pipeline=1, tensor=1, context=1, servers=0)
    return SearchSpec(base=base, steps=found.steps, **values)


def _memory(said: str, cluster: "Cluster") -> float:
    """Return the bytes of --memory. Raises UsageError for what are none, or more than there are."""
    from hpcdist.planner.cluster.units import parse

    try:
        limit = parse(said, "bytes")
    except ConfigurationError as error:
        raise UsageError(f"--memory {error}") from error
    if not 0 < limit <= cluster.device.memory_bytes:
        size = f"{cluster.device.memory_bytes:,.0f} bytes of a device of {cluster.name}"
        raise UsageError(f"--memory {said} is none of the {size}; leave it out, or choose more than 0 and no more")
    return limit


def _again(
    result: "SearchResult", path: Path | None, overrides: tuple[str, ...], options: Mapping[str, Any], found: "Subject"
) -> str | None:
    """Return the command that plans the best layout again; None where nothing was found."""
    from hpcdist.cli.plan_line import line
    from hpcdist.planner.search.best_layouts import MOST_PASSES, passes

    if not result.found:
        return None
    layout = result.found[0].estimate.layout
    simulate = options["simulate"] and passes(layout, found.global_batch) <= MOST_PASSES
    return line(path, overrides, options, found.layout, layout, simulate=simulate)


def _jsonable(result: "SearchResult", found: "Subject", cluster: "Cluster", notes: tuple[str, ...]) -> dict[str, Any]:
    from hpcdist.cli.plan_json import finite, jsonable

    plans = [
        {"value": one.value, "unit": one.unit, "why": one.why, "limits": one.limits}
        | jsonable(one.estimate, found.description, cluster)
        for one in result.found
    ]
    about = {name: getattr(result, name) for name in ("objective", "devices", "layouts", "estimated", "left_out")}
    refused = [dataclasses.asdict(one) for one in result.refused]
    said: dict[str, Any] = finite(
        {**about, "found": plans, "refused": refused, "nothing": result.nothing, "flags": (*result.flags, *notes)}
    )
    return said
