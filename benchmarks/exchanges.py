"""Steps of every lock-step exchange on one model, alternating in one process: what an architecture costs, and saves.

    mpirun -n 2 python benchmarks/exchanges.py
    mpirun -n 2 python benchmarks/exchanges.py --hidden 128 --steps 50 --output exchanges.h5 --anonymous

Every contender trains a model of its own on the same samples, one step each in turn, from a barrier on; a step takes as
long as its slowest rank. "x allreduce" is the median, over the steps, of its time over that of the first contender in
the same turn: below 1 is faster. Those that are the same run have the same weights afterwards, to rounding, or the
benchmark ends with an error. "memory" is what the ledger has of parameters, gradients and optimizer state on a rank.
"""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist import models
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.store import FlatStore
from hpcdist.bench import output_file
from hpcdist.collectives.node import shared_memory
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies import build as parameter_server
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.build import build_executor, operations
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.strategies.parameter_server.lockstep import LockStepExchange
from hpcdist.strategies.zero.config import ZeroConfig
from hpcdist.strategies.zero.exchange import ZeroExchange

WARM_UP: Final = 3
SAME: Final = 1e-4  # norm of the difference of weights over their norm
CATEGORIES: Final = ("parameters", "gradients", "optimizer")


def zero(context: RankContext, stage: int, **config: Any) -> Exchange:
    """Return ZeRO with these keys of its section. Collective."""
    return ZeroExchange(context, stage, ZeroConfig(**config))


def served(context: RankContext, transport: str) -> Exchange:
    """Return a parameter server on every rank. Collective."""
    return parameter_server.server_exchange(context, ParameterServerConfig(placement="colocated", transport=transport))


# name -> (algorithm, exchange of a context); the first is what the others are compared with
CONTENDERS: Final[Mapping[str, tuple[str, Any]]] = {
    "allreduce": ("node_shared", AllreduceExchange),
    "allreduce, native": ("native", AllreduceExchange),
    "zero1": ("node_shared", lambda context: zero(context, 1)),
    "zero2": ("node_shared", lambda context: zero(context, 2)),
    "zero3": ("node_shared", lambda context: zero(context, 3)),
    "zero1, native": ("native", lambda context: zero(context, 1)),
    "zero3, native": ("native", lambda context: zero(context, 3)),
    "shared parameters": ("node_shared", lambda context: zero(context, 1, shared_parameters=True)),
    "shared parameters, zero2": ("node_shared", lambda context: zero(context, 2, shared_parameters=True)),
    "parameter server, messages": ("native", lambda context: served(context, "messages")),
    "parameter server, shared": ("native", lambda context: served(context, "shared")),
    "parameter server, rma": ("native", lambda context: served(context, "rma")),
}


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4, help="of each rank in a step (default 4)")
    parser.add_argument("--steps", type=int, default=20, help="of each contender (default 20)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these beside the first contender")
    parser.add_argument("--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    options = parser.parse_args()
    for name in options.only:
        if name not in CONTENDERS:
            parser.error(f"--only {name!r}: choose among {', '.join(map(repr, CONTENDERS))}")
    return options


class Contender:
    """A model in training."""

    def __init__(self, comm: Communicator, name: str, options: argparse.Namespace) -> None:
        algorithm, build = CONTENDERS[name]
        self.comm, self.number, self.ledger = comm, 0, Ledger()
        config = ModelConfig(layers=options.layers, hidden=options.hidden, heads=max(1, options.hidden // 64))
        self.model = models.build(config, "float32", context=options.context)
        context = RankContext(
            world=comm,
            data=comm,
            pipeline=solo(),
            model=self.model,
            optimizer=OptimizerConfig(learning_rate=1e-4),
            total_steps=options.steps + WARM_UP,
            algorithm=algorithm,
            ledger=self.ledger,
        )
        self.exchange: Exchange = build(context)
        self.executor = build_executor(context, self.exchange)
        self.operations = operations(context, self.exchange, self.executor.copies, ParallelConfig())
        initial = FlatStore(self.model.layout, self.model.dtype)
        self.model.initialise(initial, seed=1)
        self.exchange.load_initial(initial)

    def step(self, samples: np.ndarray) -> list[float]:
        """Make a step; return its time and that of its communication. Collective."""
        self.number += 1
        batch = [(samples[:, :-1], samples[:, 1:])]
        self.comm.barrier()
        begin = time.perf_counter()
        found = self.executor.run(self.operations, batch, len(samples) * self.comm.size, self.number, np.zeros(1))
        return [time.perf_counter() - begin, found.seconds["communication_s"]]

    def memory_bytes(self) -> int:
        """Return what this rank keeps of model states (local)."""
        return sum(self.ledger.peak[category] for category in CATEGORIES)


def weights(run: Contender) -> np.ndarray:
    """Return all weights, brought together from the ranks' pieces. Collective."""
    own = [
        (piece.tensor, piece.flat.start, np.array(piece.array))
        for piece in run.exchange.pieces()
        if piece.kind == "parameters"
    ]
    found = sorted((each for rank in run.comm.allgather_object(own) for each in rank), key=lambda each: each[:2])
    return np.concatenate([values.ravel() for _, _, values in found])


def measure(comm: Communicator, runs: dict[str, Contender], options: argparse.Namespace) -> np.ndarray:
    """Return times of all ranks, (contenders, 2, ranks, steps): whole step and communication. Collective."""
    draw, order = np.random.default_rng(comm.rank), np.random.default_rng(0)
    rows = []
    for _ in range(options.steps + WARM_UP):
        samples = draw.integers(0, 256, (options.samples, options.context + 1)).astype(np.uint8)
        row = {name: runs[name].step(samples) for name in order.permutation(list(runs)).tolist()}
        rows.append([row[name] for name in runs])
    own = np.array(rows[WARM_UP:])  # (steps, contenders, 2)
    return np.array(comm.allgather_object(own)).transpose(2, 3, 0, 1)


def main() -> None:
    """Measure, print on rank 0, write. Collective over the world."""
    options = arguments()
    session = start.start()
    output_file.exit_unless_writable(session, options.output)
    comm = session.comm
    names = [name for number, name in enumerate(CONTENDERS) if not options.only or name in options.only or not number]
    if not shared_memory.is_available(comm):
        raise SystemExit("the ranks cannot share memory: they must be on one node")
    runs = {name: Contender(comm, name, options) for name in names}
    times = measure(comm, runs, options)
    memory = comm.allgather_object([run.memory_bytes() for run in runs.values()])
    expected = weights(runs[names[0]])
    for name, run in runs.items():
        difference = np.linalg.norm(weights(run) - expected) / np.linalg.norm(expected)
        if difference > SAME:
            raise SystemExit(f"{name}: weights differ by {difference:.1e} of their norm from those of {names[0]}")
    if comm.rank == 0:
        print(f"{comm.size} ranks, {runs[names[0]].model.layout.parameters:,} parameters, {options.steps} steps each")
        print("\n".join(report(names, times, np.max(memory, axis=0))), flush=True)
    if options.output is not None and comm.rank == 0:
        write(options.output, names, times, np.array(memory), session, options)
    for run in runs.values():
        if isinstance(run.exchange, LockStepExchange):
            run.exchange.close()  # frees its windows
    session.leave(0)


def report(names: list[str], times: np.ndarray, memory: np.ndarray) -> list[str]:
    """Return the lines of the table."""
    steps, waits = times[:, 0].max(axis=1), times[:, 1].mean(axis=1)  # (contenders, steps)
    lines = [f"  {'':<28} {'ms a step':>10} {'(quartiles)':>17}  x allreduce  communication ms  memory MB"]
    for index, name in enumerate(names):
        low, median, high = np.percentile(steps[index] * 1e3, [25, 50, 75])
        ratio = np.median(steps[index] / steps[0])
        quartiles = f"({low:.1f} - {high:.1f})"
        lines.append(
            f"  {name:<28} {median:10.1f} {quartiles:>17} {ratio:12.3f} {np.median(waits[index]) * 1e3:17.1f}"
            f" {memory[index] / 1e6:10.1f}"
        )
    return lines


def write(
    path: Path,
    names: list[str],
    times: np.ndarray,
    memory: np.ndarray,
    session: start.Session,
    options: argparse.Namespace,
) -> None:
    """Write ``times`` (contenders, 2, ranks, steps) and ``memory`` (ranks, contenders) with the provenance."""
    from hpcdist.hdf5 import files
    from hpcdist.telemetry.provenance import provenance

    card = provenance(mpi_library=session.library, hosts=[session.place.host], anonymous=options.anonymous)
    shape = {name: getattr(options, name) for name in ("layers", "hidden", "context", "samples")}
    files.write_contiguous(
        path,
        {"time_s": times, "memory_bytes": memory},
        {**card, **shape, "ranks": session.comm.size, "contenders": "; ".join(names)},
        {
            "time_s": {"dims": "contenders, (step, communication), ranks, steps"},
            "memory_bytes": {"dims": "ranks, contenders"},
        },
        schema="hpcdist-benchmark-exchanges",
        version=1,
    )
    print(f"raw times are in {path}")


if __name__ == "__main__":
    main()
