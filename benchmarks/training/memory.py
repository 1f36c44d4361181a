"""Memory of the model states of each strategy on 1 to 4 ranks, by the ledger and by the kernel.

    python -m benchmarks memory -o memory.h5 --anonymous
    python -m benchmarks memory --ranks 1 2 --strategy zero2 zero3

Each case is a job that trains 50 million float32 parameters with AdamW for two steps. "states" is the ledger's bytes
per parameter of parameters, gradients and optimizer state after a step, on the rank with the most. On N ranks the
expected numbers are 16, 8 + 8/N, 4 + 12/N and 16/N (Rajbhandari et al., arXiv:1910.02054, with K = 12 and no 16-bit
copies). The excess is buffers of whole layers; "layers" is their number.

"PSS" is the kernel's count for all ranks, minus the same job with a tiny model. "ledger" is the bytes of all ranks and
categories at the same time. Both count shared memory once.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.training.turns import STATES, Keys, Training
from hpcdist.arrays.backend import CATEGORIES
from hpcdist.comm import start
from hpcdist.comm.start import Session
from hpcdist.reporting.table import aligned
from hpcdist.telemetry.provenance import pss_bytes

SCHEMA, COMMITTED = "hpcdist.benchmark.memory", "training/2026-11-21-memory.h5"
SMALL, WORSE = {"ranks": [2]}, 1.01

CASES: Final[Mapping[str, Keys]] = {
    **{name: {"parallel.strategy": name} for name in ("allreduce", "zero1", "zero2", "zero3")},
    "shared parameters": {
        "parallel.strategy": "zero1",
        "zero.shared_parameters": True,
        "communication.algorithm": "node_shared",
    },
}
EXPECTED: Final[Mapping[str, Callable[[int], float]]] = {
    "allreduce": lambda ranks: 16.0,
    "zero1": lambda ranks: 8 + 8 / ranks,
    "zero2": lambda ranks: 4 + 12 / ranks,
    "zero3": lambda ranks: 16 / ranks,
}
COMMON: Final = {"data.context": 8, "run.global_batch": 4, "communication.algorithm": "ring", "optimizer.name": "adamw"}
LIMIT_S: Final = 600.0
OPTIONS: Final = {"ranks": [1, 2, 3, 4], "layers": 64, "hidden": 256, "strategy": tuple(CASES)}


def work(name: str, layers: int, hidden: int) -> None:
    """Train a tiny model, then the large one, and print the memory of both on rank 0. Collective over the world."""
    session = start.start()
    comm = session.comm
    _trained(session, name, 1, 32)
    gc.collect()
    comm.barrier()
    before = comm.allgather_object(pss_bytes())
    trainer = _trained(session, name, layers, hidden).trainer
    gc.collect()
    comm.barrier()  # so that no rank allocates, which would change shares of common pages, while others measure
    held = comm.allgather_object((pss_bytes(), trainer.ledger.current))
    if comm.rank == 0:
        layout = trainer.model.layout
        longest = max(unit.size for unit in layout.units.values()) * trainer.model.dtype.itemsize
        case = {"parameters": layout.parameters, "longest_layer_bytes": longest, "pss_before": before}
        print(json.dumps(case | {"pss": [pss for pss, _ in held], "ledger": [now for _, now in held]}), flush=True)
    comm.barrier()
    session.leave(0)


def _trained(session: Session, name: str, layers: int, hidden: int) -> Training:
    shape = {"model.layers": layers, "model.hidden": hidden, "model.heads": max(1, hidden // 64)}
    training = Training(session, {**COMMON, **CASES[name], **shape}, 2)
    for _ in range(2):
        training.next_step()()
    training.end_reading()
    return training


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    shape = (len(chosen.strategy), len(chosen.ranks), max(chosen.ranks))
    ledger, pss = np.full((*shape, len(CATEGORIES)), np.nan), np.full((*shape, 2), np.nan)
    case: dict[str, Any] = {}
    for position in np.ndindex(*shape[:2]):
        name, ranks = chosen.strategy[position[0]], chosen.ranks[position[1]]
        program = ["-m", __spec__.name, name, str(chosen.layers), str(chosen.hidden)]
        done = harness.launch(ranks, program, limit_s=LIMIT_S, capture=True)
        if done.returncode:
            sys.exit(f"{name} on {ranks} ranks exited with code {done.returncode}:\n{done.stderr}")
        case = json.loads(done.stdout.strip().splitlines()[-1])
        for rank, held in enumerate(case["ledger"]):
            ledger[(*position, rank)] = [held[kind] for kind in CATEGORIES]
            pss[(*position, rank)] = case["pss_before"][rank], case["pss"][rank]
    about = {"strategies": ",".join(chosen.strategy), "ranks": chosen.ranks}
    about |= {name: case[name] for name in ("parameters", "longest_layer_bytes")}
    dims = {
        "ledger_bytes": f"strategies, ranks, rank, ({', '.join(CATEGORIES)})",
        "pss_bytes": "strategies, ranks, rank, (with the tiny model, with the large one)",
    }
    return Results({"ledger_bytes": ledger, "pss_bytes": pss}, dims, about)


def states(results: Results) -> np.ndarray:
    """Return the bytes of states per parameter (strategies, ranks), on the rank with the most."""
    kinds = [CATEGORIES.index(kind) for kind in STATES]
    held = results.arrays["ledger_bytes"][..., kinds].sum(axis=-1)
    return np.nanmax(held, axis=2) / results.attributes["parameters"]


def ratios(results: Results) -> harness.Ratios:
    shares = states(results) / EXPECTED["allreduce"](1)
    worlds = list(results.attributes["ranks"])
    names = results.names("strategies")
    return {
        f"{name} on {ranks}": shares[row, column : column + 1]
        for row, name in enumerate(names)
        for column, ranks in enumerate(worlds)
    }


def lines(results: Results) -> Sequence[str]:
    rows = [["bytes a parameter", "N", "states", "expected", "above", "layers", "ledger MiB", "PSS MiB", "differ"]]
    about, held = results.attributes, states(results)
    totals = np.nansum(results.arrays["ledger_bytes"], axis=(2, 3)) / 2**20
    pss = np.nansum(np.diff(results.arrays["pss_bytes"])[..., 0], axis=2) / 2**20
    for row, column in np.ndindex(*held.shape):
        name, ranks = results.names("strategies")[row], int(about["ranks"][column])
        cells = ["-", "-", "-"]
        if name in EXPECTED:
            expected = EXPECTED[name](ranks)
            layers = (held[row, column] - expected) * about["parameters"] / about["longest_layer_bytes"]
            cells = [f"{expected:.3f}", f"{held[row, column] / expected - 1:.1%}", f"{layers:.2f}"]
        both = totals[row, column], pss[row, column]
        sizes = [*(f"{value:,.1f}" for value in both), f"{both[1] / both[0] - 1:.1%}"]
        rows.append([name, f"{ranks}", f"{held[row, column]:.3f}", *cells, *sizes])
    return aligned(rows)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
