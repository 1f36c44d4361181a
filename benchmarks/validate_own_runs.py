"""Trainings of hpcdist on this machine beside what the planner says of them. One command.

    python benchmarks/validate_own_runs.py -o benchmarks/results/DATE-own-runs --anonymous
    python benchmarks/validate_own_runs.py --cluster here.toml --only zero3 --turns 3

First the machine is calibrated (`hpcdist plan calibrate` on 2 ranks): products of matrices, copies, steps of small
models on one rank, messages and collectives. No training below is among these. Then trainings on 1 and 2 ranks, of two
other models, each rank on a core of its own, take turns in one job: three steps each, of which two are kept. Times are
medians of steps, from a barrier to the end on the slowest rank; bytes are those of messages that the busiest rank
sends in a step; memory is the peak of the ledger on the fullest rank; a bubble is what the rank that waits longest
waits in receives, of its span. The planner gets the recipe of each and the calibrated cluster.

What is planned comes from a calibration, whose times are first quartiles: of a machine that does nothing else. Steps
are told by their median, as a training lives with what disturbs it now and then; part of what is off is that.

Goals: memory within 5 % and step time within 15 % in every row, or this ends with 1 when all is printed and written.
How many sizes that no fit has seen are within 20 %, and whether bytes of messages are exact but for the few numbers
that ranks agree on, is told. Where ranks share memory, bytes are not messages, and none are compared. With --hosts,
trainings between hosts with slow links follow (`own_runs_hosts.py`, root only).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import own_runs_fits as fits
import own_runs_report as reports
from own_runs_pin import PINNED
from own_runs_rows import CALIBRATION, Row, between, rows

LIMIT_S: Final = 1800.0
RANKS: Final = (1, 2)


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, help="a file of `hpcdist plan calibrate`; default: calibrate now")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each half of the calibration (default 20)")
    parser.add_argument("--turns", type=int, default=6, help="of each training, two kept steps each (default 6)")
    parser.add_argument("--only", action="append", default=[], help="trainings whose names begin so; may be repeated")
    parser.add_argument("--ranks", type=int, nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--hosts", action="store_true", help="also between hosts with slow links (root)")
    parser.add_argument("-o", "--output", type=Path, help="what .h5, .png and -cluster.toml begin with; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    parser.add_argument("--between", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def wanted(options: argparse.Namespace, ranks: int) -> tuple[Row, ...]:
    """Return the trainings on so many ranks."""
    found = between() if options.between else rows(ranks)
    return tuple(row for row in found if not options.only or row.name.startswith(tuple(options.only)))


def work(options: argparse.Namespace) -> None:
    """Be one of the ranks."""
    import own_runs_worker

    from hpcdist.comm import start

    session = start.start()
    own_runs_worker.work(session, wanted(options, session.comm.size), options.turns, options.worker)
    session.leave(0)


def launched(ranks: int, program: list[str], folder: Path) -> None:
    """Run ``program`` on so many ranks, with what this prints."""
    from hpcdist.comm.launch import mpirun
    from hpcdist.comm.launch.environment import python_path_variables

    launcher = mpirun.find()
    settings = {**mpirun.settings(launcher), **python_path_variables()}
    line = mpirun.command(launcher, ranks, [*PINNED, *program], settings)
    subprocess.run(line, env={**os.environ, **settings}, timeout=LIMIT_S, check=True, cwd=folder)


def calibrated(options: argparse.Namespace, folder: Path) -> tuple[Path, list[fits.Time]]:
    """Return the cluster's file, measured now where none was given, and what its fits say of unseen sizes."""
    if options.cluster is not None:
        return Path(options.cluster).resolve(), []
    path, points = folder / "here.toml", folder / "here.h5"
    program = ["-P", "-m", "hpcdist", "plan", "calibrate", "-o", str(path), "--points", str(points)]
    launched(max(RANKS), [*program, "--seconds", str(options.seconds)], folder)
    return path, fits.unseen(points, "one host")


def measured(options: argparse.Namespace, ranks: int, folder: Path) -> dict[str, Any]:
    """Return what the trainings on so many ranks told."""
    path = folder / f"ranks-{ranks}.json"
    program = [str(Path(__file__).resolve()), "--worker", str(path), "--turns", str(options.turns)]
    for name in options.only:
        program += ["--only", name]
    launched(ranks, program, folder)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Calibrate, measure, predict, print and write; end with 1 where a goal is missed."""
    options = arguments()
    if options.worker is not None:
        work(options)
        return
    if not any(wanted(options, ranks) for ranks in options.ranks) and not options.hosts:
        sys.exit(f"no training on {options.ranks} ranks begins with {', '.join(options.only)}; see own_runs_rows.py")
    from hpcdist.planner.cluster import toml_file

    outputs = None if options.output is None else reports.places(options.output)
    found: list[reports.Compared] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, times = calibrated(options, folder)
        cluster, library = toml_file.read(str(path)), ""
        print(f"calibrated by {CALIBRATION}")
        print("\n".join(toml_file.assumptions(cluster)))
        for ranks in options.ranks:
            own = wanted(options, ranks)
            if not own:
                continue
            told = measured(options, ranks, folder)
            library = told["library"]
            found += [reports.compared(row, one, cluster) for row, one in zip(own, told["rows"], strict=True)]
        if options.hosts:
            import own_runs_hosts

            compared, more = own_runs_hosts.measured(options, path, folder)
            found, times = found + compared, times + more
        text = path.read_text(encoding="utf-8")
    print("\n".join(filter(None, [reports.table(found), fits.table(times)])))
    if outputs is not None:
        reports.write(outputs, found, times, text, library, anonymous=options.anonymous)
    if goals := reports.missed(found):
        sys.exit(f"missed: {'; '.join(goals)}")


if __name__ == "__main__":
    main()
