"""Trainings and collectives between hosts with slow links, for `validate_own_runs.py`. Root only.

Hosts are network namespaces of this machine (`benchmarks/hosts`). On one rank of each the links are calibrated and
trainings predicted from them, as on one host. On two ranks of each, where cores are shared and no training is timed,
messages alone are fitted, inside a host and between hosts: what collectives of all four ranks take is then predicted
by the formulas of `hpcdist.planner.time.network` from these two levels, and measured.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import own_runs_fits as fits
import own_runs_report as reports
from own_runs_fits import Time
from own_runs_pin import PINNED
from own_runs_rows import between

from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import Cluster

RATE: Final = "1gbit"
BURST: Final = "80kb"  # that passes at any speed after a pause: as little as keeps the rate
HOSTS: Final = 2
LEAST_BYTES: Final = 1 << 20  # of a collective that is predicted: below, latency under shared cores is all there is
MAX_BYTES: Final = {1: "8M", 2: "4M"}  # by ranks of a host, which share its link
LIMIT_S: Final = 1200.0


def measured(options: argparse.Namespace, base: Path, folder: Path) -> tuple[list[reports.Compared], list[Time]]:
    """Return the trainings and the collectives between hosts, measured and predicted."""
    sys.path.insert(0, str(Path(__file__).resolve().parent / "hosts"))
    from cluster import Hosts

    from hpcdist.comm.launch import mpirun

    launcher = mpirun.find()
    # HAN, Open MPI's default between hosts, is ten times slower now and then.
    extra = ["--mca", "coll", "^han"] if launcher.vendor == mpirun.OPEN_MPI else []
    where = f"{HOSTS} hosts, {RATE}"
    with Hosts(HOSTS, RATE, BURST) as hosts:

        def run(ranks: int, program: list[str]) -> None:
            line = hosts.command(launcher, ranks, [*PINNED, *program], extra)
            done = hosts.run(line, hosts.environment(launcher), LIMIT_S)
            if done.returncode != 0:
                raise SystemExit(f"between hosts: the ranks ended with {done.returncode}\n{done.stdout}")

        def calibrate(ranks: int) -> tuple[Path, Path]:
            found = folder / f"hosts-{ranks}.toml", folder / f"hosts-{ranks}.h5"
            line = ["-P", "-m", "hpcdist", "plan", "calibrate", "-o", str(found[0]), "--points", str(found[1])]
            line += ["--from", str(base), "--max-bytes", MAX_BYTES[ranks], "--seconds", str(options.seconds)]
            run(ranks, [*line, *(f"--algorithm={name}" for name in ("auto", "ring", "hierarchical"))])
            return found

        print(f"{where}: links, one rank of each", flush=True)
        path, points = calibrate(1)
        times = fits.unseen(points, f"{where}, 1 rank each")
        compared = _trainings(options, path, run, folder, where)
        print(f"{where}: links, two ranks of each", flush=True)
        path, points = calibrate(2)
    cluster = replace(_narrowed(path, 2), fits=())
    times += fits.by_formula(points, cluster, f"{where}, 2 ranks each", LEAST_BYTES)
    return compared, times


def _narrowed(path: Path, ranks: int) -> Cluster:
    """Return the cluster of a file with as many devices of each host as there are ranks, whatever cores it has."""
    found = toml_file.read(str(path))
    levels = (*(replace(level, devices=ranks) for level in found.levels[:-1]), found.levels[-1])
    return replace(found, devices=HOSTS * ranks, node=replace(found.node, devices=ranks), levels=levels)


def _trainings(options: argparse.Namespace, path: Path, run: Any, folder: Path, where: str) -> list[reports.Compared]:
    """Return the trainings on one rank of each host."""
    rows = [row for row in between() if not options.only or row.name.startswith(tuple(options.only))]
    if not rows:
        return []
    told = folder / "hosts.json"
    program = [str(Path(__file__).with_name("validate_own_runs.py")), "--worker", str(told), "--between"]
    program += ["--turns", str(options.turns), *(f"--only={name}" for name in options.only)]
    run(1, program)
    found = json.loads(told.read_text(encoding="utf-8"))
    cluster = _narrowed(path, 1)
    # The devices are those of the calibration on one host: here, ranks of other processes share the cores.
    return [reports.compared(row, one, cluster, where) for row, one in zip(rows, found["rows"], strict=True)]
