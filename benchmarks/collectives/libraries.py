"""Allreduce of hpcdist compared with MPI libraries and PyTorch's gloo, on the ranks of this machine, in one session.

    python -m benchmarks libraries --mpi "Open MPI=VENV1/bin/python" --mpi "MPICH=VENV2/bin/python" \
        --torch VENV1/bin/python --output collectives.h5 --plot collectives.png
    python -m benchmarks libraries ... --short     # three sizes, under three minutes
    python -m benchmarks libraries ... --mpi "Debian=VENV2/bin/python@/usr/bin/mpiexec@/usr/lib/LIBMPICH.so.12"

Every contender is a separate job, started several times (rounds), in a new random order in each round. All jobs use the
same rotating buffers and barrier, and check every result (see `hpcdist bench collectives`).

    hpcdist     node_shared, in place in memory shared by the ranks, and on ordinary arrays; under every MPI library
    MPI         MPI_Allreduce by default, and with each algorithm that can be forced, in place and to a result
    gloo        torch.distributed.all_reduce

The first round omits the largest sizes. Later rounds keep the default of each library and the forced algorithms among
the best two of their library at any size. For each size the table compares hpcdist with the best of all others.
"""

import argparse
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.collectives import jobs
from benchmarks.collectives.jobs import AS_IT_COMES, OURS, Contender
from benchmarks.harness import Results
from hpcdist.bench.collectives import report, results
from hpcdist.bench.collectives.results import CollectivesConfiguration
from hpcdist.comm.start import Session
from hpcdist.errors import StorageError, UsageError
from hpcdist.hdf5 import files
from hpcdist.reporting.table import aligned
from hpcdist.telemetry.provenance import provenance

SCHEMA = results.SCHEMA
NO_CHECK = "compare two of its files with `hpcdist compare results/collectives/2026-11-21-collectives.h5 NEW.h5`"
WRITES_ITSELF = True

SIZES: Final = "16K-256M x4"
SHORT_SIZES: Final = "16K 1M 16M"
SCREENING_BYTES: Final = 16 << 20  # largest size of the first round
KEPT: Final = 2  # forced algorithms per library and size that go on to the later rounds
OUR_ALGORITHMS: Final = ("node_shared", "auto")
# rounds: starts of each contender; seconds, least: duration and minimum iterations of a job and size; keep: iterations
# to store; only: a regular expression for names
OPTIONS: Final = {"torch": "", "ranks": [2, 4], "bytes": "", "rounds": 3, "seconds": 0.4, "least": 3, "keep": 100}
OPTIONS |= {"budget_s": 700.0, "only": "", "short": False, "seed": 0}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mpi",
        action="append",
        type=jobs.library_of,
        required=True,
        metavar="NAME=PYTHON[@MPIEXEC[@LIBMPI]]",
        dest="mpis",
    )


@dataclass(frozen=True)
class Configurations(Results):
    measured: Sequence[CollectivesConfiguration] = ()
    failed: frozenset[str] = frozenset()


class Driver:
    """Runs jobs one after the other and collects their measurements."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.end = options, folder, 0.0
        self.number, self.failed = 0, set[str]()
        self.card = {**provenance(anonymous=True), "command": shlex.join(["libraries", *sys.argv[2:]])}

    def run(self, ranks: int, budget_s: float) -> None:
        """Run all rounds on ``ranks`` ranks. Start no job after ``budget_s`` seconds."""
        self.end = time.monotonic() + budget_s
        rng = np.random.default_rng([self.options.seed, ranks])
        contenders = [
            contender
            for contender in jobs.contenders(self.options.mpis, bool(self.options.torch))
            if re.search(self.options.only, contender.name)
        ]
        for round_number in range(self.options.rounds):
            sizes = [n for n in self.options.bytes if round_number or n <= SCREENING_BYTES]
            for index in rng.permutation(len(contenders)):
                contender = contenders[index]
                if contender.name not in self.failed and sizes:
                    self.start(contender, ranks, sizes, int(rng.integers(2**31)))
            if round_number == 0:
                contenders = self.kept(contenders, ranks)

    def kept(self, contenders: Sequence[Contender], ranks: int) -> list[Contender]:
        medians: dict[tuple[str, int], list[tuple[float, str]]] = {}
        for one in self.results(ranks):
            key = one.key
            algorithm = key.algorithm.removesuffix(", to a result")
            if key.implementation != OURS and not one.wrong and algorithm != AS_IT_COMES:
                candidates = medians.setdefault((key.implementation, key.bytes), [])
                candidates.append((float(np.median(one.slowest_s)), f"{key.implementation} {algorithm}"))
        best = {
            name for entries in medians.values() for name in list(dict.fromkeys(n for _, n in sorted(entries)))[:KEPT]
        }
        remaining = [one for one in contenders if one.algorithm in ("", AS_IT_COMES) or one.name in best]
        print(
            f"{ranks} ranks: the screening removed {len(contenders) - len(remaining)} of {len(contenders)} contenders",
            flush=True,
        )
        return remaining

    def start(self, one: Contender, ranks: int, sizes: Sequence[int], seed: int) -> None:
        if time.monotonic() > self.end:
            print(f"skipped, the time budget is spent: {one.name} on {ranks} ranks", flush=True)
            return
        self.number += 1
        output = self.folder / f"{self.number}.h5"
        begin = time.monotonic()
        try:
            reason = jobs.launch(one, ranks, self.program(one, sizes, seed, output), self.options.torch)
            if output.exists():
                measured = results.read(output).configurations
                results.append(self.options.output, [thinned(one, self.options.keep) for one in measured], self.card)
        except StorageError as error:
            reason = str(error)
        if reason:
            self.failed.add(one.name)
        message = f"FAILED, not started again: {reason}" if reason else f"{time.monotonic() - begin:.1f} s"
        print(f"[{self.number}] {one.name} on {ranks} ranks: {message}", flush=True)

    def program(self, one: Contender, sizes: Sequence[int], seed: int, output: Path) -> list[str]:
        common = ["--bytes", ",".join(map(str, sizes)), "--seconds", f"{self.options.seconds}", "--seed", str(seed)]
        common += ["--least", str(self.options.least), "--output", str(output)]
        if not one.algorithm:
            algorithms = [word for name in OUR_ALGORITHMS for word in ("--algorithm", name)]
            return ["-m", "hpcdist", "bench", "collectives", *algorithms, "--warmup", "2", "--anonymous", *common]
        backend, name = ("gloo", "gloo") if one.library is None else ("mpi", one.library.name)
        return [*jobs.WORKER, backend, "--implementation", name, "--algorithm", one.algorithm, *common]

    def results(self, ranks: int) -> list[CollectivesConfiguration]:
        configurations = results.read(self.options.output).configurations
        return [configuration for configuration in configurations if configuration.key.ranks == ranks]


def thinned(configuration: CollectivesConfiguration, keep: int) -> CollectivesConfiguration:
    """Keep at most ``keep`` evenly spaced iterations; small buffers have tens of thousands."""
    stride = max(1, -(-len(configuration.time_s) // keep))
    return replace(
        configuration,
        time_s=configuration.time_s[::stride],
        start_s=configuration.start_s[::stride],
        session=configuration.session[::stride],
    )


def best(result: Sequence[CollectivesConfiguration]) -> CollectivesConfiguration | None:
    correct = [one for one in result if not one.wrong]
    return min(correct, key=lambda one: float(np.median(one.slowest_s))) if correct else None


def bests(
    result: Sequence[CollectivesConfiguration],
) -> dict[tuple[int, int], dict[str, CollectivesConfiguration | None]]:
    """Return by (ranks, bytes) the best of the other libraries, of hpcdist in both kinds of memory, and of memcpy."""
    cells: dict[tuple[int, int], dict[str, CollectivesConfiguration | None]] = {}
    for cell in sorted({(one.key.ranks, one.key.bytes) for one in result}):
        measured = [one for one in result if (one.key.ranks, one.key.bytes) == cell]
        ours = [one for one in measured if one.key.implementation == OURS and one.key.algorithm in OUR_ALGORITHMS]
        cells[cell] = {
            "best of all others, forced": best([one for one in measured if one.key.implementation != OURS]),
            "hpcdist, shared memory": best([one for one in ours if one.key.buffers == "shared"]),
            "hpcdist, ordinary arrays": best([one for one in ours if one.key.buffers == "ordinary"]),
            "memcpy": best([one for one in measured if one.reference]),
        }
    return cells


def _us(one: CollectivesConfiguration | None) -> float:
    return np.nan if one is None else 1e6 * float(np.median(one.slowest_s))


def table(result: Sequence[CollectivesConfiguration]) -> list[str]:
    head = ["ranks", "bytes", "best other", "us", "shared", "faster", "ordinary", "faster", "memcpy", "shared / memcpy"]
    rows = [head]
    for (ranks, nbytes), members in bests(result).items():
        other = next(iter(members.values()))
        least, shared, ordinary, memcpy = map(_us, members.values())
        times = [f"{value:,.1f}" for value in (least, shared, least / shared, ordinary, least / ordinary, memcpy)]
        cells = [*times[:2], f"{times[2]}x", times[3], f"{times[4]}x", times[5], f"{shared / memcpy:.2f}"]
        rows.append([f"{ranks}", f"{nbytes}", "-" if other is None else other.key.label, *cells])
    return aligned(rows)


def measure(chosen: argparse.Namespace, session: Session) -> Configurations:
    """Run all jobs. Every job appends its raw samples to --output."""
    if chosen.output is None or chosen.keep < 1:
        raise UsageError("--output (a new file for the raw samples) is required, and --keep must be at least 1")
    if chosen.short:
        chosen.rounds, chosen.budget_s = min(chosen.rounds, 2), min(chosen.budget_s, 170.0)
    chosen.bytes = results.sizes([chosen.bytes or (SHORT_SIZES if chosen.short else SIZES)])
    files.check_place(chosen.output)
    with tempfile.TemporaryDirectory(prefix="collectives-") as folder:
        chosen.mpis = [jobs.with_abi_name(library, Path(folder)) for library in chosen.mpis]
        driver = Driver(chosen, Path(folder))
        end = time.monotonic() + chosen.budget_s
        for number, ranks in enumerate(chosen.ranks):
            # The budget is split by rank count, since runs on more ranks than cores take longer.
            driver.run(ranks, (end - time.monotonic()) * ranks / sum(chosen.ranks[number:]))
    if not chosen.output.exists():
        raise SystemExit("nothing was measured: every job failed")
    return Configurations({}, {}, {}, results.read(chosen.output).configurations, frozenset(driver.failed))


def failures(result: Any) -> list[str]:
    wrong = [one for one in result.measured if one.wrong]
    texts = [f"{one.key.label}, {one.key.bytes} bytes on {one.key.ranks} ranks: WRONG: {one.wrong}" for one in wrong]
    return [*texts, *sorted(result.failed)]


def plot(result: Any, path: Path) -> None:
    report.plot(report.rows(shown(result.measured)), path)


def shown(result: Sequence[CollectivesConfiguration]) -> list[CollectivesConfiguration]:
    """Return the configurations to plot: the default of each library, and the best contenders of `bests`."""
    lines = [one for one in result if one.key.algorithm == AS_IT_COMES or one.key.implementation == "gloo"]
    for members in bests(result).values():
        for name, winner in members.items():
            if winner is not None:
                key = replace(winner.key, algorithm=name, implementation=OURS, buffers="ordinary", mpi_library="")
                lines.append(replace(winner, key=key))
    return lines


def lines(result):
    return table(result.measured)
