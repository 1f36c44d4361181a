"""Steps of every synchronous exchange strategy on one model, alternating in one process: time and memory.

    python -m benchmarks exchanges
    python -m benchmarks exchanges --hidden 128 --steps 50 --output exchanges.h5 --anonymous

"x allreduce" is the step time relative to the first contender in the same round: below 1 is faster. "memory" is a
rank's ledger bytes of parameters, gradients and optimizer state.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.training import turns
from benchmarks.training.turns import ratios  # noqa: F401 - of the study
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.start import Session

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-exchanges", 2, "training/2026-11-21-exchanges-openmpi.h5"
SMALL = {"steps": 8, "only": ["zero1", "zero3", "shared parameters"]}


def _keys(strategy: str, algorithm: str = "node_shared", **more: Any) -> dict[str, Any]:
    keys = {key.replace("__", "."): value for key, value in more.items()}
    return {"parallel.strategy": strategy, "communication.algorithm": algorithm, **keys}


def _servers(transport: str) -> dict[str, Any]:
    keys = {"parameter_server__placement": "colocated", "parameter_server__transport": transport}
    return _keys("parameter_server", "native", **keys)


CONTENDERS: Final[Mapping[str, turns.Keys]] = {  # the first is the base
    "allreduce": _keys("allreduce"),
    "allreduce, native": _keys("allreduce", "native"),
    "zero1": _keys("zero1"),
    "zero2": _keys("zero2"),
    "zero3": _keys("zero3"),
    "zero1, native": _keys("zero1", "native"),
    "zero3, native": _keys("zero3", "native"),
    "shared parameters": _keys("zero1", zero__shared_parameters=True),
    "shared parameters, zero2": _keys("zero2", zero__shared_parameters=True),
    "parameter server, messages": _servers("messages"),
    "parameter server, shared": _servers("shared"),
    "parameter server, rma": _servers("rma"),
}
OPTIONS: Final = {"layers": 4, "hidden": 256, "context": 256, "samples": 4, "steps": 20, "only": tuple(CONTENDERS)}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    comm, first = session.comm, next(iter(CONTENDERS))
    if not shared_memory.is_available(comm):
        raise SystemExit("the ranks cannot share memory; start all ranks on one node")
    contenders = {name: keys for name, keys in CONTENDERS.items() if name in (first, *chosen.only)}
    common = turns.gpt_keys(chosen, **{"run.global_batch": chosen.samples * comm.size})
    trainings, times = turns.measure(session, contenders, common, chosen.steps)
    turns.check_weights(comm, trainings)
    held = [sum(run.trainer.ledger.peak[kind] for kind in turns.STATES) for run in trainings.values()]
    memory = np.array(comm.allgather_object(held))
    for training in trainings.values():
        training.close()
    about = {"ranks": comm.size, "contenders": "; ".join(trainings)}
    dims = {"time_s": "contenders, (step, communication), ranks, steps", "memory_bytes": "ranks, contenders"}
    return Results({"time_s": times[:, :2], "memory_bytes": memory}, dims, about)


def lines(results: Results) -> Sequence[str]:
    waits_s = np.median(results.arrays["time_s"][:, 1].mean(axis=1), axis=1)
    more = {
        "communication ms": [f"{1e3 * value:.1f}" for value in waits_s],
        "memory MB": [f"{value / 1e6:.1f}" for value in results.arrays["memory_bytes"].max(axis=0)],
    }
    return harness.time_table(turns.slowest(results), results.names(), more=more)
