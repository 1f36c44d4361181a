"""`hpcdist bench step`: time training steps of a gpt beside PyTorch; rank 0 prints and writes.

It runs on every rank that a launcher started, or starts them itself.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcdist.cli.bench.pipeline import rank_arguments
from hpcdist.errors import FAILURE, OK, UsageError

if TYPE_CHECKING:  # late at run time: --help must load neither h5py nor MPI
    from hpcdist.bench.step.results import StepRequest, StepResults


@click.command("step")
@click.option("-n", "--ranks", type=click.IntRange(min=1), help="Replicas of the model.  [default: 1]")
@click.option("--only", "names", multiple=True, metavar="NAME", help="Contender; may be repeated.  [default: all]")
@click.option("--layers", type=click.IntRange(min=1), default=4, help="Blocks of the gpt.")
@click.option("--hidden", type=click.IntRange(min=1), default=256, help="Its width.")
@click.option("--heads", type=click.IntRange(min=1), default=4, help="Heads of its attention.")
@click.option("--context", type=click.IntRange(min=1), default=256, help="Tokens of a sample.")
@click.option("--vocabulary", type=click.IntRange(min=2), default=256, help="Tokens that there are.")
@click.option("--samples", type=click.IntRange(min=1), default=8, help="Samples of each rank in a step.")
@click.option("--steps", type=click.IntRange(min=1), default=40, help="Steps of each contender that are timed.")
@click.option("--warmup", type=click.IntRange(min=1), default=3, help="Steps before; their losses are compared, too.")
@click.option("--profiled", type=click.IntRange(min=0), default=5, help="Steps after, timed operation by operation.")
@click.option("--threads", type=click.IntRange(min=1), default=1, help="Threads of each rank.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of parameters, batches and the order of turns.")
@click.option("--list", "list_only", is_flag=True, help="Print who there is, and start nothing.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="New HDF5 file for every phase of each step.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw them (.png, .pdf, .svg).")
@click.option("--anonymous", is_flag=True, help="Leave the names of hosts out of the results.")
@click.pass_context
def command(
    call: click.Context,
    /,
    ranks: int | None,
    names: tuple[str, ...],
    steps: int,
    warmup: int,
    profiled: int,
    threads: int,
    seed: int,
    list_only: bool,
    output: Path | None,
    as_json: bool,
    plot: Path | None,
    anonymous: bool,
    **shape: int,
) -> int:
    """Measure training steps of a gpt beside PyTorch, with the same parameters on the same batches.

    The built-in model, the PyTorch model wrapped, and PyTorch itself (eager, and compiled where that runs) take turns.
    Told are the time of each phase and of each kind of operation, the model's operations a second and their share of
    the fastest matrix product of the same run (MFU), how far losses are apart, and the memory of activations beside its
    closed form. Called as one process it starts the ranks; under mpirun, srun or `hpcdist run` each rank takes part.

    Exit code 0 when all was measured, 1 when losses differ by more than 1e-4 of themselves within the first 100 steps,
    2 for usage, 74 when a file cannot be written, which is tried first; another one when a rank failed.
    """
    from hpcdist.bench.step import results
    from hpcdist.comm.doctor.facts import THREADS
    from hpcdist.comm.launch import environment

    if list_only:
        for name, meaning in results.CONTENDERS.items():
            click.echo(f"{name}: {meaning}")
        return OK
    launched = environment.launch_environment()
    there = launched.size if launched is not None and launched.size > 1 else None
    if there is not None and ranks not in (None, there):
        raise UsageError(f"--ranks {ranks}, but this process is one of {there} ranks; leave --ranks out there")
    size = results.StepShape(**shape)
    if size.hidden % size.heads:
        raise UsageError(f"--hidden {size.hidden} is not a multiple of --heads {size.heads}")
    count = there or ranks or 1
    request = results.StepRequest(size, results.chosen(names), count, steps, warmup, profiled, seed, threads)
    outputs = StepOutputs(output, as_json, plot, anonymous)
    inherited = os.environ.get(THREADS)
    if inherited not in (None, str(threads)) and count > 1:
        raise UsageError(
            f"--threads {threads}, but {THREADS}={inherited}: the ranks would use that; unset it, or make it equal"
        )
    if there is None and (count > 1 or inherited != str(threads)):
        _check_places(outputs)
        return _start(count, threads, call)
    return _measure(request, outputs)


@dataclass(frozen=True)
class StepOutputs:
    """Destinations of the results."""

    file: Path | None
    as_json: bool
    plot: Path | None
    anonymous: bool


def _start(ranks: int, threads: int, call: click.Context) -> int:
    """Start the ranks, with so many threads each, and return their exit code."""
    from hpcdist.cli import run
    from hpcdist.comm.launch.mpirun import common_settings

    line = ["bench", "step", *rank_arguments(call)]
    if ranks == 1:
        environment = {**os.environ, **common_settings(threads, {})}
        return subprocess.run([sys.executable, "-P", "-m", "hpcdist", *line], env=environment, check=False).returncode
    line = ["-n", str(ranks), "--cpus-per-task", str(threads), "--grace", "5", *line]
    code: int = run.command.main(args=line, prog_name="hpcdist run", standalone_mode=False)
    return code


def _measure(request: "StepRequest", outputs: StepOutputs) -> int:
    """Measure, show and write. Collective over the world; leaves with the exit code."""
    from hpcdist.bench import output_file
    from hpcdist.bench.step import results, run
    from hpcdist.bench.step.results import COMPARED, SAME
    from hpcdist.comm import start
    from hpcdist.telemetry.provenance import provenance

    session = start.start()
    comm = session.comm
    output_file.check_on_all_ranks(comm, lambda: _check_places(outputs))
    hosts = list(dict.fromkeys(comm.allgather_object(session.place.host)))
    origin: dict[str, Any] = {**provenance(mpi_library=session.library, hosts=hosts, anonymous=outputs.anonymous)}
    measured = run.run(comm, request, origin, lambda line: click.echo(line, err=True))
    code = OK
    if measured is not None:
        if outputs.file is not None:
            results.write(outputs.file, measured)
        _show(measured, outputs)
        apart = run.differences(measured, COMPARED)
        code = OK if all(difference <= SAME for difference in apart.values()) else FAILURE  # NaN is no agreement
    session.leave(comm.broadcast_object(code))
    return OK


def _check_places(outputs: StepOutputs) -> None:
    """Raise what is in the way of the files."""
    from hpcdist.bench.collectives import report
    from hpcdist.hdf5 import files

    if outputs.file is not None:
        files.check_place(outputs.file)
    if outputs.plot is not None:
        report.check_plot(outputs.plot)


def _show(measured: "StepResults", outputs: StepOutputs) -> None:
    """Print the report, and draw it (on rank 0)."""
    from hpcdist.bench.step import report

    click.echo(json.dumps(report.jsonable(measured)) if outputs.as_json else report.text(measured))
    if outputs.plot is not None:
        report.plot(measured, outputs.plot)
