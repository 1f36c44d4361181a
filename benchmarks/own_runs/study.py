"""Trainings of hpcdist on this machine, compared with the planner's predictions.

    python -m benchmarks own_runs -o benchmarks/results/own_runs/DATE-own-runs --anonymous
    python -m benchmarks own_runs --cluster here.toml --only zero3 --turns 3

The machine is calibrated first (`hpcdist plan calibrate` on 2 ranks): matrix products, copies, steps of small models,
messages and collectives. Then trainings of two other models on 1 and 2 ranks, each rank on a separate core, alternate
in one job: three steps each, the first not kept. Times are median steps of the slowest rank. Bytes are the messages of
the busiest rank per step. Memory is the largest peak of a rank's ledger. A bubble is the largest share of a rank's span
spent in receives. The planner gets each recipe and the calibrated cluster.

Calibrated times are first quartiles, as on an idle machine, but measured steps are medians. This explains part of the
errors.

Goals: memory within 5 % and step time within 15 % for every training; otherwise exit code 1. The output also counts
unseen sizes predicted within 20 %, and trainings with exact message bytes. Bytes are not compared if ranks share
memory. --hosts adds trainings between hosts with slow links (`between_hosts`, root only). -o is the prefix of the files
.h5 and -cluster.toml.
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
# seconds: duration of each half of the calibration


@dataclass(frozen=True)
class Compared(Results):
    rows: Sequence[reports.Compared] = ()
    times: Sequence[fits.Time] = ()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", type=Path, help="a file of `hpcdist plan calibrate`; default: calibrate now")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="prefixes of the trainings to run")
    parser.add_argument("--ranks", type=int, nargs="+", choices=WORLDS, default=list(WORLDS))


def launched(ranks: int, program: Sequence[str]) -> None:
    """Run ``program`` on ``ranks`` ranks, each on a separate core, and show its output."""
    done = harness.launch(ranks, [*PINNED[1:], *program])
    if done.returncode:
        sys.exit(f"{' '.join(program)} exited with code {done.returncode}")


def calibrated(chosen: argparse.Namespace, folder: Path) -> tuple[Path, list[fits.Time]]:
    """Return the cluster file (calibrated now by default), and predictions of its fits at unseen sizes."""
    if chosen.cluster is not None:
        return Path(chosen.cluster).resolve(), []
    path, points = folder / "here.toml", folder / "here.h5"
    program = ["-P", "-m", "hpcdist", "plan", "calibrate", "-o", str(path), "--points", str(points)]
    launched(max(WORLDS), [*program, "--seconds", str(chosen.seconds), "--device", chosen.device])
    return path, fits.unseen(points, "one host")


def measured(chosen: argparse.Namespace, ranks: int, folder: Path) -> dict[str, Any]:
    path = folder / f"ranks-{ranks}.json"
    launched(
        ranks, ["-m", "benchmarks.own_runs.worker", str(path), str(chosen.turns), chosen.device, "one", *chosen.only]
    )
    output: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return output


def measure(chosen: argparse.Namespace, session: Session) -> Compared:
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
            row_specs = chosen_rows(ranks, chosen.only)
            if row_specs:
                output = measured(chosen, ranks, folder)
                library = output["library"]
                rows += [
                    reports.compared(row, measurement, cluster)
                    for row, measurement in zip(row_specs, output["rows"], strict=True)
                ]
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
    return [text for text in (reports.table(results.rows), fits.table(results.times)) if text]


def ratios(results: Results) -> harness.Ratios:
    """Return the larger of planned / measured memory and its inverse, for each training: 1 is exact."""
    factors = results.arrays["predicted_memory"] / results.arrays["peak_bytes"]
    names = str(results.attributes["trainings"]).split("; ")
    return {
        f"memory of {name}": np.array([max(factor, 1 / factor)]) for name, factor in zip(names, factors, strict=True)
    }


def read(path: Path) -> Results:
    with files.open_read(path, reports.SCHEMA, 1) as file:
        memory = {name: file[name][...] for name in ("peak_bytes", "predicted_memory")}
        return Results(memory, {}, {"trainings": str(file.attrs["trainings"])})


def failures(results: Any) -> list[str]:
    return reports.missed(results.rows)
