"""Steps of one model on GPUs with pipeline or tensor parallelism, compared with one rank.

    python -m benchmarks gpu.pipeline
    python -m benchmarks gpu.pipeline --set model.hidden=1024 -o gpu_pipeline.h5 --anonymous

All ranks form one pipeline (1f1b, zb-h1) or one tensor axis (with or without sequence parallelism), with and without
dropout; rank 0 also trains alone. Contenders train separate copies of the model on the same batches, one step each in
turn. Contenders with the same dropout must have the same loss in every step. Ranks may share a GPU, where a pipeline
can only be slower.

A step is timed from a barrier until the GPU of the slowest rank is done. "x one rank" is the time relative to one rank
without dropout in the same round. The phase times are from the rank that computes longest; they count reductions inside
tensor-parallel layers as computing.
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

WARM_UP: Final = 3  # untimed steps: kernels are compiled, memory is allocated
AGREEMENT: Final = {"float32": 1e-3, "float64": 1e-9}  # relative difference of losses; rounding grows over the steps
PHASES: Final = ("compute_s", "communication_s", "update_s")
FIRST: Final = ("run.global_batch=32", "parallel.microbatches=8")  # --set overrides these keys
ALL: Final = "RANKS"  # placeholder for the number of ranks
# Recipe keys of each contender. Contenders without RANKS train on rank 0. The first with each dropout is the reference.
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
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="recipe keys")


class Contender:
    """A model in training, on all ranks or on rank 0. Building it is collective over the world."""

    def __init__(self, session: Session, name: str, overrides: Sequence[str], steps: int) -> None:
        comm = session.comm
        rank_keys = [key.replace(ALL, str(comm.size)) for key in CONTENDERS[name]]
        uses_all_ranks = rank_keys != list(CONTENDERS[name])
        keys = [*FIRST, *overrides, *rank_keys, "run.device=gpu"]
        self.recipe = recipes.load(None, [*keys, f"run.steps={steps}"]).recipe
        group = comm.dup(name.replace(" ", "_")) if uses_all_ranks else solo()
        group_session = Session(group, session.place, session.library, session.abort)
        self.training = Training(group_session, keys, steps) if uses_all_ranks or comm.rank == 0 else None

    def step(self, comm: Communicator) -> tuple[list[float], float]:
        """Run a step; return this rank's seconds (step, then phases) and the loss. Collective over ``comm``."""
        step, done = None if self.training is None else self.training.next_step(), list[StepResult]()
        device.synchronise()

        def run_step() -> None:
            if step is not None:
                done.append(step())
                device.synchronise()

        step_s = harness.seconds(run_step, comm)
        if not done:
            return [0.0] * (1 + len(PHASES)), comm.broadcast_object(None)
        return [step_s, *(done[0].seconds[phase] for phase in PHASES)], comm.broadcast_object(done[0].loss)


def check_losses(runs: Mapping[str, Contender], losses: Mapping[str, float], number: int) -> None:
    """Raise SystemExit if contenders with the same dropout have different losses. Local."""
    first: dict[float, str] = {}
    for name, run in runs.items():
        other = first.setdefault(run.recipe.model.dropout, name)
        if not abs(losses[name] - losses[other]) <= AGREEMENT[run.recipe.precision.mode] * abs(losses[other]):
            raise SystemExit(f"step {number}: {name} has loss {losses[name]}, {other} has {losses[other]}")


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    comm = session.comm
    if comm.size < 2:
        raise UsageError("a pipeline needs at least 2 ranks; choose --ranks 2")
    runs = {name: Contender(session, name, chosen.set, WARM_UP + chosen.steps) for name in CONTENDERS}
    rows, draw = [], np.random.default_rng(0)  # the same order on all ranks
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
    times = np.array(list(results.arrays.values()))[..., 0].max(axis=1)
    return harness.over_base(times, list(results.arrays))


def lines(results: Results) -> Sequence[str]:
    times = np.array(list(results.arrays.values()))  # (contenders, ranks, steps, step and phases)
    phases = np.median(times[..., 1:], axis=2)
    longest = [figures[figures[:, 0].argmax()] for figures in phases]
    more = {phase: [f"{figures[index]:.4g}" for figures in longest] for index, phase in enumerate(PHASES)}
    return harness.time_table(times[..., 0].max(axis=1), list(results.arrays), more=more)
