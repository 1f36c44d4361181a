"""A training step on a GPU, with CUDA graphs and without, against one on the CPU: from the batch to the update.

    python -m benchmarks gpu.step --set model.hidden=512 run.global_batch=32 -o gpu_step.h5
    python -m benchmarks gpu.step --sides gpu graph --set model.layers=12 precision.mode=bfloat16

All sides train the same recipe on one rank, alternating in one run, and their losses are compared step by step; "graph"
has `run.cuda_graph`. A step on the GPU is timed by events on its stream, from before the batch is copied there to after
the update; one on the CPU, and the GPU's step as the host sees it, by the clock. Told are the times, also by phase, and
the ratio of each to the step of the first side in the same turn: below 1 it is faster. Without a GPU it leaves with 69.
"""

import argparse
from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.gpu.card import card, event_seconds
from benchmarks.harness import Results
from benchmarks.training.turns import Training
from hpcdist.arrays.gpu import device
from hpcdist.comm.start import Session
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.training.recipe import recipe as recipes

SCHEMA, ON = "hpcdist.benchmark.gpu_step", "gpu"

WARM_UP: Final = 3  # kernels are compiled, memory is taken, graphs are captured
AGREEMENT: Final = {"bfloat16": 5e-2, "float16": 2e-2, "float32": 1e-3, "float64": 1e-9}  # losses; rounding grows
SIDES: Final = {
    "cpu": ("run.device=cpu",),
    "gpu": ("run.device=gpu",),
    "graph": ("run.device=gpu", "run.cuda_graph=true"),
}
OPTIONS: Final = {"steps": 30, "sides": tuple(SIDES)}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the recipe")


def step_on(side: Training, on: str) -> tuple[dict[str, float], StepResult]:
    """Make a step; return its times by name, and what came of it."""
    step, done = side.next_step(), list[StepResult]()
    times: dict[str, float] = {}

    def call() -> None:
        done.append(step())

    def timed() -> None:
        times[f"{on}_s"] = harness.seconds(call) if on == "cpu" else event_seconds(call)

    host_s = harness.seconds(timed)
    times |= {} if on == "cpu" else {f"{on}_host_s": host_s}
    return times | {f"{on}_{name}": value for name, value in done[0].seconds.items()}, done[0]


def turn(sides: dict[str, Training]) -> dict[str, float]:
    """Make the next step on all sides, which must agree; return its times in s."""
    times, losses = dict[str, float](), dict[str, float]()
    for on, side in sides.items():
        own, done = step_on(side, on)
        times |= own
        losses[on] = done.loss
    (first, wanted), *others = losses.items()
    training = sides[first]
    for on, loss in others:
        if not abs(loss - wanted) <= AGREEMENT[training.recipe.precision.mode] * abs(wanted):
            raise SystemExit(f"step {training.number}: loss {loss} of the side {on}, {wanted} of the side {first}")
    return times


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Return the times of each step that was not for warming up."""
    device.choose(0)
    steps = WARM_UP + chosen.steps
    sides = {on: Training(session, [*chosen.set, *SIDES[on]], steps) for on in chosen.sides}
    rows = [turn(sides) for _ in range(steps)][WARM_UP:]
    trainer = sides[chosen.sides[-1]].trainer
    for side in sides.values():
        side.close()
    arrays = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    tokens = trainer.recipe.run.global_batch * trainer.model.tokens_per_sample
    about = card() | {"recipe": recipes.dump(trainer.recipe), "tokens": tokens}
    return Results(arrays, dict.fromkeys(arrays, "steps; s"), about)


def lines(results: Results) -> Sequence[str]:
    names, tokens, sides = list(results.arrays), int(results.attributes["tokens"]), sides_of(results)
    speeds = [f"{on} {tokens / np.median(results.arrays[f'{on}_s']):,.0f} tokens/s" for on in sides]
    times = np.array([results.arrays[name] for name in names])
    return [
        f"{results.attributes['gpu']}: {', '.join(speeds)}",
        *harness.time_table(times, names, names.index(f"{sides[0]}_s")),
    ]


def sides_of(results: Results) -> list[str]:
    """Return the sides that were measured, in their order."""
    return [on for on in SIDES if f"{on}_s" in results.arrays]


def ratios(results):
    first, *others = sides_of(results)
    return {f"{on}_s": results.arrays[f"{on}_s"] / results.arrays[f"{first}_s"] for on in others}
