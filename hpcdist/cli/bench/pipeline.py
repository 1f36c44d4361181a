"""`hpcdist bench pipeline`: time pipeline schedules beside their simulation; rank 0 prints and writes.

It runs on every rank that a launcher started, or starts them itself.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.errors import OK, UsageError

if TYPE_CHECKING:  # late at run time: --help must load neither h5py nor MPI
    from hpcdist.bench.pipeline.results import MeasuredCase, PipelineCase, PipelineRequest, PipelineResults
    from hpcdist.comm.start import Session

_RANKS: Final = 2


@click.command("pipeline")
@click.option("-n", "--ranks", type=click.IntRange(min=2), help=f"Ranks of the pipeline.  [default: {_RANKS}]")
@click.option("--schedule", "schedules", multiple=True, help="Schedule; may be repeated.  [default: all]")
@click.option(
    "--microbatches",
    type=click.IntRange(min=1),
    multiple=True,
    default=(4, 8, 16),
    help="Micro-batches of a step; may be repeated.",
)
@click.option("--chunks", type=click.IntRange(min=2), default=2, help="Chunks of every rank, for interleaved.")
@click.option("--layers", type=click.IntRange(min=1), default=8, help="Blocks of the gpt.")
@click.option("--hidden", type=click.IntRange(min=1), default=256, help="Its width.")
@click.option("--context", type=click.IntRange(min=1), default=128, help="Tokens of a sample.")
@click.option("--samples", type=click.IntRange(min=1), default=1, help="Samples of a micro-batch.")
@click.option("--steps", type=click.IntRange(min=1), default=12, help="Steps of each schedule that are kept.")
@click.option("--warmup", type=click.IntRange(min=1), default=2, help="Steps before, which are not kept.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of batches and of the order of turns.")
@click.option("--list", "list_only", is_flag=True, help="Print what would be measured, and start nothing.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="HDF5 file for every operation of every step; what it holds already is not measured again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the bubbles (.png, .pdf, .svg).")
@click.option(
    "--timeline",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw a measured step of each schedule (.png, .pdf, .svg), or write it for Perfetto (.json).",
)
@click.option("--anonymous", is_flag=True, help="Leave the names of hosts out of the results.")
@click.pass_context
def command(
    call: click.Context,
    /,
    ranks: int | None,
    schedules: tuple[str, ...],
    microbatches: tuple[int, ...],
    chunks: int,
    layers: int,
    hidden: int,
    context: int,
    samples: int,
    steps: int,
    warmup: int,
    seed: int,
    list_only: bool,
    output: Path | None,
    as_json: bool,
    plot: Path | None,
    timeline: Path | None,
    anonymous: bool,
) -> int:
    """Measure pipeline schedules beside the simulator, and beside ranks that work alone.

    Called as one process it starts the ranks; under mpirun, srun or `hpcdist run` each rank takes part. Schedules take
    turns on the same batches, with the same model on every rank alone among them. The units of the model are measured
    first, and cut so that the slowest rank is as fast as can be. Bubble, waiting and overhead come from the time of
    every operation.

    Exit code 0 when all was measured, 2 for usage, 74 when a file cannot be written, which is tried first; another one
    when a rank failed: with --output, the same command goes on behind what was measured.
    """
    from hpcdist.bench.pipeline.results import PipelineRequest, PipelineShape, chosen
    from hpcdist.comm.launch import environment

    launched = environment.launch_environment()
    there = launched.size if launched is not None and launched.size > 1 else None
    if there is not None and ranks not in (None, there):
        raise UsageError(f"--ranks {ranks}, but this process is one of {there} ranks; leave --ranks out there")
    shape = PipelineShape(layers, hidden, context, samples)
    counts = tuple(dict.fromkeys(microbatches))
    request = PipelineRequest(chosen(schedules), counts, there or ranks or _RANKS, chunks, shape, steps, warmup, seed)
    if list_only:
        _list(request)
        return OK
    outputs = PipelineOutputs(output, as_json, plot, timeline, anonymous)
    if there is None:
        _cases(request)
        _check_places(outputs)
        return _start(request.ranks, call)
    return _measure(request, outputs)


@dataclass(frozen=True)
class PipelineOutputs:
    """Destinations of the results."""

    file: Path | None
    as_json: bool
    plot: Path | None
    timeline: Path | None
    anonymous: bool


def _list(request: "PipelineRequest") -> None:
    from hpcdist.bench.pipeline.results import cases

    possible, left_out = cases(request)
    for case in possible:
        click.echo(
            f"{case.schedule}, {case.microbatches} micro-batches, {case.chunks} chunks on each of {case.ranks} ranks"
        )
    for name, reason in left_out.items():
        click.echo(f"left out: {name}: {reason}")


def _cases(request: "PipelineRequest") -> "tuple[list[PipelineCase], dict[str, str]]":
    """Return the cases, and why others are left out. Raises UsageError for none."""
    from hpcdist.bench.pipeline.results import cases

    possible, left_out = cases(request)
    if not possible:
        raise UsageError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    return possible, left_out


def rank_arguments(call: click.Context) -> list[str]:
    """Return the command line of ``call`` for each of the ranks, which know themselves how many they are."""
    line: list[str] = []
    for option in call.command.params:
        value = call.params[option.name or ""]
        if option.name == "ranks" or value in (None, False):
            continue
        if isinstance(option, click.Option) and option.is_flag:
            line.append(option.opts[-1])
        else:
            for item in value if option.multiple else (value,):
                line += [option.opts[-1], str(item)]
    return line


def _start(ranks: int, call: click.Context) -> int:
    """Start the ranks and return their exit code."""
    from hpcdist.cli import run

    line = ["-n", str(ranks), "--grace", "5", "bench", "pipeline", *rank_arguments(call)]
    code: int = run.command.main(args=line, prog_name="hpcdist run", standalone_mode=False)
    return code


def _measure(request: "PipelineRequest", outputs: PipelineOutputs) -> int:
    """Measure what is not there yet, show and write. Collective over the world; leaves with the exit code."""
    from hpcdist.bench import output_file
    from hpcdist.bench.pipeline import results, run
    from hpcdist.comm import start

    expected, left_out = _cases(request)
    session = start.start()
    comm, path, known = session.comm, outputs.file, {}
    output_file.check_on_all_ranks(comm, lambda: _check_places(outputs))
    if comm.rank == 0 and path is not None and path.exists():
        known = {measured.case.id: measured for measured in results.read(path).cases}
    measured_ids = comm.broadcast_object(list(known))
    origin = _provenance(session, request, outputs.anonymous)

    def keep(cases: "Sequence[MeasuredCase]") -> None:
        known.update({measured.case.id: measured for measured in cases})
        if path is not None:
            results.append(path, cases, origin)

    run.run(comm, request, measured_ids, keep, lambda line: click.echo(line, err=True))
    if comm.rank == 0:
        shown = tuple(known[case.id] for case in expected)
        _show(results.PipelineResults(origin, shown), left_out, outputs)
    session.leave(OK)
    return OK


def _check_places(outputs: PipelineOutputs) -> None:
    """Raise what is in the way of the files."""
    from hpcdist.bench.collectives import report
    from hpcdist.bench.pipeline import results
    from hpcdist.hdf5 import files

    if outputs.file is not None and outputs.file.exists():
        results.read(outputs.file)
    elif outputs.file is not None:
        files.check_place(outputs.file)
    if outputs.plot is not None:
        report.check_plot(outputs.plot)
    if outputs.timeline is not None:
        check = report.check_folder if outputs.timeline.suffix == ".json" else report.check_plot
        check(outputs.timeline)


def _show(measured: "PipelineResults", left_out: dict[str, str], outputs: PipelineOutputs) -> None:
    """Print the table, and draw it (on rank 0)."""
    from hpcdist.bench.pipeline import report, schedules

    if outputs.as_json:
        click.echo(json.dumps(report.jsonable(measured, left_out)))
    else:
        click.echo(report.text(report.rows(measured), left_out))
    if outputs.plot is not None:
        report.plot(measured, outputs.plot)
    if outputs.timeline is not None:
        write = schedules.write_trace if outputs.timeline.suffix == ".json" else schedules.draw
        write(report.panels(measured), outputs.timeline)


def _provenance(session: "Session", request: "PipelineRequest", anonymous: bool) -> dict[str, Any]:
    """Return what the file says of the run. Collective over the world."""
    from hpcdist.telemetry.provenance import provenance

    places = session.comm.allgather_object((session.place.host, ",".join(map(str, session.place.cores))))
    hosts = list(dict.fromkeys(host for host, _ in places))
    return {
        **provenance(mpi_library=session.library, hosts=hosts, anonymous=anonymous),
        "cores_of_rank": [cores for _, cores in places],
        "seed": request.seed,
        "warmup": request.warmup,
        "order": "cases of as many micro-batches, and the model on one rank, take turns, in a new order each step",
    }
