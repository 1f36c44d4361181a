"""Steps of a mixture of experts and of the dense GPT with as many products a token, alternating in one process.

    python -m benchmarks experts
    python -m benchmarks experts --ranks 1 --experts 16 --output experts.h5 --anonymous

"dense" has a feed-forward as wide as the experts that see a token have together. "experts" is the mixture, whose ranks
hold all experts each; with several ranks "expert ranks" has them divided among the ranks, to which tokens are sent.
"x dense" is the time of a step over that of the dense model in the same turn, "x experts" the same over that of the
mixture: below 1 is faster. "sent" is what a rank sends in a step, "states" what it has of parameters, gradients and
optimizer state.
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
    """Return the keys of a dense GPT, and of a mixture with as many products a token."""
    mixture = {f"model.{name}": getattr(chosen, name) for name in ("experts", "experts_per_token")}
    return {"dense": {}, "experts": {**mixture, "model.expert_hidden": 4 * chosen.hidden // chosen.experts_per_token}}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Return times and bytes of all contenders. Collective."""
    contenders = contenders_of(chosen)
    if session.comm.size > 1:
        contenders["expert ranks"] = {**contenders["experts"], "parallel.expert": session.comm.size}
    return turns.measured(chosen, session, contenders, [name for name in contenders if name != "dense"])


def ratios(results: Results) -> harness.Ratios:
    """Return the times of steps over those of the model before in the same turn."""
    steps, names = turns.slowest(results), results.names()
    return {name: steps[place] / steps[place - 1] for place, name in enumerate(names) if place}


def lines(results: Results) -> Sequence[str]:
    steps = turns.slowest(results)
    apart = [f"{harness.interval(steps[place] / steps[1])[0]:.3f}" if place > 1 else "" for place in range(len(steps))]
    more = {"x experts": apart, **turns.megabytes(results, "sent", "states")}
    return harness.time_table(steps, results.names(), more=more)
