"""Training step on a GPU, with and without CUDA graphs, compared with a step on the CPU, from batch to update.

    python -m benchmarks gpu.step --set model.hidden=512 run.global_batch=32 -o gpu_step.h5
    python -m benchmarks gpu.step --sides gpu graph --set model.layers=12 precision.mode=bfloat16

All sides train the same recipe on one rank, alternating; their losses must agree in every step. "graph" sets
`run.cuda_graph`. GPU steps are timed by events on the stream, from before the batch copy to after the update; CPU steps
and the host's share of GPU steps by the clock. Ratios are relative to the first side in the same round.
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

WARM_UP: Final = 3  # untimed steps: kernels are compiled, memory is allocated, graphs are captured
AGREEMENT: Final = {"bfloat16": 5e-2, "float16": 2e-2, "float32": 1e-3, "float64": 1e-9}  # relative loss difference
SIDES: Final = {
    "cpu": ("run.device=cpu",),
    "gpu": ("run.device=gpu",),
    "graph": ("run.device=gpu", "run.cuda_graph=true"),
}
OPTIONS: Final = {"steps": 30, "sides": tuple(SIDES)}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="recipe keys")


def step_on(side: Training, on: str) -> tuple[dict[str, float], StepResult]:
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
    """Run the next step on all sides, check that their losses agree, and return the times in seconds."""
    times, losses = dict[str, float](), dict[str, float]()
    for on, side in sides.items():
        side_times, done = step_on(side, on)
        times |= side_times
        losses[on] = done.loss
    (base, expected), *others = losses.items()
    training = sides[base]
    for on, loss in others:
        if not abs(loss - expected) <= AGREEMENT[training.recipe.precision.mode] * abs(expected):
            raise SystemExit(f"step {training.number}: loss {loss} of the side {on}, {expected} of the side {base}")
    return times


def measure(chosen: argparse.Namespace, session: Session) -> Results:
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
    return [on for on in SIDES if f"{on}_s" in results.arrays]


def ratios(results):
    first, *others = sides_of(results)
    return {f"{on}_s": results.arrays[f"{on}_s"] / results.arrays[f"{first}_s"] for on in others}
