"""Validation losses of a mixture of experts and of a dense GPT with equal matrix products per token, by seed.

    python -m benchmarks experts.losses
    python -m benchmarks experts.losses --seeds 1 --steps 1000 --output losses.h5 --anonymous

Both train equally many steps on the default text, on one rank. "x dense" is the loss relative to the dense model with
the same seed: below 1 the mixture is better.
"""

import argparse
from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.training import experts, turns
from hpcdist.comm.start import Session
from hpcdist.training.run.loop import mean_validation_loss

SCHEMA, COMMITTED = "hpcdist-benchmark-expert-losses", "training/2026-11-28-experts-losses.h5"
SMALL = {"seeds": [1]}
WORSE: Final = 1.02

SIZES: Final = {"layers": 2, "hidden": 128, "heads": 4, "context": 128, "samples": 16}
OPTIONS: Final = {**SIZES, "experts": 8, "experts_per_token": 2, "steps": 300, "seeds": [1, 2, 3]}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    contenders = experts.contenders_of(chosen)
    common = turns.gpt_keys(chosen, **{"run.global_batch": chosen.samples, "optimizer.learning_rate": 3e-3})
    losses = np.array(
        [
            [trained(session, {**common, **keys, "run.seed": seed}, chosen.steps) for seed in chosen.seeds]
            for keys in contenders.values()
        ]
    )
    about = {"contenders": "; ".join(contenders), "seeds": chosen.seeds}
    return Results({"loss": losses}, {"loss": "contenders, seeds"}, about)


def trained(session: Session, keys: turns.Keys, steps: int) -> float:
    training = turns.Training(session, keys, steps)
    for _ in range(steps):
        training.next_step()()
    loss = mean_validation_loss(training.trainer)
    training.close()
    return loss


def ratios(results: Results) -> harness.Ratios:
    return harness.over_base(results.arrays["loss"], results.names())


def lines(results: Results) -> Sequence[str]:
    return harness.time_table(results.arrays["loss"], results.names(), unit="nats", scale=1.0)


def failures(results: Results) -> Sequence[str]:
    dense, mixture = results.arrays["loss"]
    worse = np.flatnonzero(mixture >= dense)
    return [f"seed {results.attributes['seeds'][index]}: the mixture's loss is not lower" for index in worse]
