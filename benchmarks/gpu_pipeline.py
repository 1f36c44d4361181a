"""Steps of one model on GPUs over a pipeline and over tensor ranks, beside one rank: what a cut costs, and saves.

    mpirun -n 2 python benchmarks/gpu_pipeline.py
    mpirun -n 2 python benchmarks/gpu_pipeline.py --set model.hidden=1024 -o gpu_pipeline.h5 --anonymous

All ranks are one pipeline (1f1b, zb-h1) or one tensor axis (whole activations, or cut by tokens), and the first of them
trains alone; with and without dropout. Each contender trains its own copy of the model, one step each in turn, on the
same batches, and those with the same dropout must have the same loss in every step. Ranks take GPUs round robin: on one
GPU they share it, so that a pipeline can only lose there, and shows what it costs.

A step is timed from a barrier until the GPU is done, and takes as long as its slowest rank: one JSON line a contender
with the median and the quartiles in seconds, tokens/s, "x_one_rank" (the median of the ratios within the same turn;
above 1: faster than one rank without dropout), and the seconds by phase of the rank that computes longest; what tensor
ranks sum inside of their layers counts as computing. Raw times of all ranks go to the HDF5 file. Exit code 69 without a
GPU.
"""

import argparse
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.arrays.gpu import device
from hpcdist.bench import output_file
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import MissingCapabilityError, UsageError
from hpcdist.hdf5 import files
from hpcdist.telemetry.provenance import provenance
from hpcdist.training.build.assemble import assemble
from hpcdist.training.recipe import recipe as recipes

SCHEMA, VERSION = "hpcdist.benchmark.gpu_pipeline", 1
WARM_UP: Final = 3  # kernels are compiled, memory is taken
AGREEMENT: Final = {"float32": 1e-3, "float64": 1e-9}  # of the losses; rounding grows over the steps
PHASES: Final = ("compute_s", "communication_s", "update_s")
ONE: Final = "one rank"
FIRST: Final = ("run.global_batch=32", "parallel.microbatches=8")  # --set comes behind
ALL: Final = "RANKS"  # stands for their number
# Keys of each contender; those without ranks are of the first rank alone. The first of each dropout has the right loss.
CONTENDERS: Final[dict[str, tuple[str, ...]]] = {
    ONE: (),
    "1f1b": (f"parallel.pipeline={ALL}",),
    "zb-h1": (f"parallel.pipeline={ALL}", "parallel.schedule=zb-h1"),
    "tensor": (f"parallel.tensor={ALL}",),
    "tensor by rows": (f"parallel.tensor={ALL}", "parallel.sequence_parallel=true"),
    "one rank, dropout": ("model.dropout=0.1",),
    "1f1b, dropout": (f"parallel.pipeline={ALL}", "model.dropout=0.1"),
    "tensor, dropout": (f"parallel.tensor={ALL}", "model.dropout=0.1"),
}


class Contender:
    """A model in training, on all ranks or on the first. Building one is collective over the world."""

    def __init__(self, session: Session, name: str, overrides: list[str], steps: int) -> None:
        comm, self.number = session.comm, 0
        own = [key.replace(ALL, str(comm.size)) for key in CONTENDERS[name]]
        together = own != list(CONTENDERS[name])
        keys = [*FIRST, *overrides, *own, f"run.steps={steps}", "run.device=gpu"]
        self.recipe = recipes.load(None, keys).recipe
        group = comm.dup(name.replace(" ", "_")) if together else solo()
        self.computes = together or comm.rank == 0
        if self.computes:
            self.trainer = assemble(Session(group, session.place, session.library, session.abort), self.recipe)
            self.batches = self.trainer.batches(steps)

    def step(self, comm: Communicator) -> tuple[list[float], float]:
        """Make a step; return its seconds and those by phase on this rank, and the loss. Collective over ``comm``."""
        self.number += 1
        device.synchronise()
        comm.barrier()
        begin_s = time.perf_counter()
        if not self.computes:
            return [0.0] * (1 + len(PHASES)), comm.broadcast_object(None)
        trainer = self.trainer
        parts = trainer.cut(trainer.place(next(self.batches)))
        done = trainer.step(self.number, parts, np.zeros(2))
        device.synchronise()
        times = [time.perf_counter() - begin_s, *(done.seconds[phase] for phase in PHASES)]
        return times, comm.broadcast_object(done.loss)


def measure(session: Session, overrides: list[str], steps: int) -> tuple[dict[str, Contender], np.ndarray]:
    """Return the contenders and their times in s, (contenders, ranks, steps, step and phases). Collective."""
    comm = session.comm
    runs = {name: Contender(session, name, overrides, WARM_UP + steps) for name in CONTENDERS}
    rows = []
    draw = np.random.default_rng(0)  # the same on all ranks
    with ExitStack() as open_:
        for run in runs.values():
            if run.computes:
                open_.enter_context(run.batches)
        for _ in range(WARM_UP + steps):
            turn = {name: runs[name].step(comm) for name in draw.permutation(list(runs)).tolist()}
            check_losses(runs, {name: loss for name, (_, loss) in turn.items()})
            rows.append([turn[name][0] for name in runs])
    for run in runs.values():
        if run.computes:
            run.trainer.close()
    return runs, np.array(comm.allgather_object(np.array(rows[WARM_UP:]))).transpose(2, 0, 1, 3)


def check_losses(runs: dict[str, Contender], losses: dict[str, float]) -> None:
    """End with an error unless contenders that drop as much have the same loss (local)."""
    first: dict[float, str] = {}
    for name, run in runs.items():
        expected = losses[first.setdefault(run.recipe.model.dropout, name)]
        if not abs(losses[name] - expected) <= AGREEMENT[run.recipe.precision.mode] * abs(expected):
            other = first[run.recipe.model.dropout]
            raise SystemExit(f"step {run.number}: {name} has loss {losses[name]}, {other} has {expected}")


def card(comm: Communicator) -> dict[str, Any]:
    """Return which GPUs, and which CUDA it was. Collective."""
    runtime = device.cupy().cuda.runtime
    name = runtime.getDeviceProperties(runtime.getDevice())["name"]
    places = comm.allgather_object((comm.nodes().index, device.bus_id()))
    return {
        "gpu": name.decode() if isinstance(name, bytes) else str(name),
        "gpus": len(set(places)),
        "ranks": comm.size,
        "cupy_version": getattr(device.cupy(), "__version__", "unknown"),
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
    }


def report(runs: dict[str, Contender], times: np.ndarray) -> list[dict[str, Any]]:
    """Return a line for each contender (local)."""
    step_s = times[..., 0].max(axis=1)  # (contenders, steps)
    alone_s = step_s[list(runs).index(ONE)]
    trainer = runs[ONE].trainer
    tokens = trainer.recipe.run.global_batch * trainer.model.tokens_per_sample
    lines = []
    for own_s, (name, phases) in zip(step_s, zip(runs, np.median(times[..., 1:], axis=2), strict=True), strict=True):
        low, median, high = np.percentile(own_s, [25, 50, 75]).tolist()
        longest = phases[phases[:, 0].argmax()]
        lines.append(
            {
                "contender": name,
                "step_s": median,
                "quartiles_s": [low, high],
                "tokens_per_s": round(tokens / median),
                "x_one_rank": round(float(np.median(alone_s / own_s)), 3),
                **dict(zip(PHASES, longest.tolist(), strict=True)),
            }
        )
    return lines


def write(path: Path, runs: dict[str, Contender], times: np.ndarray, attributes: dict[str, Any]) -> None:
    """Write the times of every rank and step, with the recipe of each contender (local)."""
    with files.edit(path, SCHEMA, VERSION) as file:
        for (name, run), own in zip(runs.items(), times, strict=True):
            dataset = file.create_dataset(name, data=own)
            dataset.attrs.update({"units": "s", "dims": f"ranks, steps, (step_s, {', '.join(PHASES)})"})
            dataset.attrs["recipe"] = recipes.dump(run.recipe)
        file.attrs.update(attributes)
    print(f"raw times are in {path}", file=sys.stderr)


def run(session: Session, options: argparse.Namespace) -> None:
    """Measure, print on rank 0, write. Collective over the world."""
    comm = session.comm
    if comm.size < 2:
        raise UsageError("one rank has nobody to share a model with; start it with mpirun -n 2")
    runs, times = measure(session, options.set, options.steps)
    described = card(comm)
    if comm.rank:
        return
    for line in report(runs, times):
        print(json.dumps(line | {"gpus": described["gpus"], "ranks": comm.size}))
    if options.output is not None:
        attributes = provenance(mpi_library=session.library, anonymous=options.anonymous) | described
        write(options.output, runs, times, attributes)


def main(arguments: list[str] | None = None) -> None:
    """Start, run, leave. Collective over the world."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the recipe")
    parser.add_argument("--steps", type=int, default=30, help="of each contender (default 30)")
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file for the raw figures; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    options = parser.parse_args(arguments)
    try:
        device.count()  # on every rank alike, before MPI starts
        session = start.start("gpu")
    except MissingCapabilityError as error:
        print(f"gpu_pipeline: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    output_file.exit_unless_writable(session, options.output)
    run(session, options)
    session.leave(0)


if __name__ == "__main__":
    main()
