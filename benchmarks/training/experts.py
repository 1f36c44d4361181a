"""Steps of a mixture of experts and of a dense GPT with equal matrix products per token, alternating in one process.

    python -m benchmarks experts
    python -m benchmarks experts --ranks 1 --experts 16 --output experts.h5 --anonymous

The feed-forward width of "dense" is the total width of the experts of a token. In "experts" each rank has all experts;
in "expert ranks" they are divided among the ranks. "x dense" is the step time relative to the dense model in the same
round, "x experts" relative to the mixture. "sent" is a rank's bytes per step; "states" is its bytes of parameters,
gradients and optimizer state.
"""

import argparse
from collections.abc import Sequence
from typing import Final

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.training import turns
from hpcdist.comm.start import Session

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-experts", 2, "training/2026-11-28-experts.h5"
SMALL = {"steps": 6}

SIZES: Final = {"layers": 4, "hidden": 256, "heads": 4, "context": 256, "samples": 16}
OPTIONS: Final = {**SIZES, "experts": 8, "experts_per_token": 2, "steps": 20}


def contenders_of(chosen: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Return the recipe keys of a dense GPT, and of a mixture with equal matrix products per token."""
    mixture = {f"model.{name}": getattr(chosen, name) for name in ("experts", "experts_per_token")}
    return {"dense": {}, "experts": {**mixture, "model.expert_hidden": 4 * chosen.hidden // chosen.experts_per_token}}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    contenders = contenders_of(chosen)
    if session.comm.size > 1:
        contenders["expert ranks"] = {**contenders["experts"], "parallel.expert": session.comm.size}
    return turns.measured(chosen, session, contenders, [name for name in contenders if name != "dense"])


def ratios(results: Results) -> harness.Ratios:
    """Return the step times of each model relative to the previous model in the same round."""
    steps, names = turns.slowest(results), results.names()
    return {name: steps[index] / steps[index - 1] for index, name in enumerate(names) if index}


def lines(results: Results) -> Sequence[str]:
    steps = turns.slowest(results)
    apart = [f"{harness.interval(steps[index] / steps[1])[0]:.3f}" if index > 1 else "" for index in range(len(steps))]
    more = {"x experts": apart, **turns.megabytes(results, "sent", "states")}
    return harness.time_table(steps, results.names(), more=more)
