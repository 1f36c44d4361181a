"""`hpcdist plan search`: find and explain the best layouts for a number of devices."""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.common import COUNT, check_plot, json_option, recipe_argument
from hpcdist.cli.plan.options import (
    FOUND,
    SEARCH_AXES,
    SectionedCommand,
    cluster_option,
    option_words,
    plot_option,
    search_layout_options,
    search_subject_options,
    section_option,
)
from hpcdist.errors import FAILURE, ConfigurationError, UsageError
from hpcdist.planner.layout import LAYOUT_FIELDS, OBJECTIVES, OPTION_KEYS, PARAMETER_SERVER
from hpcdist.reporting.jsonable import jsonable

if TYPE_CHECKING:
    from hpcdist.planner.cluster.hardware import Cluster
    from hpcdist.planner.layout import ParallelLayout
    from hpcdist.planner.search.best_layouts import SearchResult
    from hpcdist.planner.search.space import SearchSpec
    from hpcdist.training.use_cases.plan import PlanSubject
    from hpcdist.training.use_cases.plan_layout import GivenValues

SEARCH_SECTION: Final = "Search"
# Notes on the searched layouts:
WITH_OTHERS: Final = "the search includes layouts that this version of hpcdist cannot run; --runnable excludes them"
RUNNABLE_ALONE: Final = "the search covers only layouts that this version of hpcdist runs; omit --runnable for all"
# Options of the command that plans the best layout again. --data and --microbatch are always printed.
_LAYOUT_FIELDS: Final = tuple(name for name in LAYOUT_FIELDS if name not in ("data", "microbatch", "zero", "servers"))
# Recipe key -> search setting (`SearchSpec` field) that gets only the key's value, if the command line sets it.
_FIXED_KEYS: Final = {OPTION_KEYS[name]: setting for name, setting in SEARCH_AXES.items() if name in OPTION_KEYS}


_option: Final = partial(section_option, SEARCH_SECTION)


@click.command("search", cls=SectionedCommand)
@recipe_argument
@cluster_option
@search_subject_options
@_option(
    "--objective",
    type=click.Choice(OBJECTIVES),
    default="time",
    help="Quantity to minimize per step: time, energy, cost, or energy x time.",
)
@_option("--memory", metavar="SIZE", help='Memory limit per device, e.g. "70 GB" or "64 GiB".  [default: 95 % of it]')
@_option("--fewer", is_flag=True, help="Also try layouts that leave devices unused.")
@_option("--runnable", is_flag=True, help="Only layouts that this version of hpcdist can run.")
@_option("--distinct", is_flag=True, help="Keep only the best layout of each data x pipeline x tensor x context split.")
@_option("--first", type=COUNT, default=10, metavar="N", help="Number of layouts to print and explain.")
@_option("--simulate/--no-simulate", default=True, help="Simulate the pipeline schedules of the best candidates.")
@search_layout_options
@plot_option
@json_option
def command(
    recipe: Path | None,
    cluster: str | None,
    overrides: tuple[str, ...],
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find and explain the best layouts for RECIPE, or for a model given by its sizes, on --devices of a cluster.

    The search varies the data, pipeline, tensor and context parallel sizes. It also varies ZeRO stage, micro-batch
    size, schedule and recomputation. A layout option that you give stays fixed. Only --compression enables compression.
    Exit code 1: no layout fits.
    """
    from hpcdist.cli.plan.group import draw_plot
    from hpcdist.planner.report import table, text
    from hpcdist.planner.report.table import search_table
    from hpcdist.planner.search import best_layouts
    from hpcdist.training.use_cases.plan import read_cluster, with_simulator
    from hpcdist.training.use_cases.plan_layout import given_values

    check_plot(plot)
    on = read_cluster(cluster)
    given = given_values(overrides, options)
    subject = _subject(recipe, overrides, options, given, on)
    devices = options["devices"] or on.devices
    request = _search_request(subject, on, options, given)
    result, simulator_notes = with_simulator(
        lambda runs: best_layouts.search(
            subject.description, on, devices, subject.global_batch, dataclasses.replace(request, simulate=runs)
        ),
        simulate=request.simulate,
    )
    idle_lines = {line for candidate in result.found for line in text.idle_devices_line(candidate.estimate.layout, on)}
    searched = RUNNABLE_ALONE if options["runnable"] else WITH_OTHERS
    notes = (searched, *simulator_notes, *sorted(idle_lines), *subject.notes, *table.assumption_line(on))
    replan = _replan_command(result, recipe, overrides, options | {"cluster": cluster}, subject.layout)
    if as_json:
        click.echo(json.dumps(_jsonable(result, subject, on, notes) | {"again": replan}))
    else:
        click.echo(search_table(result, notes, replan))
    if plot is not None and result.found:
        best = result.found[0].estimate
        draw_plot(best, dataclasses.replace(subject, layout=best.layout), on, plot)
    if not result.found:
        click.get_current_context().exit(FAILURE)


def _subject(
    path: Path | None, overrides: tuple[str, ...], options: Mapping[str, Any], given: "GivenValues", cluster: "Cluster"
) -> "PlanSubject":
    from hpcdist.planner.report.text import ONE_REPLICA
    from hpcdist.training.use_cases.plan import subject_of_values, with_published_kernels
    from hpcdist.training.use_cases.plan_layout import GivenValues, options_given

    refused = [*options_given(options, FOUND), *(["--set parallel.data"] if "parallel.data" in given.keys else [])]
    for name in refused:
        raise UsageError(f"the search computes {name} from --devices, so {name} cannot be set; leave {name} out")
    varied = {field for field in _FIXED_KEYS.values() if field not in ("compressions", "strategies")}
    base = GivenValues(
        {key: value for key, value in given.keys.items() if _FIXED_KEYS.get(key) not in varied},
        {name: value for name, value in given.fields.items() if name not in SEARCH_AXES},
    )
    subject = subject_of_values(path, overrides, {**options, "devices": None}, base, cluster)
    notes = tuple(note for note in subject.notes if note != ONE_REPLICA)
    return with_published_kernels(dataclasses.replace(subject, notes=notes), cluster, given, always=True)


def _search_request(
    subject: "PlanSubject", cluster: "Cluster", options: Mapping[str, Any], given: "GivenValues"
) -> "SearchSpec":
    from hpcdist.planner.search.space import SearchSpec

    values: dict[str, Any] = {
        axis: (given.keys[key],) for key, axis in _FIXED_KEYS.items() if given.keys.get(key, "auto") != "auto"
    }
    values |= {SEARCH_AXES[name]: (value,) for name, value in given.fields.items() if name in SEARCH_AXES}
    if "parallel.recompute" in given.keys and "recompute" not in values:
        values["recompute"] = ("full" if given.keys["parallel.recompute"] else "none",)
    values["programs"] = subject.programs
    values["compressions"] = (subject.layout.compression,)
    if options["memory"] is not None:
        values["memory_bytes"] = _memory_bytes(options["memory"], cluster)
    for name in ("objective", "fewer", "runnable", "distinct", "first", "simulate"):
        values[name] = options[name]
    base = dataclasses.replace(subject.layout, data=1, pipeline=1, tensor=1, context=1, servers=0)
    return SearchSpec(base=base, steps=subject.steps, **values)


def _memory_bytes(size_text: str, cluster: "Cluster") -> float:
    from hpcdist.planner.cluster.hardware import parse

    try:
        limit = parse(size_text, "bytes")
    except ConfigurationError as error:
        raise UsageError(f"--memory is invalid: {error}") from error
    if not 0 < limit <= cluster.device.memory_bytes:
        device_memory = f"{cluster.device.memory_bytes:,.0f} bytes, the memory of a device of {cluster.name}"
        raise UsageError(f"--memory {size_text} must be above 0 and at most {device_memory}; correct --memory")
    return limit


def _jsonable(
    result: "SearchResult", subject: "PlanSubject", cluster: "Cluster", notes: tuple[str, ...]
) -> dict[str, Any]:
    from hpcdist.planner.report.quantities import estimate_json

    plans = [
        {"value": candidate.value, "unit": candidate.unit, "why": candidate.why, "limits": candidate.limits}
        | estimate_json(candidate.estimate, subject.description, cluster)
        for candidate in result.found
    ]
    about = {name: getattr(result, name) for name in ("objective", "devices", "layouts", "estimated", "left_out")}
    more = {"refused": result.refused, "nothing": result.nothing, "flags": (*result.flags, *notes)}
    figures: dict[str, Any] = jsonable({**about, "found": plans, **more})
    return figures


def _replan_command(
    result: "SearchResult",
    path: Path | None,
    overrides: Sequence[str],
    options: Mapping[str, Any],
    base: "ParallelLayout",
) -> str | None:
    # The `hpcdist plan` command line for the best layout, or None without one. ``base``: layout of the recipe.
    from hpcdist.cli.plan.group import command
    from hpcdist.planner.search.best_layouts import MOST_PASSES, passes

    if not result.found:
        return None
    layout = result.found[0].estimate.layout
    is_simulated = options["simulate"] and passes(layout, result.global_batch) <= MOST_PASSES
    values = {
        **{name: value for name, value in options.items() if name not in (*LAYOUT_FIELDS, "devices", "simulate")},
        **_layout_options(options, base, layout),
        "overrides": overrides,
        "simulate": None if is_simulated or layout.pipeline == 1 else False,
    }
    words = [
        word for option in command.params if isinstance(option, click.Option) for word in option_words(option, values)
    ]
    return shlex.join(["hpcdist", "plan", *([] if path is None else [str(path)]), *words])


def _layout_options(options: Mapping[str, Any], base: "ParallelLayout", layout: "ParallelLayout") -> dict[str, Any]:
    values: dict[str, Any] = {"data": layout.data, "microbatch": layout.microbatch}
    values["servers"] = layout.servers if layout.strategy == PARAMETER_SERVER else None
    for name in _LAYOUT_FIELDS:
        if layout.pipeline == 1 and name in ("schedule", "chunks"):
            continue  # no effect without a pipeline, and rejected
        value = getattr(layout, LAYOUT_FIELDS[name])
        is_given = options[name] is not None or (name == "strategy" and options["zero"] is not None)
        if is_given or value != getattr(base, LAYOUT_FIELDS[name]):
            values[name] = value
    if "implementation" in values and layout.library:
        values["library"] = layout.library
    return values
