"""`hpcdist bench step`: measure training steps of a GPT in hpcdist, PyTorch and JAX.

The command runs on every rank that a launcher started, or starts the ranks. Rank 0 prints and writes the results.
"""

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import click

from hpcdist.cli.bench import skeleton
from hpcdist.cli.bench.skeleton import Outputs, count_option
from hpcdist.errors import FAILURE, OK, UsageError

if TYPE_CHECKING:  # imported late at run time: --help must load neither h5py nor MPI
    from hpcdist.bench.step.request import StepRequest


@click.command("step")
@count_option("-n", "--ranks", help="Replicas of the model.  [default: 1]")
@click.option(
    "--only", "names", multiple=True, metavar="NAME", help="Contender to measure; may be repeated.  [default: all]"
)
@count_option("--layers", default=4, help="Number of transformer blocks.")
@count_option("--hidden", default=256, help="Hidden size of the model.")
@count_option("--heads", default=4, help="Number of attention heads.")
@count_option("--context", default=256, help="Tokens per sample.")
@count_option("--vocabulary", least=2, default=256, help="Number of different tokens.")
@count_option("--samples", default=8, help="Samples per rank in a step.")
@count_option("--steps", default=40, help="Timed steps of each contender.")
@count_option("--warmup", default=3, help="Untimed first steps; their losses are compared too.")
@count_option("--profiled", least=0, default=5, help="Additional steps of the built-in models with timed operations.")
@count_option("--threads", default=1, help="Threads of each rank.")
@count_option("--seed", least=0, default=0, help="Seed for parameters, batches and the order of turns.")
@skeleton.list_option
@skeleton.output_options("New HDF5 file for the phases of each step.", "Plot phases, operations and losses")
@click.pass_context
def command(
    call: click.Context, /, ranks: int | None, names: tuple[str, ...], list_only: bool, threads: int, **options: Any
) -> int:
    """Measure training steps of a GPT in hpcdist, PyTorch and JAX, with the same parameters and batches.

    The contenders take turns: the built-in model, models wrapped in PyTorch and JAX, and PyTorch (eager and compiled).
    --list prints their names. Contenders that cannot run here are left out.
    The command prints the time of each phase and kind of operation, flop/s, MFU (flop/s relative to the fastest matrix
    product of the run), loss differences, and the memory of the activations relative to a formula.
    The command starts the ranks, unless mpirun, srun or `hpcdist run` has already started several ranks.

    Exit codes: 0 if all losses agree, 1 if losses differ by more than 1e-4 (relative) in the first 100 steps, 2 for
    invalid options, 74 if a file cannot be written, which is checked first, and others if a rank failed.
    """
    from hpcdist.bench.step.request import CONTENDERS, StepRequest, StepShape

    if list_only:
        for name, description in CONTENDERS.items():
            click.echo(f"{name}: {description}")
        return OK
    from hpcdist.comm.doctor.facts import THREADS

    outputs = Outputs.of(options)
    count, is_started = skeleton.world(ranks, 1)
    lengths = {name: options.pop(name) for name in ("steps", "warmup", "profiled", "seed")}
    shape = StepShape(**options)
    if shape.hidden % shape.heads:
        raise UsageError(f"--hidden {shape.hidden} is not a multiple of --heads {shape.heads}; change one of them")
    contenders = skeleton.chosen("--only", names, CONTENDERS) or tuple(CONTENDERS)
    inherited = os.environ.get(THREADS)
    if inherited not in (None, str(threads)) and count > 1:
        raise UsageError(
            f"--threads {threads}, but {THREADS}={inherited} sets the threads of the ranks; unset {THREADS}"
        )
    if is_started or (count == 1 and inherited == str(threads)):
        return _measure(StepRequest(shape, contenders, count, threads=threads, **lengths), outputs)
    outputs.check()
    if count > 1:
        return skeleton.start_ranks(count, call, "--cpus-per-task", str(threads))
    from hpcdist.comm.launch.mpirun import common_settings

    line = [sys.executable, "-P", "-m", "hpcdist", "bench", "step", *skeleton.rank_arguments(call)]
    environment = {**os.environ, **common_settings(threads, {})}
    return subprocess.run(line, env=environment, check=False).returncode


def _measure(request: "StepRequest", outputs: Outputs) -> int:
    from hpcdist.bench.step import report, results, run
    from hpcdist.bench.step.request import SAME

    session = skeleton.begin(outputs.check)
    provenance = skeleton.origin(session, outputs.anonymous)
    measured = run.run(session.comm, request, provenance, skeleton.print_progress)
    code = OK
    if measured is not None:
        if outputs.file is not None:
            results.write(outputs.file, measured)
        outputs.show(
            lambda: report.jsonable(measured), lambda: report.text(measured), lambda file: report.plot(measured, file)
        )
        # A difference of NaN is a failure.
        code = OK if all(row.loss_difference <= SAME for row in report.rows(measured)) else FAILURE
    session.leave(session.comm.broadcast_object(code))
    return OK
