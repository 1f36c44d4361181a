"""`hpcdist bench step`: time training steps of a gpt beside PyTorch; rank 0 prints and writes.

It runs on every rank that a launcher started, or starts them itself.
"""

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import click

from hpcdist.cli.bench import skeleton
from hpcdist.cli.bench.skeleton import Outputs, count_option
from hpcdist.errors import FAILURE, OK, UsageError

if TYPE_CHECKING:  # late at run time: --help must load neither h5py nor MPI
    from hpcdist.bench.step.request import StepRequest


@click.command("step")
@count_option("-n", "--ranks", help="Replicas of the model.  [default: 1]")
@click.option("--only", "names", multiple=True, metavar="NAME", help="Contender; may be repeated.  [default: all]")
@count_option("--layers", default=4, help="Blocks of the gpt.")
@count_option("--hidden", default=256, help="Its width.")
@count_option("--heads", default=4, help="Heads of its attention.")
@count_option("--context", default=256, help="Tokens of a sample.")
@count_option("--vocabulary", least=2, default=256, help="Tokens that there are.")
@count_option("--samples", default=8, help="Samples of each rank in a step.")
@count_option("--steps", default=40, help="Steps of each contender that are timed.")
@count_option("--warmup", default=3, help="Steps before; their losses are compared, too.")
@count_option("--profiled", least=0, default=5, help="Steps after, timed operation by operation.")
@count_option("--threads", default=1, help="Threads of each rank.")
@count_option("--seed", least=0, default=0, help="Of parameters, batches and the order of turns.")
@skeleton.list_option
@skeleton.output_options("New HDF5 file for every phase of each step.", "Draw them")
@click.pass_context
def command(
    call: click.Context, /, ranks: int | None, names: tuple[str, ...], list_only: bool, threads: int, **options: Any
) -> int:
    """Measure training steps of a gpt beside PyTorch, with the same parameters on the same batches.

    The built-in model, the same wrapped in PyTorch and in JAX, and PyTorch itself (eager, and compiled where that runs)
    take turns; --list names them, and those that are not installed are left out.
    Told are the time of each phase and of each kind of operation, the model's operations a second and their share of
    the fastest matrix product of the same run (MFU), how far losses are apart, and the memory of activations beside its
    closed form. Called as one process it starts the ranks; under mpirun, srun or `hpcdist run` each rank takes part.

    Exit code 0 when all was measured, 1 when losses differ by more than 1e-4 of themselves within the first 100 steps,
    2 for usage, 74 when a file cannot be written, which is tried first; another one when a rank failed.
    """
    from hpcdist.bench.step.request import CONTENDERS, StepRequest, StepShape

    if list_only:
        for name, meaning in CONTENDERS.items():
            click.echo(f"{name}: {meaning}")
        return OK
    from hpcdist.comm.doctor.facts import THREADS

    outputs = Outputs.of(options)
    count, started = skeleton.world(ranks, 1)
    lengths = {name: options.pop(name) for name in ("steps", "warmup", "profiled", "seed")}
    shape = StepShape(**options)
    if shape.hidden % shape.heads:
        raise UsageError(f"--hidden {shape.hidden} is not a multiple of --heads {shape.heads}")
    taking_part = skeleton.chosen("--only", names, CONTENDERS) or tuple(CONTENDERS)
    inherited = os.environ.get(THREADS)
    if inherited not in (None, str(threads)) and count > 1:
        raise UsageError(
            f"--threads {threads}, but {THREADS}={inherited}: the ranks would use that; unset it, or make it equal"
        )
    if started or (count == 1 and inherited == str(threads)):
        return _measure(StepRequest(shape, taking_part, count, threads=threads, **lengths), outputs)
    outputs.check()
    if count > 1:
        return skeleton.start_ranks(count, call, "--cpus-per-task", str(threads))
    return _start_again(threads, call)


def _start_again(threads: int, call: click.Context) -> int:
    """Start one process with so many threads, and return its exit code."""
    from hpcdist.comm.launch.mpirun import common_settings

    line = [sys.executable, "-P", "-m", "hpcdist", "bench", "step", *skeleton.rank_arguments(call)]
    environment = {**os.environ, **common_settings(threads, {})}
    return subprocess.run(line, env=environment, check=False).returncode


def _measure(request: "StepRequest", outputs: Outputs) -> int:
    """Measure, show and write. Collective over the world; leaves with the exit code."""
    from hpcdist.bench.step import report, results, run
    from hpcdist.bench.step.request import SAME

    session = skeleton.begin(outputs.check)
    about = skeleton.origin(session, outputs.anonymous)
    measured = run.run(session.comm, request, about, skeleton.print_progress)
    code = OK
    if measured is not None:
        if outputs.file is not None:
            results.write(outputs.file, measured)
        outputs.show(
            lambda: report.jsonable(measured), lambda: report.text(measured), lambda file: report.plot(measured, file)
        )
        apart = [row.loss_difference for row in report.rows(measured)]
        code = OK if all(difference <= SAME for difference in apart) else FAILURE  # NaN is no agreement
    session.leave(session.comm.broadcast_object(code))
    return OK
