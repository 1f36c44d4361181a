"""Trainings of hpcdist on this machine beside what the planner says of them.

    python -m benchmarks own_runs -o benchmarks/results/own_runs/DATE-own-runs --anonymous
    python -m benchmarks own_runs --cluster here.toml --only zero3 --turns 3

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
that ranks agree on, is told. Where ranks share memory, bytes are not messages, and none are compared. With --device gpu
all of it is of the GPUs that the ranks have. With --hosts,
trainings between hosts with slow links follow (`between_hosts`, root only). -o is what .h5 and
-cluster.toml begin with.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.own_runs import between_hosts, fits
from benchmarks.own_runs import report as reports
from benchmarks.own_runs.pin import PINNED
from benchmarks.own_runs.trainings import CALIBRATION, chosen_rows
from hpcdist.comm.start import Session
from hpcdist.hdf5 import files
from hpcdist.planner.cluster import toml_file

SCHEMA, COMMITTED = reports.SCHEMA, "own_runs/2026-11-22-own-runs.h5"
SMALL, WORSE = {"only": ["one rank", "zero3, ring"], "turns": 1, "seconds": 3.0}, 1.02
WRITES_ITSELF = True

WORLDS: Final = (1, 2)
OPTIONS: Final = {"seconds": 20.0, "turns": 6, "hosts": False, "device": {"cpu": 0, "gpu": 0}}
# seconds: of each half of the calibration


@dataclass(frozen=True)
class Compared(Results):
    """Trainings and times beside their predictions."""

    rows: Sequence[reports.Compared] = ()
    times: Sequence[fits.Time] = ()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", type=Path, help="a file of `hpcdist plan calibrate`; default: calibrate now")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="trainings whose names begin so")
    parser.add_argument("--ranks", type=int, nargs="+", choices=WORLDS, default=list(WORLDS))


def launched(ranks: int, program: Sequence[str]) -> None:
    """Run ``program`` on so many ranks, each on a core of its own, with what this prints."""
    done = harness.launch(ranks, [*PINNED[1:], *program])
    if done.returncode:
        sys.exit(f"{' '.join(program)} ended with {done.returncode}")


def calibrated(chosen: argparse.Namespace, folder: Path) -> tuple[Path, list[fits.Time]]:
    """Return the cluster's file, measured now where none was given, and what its fits say of unseen sizes."""
    if chosen.cluster is not None:
        return Path(chosen.cluster).resolve(), []
    path, points = folder / "here.toml", folder / "here.h5"
    program = ["-P", "-m", "hpcdist", "plan", "calibrate", "-o", str(path), "--points", str(points)]
    launched(max(WORLDS), [*program, "--seconds", str(chosen.seconds), "--device", chosen.device])
    return path, fits.unseen(points, "one host")


def measured(chosen: argparse.Namespace, ranks: int, folder: Path) -> dict[str, Any]:
    """Return what the trainings on so many ranks told."""
    path = folder / f"ranks-{ranks}.json"
    launched(
        ranks, ["-m", "benchmarks.own_runs.worker", str(path), str(chosen.turns), chosen.device, "one", *chosen.only]
    )
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return told


def measure(chosen: argparse.Namespace, session: Session) -> Compared:
    """Calibrate, measure and predict; write where --output says."""
    if not any(chosen_rows(ranks, chosen.only) for ranks in chosen.ranks) and not chosen.hosts:
        sys.exit(f"no training on {chosen.ranks} ranks begins with {', '.join(chosen.only)}; see own_runs/trainings.py")
    outputs = None if chosen.output is None else reports.places(chosen.output)
    rows: list[reports.Compared] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, times = calibrated(chosen, folder)
        cluster, library = toml_file.read(str(path)), ""
        print(f"calibrated by {CALIBRATION}")
        print("\n".join(toml_file.assumptions(cluster)))
        for ranks in chosen.ranks:
            own = chosen_rows(ranks, chosen.only)
            if own:
                told = measured(chosen, ranks, folder)
                library = told["library"]
                rows += [reports.compared(row, each, cluster) for row, each in zip(own, told["rows"], strict=True)]
        if chosen.hosts:
            compared, more = between_hosts.measured(chosen, path, folder)
            rows, times = rows + compared, times + more
        text = path.read_text(encoding="utf-8")
    if outputs is not None:
        reports.write(outputs, rows, times, text, library, anonymous=chosen.anonymous)
    names = "; ".join(f"{row.where}: {row.name}" for row in rows)
    memory = {name: np.array([getattr(row, name) for row in rows]) for name in ("peak_bytes", "predicted_memory")}
    return Compared(memory, {}, {"trainings": names}, rows, times)


def lines(results: Any) -> list[str]:
    return [part for part in (reports.table(results.rows), fits.table(results.times)) if part]


def ratios(results: Results) -> harness.Ratios:
    """Return the planned memory of each training over the measured one, or its inverse: 1 is exact."""
    factors = results.arrays["predicted_memory"] / results.arrays["peak_bytes"]
    names = str(results.attributes["trainings"]).split("; ")
    return {f"memory of {name}": np.array([max(own, 1 / own)]) for name, own in zip(names, factors, strict=True)}


def read(path: Path) -> Results:
    """Return the memory of the trainings in a file."""
    with files.open_read(path, reports.SCHEMA, 1) as file:
        memory = {name: file[name][...] for name in ("peak_bytes", "predicted_memory")}
        return Results(memory, {}, {"trainings": str(file.attrs["trainings"])})


def failures(results: Any) -> list[str]:
    return reports.missed(results.rows)
