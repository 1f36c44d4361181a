"""Losses of every strategy on a GPU that its ranks share, beside those of the same ranks on processors.

    python -m benchmarks gpu.strategies
    python -m benchmarks gpu.strategies --ranks 4 --only zero3 1f1b tensor -o gpu_strategies.h5 --anonymous

Each layout trains the same recipe twice in one job, on CPUs and on GPUs, for as many steps from the same weights on the
same batches. "apart" is the largest difference of the losses of a step over that on the CPU; the goal is at most 1e-4
in float32. What a layout is refused for is told. Each is printed as it is done, so that an error names the one behind.
Exit code 1 where one is farther apart, 69 without a GPU.
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
ALL: Final = "RANKS"  # stands for their number
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
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the recipe")


def losses(session: Session, keys: Sequence[str], steps: int) -> list[float]:
    """Return the losses of a training. Collective."""
    training = Training(session, keys, steps)
    values = [training.next_step()().loss for _ in range(steps)]
    training.close()
    return values


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Return the losses of all layouts. Collective."""
    harness.at_least(chosen, steps=1)
    comm, rows, refused = session.comm, dict[str, list[list[float]]](), dict[str, str]()
    for name in chosen.only:
        own = [key.replace(ALL, str(comm.size)) for key in LAYOUTS[name]]
        keys = [*MODEL, *own, *chosen.set]
        try:
            both = [losses(session, [*keys, f"run.device={on}"], chosen.steps) for on in ("cpu", "gpu")]
        except (ConfigurationError, MissingCapabilityError) as error:  # of every rank alike, before it trains
            refused[name] = str(error)
            told = f"refused, {error}"
        else:
            rows[name] = both
            told = f"{apart(np.array(both)):.2e}"
        if comm.rank == 0:
            print(f"{name}: {told}", flush=True)
    about = card(comm) | {"layouts": ";".join(rows), "steps": chosen.steps}
    about |= {f"refused: {name}": reason for name, reason in refused.items()}
    dims = "layouts, (CPU, GPU), steps"
    return Results({"loss": np.array(list(rows.values()))}, {"loss": dims}, about)


def apart(both: np.ndarray) -> float:
    """Return the largest difference of ``both``, (CPU, GPU), steps, over the first; infinite where one is no number."""
    difference = float(np.max(np.abs(both[1] - both[0]) / np.abs(both[0])))
    return difference if np.isfinite(difference) else np.inf


def lines(results: Results) -> Sequence[str]:
    rows = [["", "first loss", "last loss", "apart"]]
    for name, both in zip(results.names("layouts"), results.arrays["loss"], strict=True):
        rows.append([name, f"{both[1][0]:.4f}", f"{both[1][-1]:.4f}", f"{apart(both):.2e}"])
    return aligned(rows)


def ratios(results: Results) -> harness.Ratios:
    """Return how far each layout is apart, over the goal."""
    both = zip(results.names("layouts"), results.arrays["loss"], strict=True)
    return {name: np.array([apart(own) / APART]) for name, own in both}


def failures(results: Results) -> Sequence[str]:
    return [
        f"{name} is {own[0] * APART:.1e} apart, more than {APART:g}"
        for name, own in ratios(results).items()
        if own[0] > 1
    ]
