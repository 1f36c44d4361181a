"""`hpcdist schedule`: verify, simulate and draw pipeline schedules; needs no rank."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcdist.cli.common import COUNT, EXISTING_FILE, FILE, Parsed, check_plot, json_option, set_option
from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting import regular

if TYPE_CHECKING:  # late at run time: --help must not load numpy
    from hpcdist.bench.pipeline.schedules import ScheduleRequest, SimulatedSchedule
    from hpcdist.strategies.schedule.generate.operation_list import ScheduleText


def _costs(text: str) -> tuple[float, float, float]:
    """Return the seconds of F, I and W."""
    try:
        forward, inputs, weights = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not three numbers of seconds, as 1,1,1: forward, input, weights") from None
    return forward, inputs, weights


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--stages", type=COUNT, default=4, help="Ranks of the pipeline.")
@click.option("--microbatches", type=COUNT, default=8, help="Micro-batches of a step.")
@click.option("--chunks", type=COUNT, default=2, help="Chunks of every rank, for interleaved.")
@click.option(
    "--costs",
    multiple=True,
    type=Parsed("F,I,W", _costs),
    default=((1.0, 1.0, 1.0),),
    show_default="1,1,1",
    help="Seconds of a stage for a micro-batch: forward, gradient of the input, gradients of the weights; once for all "
    "stages, or once for each.",
)
@click.option("--message-s", type=click.FloatRange(min=0.0), default=0.0, help="Seconds that a message takes.")
@click.option("--recompute", is_flag=True, help="Keep inputs only, and compute activations again.")
@click.option("--file", "source", type=EXISTING_FILE, help="A schedule that was written out, or by hand.")
@click.option(
    "--recipe",
    type=EXISTING_FILE,
    help="Show the stages that the pipeline of a recipe is cut into: their work and memory.",
)
@set_option
@click.option("--dump", type=FILE, help="Write the schedule for --file.")
@json_option
@click.option("--plot", type=FILE, help="Draw the timelines (.png, .pdf, .svg).")
@click.option("--trace", type=FILE, help="Write them for Perfetto (.json).")
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
    """Show what pipeline schedules cost: bubble, critical path, activations alive.

    NAME is gpipe, 1f1b, interleaved, zb-h1, zb-h2 or zb-v; several are drawn below each other. Each is proven free of
    deadlock first. Nothing is trained and no MPI is needed.
    """
    from hpcdist.bench.pipeline import schedules
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
    with without_collection():  # a million tuples would be looked through again and again
        known = _from_file(names, request, chunks, source)
        if dump is not None:
            _dump(known, dump)
        simulated = [schedules.simulate_schedule(name, written, request) for name, written in known]
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
    """Return the schedules by name."""
    from hpcdist.strategies.schedule.generate import operation_list
    from hpcdist.strategies.schedule.generate.registry import SCHEDULES

    known = [name for name, schedule in SCHEDULES.items() if schedule.pipelines]
    if not names and source is None:
        raise UsageError(f"give a schedule: {', '.join(known)}, or --file FILE")
    schedules = []
    for name in dict.fromkeys(names):
        if name not in known:
            raise UsageError(f"{name!r} is no pipeline schedule; choose from {', '.join(known)}, or give --file FILE")
        many = chunks if SCHEDULES[name].most is None else 1
        schedules.append((name, operation_list.generated(name, request.stages, request.microbatches, many)))
    if source is not None:
        try:
            text = regular.text(source)
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"{source}: cannot be read: {error}") from error
        schedules.append((source.name, operation_list.read(text, request.stages, request.microbatches, str(source))))
    return schedules


def _dump(known: "list[tuple[str, ScheduleText]]", file: Path) -> None:
    from hpcdist.strategies.schedule.generate import operation_list

    if len(known) != 1:
        raise UsageError(f"--dump writes one schedule, and {len(known)} are named")
    name, written = known[0]
    try:
        file.write_text(operation_list.dump(written, name), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{file}: cannot be written: {error.strerror}") from error


def _draw(simulated: "list[SimulatedSchedule]", plot: Path | None, trace: Path | None) -> None:
    from hpcdist.bench.pipeline import schedules

    panels = [
        schedules.panel(f"{schedule.name}, bubble {schedule.timeline.bubble:.1%}", schedule.timeline)
        for schedule in simulated
    ]
    if plot is not None:
        schedules.draw(panels, plot)
    if trace is not None:
        schedules.write_trace(panels, trace)
