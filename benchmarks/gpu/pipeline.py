"""Steps of one model on GPUs over a pipeline and over tensor ranks, beside one rank: what a cut costs, and saves.

    python -m benchmarks gpu.pipeline
    python -m benchmarks gpu.pipeline --set model.hidden=1024 -o gpu_pipeline.h5 --anonymous

All ranks are one pipeline (1f1b, zb-h1) or one tensor axis (whole activations, or cut by tokens), and the first of them
trains alone; with and without dropout. Each contender trains its own copy of the model, one step each in turn, on the
same batches, and those with the same dropout must have the same loss in every step. Ranks take GPUs round robin: on one
GPU they share it, so that a pipeline can only lose there, and shows what it costs.

A step is timed from a barrier until the GPU is done, and takes as long as its slowest rank. "x one rank" is its time
over that of one rank without dropout in the same turn: below 1 is faster. The seconds by phase are of the rank that
computes longest; what tensor ranks sum inside of their layers counts as computing. Exit code 69 without a GPU.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.gpu.card import card
from benchmarks.harness import Results
from benchmarks.training.turns import Training
from hpcdist.arrays.gpu import device
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import UsageError
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.training.recipe import recipe as recipes

SCHEMA, RANKS, ON = "hpcdist.benchmark.gpu_pipeline", 2, "gpu"

WARM_UP: Final = 3  # kernels are compiled, memory is taken
AGREEMENT: Final = {"float32": 1e-3, "float64": 1e-9}  # of the losses; rounding grows over the steps
PHASES: Final = ("compute_s", "communication_s", "update_s")
FIRST: Final = ("run.global_batch=32", "parallel.microbatches=8")  # --set comes behind
ALL: Final = "RANKS"  # stands for their number
# Keys of each contender; those without ranks are of the first rank alone. The first of each dropout has the right loss.
CONTENDERS: Final[dict[str, tuple[str, ...]]] = {
    "one rank": (),
    "1f1b": (f"parallel.pipeline={ALL}",),
    "zb-h1": (f"parallel.pipeline={ALL}", "parallel.schedule=zb-h1"),
    "tensor": (f"parallel.tensor={ALL}",),
    "tensor by rows": (f"parallel.tensor={ALL}", "parallel.sequence_parallel=true"),
    "one rank, dropout": ("model.dropout=0.1",),
    "1f1b, dropout": (f"parallel.pipeline={ALL}", "model.dropout=0.1"),
    "tensor, dropout": (f"parallel.tensor={ALL}", "model.dropout=0.1"),
}
OPTIONS: Final = {"steps": 30}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the recipe")


class Contender:
    """A model in training, on all ranks or on the first. Building one is collective over the world."""

    def __init__(self, session: Session, name: str, overrides: Sequence[str], steps: int) -> None:
        comm = session.comm
        own = [key.replace(ALL, str(comm.size)) for key in CONTENDERS[name]]
        together = own != list(CONTENDERS[name])
        keys = [*FIRST, *overrides, *own, "run.device=gpu"]
        self.recipe = recipes.load(None, [*keys, f"run.steps={steps}"]).recipe
        group = comm.dup(name.replace(" ", "_")) if together else solo()
        place = Session(group, session.place, session.library, session.abort)
        self.training = Training(place, keys, steps) if together or comm.rank == 0 else None

    def step(self, comm: Communicator) -> tuple[list[float], float]:
        """Make a step; return its seconds and those by phase on this rank, and the loss. Collective over ``comm``."""
        step, done = None if self.training is None else self.training.next_step(), list[StepResult]()
        device.synchronise()

        def whole() -> None:
            if step is not None:
                done.append(step())
                device.synchronise()

        step_s = harness.seconds(whole, comm)
        if not done:
            return [0.0] * (1 + len(PHASES)), comm.broadcast_object(None)
        return [step_s, *(done[0].seconds[phase] for phase in PHASES)], comm.broadcast_object(done[0].loss)


def check_losses(runs: Mapping[str, Contender], losses: Mapping[str, float], number: int) -> None:
    """End with an error unless contenders that drop as much have the same loss (local)."""
    first: dict[float, str] = {}
    for name, run in runs.items():
        other = first.setdefault(run.recipe.model.dropout, name)
        if not abs(losses[name] - losses[other]) <= AGREEMENT[run.recipe.precision.mode] * abs(losses[other]):
            raise SystemExit(f"step {number}: {name} has loss {losses[name]}, {other} has {losses[other]}")


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Return the times of all contenders, ranks and steps. Collective."""
    comm = session.comm
    if comm.size < 2:
        raise UsageError("one rank has nobody to share a model with; choose --ranks 2")
    runs = {name: Contender(session, name, chosen.set, WARM_UP + chosen.steps) for name in CONTENDERS}
    rows, draw = [], np.random.default_rng(0)  # the same on all ranks
    for number in range(1, WARM_UP + chosen.steps + 1):
        turn = {name: runs[name].step(comm) for name in draw.permutation(list(runs)).tolist()}
        check_losses(runs, {name: loss for name, (_, loss) in turn.items()}, number)
        rows.append([turn[name][0] for name in runs])
    for run in runs.values():
        if run.training is not None:
            run.training.close()
    times = np.array(comm.allgather_object(np.array(rows[WARM_UP:]))).transpose(2, 0, 1, 3)
    dims = f"ranks, steps, (step_s, {', '.join(PHASES)})"
    about = card(comm) | {f"recipe of {name}": recipes.dump(run.recipe) for name, run in runs.items()}
    return Results(dict(zip(runs, times, strict=True)), dict.fromkeys(runs, dims), about)


def ratios(results: Results) -> harness.Ratios:
    """Return the times of every contender over those of one rank in the same turn."""
    times = np.array(list(results.arrays.values()))[..., 0].max(axis=1)
    return harness.over_base(times, list(results.arrays))


def lines(results: Results) -> Sequence[str]:
    times = np.array(list(results.arrays.values()))  # (contenders, ranks, steps, step and phases)
    phases = np.median(times[..., 1:], axis=2)
    longest = [own[own[:, 0].argmax()] for own in phases]
    more = {phase: [f"{own[place]:.4g}" for own in longest] for place, phase in enumerate(PHASES)}
    return harness.time_table(times[..., 0].max(axis=1), list(results.arrays), more=more)
