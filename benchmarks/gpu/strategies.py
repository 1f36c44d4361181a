"""Losses of every strategy on a GPU shared by its ranks, compared with the losses of the same ranks on CPUs.

    python -m benchmarks gpu.strategies
    python -m benchmarks gpu.strategies --ranks 4 --only zero3 1f1b tensor -o gpu_strategies.h5 --anonymous

Each layout trains the same recipe twice in one job, on CPUs and on GPUs, from the same weights and on the same batches.
"apart" is the largest relative difference of a step's losses; the goal is at most 1e-4 in float32. Results are printed
layout by layout, with the reason if a layout is refused. Exit code 1 if a layout misses the goal, 69 without a GPU.
"""

import argparse
from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.gpu.card import card
from benchmarks.harness import Results
from benchmarks.training.turns import Training
from hpcdist.comm.start import Session
from hpcdist.errors import ConfigurationError, MissingCapabilityError
from hpcdist.reporting.table import aligned

SCHEMA, RANKS, ON = "hpcdist.benchmark.gpu_strategies", 2, "gpu"

APART: Final = 1e-4
ALL: Final = "RANKS"  # placeholder for the number of ranks
MODEL: Final = ("model.layers=4", "model.hidden=128", "model.heads=4", "data.context=64", "run.global_batch=16")
_PIPE: Final = (f"parallel.pipeline={ALL}", "parallel.microbatches=8")
_SERVERS: Final = ("parallel.strategy=parameter_server", "parameter_server.placement=colocated")
LAYOUTS: Final[dict[str, tuple[str, ...]]] = {
    "allreduce": (),
    "ring": ("communication.algorithm=ring",),
    "node_shared": ("communication.algorithm=node_shared",),
    "zero1": ("parallel.strategy=zero1",),
    "zero2": ("parallel.strategy=zero2",),
    "zero3": ("parallel.strategy=zero3",),
    "servers": _SERVERS,
    "gossip": ("parallel.strategy=gossip",),
    "local_sgd": ("parallel.strategy=local_sgd",),
    "gpipe": (*_PIPE, "parallel.schedule=gpipe"),
    "1f1b": (*_PIPE, "parallel.schedule=1f1b"),
    "zb-h1": (*_PIPE, "parallel.schedule=zb-h1"),
    "tensor": (f"parallel.tensor={ALL}",),
    "tensor-by-rows": (f"parallel.tensor={ALL}", "parallel.sequence_parallel=true"),
    "context": (f"parallel.context={ALL}",),
    "experts": (f"parallel.expert={ALL}", "model.experts=4"),
    "int8": ("communication.compression=int8",),
    "topk": ("communication.compression=topk", "compression.density=0.05"),
    "powersgd": ("communication.compression=powersgd",),
}
OPTIONS: Final = {"steps": 20, "only": tuple(LAYOUTS)}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="recipe keys")


def losses(session: Session, keys: Sequence[str], steps: int) -> list[float]:
    training = Training(session, keys, steps)
    values = [training.next_step()().loss for _ in range(steps)]
    training.close()
    return values


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    harness.at_least(chosen, steps=1)
    comm, rows, refused = session.comm, dict[str, list[list[float]]](), dict[str, str]()
    for name in chosen.only:
        layout_keys = [key.replace(ALL, str(comm.size)) for key in LAYOUTS[name]]
        keys = [*MODEL, *layout_keys, *chosen.set]
        try:
            both = [losses(session, [*keys, f"run.device={on}"], chosen.steps) for on in ("cpu", "gpu")]
        except (ConfigurationError, MissingCapabilityError) as error:  # raised on every rank, before training
            refused[name] = str(error)
            output = f"refused, {error}"
        else:
            rows[name] = both
            output = f"{apart(np.array(both)):.2e}"
        if comm.rank == 0:
            print(f"{name}: {output}", flush=True)
    about = card(comm) | {"layouts": ";".join(rows), "steps": chosen.steps}
    about |= {f"refused: {name}": reason for name, reason in refused.items()}
    dims = "layouts, (CPU, GPU), steps"
    return Results({"loss": np.array(list(rows.values()))}, {"loss": dims}, about)


def apart(both: np.ndarray) -> float:
    """Return the largest relative difference of the losses ``both`` ((CPU, GPU), steps), or infinity if it is NaN."""
    difference = float(np.max(np.abs(both[1] - both[0]) / np.abs(both[0])))
    return difference if np.isfinite(difference) else np.inf


def lines(results: Results) -> Sequence[str]:
    rows = [["", "first loss", "last loss", "apart"]]
    for name, both in zip(results.names("layouts"), results.arrays["loss"], strict=True):
        rows.append([name, f"{both[1][0]:.4f}", f"{both[1][-1]:.4f}", f"{apart(both):.2e}"])
    return aligned(rows)


def ratios(results: Results) -> harness.Ratios:
    both = zip(results.names("layouts"), results.arrays["loss"], strict=True)
    return {name: np.array([apart(pair) / APART]) for name, pair in both}


def failures(results: Results) -> Sequence[str]:
    return [
        f"{name} is {ratio[0] * APART:.1e} apart, more than {APART:g}"
        for name, ratio in ratios(results).items()
        if ratio[0] > 1
    ]
