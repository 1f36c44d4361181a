"""Steps of one model over the tensor axis and the data axis, alternating in one process: what a cut costs, and saves.

    mpirun -n 2 python benchmarks/tensor.py
    mpirun -n 2 python benchmarks/tensor.py --hidden 512 --context 256 --output tensor.h5 --anonymous

Every contender trains a model of its own on the same batch, one step each in turn, from a barrier on; a step takes as
long as its slowest rank. "x data" is the median, over the steps, of its time over that of the data axis in the same
turn: below 1 is faster. All are the same run: their weights agree afterwards, or the benchmark ends with an error.
"tensor MB" is what a step brings a rank to send over the tensor axis by messages (none in shared memory), "states" what
the ledger has of parameters, gradients and optimizer state on a rank, "activations" what it has of those.
"""

import argparse
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist import models
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.piece import runs as runs_of
from hpcdist.arrays.store import FlatStore
from hpcdist.bench import output_file
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.record.timing import MessageTraffic
from hpcdist.comm.threads.communicator import solo
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.build import build_executor, operations
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.tensor.model import cut_model
from hpcdist.training.recipe.config import DataConfig
from hpcdist.training.recipe.recipe import Recipe

WARM_UP: Final = 3
SAME: Final = 1e-4  # norm of the difference of weights over their norm
STATES: Final = ("parameters", "gradients", "optimizer")
# name -> (algorithm, whether over the tensor axis, whether activations are cut by tokens); the first is the measure
CONTENDERS: Final[dict[str, tuple[str, bool, bool]]] = {
    "data": ("node_shared", False, False),
    "tensor": ("node_shared", True, False),
    "tensor, by rows": ("node_shared", True, True),
    "tensor, ring": ("ring", True, False),
    "tensor, by rows, ring": ("ring", True, True),
}


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4, help="of a step, over all ranks (default 4)")
    parser.add_argument("--steps", type=int, default=20, help="of each contender (default 20)")
    parser.add_argument("--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args()


class Contender:
    """A model in training."""

    def __init__(self, comm: Communicator, name: str, options: argparse.Namespace) -> None:
        algorithm, over_tensor, by_rows = CONTENDERS[name]
        own = comm.dup(name)  # its messages are counted apart
        self.comm, self.number, self.ledger = own, 0, Ledger()
        config = ModelConfig(layers=options.layers, hidden=options.hidden, heads=options.heads)
        parallel = ParallelConfig(tensor=comm.size if over_tensor else 1, sequence_parallel=by_rows and over_tensor)
        Recipe(model=config, data=DataConfig(context=options.context), parallel=parallel)  # or it raises
        whole = models.build(config, "float32", context=options.context)
        self.whole = whole.layout.parameters
        context = RankContext(
            world=own,
            data=solo() if over_tensor else own,
            tensor=own if over_tensor else solo(),
            pipeline=solo(),
            model=cut_model(whole, own, algorithm, sequence_parallel=by_rows) if over_tensor else whole,
            optimizer=OptimizerConfig(learning_rate=1e-4),
            total_steps=options.steps + WARM_UP,
            algorithm=algorithm,
            ledger=self.ledger,
        )
        self.share = slice(None) if over_tensor else slice(comm.rank, None, comm.size)
        self.exchange = AllreduceExchange(context)
        self.executor = build_executor(context, self.exchange)
        parallel = ParallelConfig(tensor=context.tensor.size, sequence_parallel=by_rows)
        self.operations = operations(context, self.exchange, self.executor.copies, parallel)
        initial = FlatStore(context.model.layout, context.model.dtype)
        context.model.initialise(initial, seed=1)
        self.exchange.load_initial(initial)

    def step(self, samples: np.ndarray) -> float:
        """Make a step; return its time. Collective."""
        self.number += 1
        mine = samples[self.share]
        self.comm.barrier()
        begin = time.perf_counter()
        self.executor.run(self.operations, [(mine[:, :-1], mine[:, 1:])], len(samples), self.number, np.zeros(1))
        return time.perf_counter() - begin

    def figures(self, samples: np.ndarray) -> list[float]:
        """Return the bytes that this rank sends in a step, and keeps of states and of activations. Collective."""
        before, self.comm.events = self.comm.events, MessageTraffic(self.comm.events)
        self.step(samples)
        sent, self.comm.events = self.comm.events.sent_bytes, before
        peak = self.ledger.peak
        return [sent, sum(peak[category] for category in STATES), peak["activations"]]


def weights(run: Contender) -> dict[str, np.ndarray]:
    """Return all weights, brought together from the ranks' pieces. Collective."""
    own = [
        (p.tensor, int(np.prod(p.global_shape)), runs_of(p.global_shape, p.box, p.flat), np.array(p.array))
        for p in run.exchange.pieces()
        if p.kind == "parameters"
    ]
    found: dict[str, np.ndarray] = {}
    for tensor, size, where, values in (each for rank in run.comm.allgather_object(own) for each in rank):
        whole = found.setdefault(tensor, np.full(size, np.nan, values.dtype))
        for start_, local, count in zip(where.start, where.local, where.size, strict=True):
            whole[start_ : start_ + count] = values[local : local + count]
    return found


def check_same(runs: dict[str, Contender]) -> None:
    """End with an error unless all contenders have the same weights. Collective."""
    first = next(iter(runs))
    expected = weights(runs[first])
    norm = np.linalg.norm([np.linalg.norm(values) for values in expected.values()])
    for name, run in runs.items():
        found = weights(run)
        difference = np.linalg.norm([np.linalg.norm(found[key] - expected[key]) for key in expected]) / norm
        if not difference <= SAME:
            raise SystemExit(f"{name}: weights differ by {difference:.1e} of their norm from those of {first}")


def measure(comm: Communicator, runs: dict[str, Contender], options: argparse.Namespace) -> np.ndarray:
    """Return times of all ranks, (contenders, ranks, steps). Collective."""
    draw = np.random.default_rng(0)  # the same on all ranks
    rows = []
    for _ in range(options.steps + WARM_UP):
        samples = draw.integers(0, 256, (options.samples, options.context + 1)).astype(np.uint8)
        row = {name: runs[name].step(samples) for name in draw.permutation(list(runs)).tolist()}
        rows.append([row[name] for name in runs])
    return np.array(comm.allgather_object(np.array(rows[WARM_UP:]))).transpose(2, 0, 1)


def main() -> None:
    """Measure, print on rank 0, write. Collective over the world."""
    options = arguments()
    session = start.start()
    output_file.exit_unless_writable(session, options.output)
    comm = session.comm
    runs = {name: Contender(comm, name, options) for name in CONTENDERS}
    times = measure(comm, runs, options)
    check_same(runs)
    samples = np.zeros((options.samples, options.context + 1), np.uint8)
    figures = np.array(comm.allgather_object([run.figures(samples) for run in runs.values()]))
    if comm.rank == 0:
        print(f"{comm.size} ranks, {runs['data'].whole:,} parameters, {options.steps} steps each")
        print("\n".join(report(times, figures)), flush=True)
        if options.output is not None:
            write(options.output, times, figures, session, options)
    session.leave(0)


def report(times: np.ndarray, figures: np.ndarray) -> list[str]:
    """Return the lines of the table."""
    steps = times.max(axis=1)  # (contenders, steps)
    most = figures.max(axis=0) / 1e6  # (contenders, 3)
    lines = [f"  {'':<22} {'ms a step':>10} {'(quartiles)':>17}  x data  tensor MB  states MB  activations MB"]
    for index, name in enumerate(CONTENDERS):
        low, median, high = np.percentile(steps[index] * 1e3, [25, 50, 75])
        ratio, quartiles = np.median(steps[index] / steps[0]), f"({low:.1f} - {high:.1f})"
        sent = f"{most[index, 0]:.1f}" if CONTENDERS[name][1] else "-"
        lines.append(
            f"  {name:<22} {median:10.1f} {quartiles:>17} {ratio:7.3f} {sent:>10} {most[index, 1]:10.1f}"
            f" {most[index, 2]:15.1f}"
        )
    return lines


def write(
    path: Path, times: np.ndarray, figures: np.ndarray, session: start.Session, options: argparse.Namespace
) -> None:
    """Write ``times`` (contenders, ranks, steps) and ``figures`` (ranks, contenders, 3) with the provenance."""
    from hpcdist.hdf5 import files
    from hpcdist.telemetry.provenance import provenance

    card: dict[str, Any] = provenance(
        mpi_library=session.library, hosts=[session.place.host], anonymous=options.anonymous
    )
    shape = {name: getattr(options, name) for name in ("layers", "hidden", "heads", "context", "samples")}
    files.write_contiguous(
        path,
        {"time_s": times, "bytes": figures},
        {**card, **shape, "ranks": session.comm.size, "contenders": "; ".join(CONTENDERS)},
        {
            "time_s": {"dims": "contenders, ranks, steps"},
            "bytes": {"dims": "ranks, contenders, (sent, states, activations)"},
        },
        schema="hpcdist-benchmark-tensor",
        version=1,
    )
    print(f"raw times are in {path}")


if __name__ == "__main__":
    main()
