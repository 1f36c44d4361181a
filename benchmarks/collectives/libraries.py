"""Our allreduce against those of MPI libraries and of PyTorch's gloo, on the ranks of this machine, in one session.

    python -m benchmarks libraries --mpi "Open MPI=VENV1/bin/python" --mpi "MPICH=VENV2/bin/python" \
        --torch VENV1/bin/python --output collectives.h5 --plot collectives.png
    python -m benchmarks libraries ... --short     # three sizes, under three minutes
    python -m benchmarks libraries ... --mpi "Debian=VENV2/bin/python@/usr/bin/mpiexec@/usr/lib/LIBMPICH.so.12"

Every contender is started as a job of its own, several times (rounds), in a new random order in each round. All use the
same buffers in turn and the same barrier, and every result is compared (`hpcdist bench collectives` says more).

    ours        node_shared, in place in memory that the ranks share, and on ordinary arrays; under every MPI given
    MPI         MPI_Allreduce as it comes, and with each algorithm that can be forced, in place and to a result
    gloo        torch.distributed.all_reduce

The first round is a screening: it leaves out the largest sizes. Later rounds have the libraries as they come and those
forced algorithms that were among the best two of their library at any size. The table shows the best of all others
for each size; so it compares one algorithm of ours with the best of many, chosen after the fact.
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
NO_CHECK = "`hpcdist compare results/collectives/2026-11-21-collectives.h5 NEW.h5` compares two of its files"
WRITES_ITSELF = True

SIZES: Final = "16K-256M x4"
SHORT_SIZES: Final = "16K 1M 16M"
SCREENING_BYTES: Final = 16 << 20  # the largest size of the first round
KEPT: Final = 2  # forced algorithms of a library and size that go on to the later rounds
OUR_ALGORITHMS: Final = ("node_shared", "auto")
# rounds: starts of each contender; seconds: of a job and size; least, keep: iterations of it; only: a pattern of names
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
    """All that was measured, and the jobs that failed."""

    measured: Sequence[CollectivesConfiguration] = ()
    failed: frozenset[str] = frozenset()


class Driver:
    """Starts jobs one after the other and collects what they measured."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.end = options, folder, 0.0
        self.number, self.failed = 0, set[str]()
        self.card = {**provenance(anonymous=True), "command": shlex.join(["libraries", *sys.argv[2:]])}

    def run(self, ranks: int, budget_s: float) -> None:
        """Run all rounds on ``ranks`` ranks, starting no job after ``budget_s``."""
        self.end = time.monotonic() + budget_s
        rng = np.random.default_rng([self.options.seed, ranks])
        everyone = [
            one
            for one in jobs.contenders(self.options.mpis, bool(self.options.torch))
            if re.search(self.options.only, one.name)
        ]
        for turn in range(self.options.rounds):
            sizes = [n for n in self.options.bytes if turn or n <= SCREENING_BYTES]
            for index in rng.permutation(len(everyone)):
                one = everyone[index]
                if one.name not in self.failed and sizes:
                    self.start(one, ranks, sizes, int(rng.integers(2**31)))
            if turn == 0:
                everyone = self.kept(everyone, ranks)

    def kept(self, everyone: Sequence[Contender], ranks: int) -> list[Contender]:
        """Return those that the later rounds measure."""
        medians: dict[tuple[str, int], list[tuple[float, str]]] = {}
        for one in self.results(ranks):
            key = one.key
            algorithm = key.algorithm.removesuffix(", to a result")
            if key.implementation != OURS and not one.wrong and algorithm != AS_IT_COMES:
                place = medians.setdefault((key.implementation, key.bytes), [])
                place.append((float(np.median(one.slowest_s)), f"{key.implementation} {algorithm}"))
        best = {name for found in medians.values() for name in list(dict.fromkeys(n for _, n in sorted(found)))[:KEPT]}
        left = [one for one in everyone if one.algorithm in ("", AS_IT_COMES) or one.name in best]
        print(f"{ranks} ranks: {len(everyone) - len(left)} of {len(everyone)} contenders are screened out", flush=True)
        return left

    def start(self, one: Contender, ranks: int, sizes: Sequence[int], seed: int) -> None:
        """Run one job, unless the budget is spent, and append what it measured."""
        if time.monotonic() > self.end:
            print(f"left out, the budget is spent: {one.name} on {ranks} ranks", flush=True)
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
        told = f"FAILED, not tried again: {reason}" if reason else f"{time.monotonic() - begin:.1f} s"
        print(f"[{self.number}] {one.name} on {ranks} ranks: {told}", flush=True)

    def program(self, one: Contender, sizes: Sequence[int], seed: int, output: Path) -> list[str]:
        """Return the arguments of Python for the job."""
        common = ["--bytes", ",".join(map(str, sizes)), "--seconds", f"{self.options.seconds}", "--seed", str(seed)]
        common += ["--least", str(self.options.least), "--output", str(output)]
        if not one.algorithm:
            chosen = [part for name in OUR_ALGORITHMS for part in ("--algorithm", name)]
            return ["-m", "hpcdist", "bench", "collectives", *chosen, "--warmup", "2", "--anonymous", *common]
        what, name = ("gloo", "gloo") if one.library is None else ("mpi", one.library.name)
        return [*jobs.WORKER, what, "--implementation", name, "--algorithm", one.algorithm, *common]

    def results(self, ranks: int) -> list[CollectivesConfiguration]:
        """Return what has been measured on ``ranks`` ranks."""
        found = results.read(self.options.output).configurations
        return [one for one in found if one.key.ranks == ranks]


def thinned(one: CollectivesConfiguration, keep: int) -> CollectivesConfiguration:
    """Return ``one`` with at most ``keep`` of its iterations, evenly spread: small buffers have tens of thousands."""
    every = max(1, -(-len(one.time_s) // keep))
    return replace(one, time_s=one.time_s[::every], start_s=one.start_s[::every], session=one.session[::every])


def best(found: Sequence[CollectivesConfiguration]) -> CollectivesConfiguration | None:
    """Return the configuration of the least median; None for none."""
    good = [one for one in found if not one.wrong]
    return min(good, key=lambda one: float(np.median(one.slowest_s))) if good else None


def bests(
    found: Sequence[CollectivesConfiguration],
) -> dict[tuple[int, int], dict[str, CollectivesConfiguration | None]]:
    """Return by ranks and bytes the best of all others, of ours in both kinds of memory, and of the memcpys."""
    of: dict[tuple[int, int], dict[str, CollectivesConfiguration | None]] = {}
    for place in sorted({(one.key.ranks, one.key.bytes) for one in found}):
        here = [one for one in found if (one.key.ranks, one.key.bytes) == place]
        ours = [one for one in here if one.key.implementation == OURS and one.key.algorithm in OUR_ALGORITHMS]
        of[place] = {
            "best of all others, forced": best([one for one in here if one.key.implementation != OURS]),
            "hpcdist, shared memory": best([one for one in ours if one.key.buffers == "shared"]),
            "hpcdist, ordinary arrays": best([one for one in ours if one.key.buffers == "ordinary"]),
            "memcpy": best([one for one in here if one.reference]),
        }
    return of


def _us(one: CollectivesConfiguration | None) -> float:
    return np.nan if one is None else 1e6 * float(np.median(one.slowest_s))


def table(found: Sequence[CollectivesConfiguration]) -> list[str]:
    """Return the lines for people: for each size the best of the others, and ours with how many times it is faster."""
    head = ["ranks", "bytes", "best other", "us", "shared", "faster", "ordinary", "faster", "memcpy", "shared / memcpy"]
    rows = [head]
    for (ranks, nbytes), members in bests(found).items():
        other = next(iter(members.values()))
        least, shared, ordinary, memcpy = map(_us, members.values())
        times = [f"{value:,.1f}" for value in (least, shared, least / shared, ordinary, least / ordinary, memcpy)]
        cells = [*times[:2], f"{times[2]}x", times[3], f"{times[4]}x", times[5], f"{shared / memcpy:.2f}"]
        rows.append([f"{ranks}", f"{nbytes}", "-" if other is None else other.key.label, *cells])
    return aligned(rows)


def measure(chosen: argparse.Namespace, session: Session) -> Configurations:
    """Run everything; all raw samples go to --output, job by job."""
    if chosen.output is None or chosen.keep < 1:
        raise UsageError("name a new --output for the raw samples, and --keep at least one iteration")
    if chosen.short:
        chosen.rounds, chosen.budget_s = min(chosen.rounds, 2), min(chosen.budget_s, 170.0)
    chosen.bytes = results.sizes([chosen.bytes or (SHORT_SIZES if chosen.short else SIZES)])
    files.check_place(chosen.output)
    with tempfile.TemporaryDirectory(prefix="collectives-") as folder:
        chosen.mpis = [jobs.with_abi_name(library, Path(folder)) for library in chosen.mpis]
        driver = Driver(chosen, Path(folder))
        end = time.monotonic() + chosen.budget_s
        for number, ranks in enumerate(chosen.ranks):
            # On more ranks than cores everything takes longer.
            driver.run(ranks, (end - time.monotonic()) * ranks / sum(chosen.ranks[number:]))
    if not chosen.output.exists():
        raise SystemExit("nothing was measured: no job ended well")
    return Configurations({}, {}, {}, results.read(chosen.output).configurations, frozenset(driver.failed))


def failures(found: Any) -> list[str]:
    """Return wrong results and jobs that failed."""
    wrong = [one for one in found.measured if one.wrong]
    texts = [f"{one.key.label}, {one.key.bytes} bytes on {one.key.ranks} ranks: WRONG: {one.wrong}" for one in wrong]
    return [*texts, *sorted(found.failed)]


def plot(found: Any, path: Path) -> None:
    report.plot(report.rows(shown(found.measured)), path)


def shown(found: Sequence[CollectivesConfiguration]) -> list[CollectivesConfiguration]:
    """Return what the plot has room for: the libraries as they come, and three lines that are the best at each size.

    Those are, as in the table: of all other contenders, of ours in shared and in ordinary memory, and of the memcpys,
    whatever MPI library it was measured under.
    """
    lines = [one for one in found if one.key.algorithm == AS_IT_COMES or one.key.implementation == "gloo"]
    for members in bests(found).values():
        for name, winner in members.items():
            if winner is not None:
                key = replace(winner.key, algorithm=name, implementation=OURS, buffers="ordinary", mpi_library="")
                lines.append(replace(winner, key=key))
    return lines


def lines(found):
    return table(found.measured)
