"""Steps of one GPT over the context axis and the data axis, alternating in one process, with the same tokens in all.

    python -m benchmarks context
    python -m benchmarks context --context 4096 --steps 8 --output context.h5 --anonymous

"x data" is the time of a step over that of the data axis in the same turn: below 1 is faster. "sent" is what a rank
sends by messages in a step, "activations" what the ledger has of them on a rank. "uneven" is the computation of the
rank that computes longest over the mean of the ranks, less 1: with a causal mask that of head and tail.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.training import turns
from benchmarks.training.turns import ratios  # noqa: F401 - of the study
from hpcdist.comm.start import Session

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-context", 2, "training/2026-11-28-context.h5"
SMALL = {"context": 512, "steps": 4}

CONTENDERS: Final = ("data", "ring", "all_to_all")  # the first is the measure
OPTIONS: Final = {"layers": 4, "hidden": 256, "heads": 4, "context": 4096, "samples": 2, "steps": 8}


def keys_of(name: str, ranks: int) -> dict[str, Any]:
    """Return the keys of a contender."""
    cut: Mapping[str, Any] = {"parallel.context": ranks, "parallel.context_method": name}
    return {"communication.algorithm": "ring", **({} if name == "data" else cut)}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Return times and bytes of all contenders. Collective."""
    contenders = {name: keys_of(name, session.comm.size) for name in CONTENDERS}
    return turns.measured(chosen, session, contenders)


def lines(results: Results) -> Sequence[str]:
    step_s, waits_s = results.arrays["time_s"].swapaxes(0, 1)
    computes_s = np.median(step_s - waits_s, axis=-1)
    uneven = computes_s.max(axis=1) / computes_s.mean(axis=1) - 1
    more = {**turns.megabytes(results, "sent", "activations"), "uneven": [f"{value:.1%}" for value in uneven]}
    return harness.time_table(turns.slowest(results), results.names(), more=more)
