"""Training steps with and without reductions behind the backward, alternating in one run, on the real model.

    mpirun -n 2 python benchmarks/overlap.py
    mpirun -n 2 python benchmarks/overlap.py --hidden 256 --samples 8 --output overlap.h5 --anonymous

Every contender trains a model of its own on the same samples, one step each in turn. "none" reduces a bucket of
gradients and goes on when that is done; "thread" and "poll" are the two kinds of communication.overlap; "poll native"
polls MPI_Iallreduce. The weights of contenders with one algorithm are compared bit by bit after the last step.

A step takes as long as its slowest rank, from a barrier on. "exposed" is the time of a step in which a rank did nothing
but communicate: in the mean over the ranks, for it includes waiting for the other. "hidden" is how much of what "none"
needs is gone: 1 - exposed / exposed of none. It says nothing of what the computation lost meanwhile: the time of the
step does, and "x none" above 1 is faster. "of the thread" is hidden / total as the rank itself sees it, which is what
the summary of a run shows: 1 - (time spent starting and waiting) / (time in which the thread was at work).
"""

import argparse
import time
from pathlib import Path

import numpy as np

from hpcdist import collectives, models
from hpcdist.bench import place
from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.solo import solo
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.build import build_executor, operations
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.seat import Seat

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
    parser.add_argument("--steps", type=int, default=30, help="of each contender (default 30)")
    parser.add_argument("--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args()


class Contender:
    """A model in training, all of it on every rank."""

    def __init__(self, comm: Communicator, overlap: str, algorithm: str, options: argparse.Namespace) -> None:
        self.comm, self.algorithm, self.number = comm, algorithm, 0
        config = ModelConfig(layers=options.layers, hidden=options.hidden, heads=max(1, options.hidden // 64))
        self.model = models.build(config, "float32", context=options.context)
        seat = Seat(
            world=comm,
            data=comm,
            pipeline=solo(),
            model=self.model,
            units=range(len(self.model.stages)),
            optimizer=OptimizerConfig(),
            total_steps=options.steps + WARM_UP,
            algorithm=algorithm,
            bucket_bytes=options.bucket_bytes,
            overlap=overlap,
        )
        self.exchange = AllreduceExchange(seat)
        self.model.initialise(self.exchange.parameters, seed=1)
        self.executor = build_executor(seat, self.exchange)
        self.operations = operations(seat, self.exchange, self.executor.copies, ParallelConfig())

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
    found = {"none": ("none", options.algorithm)}
    if comm.supports("thread_multiple"):
        found["thread"] = ("thread", options.algorithm)
    found |= {"poll": ("poll", "ring"), "poll native": ("poll", "native")}
    return {name: Contender(comm, *how, options) for name, how in found.items()}


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
    """Leave with an error unless contenders of one algorithm have the same weights (local)."""
    expected = runs["none"]
    for name, run in runs.items():
        same = run.exchange.parameters.array.tobytes() == expected.exchange.parameters.array.tobytes()
        if run.algorithm == expected.algorithm and not same:
            raise SystemExit(f"{name} gave rank {rank} other weights than none")


def report(names: list[str], figures: np.ndarray) -> list[str]:
    """Return the lines of the table."""
    lines = []
    steps = figures[:, 0].max(axis=1)  # (contenders, steps): of the slowest rank
    exposed = figures[:, 1].mean(axis=1)
    ratios = np.median(steps[0] / steps, axis=1)  # of neighbours in time: what else runs here moves both
    for index, name in enumerate(names):
        low, median, high = np.percentile(steps[index] * 1e3, [25, 50, 75])
        wait = np.median(exposed[index]) * 1e3
        line = f"  {name:<12} {median:9.1f} ms ({low:.1f} - {high:.1f})  {ratios[index]:5.2f} x none"
        line += f"   exposed {wait:8.1f} ms  hidden {1 - wait / (np.median(exposed[0]) * 1e3):7.1%}"
        if np.isfinite(figures[index, 3]).all():
            line += f"   of the thread {1 - figures[index, 2].sum() / figures[index, 3].sum():7.1%}"
        lines.append(line)
    return lines


def main() -> None:
    """Measure, print on rank 0, write. Collective over the world."""
    options = arguments()
    session = start.start()
    place.leave_unless_free(session, options.output)
    comm = session.comm
    if comm.size == 1:
        raise SystemExit("one rank has nobody to exchange gradients with; start it under mpirun -n 2")
    runs = contenders(comm, options)
    figures = measure(comm, runs, options)
    check(runs, comm.rank)
    if comm.rank == 0:
        layout, buckets = runs["none"].model.layout, sum(op.kind.name == "REDUCE" for op in runs["none"].operations)
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
