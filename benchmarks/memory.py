"""Memory of the model states, by the ledger and by the kernel, of each strategy on 1 to 4 ranks.

    python benchmarks/memory.py -o memory.h5 --anonymous
    python benchmarks/memory.py --ranks 1 2 --strategy zero2 --strategy zero3

Every case is a job of its own, of a model of 50 million parameters in float32 with AdamW: two steps of a tiny batch.
"states" are the bytes a parameter that the ledger holds behind a step as parameters, gradients and optimizer state, on
the rank that holds most. They are to be 16, 8 + 8/N, 4 + 12/N and 16/N bytes (Rajbhandari et al., arXiv:1910.02054,
K = 12 without copies in 16 bits: 4 of parameters, 4 of gradients, 8 of moments). What is above that is whole layers,
which come and go in memory that stays taken; "layers" tells how many, and they are the named buffers.

"PSS" is what the kernel counts of all ranks together, above what it counts of the same job with a tiny model in the
place of the large one: interpreter, libraries, kernels and connections. "ledger" are the bytes of all ranks and all
categories at the same moment. Memory that ranks share is there once in both.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

STATES: Final = ("parameters", "gradients", "optimizer")
CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "allreduce": {"parallel.strategy": "allreduce"},
    "zero1": {"parallel.strategy": "zero1"},
    "zero2": {"parallel.strategy": "zero2"},
    "zero3": {"parallel.strategy": "zero3"},
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
COMMON: Final = {
    "data.context": 8,
    "run.steps": 2,
    "run.global_batch": 4,
    "communication.algorithm": "ring",
    "optimizer.name": "adamw",
}
LIMIT_S: Final = 600.0


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--strategy", action="append", choices=list(CASES), help="may be repeated; default: all")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    parser.add_argument("--worker", choices=list(CASES), help=argparse.SUPPRESS)
    return parser.parse_args()


def work(name: str, layers: int, hidden: int) -> None:
    """Train the tiny model, then the large one, and print what both hold on rank 0. Collective over the world."""
    from hpcdist.comm import start
    from hpcdist.telemetry.provenance import pss_bytes

    session = start.start()
    comm = session.comm
    tiny = trained(session, name, 1, 32)
    del tiny
    gc.collect()
    comm.barrier()
    before = comm.allgather_object(pss_bytes())
    trainer = trained(session, name, layers, hidden)
    gc.collect()
    comm.barrier()  # all hold what they hold: shares of common pages do not change while somebody looks
    found = comm.allgather_object((pss_bytes(), trainer.ledger.current, trainer.ledger.peak_total))
    if comm.rank == 0:
        layout = trainer.model.layout
        longest = max(part.size for part in layout.units.values()) * trainer.model.dtype.itemsize
        told = {"parameters": layout.parameters, "longest_layer_bytes": longest, "pss_before": before}
        told |= {"pss": [pss for pss, _, _ in found], "ledger": [current for _, current, _ in found]}
        print(json.dumps(told | {"peak": [peak for _, _, peak in found]}), flush=True)
    comm.barrier()
    session.leave(0)


def trained(session: Any, name: str, layers: int, hidden: int) -> Any:
    """Return the trainer of a model after its two steps. Collective over the world."""
    from hpcdist.training.build.assemble import assemble
    from hpcdist.training.recipe import recipe as recipes

    shape = {"model.layers": layers, "model.hidden": hidden, "model.heads": max(1, hidden // 64)}
    keys = {**COMMON, **CASES[name], **shape}
    texts = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()]
    trainer = assemble(session, recipes.load(None, texts, {}).recipe)
    with trainer.batches(2) as batches:
        for step, batch in enumerate(batches, start=1):
            samples = trainer.recipe.run.global_batch
            trainer.executor.run(trainer.operations, trainer.cut(trainer.place(batch)), samples, step, np.zeros(2))
    return trainer


def measured(name: str, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a job of ``ranks`` ranks tells of the strategy ``name``."""
    from hpcdist.comm.launch import mpirun
    from hpcdist.comm.launch.environment import python_path_variables

    launcher = mpirun.find()
    settings = {**mpirun.settings(launcher), **python_path_variables()}
    program = [sys.executable, "-P", __file__, "--worker", name]
    program += ["--layers", str(options.layers), "--hidden", str(options.hidden)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            mpirun.command(launcher, ranks, program, settings),
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=True,
            cwd=folder,
        )
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def figures(name: str, ranks: int, told: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a case: bytes a parameter, and of all ranks together."""
    states = max(sum(held[kind] for kind in STATES) for held in told["ledger"])
    expected = EXPECTED[name](ranks) if name in EXPECTED else float("nan")
    return {
        "states": states / told["parameters"],
        "expected": expected,
        "layers": (states - expected * told["parameters"]) / told["longest_layer_bytes"],
        "ledger_bytes": float(sum(sum(held.values()) for held in told["ledger"])),
        "pss_bytes": sum(told["pss"]) - sum(told["pss_before"]),
        "pss_before_bytes": sum(told["pss_before"]),
    }


def line(name: str, ranks: int, found: Mapping[str, float]) -> str:
    """Return the row of a case."""
    ledger, pss = found["ledger_bytes"] / 2**20, found["pss_bytes"] / 2**20
    cells = f"{found['states']:8.3f}{found['expected']:10.3f}{found['states'] / found['expected'] - 1:9.1%}"
    if np.isnan(found["expected"]):
        cells = f"{found['states']:8.3f}{'-':>10}{'-':>9}"
    layers = "-" if np.isnan(found["layers"]) else f"{found['layers']:.2f}"
    before = found["pss_before_bytes"] / 2**20
    return f"{name:<20}{ranks:>3}{cells}{layers:>8}{ledger:12,.1f}{pss:12,.1f}{pss / ledger - 1:8.1%}{before:12,.1f}"


def main() -> None:
    """Measure, print and write."""
    options = arguments()
    if options.worker is not None:
        work(options.worker, options.layers, options.hidden)
        return
    from hpcdist.hdf5 import files

    if options.output is not None:
        files.check_place(options.output)
    names = options.strategy or list(CASES)
    head = f"{'states':>8}{'expected':>10}{'above':>9}{'layers':>8}{'ledger MiB':>12}{'PSS MiB':>12}{'differ':>8}"
    print(f"{'bytes a parameter':<20}{'N':>3}{head}{'before MiB':>12}", flush=True)
    told: dict[tuple[str, int], dict[str, Any]] = {}
    for ranks in options.ranks:
        for name in names:
            told[name, ranks] = measured(name, ranks, options)
            print(line(name, ranks, figures(name, ranks, told[name, ranks])), flush=True)
    if options.output is not None:
        write(options, names, told)


def write(options: argparse.Namespace, names: list[str], told: Mapping[tuple[str, int], Mapping[str, Any]]) -> None:
    """Write what every rank told, NaN where there was no such rank."""
    from hpcdist.arrays.memory import CATEGORIES
    from hpcdist.hdf5 import files
    from hpcdist.telemetry.provenance import provenance

    shape = (len(names), len(options.ranks), max(options.ranks))
    ledger, pss = np.full((*shape, len(CATEGORIES)), np.nan), np.full((*shape, 2), np.nan)
    for place in np.ndindex(*shape[:2]):
        case = told[names[place[0]], options.ranks[place[1]]]
        for rank, held in enumerate(case["ledger"]):
            ledger[(*place, rank)] = [held[kind] for kind in CATEGORIES]
            pss[(*place, rank)] = case["pss_before"][rank], case["pss"][rank]
    any_case = next(iter(told.values()))
    attributes = {
        **provenance(anonymous=options.anonymous),
        "strategies": ",".join(names),
        "ranks": options.ranks,
        "parameters": any_case["parameters"],
        "longest_layer_bytes": any_case["longest_layer_bytes"],
    }
    dims = {"dims": "strategies, ranks, rank", "units": "By"}
    files.write_contiguous(
        options.output,
        {"ledger_bytes": ledger, "pss_bytes": pss},
        attributes,
        {
            "ledger_bytes": {**dims, "last": ",".join(CATEGORIES)},
            "pss_bytes": {**dims, "last": "with the tiny model, with the large one"},
        },
        schema="hpcdist.benchmark.memory",
        version=1,
    )
    print(f"what every rank told is in {options.output}")


if __name__ == "__main__":
    main()
