"""`hpcdist schedule`: verify, simulate and draw pipeline schedules in one process."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcdist.cli.common import COUNT, EXISTING_FILE, FILE, Parsed, check_plot, json_option, set_option
from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting import regular

if TYPE_CHECKING:  # late at run time: --help must not load numpy
    from hpcdist.bench.schedules import ScheduleRequest, SimulatedSchedule
    from hpcdist.strategies.schedule.operation_list import ScheduleText


def _costs(text: str) -> tuple[float, float, float]:
    try:
        forward, inputs, weights = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r}: expected seconds of three passes: forward,input,weights, e.g. 1,1,1") from None
    return forward, inputs, weights


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--stages", type=COUNT, default=4, help="Pipeline ranks.")
@click.option("--microbatches", type=COUNT, default=8, help="Micro-batches per step.")
@click.option("--chunks", type=COUNT, default=2, help="Model chunks per rank (interleaved schedule only).")
@click.option(
    "--costs",
    multiple=True,
    type=Parsed("F,I,W", _costs),
    default=((1.0, 1.0, 1.0),),
    show_default="1,1,1",
    help="Seconds of a stage per micro-batch: forward, input gradient, weight gradients. Give it once for all stages, "
    "or once per stage.",
)
@click.option("--message-s", type=click.FloatRange(min=0.0), default=0.0, help="Seconds per message between stages.")
@click.option("--recompute", is_flag=True, help="Keep only stage inputs; recompute activations in the backward pass.")
@click.option("--file", "source", type=EXISTING_FILE, help="Read a schedule from this file (see --dump).")
@click.option(
    "--recipe",
    type=EXISTING_FILE,
    help="Print the pipeline stages of this recipe, with their work and memory.",
)
@set_option
@click.option("--dump", type=FILE, help="Write the schedule to this file, in the format of --file.")
@json_option
@click.option("--plot", type=FILE, help="Draw the timelines (.png, .pdf, .svg).")
@click.option("--trace", type=FILE, help="Write the timelines for Perfetto (.json).")
def command(
    names: tuple[str, ...],
    stages: int,
    microbatches: int,
    chunks: int,
    costs: tuple[tuple[float, float, float], ...],
    message_s: float,
    recompute: bool,
    source: Path | None,
    recipe: Path | None,
    overrides: tuple[str, ...],
    dump: Path | None,
    as_json: bool,
    plot: Path | None,
    trace: Path | None,
) -> None:
    """Show the bubble, critical path and live activations of pipeline schedules. Needs no MPI and no training.

    NAME is gpipe, 1f1b, interleaved, zb-h1, zb-h2 or zb-v. Several schedules are drawn one below the other. Each
    schedule is first proven to be free of deadlocks.
    """
    from hpcdist.bench import schedules
    from hpcdist.bench.timing import without_collection
    from hpcdist.reporting.atomic import check_folder

    if recipe is not None or overrides:
        _show_stages(recipe, overrides, to_stderr=as_json)
        if not names and source is None:
            return
    request = schedules.ScheduleRequest(stages, microbatches, tuple(costs), message_s, recompute)
    check_plot(plot)
    if trace is not None:
        check_folder(trace)
    with without_collection():  # garbage collection would scan a million tuples many times
        texts = _from_file(names, request, chunks, source)
        if dump is not None:
            _dump(texts, dump)
        simulated = [schedules.simulate_schedule(name, written, request) for name, written in texts]
    if as_json:
        about = {"stages": stages, "microbatches": microbatches, "costs": costs, "message_s": message_s}
        click.echo(json.dumps({**about, "schedules": [schedules.jsonable(schedule) for schedule in simulated]}))
    else:
        click.echo(schedules.text(simulated))
    if plot is not None or trace is not None:
        _draw(simulated, plot, trace)


def _show_stages(recipe: Path | None, overrides: tuple[str, ...], *, to_stderr: bool) -> None:
    from hpcdist.training.build import pipeline
    from hpcdist.training.recipe import recipe as recipes

    for line in pipeline.plan_without_mpi(recipes.load(recipe, overrides).recipe).table():
        click.echo(line, err=to_stderr)


def _from_file(
    names: tuple[str, ...], request: "ScheduleRequest", chunks: int, source: Path | None
) -> "list[tuple[str, ScheduleText]]":
    from hpcdist.strategies.schedule import operation_list
    from hpcdist.strategies.schedule.registry import SCHEDULES

    pipelined = [name for name, schedule in SCHEDULES.items() if schedule.pipelines]
    if not names and source is None:
        raise UsageError(f"no schedule is given; choose from {', '.join(pipelined)}, or give --file FILE")
    schedules = []
    for name in dict.fromkeys(names):
        if name not in pipelined:
            raise UsageError(
                f"{name!r} is not a pipeline schedule; choose from {', '.join(pipelined)}, or give --file FILE"
            )
        many = chunks if SCHEDULES[name].most is None else 1
        schedules.append((name, operation_list.generated(name, request.stages, request.microbatches, many)))
    if source is not None:
        try:
            text = regular.text(source)
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"{source} cannot be read: {error}; give a readable text file") from error
        schedules.append((source.name, operation_list.read(text, request.stages, request.microbatches, str(source))))
    return schedules


def _dump(schedules: "list[tuple[str, ScheduleText]]", file: Path) -> None:
    from hpcdist.strategies.schedule import operation_list

    if len(schedules) != 1:
        raise UsageError(f"--dump writes only one schedule, but {len(schedules)} are given; name one")
    name, written = schedules[0]
    try:
        file.write_text(operation_list.dump(written, name), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror}; choose another file") from error


def _draw(simulated: "list[SimulatedSchedule]", plot: Path | None, trace: Path | None) -> None:
    from hpcdist.bench import schedules

    panels = [
        schedules.panel(f"{schedule.name}, bubble {schedule.timeline.bubble:.1%}", schedule.timeline)
        for schedule in simulated
    ]
    if plot is not None:
        schedules.draw(panels, plot)
    if trace is not None:
        schedules.write_trace(panels, trace)
