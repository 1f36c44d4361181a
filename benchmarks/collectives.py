"""Our allreduce against those of MPI libraries and of PyTorch's gloo, on the ranks of this machine, in one session.

    python benchmarks/collectives.py --mpi "Open MPI=VENV1/bin/python" --mpi "MPICH=VENV2/bin/python" \
        --torch VENV1/bin/python --output collectives.h5 --plot collectives.png
    python benchmarks/collectives.py ... --short     # three sizes, under three minutes
    python benchmarks/collectives.py ... --mpi "Debian=VENV2/bin/python@/usr/bin/mpiexec@/usr/lib/LIBMPICH.so.12"

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
from dataclasses import replace
from pathlib import Path

import numpy as np
from collectives_jobs import AS_IT_COMES, OURS, WORKER, Contender, contenders, launch, library_of, with_abi_name

from hpcdist.bench.collectives import report, results
from hpcdist.bench.collectives.results import CollectivesConfiguration
from hpcdist.errors import StorageError
from hpcdist.hdf5 import files
from hpcdist.telemetry.provenance import provenance

SIZES = "16K-256M x4"
SHORT_SIZES = "16K 1M 16M"
SCREENING_BYTES = 16 << 20  # the largest size of the first round
KEPT = 2  # forced algorithms of a library and size that go on to the later rounds
OUR_ALGORITHMS = ("node_shared", "auto")


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mpi", action="append", type=library_of, required=True, metavar="NAME=PYTHON[@MPIEXEC[@LIBMPI]]", dest="mpis"
    )
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has PyTorch, for gloo")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="numbers of ranks (default 2 4)")
    parser.add_argument("--bytes", help=f"sizes (default {SIZES}; with --short {SHORT_SIZES})")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each contender that is not screened out")
    parser.add_argument("--seconds", type=float, default=0.4, help="about how long a job measures one size")
    parser.add_argument("--least", type=int, default=3, help="iterations of a job and size, however long they take")
    parser.add_argument(
        "--keep", type=int, default=100, help="iterations of a job and size in the file, evenly spread (default 100)"
    )
    parser.add_argument("--budget-s", type=float, default=700.0, help="no job is started after so many seconds")
    parser.add_argument("--only", default="", metavar="REGEX", help="start only contenders whose name it is found in")
    parser.add_argument("--short", action="store_true", help="few sizes, two rounds, a budget of 170 s")
    parser.add_argument("--seed", type=int, default=0, help="of the order of jobs and sizes")
    parser.add_argument("--output", type=Path, required=True, help="new HDF5 file with all raw samples")
    parser.add_argument("--plot", type=Path, help="time and bus bandwidth against bytes")
    options = parser.parse_args()
    if options.keep < 1:
        parser.error(f"--keep {options.keep}: keep at least one iteration")
    if options.short:
        options.rounds, options.budget_s = min(options.rounds, 2), min(options.budget_s, 170.0)
    options.bytes = results.sizes([options.bytes or (SHORT_SIZES if options.short else SIZES)])
    return options


class Driver:
    """Starts jobs one after the other and collects what they measured."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.end = options, folder, 0.0
        self.number, self.failed = 0, set[str]()
        self.card = {**provenance(anonymous=True), "command": shlex.join(["collectives.py", *sys.argv[1:]])}

    def run(self, ranks: int, budget_s: float) -> None:
        """Run all rounds on ``ranks`` ranks, starting no job after ``budget_s``."""
        self.end = time.monotonic() + budget_s
        rng = np.random.default_rng([self.options.seed, ranks])
        everyone = [
            one
            for one in contenders(self.options.mpis, bool(self.options.torch))
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
            reason = launch(one, ranks, self.program(one, sizes, seed, output), self.options.torch)
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
        return [str(WORKER), what, "--implementation", name, "--algorithm", one.algorithm, *common]

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


def cell(one: CollectivesConfiguration | None, least_us: float | None = None) -> str:
    """Return the median in us, and how many times longer ``least_us`` is, which may be NaN for not known."""
    if one is None:
        return f"{'-':>11}" + ("" if least_us is None else f"{'-':>9}")
    median_us = 1e6 * float(np.median(one.slowest_s))
    ratio = "-" if least_us is None or np.isnan(least_us) else f"{least_us / median_us:.2f}x"
    return f"{median_us:11,.1f}" + ("" if least_us is None else f"{ratio:>9}")


def table(found: Sequence[CollectivesConfiguration]) -> list[str]:
    """Return the lines for people: for each size the best of the others, and ours."""
    head = f"{'ranks':>5} {'bytes':>10}  {'best other':<44}{'us':>11}"
    lines = [f"{head}{'shared':>11}{'faster':>9}{'ordinary':>11}{'faster':>9}{'memcpy':>11}{'shared / memcpy':>17}"]
    for ranks, nbytes in sorted({(one.key.ranks, one.key.bytes) for one in found}):
        here = [one for one in found if (one.key.ranks, one.key.bytes) == (ranks, nbytes)]
        ours = [one for one in here if one.key.algorithm in OUR_ALGORITHMS and one.key.implementation == OURS]
        other = best([one for one in here if one.key.implementation != OURS])
        shared, ordinary = (best([one for one in ours if one.key.buffers == kind]) for kind in ("shared", "ordinary"))
        memcpy = best([one for one in here if one.reference])
        other_us = None if other is None else 1e6 * float(np.median(other.slowest_s))
        ratio = "-"
        if shared is not None and memcpy is not None:
            ratio = f"{np.median(shared.slowest_s) / np.median(memcpy.slowest_s):.2f}"
        name = "-" if other is None else other.key.label
        line = f"{ranks:5} {nbytes:10}  {name:<44}{cell(other)}{cell(shared, other_us or np.nan)}"
        lines.append(f"{line}{cell(ordinary, other_us or np.nan)}{cell(memcpy)}{ratio:>17}")
    return lines


def main() -> None:
    """Run everything, print, plot."""
    options = arguments()
    try:
        files.check_place(options.output)
    except StorageError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    with tempfile.TemporaryDirectory(prefix="collectives-") as folder:
        options.mpis = [with_abi_name(library, Path(folder)) for library in options.mpis]
        driver = Driver(options, Path(folder))
        end = time.monotonic() + options.budget_s
        for number, ranks in enumerate(options.ranks):
            # On more ranks than cores everything takes longer.
            driver.run(ranks, (end - time.monotonic()) * ranks / sum(options.ranks[number:]))
    if not options.output.exists():
        raise SystemExit("nothing was measured: no job ended well")
    found = results.read(options.output).configurations
    wrong = [one for one in found if one.wrong]
    print("\n".join(["", *table(found), ""]))
    for one in wrong:
        print(f"WRONG: {one.key.label}, {one.key.bytes} bytes on {one.key.ranks} ranks: {one.wrong}")
    print(f"raw samples of {len(found)} configurations are in {options.output}")
    if options.plot is not None:
        report.plot(report.rows(shown(found)), options.plot)
    raise SystemExit(1 if wrong or driver.failed else 0)


def shown(found: Sequence[CollectivesConfiguration]) -> list[CollectivesConfiguration]:
    """Return what the plot has room for: the libraries as they come, and three lines that are the best at each size.

    Those are, as in the table: of all other contenders, of ours in shared and in ordinary memory, and of the memcpys,
    whatever MPI library it was measured under.
    """
    lines = [one for one in found if one.key.algorithm == AS_IT_COMES or one.key.implementation == "gloo"]
    for ranks, nbytes in {(one.key.ranks, one.key.bytes) for one in found}:
        here = [one for one in found if (one.key.ranks, one.key.bytes) == (ranks, nbytes)]
        ours = [one for one in here if one.key.implementation == OURS and one.key.algorithm in OUR_ALGORITHMS]
        for name, members in (
            ("best of all others, forced", [one for one in here if one.key.implementation != OURS]),
            ("hpcdist, shared memory", [one for one in ours if one.key.buffers == "shared"]),
            ("hpcdist, ordinary arrays", [one for one in ours if one.key.buffers == "ordinary"]),
            ("memcpy", [one for one in here if one.reference]),
        ):
            if (winner := best(members)) is not None:
                key = replace(winner.key, algorithm=name, implementation=OURS, buffers="ordinary", mpi_library="")
                lines.append(replace(winner, key=key))
    return lines


if __name__ == "__main__":
    main()
