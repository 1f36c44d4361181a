"""Steps of one model over the tensor axis and the data axis, alternating in one process: what a cut costs, and saves.

    python -m benchmarks tensor
    python -m benchmarks tensor --hidden 512 --layers 3 --steps 12 --output tensor.h5 --anonymous

All contenders train on the same batch. "x data" is the time of a step over that of the data axis in the same turn:
below 1 is faster. "sent" is what a rank sends by messages in a step (none in shared memory), "states" what the ledger
has of parameters, gradients and optimizer state on a rank, "activations" what it has of those.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.training import turns
from benchmarks.training.turns import ratios  # noqa: F401 - of the study
from hpcdist.comm.start import Session

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-tensor", 2, "training/2026-11-21-tensor.h5"
SMALL = {"steps": 6}

# name -> (algorithm, whether over the tensor axis, whether activations are cut by tokens); the first is the measure
CONTENDERS: Final[Mapping[str, tuple[str, bool, bool]]] = {
    "data": ("node_shared", False, False),
    "tensor": ("node_shared", True, False),
    "tensor, by rows": ("node_shared", True, True),
    "tensor, ring": ("ring", True, False),
    "tensor, by rows, ring": ("ring", True, True),
}
OPTIONS: Final = {"layers": 4, "hidden": 256, "heads": 8, "context": 256, "samples": 4, "steps": 20}


def keys_of(name: str, ranks: int) -> dict[str, Any]:
    """Return the keys of a contender."""
    algorithm, over_tensor, by_rows = CONTENDERS[name]
    degree = {"parallel.tensor": ranks} if over_tensor else {}
    return {**degree, "parallel.sequence_parallel": by_rows, "communication.algorithm": algorithm}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Return times and bytes of all contenders. Collective."""
    contenders = {name: keys_of(name, session.comm.size) for name in CONTENDERS}
    return turns.measured(chosen, session, contenders)


def lines(results: Results) -> Sequence[str]:
    return harness.time_table(turns.slowest(results), results.names(), more=turns.megabytes(results, *turns.SIZES))
