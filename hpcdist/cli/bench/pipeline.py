"""`hpcdist bench pipeline`: time pipeline schedules beside their simulation; rank 0 prints and writes.

It runs on every rank that a launcher started, or starts them itself.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.bench import skeleton
from hpcdist.cli.bench.skeleton import Outputs, count_option, file_option
from hpcdist.errors import OK, UsageError

if TYPE_CHECKING:  # late at run time: --help must load neither h5py nor MPI
    from hpcdist.bench.pipeline.request import PipelineCase, PipelineRequest
    from hpcdist.bench.pipeline.results import MeasuredCase, PipelineResults

_RANKS: Final = 2


@click.command("pipeline")
@count_option("-n", "--ranks", least=2, help=f"Ranks of the pipeline.  [default: {_RANKS}]")
@click.option("--schedule", "schedules", multiple=True, help="Schedule; may be repeated.  [default: all]")
@click.option(
    "--microbatches",
    type=click.IntRange(min=1),
    multiple=True,
    default=(4, 8, 16),
    help="Micro-batches of a step; may be repeated.",
)
@count_option("--chunks", least=2, default=2, help="Chunks of every rank, for interleaved.")
@count_option("--layers", default=8, help="Blocks of the gpt.")
@count_option("--hidden", default=256, help="Its width.")
@count_option("--context", default=128, help="Tokens of a sample.")
@count_option("--samples", default=1, help="Samples of a micro-batch.")
@count_option("--steps", default=12, help="Steps of each schedule that are kept.")
@count_option("--warmup", default=2, help="Steps before, which are not kept.")
@count_option("--seed", least=0, default=0, help="Of batches and of the order of turns.")
@skeleton.list_option
@skeleton.output_options(
    "HDF5 file for every operation of every step; what it holds already is not measured again.", "Draw the bubbles"
)
@file_option(
    "--timeline", help="Draw a measured step of each schedule (.png, .pdf, .svg), or write it for Perfetto (.json)."
)
@click.pass_context
def command(call: click.Context, /, ranks: int | None, list_only: bool, timeline: Path | None, **options: Any) -> int:
    """Measure pipeline schedules beside the simulator, and beside ranks that work alone.

    Called as one process it starts the ranks; under mpirun, srun or `hpcdist run` each rank takes part. Schedules take
    turns on the same batches, with the same model on every rank alone among them. The units of the model are measured
    first, and cut so that the slowest rank is as fast as can be. Bubble, waiting and overhead come from the time of
    every operation.

    Exit code 0 when all was measured, 2 for usage, 74 when a file cannot be written, which is tried first; another one
    when a rank failed: with --output, the same command goes on behind what was measured.
    """
    from hpcdist.bench.pipeline.request import CONTENDERS, PipelineRequest, PipelineShape, cases

    outputs = Outputs.of(options)
    count, started = skeleton.world(ranks, _RANKS)
    schedules = skeleton.chosen("--schedule", options.pop("schedules"), CONTENDERS) or CONTENDERS
    microbatches = tuple(dict.fromkeys(options.pop("microbatches")))
    shape = PipelineShape(*(options.pop(name) for name in ("layers", "hidden", "context", "samples")))
    request = PipelineRequest(schedules, microbatches, count, shape=shape, **options)
    possible, left_out = cases(request)
    if list_only:
        for case in possible:
            where = f"{case.chunks} chunks on each of {case.ranks} ranks"
            click.echo(f"{case.schedule}, {case.microbatches} micro-batches, {where}")
        for name, reason in left_out.items():
            click.echo(f"left out: {name}: {reason}")
        return OK
    if not possible:
        raise UsageError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    if started:
        return _measure(request, possible, left_out, outputs, timeline)
    _check_places(outputs, timeline)
    return skeleton.start_ranks(count, call)


def _measure(
    request: "PipelineRequest",
    expected: "Sequence[PipelineCase]",
    left_out: dict[str, str],
    outputs: Outputs,
    timeline: Path | None,
) -> int:
    """Measure what is not there yet, show and write. Collective over the world; leaves with the exit code."""
    from hpcdist.bench.pipeline import results, run

    session = skeleton.begin(lambda: _check_places(outputs, timeline))
    comm, path, known = session.comm, outputs.file, {}
    if comm.rank == 0 and path is not None and path.exists():
        known = {measured.case.id: measured for measured in results.read(path).cases}
    measured_ids = comm.broadcast_object(list(known))
    order = "cases of as many micro-batches, and the model on one rank, take turns, in a new order each step"
    about = skeleton.origin(session, outputs.anonymous, seed=request.seed, warmup=request.warmup, order=order)

    def keep(cases: "Sequence[MeasuredCase]") -> None:
        known.update({measured.case.id: measured for measured in cases})
        if path is not None:
            results.append(path, cases, about)

    run.run(comm, request, measured_ids, keep, skeleton.print_progress)
    if comm.rank == 0:
        shown = tuple(known[case.id] for case in expected)
        _show(results.PipelineResults(about, shown), left_out, outputs, timeline)
    session.leave(OK)
    return OK


def _check_places(outputs: Outputs, timeline: Path | None) -> None:
    """Raise what is in the way of the files."""
    from hpcdist.bench.pipeline import results
    from hpcdist.reporting import atomic, plotting

    outputs.check(results.read)
    if timeline is not None:
        (atomic.check_folder if timeline.suffix == ".json" else plotting.check_plot)(timeline)


def _show(measured: "PipelineResults", left_out: dict[str, str], outputs: Outputs, timeline: Path | None) -> None:
    """Print the table, and draw it (on rank 0)."""
    from hpcdist.bench.pipeline import report, schedules

    outputs.show(
        lambda: report.jsonable(measured, left_out),
        lambda: report.text(report.rows(measured), left_out),
        lambda file: report.plot(measured, file),
    )
    if timeline is not None:
        write = schedules.write_trace if timeline.suffix == ".json" else schedules.draw
        write(report.panels(measured), timeline)
