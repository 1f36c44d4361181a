"""Steps of a model over the tensor axis and the data axis, alternating in one process: time, traffic and memory.

    python -m benchmarks tensor
    python -m benchmarks tensor --hidden 512 --layers 3 --steps 12 --output tensor.h5 --anonymous

All contenders train on the same batch. "x data" is the step time relative to the data axis in the same round: below 1
is faster. "sent" is the bytes of a rank's messages in a step (none in shared memory). "states" (parameters, gradients
and optimizer state) and "activations" are a rank's bytes in the ledger.
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

# name -> (algorithm, uses the tensor axis, divides activations by tokens); the first is the base
CONTENDERS: Final[Mapping[str, tuple[str, bool, bool]]] = {
    "data": ("node_shared", False, False),
    "tensor": ("node_shared", True, False),
    "tensor, by rows": ("node_shared", True, True),
    "tensor, ring": ("ring", True, False),
    "tensor, by rows, ring": ("ring", True, True),
}
OPTIONS: Final = {"layers": 4, "hidden": 256, "heads": 8, "context": 256, "samples": 4, "steps": 20}


def keys_of(name: str, ranks: int) -> dict[str, Any]:
    algorithm, over_tensor, by_rows = CONTENDERS[name]
    degree = {"parallel.tensor": ranks} if over_tensor else {}
    return {**degree, "parallel.sequence_parallel": by_rows, "communication.algorithm": algorithm}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    contenders = {name: keys_of(name, session.comm.size) for name in CONTENDERS}
    return turns.measured(chosen, session, contenders)


def lines(results: Results) -> Sequence[str]:
    return harness.time_table(turns.slowest(results), results.names(), more=turns.megabytes(results, *turns.SIZES))
