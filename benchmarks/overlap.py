r"""Training steps with and without exchanges behind the computation, alternating in one run, on the real model.

    mpirun -n 2 python benchmarks/overlap.py
    mpirun -n 2 python benchmarks/overlap.py --hidden 256 --samples 8 --output overlap.h5 --anonymous
    mpirun -n 2 python benchmarks/overlap.py --strategies allreduce zero1 zero2 zero3 --algorithm node_shared \
        --hidden 256 --context 256 --samples 4 --bucket-bytes 4194304 --steps 10

Every contender trains a model of its own on the same samples, one step each in turn. "none" reduces a bucket of
gradients and goes on when that is done; "thread" and "poll" are the two kinds of communication.overlap; "poll native"
polls MPI_Iallreduce; "delayed" sums behind the whole next step. Of ZeRO, "+k" gathers k units ahead. The weights of
contenders of one strategy with one algorithm are compared bit by bit after the last step.

A step takes as long as its slowest rank, from a barrier on. "exposed" is the time of a step in which a rank did nothing
but communicate: in the mean over the ranks, for it includes waiting for the other. "hidden" is how much of what "none"
needs is gone: 1 - exposed / exposed of none. It says nothing of what the computation lost meanwhile: the time of the
step does, and "x none" above 1 is faster. "of the thread" is hidden / total as the rank itself sees it, which is what
the summary of a run shows: 1 - (time spent starting and waiting) / (time in which the thread was at work).
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcdist import collectives, models
from hpcdist.arrays.store import FlatStore
from hpcdist.bench import output_file
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.build import build_executor, operations
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdateExchange
from hpcdist.strategies.delayed import DelayedExchange
from hpcdist.strategies.zero.config import STAGES, ZeroConfig
from hpcdist.strategies.zero.exchange import ZeroExchange

WARM_UP = 2
FIGURES = ("step_s", "exposed_s", "given_s", "busy_s")  # the last two: `Overlap.taken`


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--samples", type=int, default=2, help="of each rank in a step (default 2)")
    parser.add_argument("--bucket-bytes", type=int, default=1 << 20)
    parser.add_argument("--algorithm", default="ring", choices=sorted(collectives.ALLREDUCE))
    parser.add_argument(
        "--strategies", nargs="+", default=["allreduce"], choices=["allreduce", *STAGES], help="(default allreduce)"
    )
    parser.add_argument("--ahead", type=int, nargs="*", default=[1, 2], help="units that zero3 gathers ahead (1 2)")
    parser.add_argument("--steps", type=int, default=30, help="of each contender (default 30)")
    parser.add_argument("--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args()


@dataclass(frozen=True)
class Way:
    """How a contender exchanges."""

    strategy: str
    overlap: str = "none"
    algorithm: str = ""  # that of the command line
    ahead: int = 0
    delayed: bool = False

    def exchange(self, context: RankContext) -> ShardedUpdateExchange:
        """Return the exchange. Collective."""
        if self.strategy in STAGES:
            return ZeroExchange(context, STAGES[self.strategy], ZeroConfig(prefetch=self.ahead))
        return DelayedExchange(context) if self.delayed else AllreduceExchange(context)


class Contender:
    """A model in training on every rank."""

    def __init__(self, comm: Communicator, way: Way, options: argparse.Namespace) -> None:
        self.comm, self.way, self.number = comm, way, 0
        config = ModelConfig(layers=options.layers, hidden=options.hidden, heads=max(1, options.hidden // 64))
        self.model = models.build(config, "float32", context=options.context)
        context = RankContext(
            world=comm,
            data=comm,
            pipeline=solo(),
            model=self.model,
            optimizer=OptimizerConfig(),
            total_steps=options.steps + WARM_UP,
            algorithm=way.algorithm or options.algorithm,
            bucket_bytes=options.bucket_bytes,
            overlap=way.overlap,
        )
        self.exchange = way.exchange(context)
        for unit, part in context.ranges.items():
            initial = FlatStore(self.model.layout, self.model.dtype, part)
            self.model.initialise_stage(unit, initial, 1)
            self.exchange.load_initial(initial)
        self.executor = build_executor(context, self.exchange)
        self.operations = operations(context, self.exchange, self.executor.copies, ParallelConfig())

    def step(self, samples: np.ndarray) -> list[float]:
        """Make a step and return its figures, NaN for what is not measured. Collective."""
        self.number += 1
        batch = [(samples[:, :-1], samples[:, 1:])]
        self.comm.barrier()
        begin = time.perf_counter()
        found = self.executor.run(self.operations, batch, len(samples) * self.comm.size, self.number, np.zeros(1))
        step_s = time.perf_counter() - begin
        given_s, busy_s = self.exchange.overlap.taken() if self.exchange.overlap else (np.nan, np.nan)
        return [step_s, found.seconds["communication_s"], given_s, busy_s]


def contenders(comm: Communicator, options: argparse.Namespace) -> dict[str, Contender]:
    """Return what runs here by name, "none" first. Collective."""
    threads, rings = comm.supports("thread_multiple"), options.algorithm == "ring"
    found: dict[str, Way] = {}
    for strategy in options.strategies:
        named = "" if strategy == "allreduce" else f"{strategy} "
        found[f"{named}none"] = Way(strategy)
        if threads:
            found[f"{named}thread"] = Way(strategy, "thread")
        if strategy == "allreduce":
            found |= {"poll": Way(strategy, "poll", "ring"), "poll native": Way(strategy, "poll", "native")}
            found |= {"delayed": Way(strategy, "thread", delayed=True)} if threads else {}
            continue
        found |= {f"{named}poll": Way(strategy, "poll")} if rings else {}
        for ahead in options.ahead if strategy == "zero3" else ():
            found |= {f"{named}thread +{ahead}": Way(strategy, "thread", ahead=ahead)} if threads else {}
            found |= {f"{named}poll +{ahead}": Way(strategy, "poll", ahead=ahead)} if rings else {}
    return {name: Contender(comm, way, options) for name, way in found.items()}


def measure(comm: Communicator, runs: dict[str, Contender], options: argparse.Namespace) -> np.ndarray:
    """Return the figures of all ranks, (contenders, figures, ranks, steps). Collective."""
    draw = np.random.default_rng(comm.rank)
    rows = []
    for turn in range(options.steps + WARM_UP):
        samples = draw.integers(0, 256, (options.samples, options.context + 1)).astype(np.uint8)
        names = list(runs)
        row: dict[str, list[float]] = {}
        for turned in range(len(names)):
            name = names[(turn + turned) % len(names)]
            row[name] = runs[name].step(samples)
        rows.append([row[name] for name in names])
    own = np.array(rows[WARM_UP:])  # (steps, contenders, figures)
    return np.array(comm.allgather_object(own)).transpose(2, 3, 0, 1)


def check(runs: dict[str, Contender], rank: int) -> None:
    """Leave with an error unless contenders that must have the same weights have them (local)."""
    expected: dict[tuple[str, str, bool], bytes] = {}
    for name, run in runs.items():
        weights = run.exchange.parameters.array.tobytes()
        group = (run.way.strategy, run.exchange.algorithm, run.way.delayed)
        if expected.setdefault(group, weights) != weights:
            raise SystemExit(f"{name} gave rank {rank} other weights than the others of {group}")


def report(names: list[str], figures: np.ndarray) -> list[str]:
    """Return the lines of the table."""
    lines = []
    steps = figures[:, 0].max(axis=1)  # (contenders, steps): of the slowest rank
    exposed = figures[:, 1].mean(axis=1)
    ratios = np.median(steps[0] / steps, axis=1)  # of neighbours in time: what else runs here moves both
    for index, name in enumerate(names):
        low, median, high = np.percentile(steps[index] * 1e3, [25, 50, 75])
        wait = np.median(exposed[index]) * 1e3
        line = f"  {name:<16} {median:9.1f} ms ({low:.1f} - {high:.1f})  {ratios[index]:5.2f} x {names[0]}"
        line += f"   exposed {wait:8.1f} ms  hidden {1 - wait / (np.median(exposed[0]) * 1e3):7.1%}"
        if np.isfinite(figures[index, 3]).all():
            line += f"   of the thread {1 - figures[index, 2].sum() / figures[index, 3].sum():7.1%}"
        lines.append(line)
    return lines


def main() -> None:
    """Measure, print on rank 0, write. Collective over the world."""
    options = arguments()
    session = start.start()
    output_file.exit_unless_writable(session, options.output)
    comm = session.comm
    if comm.size == 1:
        raise SystemExit("one rank has nobody to exchange gradients with; start it under mpirun -n 2")
    runs = contenders(comm, options)
    figures = measure(comm, runs, options)
    check(runs, comm.rank)
    if comm.rank == 0:
        first = next(iter(runs.values()))
        layout, buckets = first.model.layout, sum(op.kind.name == "REDUCE" for op in first.operations)
        print(f"{comm.size} ranks on {comm.nodes().count} nodes, {options.algorithm}; {session.library}")
        print(f"{layout.parameters:,} parameters in {buckets} buckets, {options.steps} steps each: median (quartiles)")
        print("\n".join(report(list(runs), figures)), flush=True)
    else:
        comm.nodes()
    for run in runs.values():
        if run.exchange.overlap is not None:
            run.exchange.overlap.close()
    if options.output is not None:
        hosts = sorted(set(comm.allgather_object(session.place.host)))
        if comm.rank == 0:
            write(options.output, list(runs), figures, session, hosts, options)
    session.leave(0)


def write(
    path: Path,
    names: list[str],
    figures: np.ndarray,
    session: start.Session,
    hosts: list[str],
    options: argparse.Namespace,
) -> None:
    """Write ``figures`` (contenders, figures, ranks, steps) with the names and the provenance."""
    from hpcdist.hdf5 import files
    from hpcdist.telemetry.provenance import provenance

    card = provenance(mpi_library=session.library, hosts=hosts, anonymous=options.anonymous)
    shape = {name: getattr(options, name) for name in ("layers", "hidden", "context", "samples", "bucket_bytes")}
    files.write_contiguous(
        path,
        {"time_s": figures},
        {**card, **shape, "ranks": session.comm.size, "algorithm": options.algorithm, "contenders": ",".join(names)},
        {"time_s": {"dims": "contenders, figures, ranks, steps", "figures": ",".join(FIGURES)}},
        schema="hpcdist-benchmark-overlap",
        version=1,
    )
    print(f"raw times are in {path}")


if __name__ == "__main__":
    main()
