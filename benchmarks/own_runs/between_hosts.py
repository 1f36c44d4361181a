"""Trainings and collectives between hosts with slow links. Root only.

Hosts are network namespaces of this machine (`benchmarks/hosts`). On one rank of each the links are calibrated and
trainings predicted from them, as on one host. On two ranks of each, where cores are shared and no training is timed,
messages alone are fitted, inside a host and between hosts: what collectives of all four ranks take is then predicted
by the formulas of `hpcdist.planner.time.network` from these two levels, and measured.
"""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks import harness
from benchmarks.hosts import cluster as network
from benchmarks.own_runs import fits
from benchmarks.own_runs import report as reports
from benchmarks.own_runs.fits import Time
from benchmarks.own_runs.pin import PINNED
from benchmarks.own_runs.trainings import chosen_rows
from hpcdist.comm.launch import mpirun
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
    os.environ["PYTHONPATH"] = harness.search_path()  # the hosts take it from there
    launcher = mpirun.find()
    where = f"{HOSTS} hosts, {RATE}"
    with network.Hosts(HOSTS, RATE, BURST) as hosts:

        def run(ranks: int, program: list[str]) -> None:
            line = hosts.command(launcher, ranks, [*PINNED, *program], network.tuned(launcher))
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
    rows = chosen_rows(HOSTS, options.only, hosts=True)
    if not rows:
        return []
    measured = folder / "hosts.json"
    run(1, ["-m", "benchmarks.own_runs.worker", str(measured), str(options.turns), "cpu", "hosts", *options.only])
    told = json.loads(measured.read_text(encoding="utf-8"))
    cluster = _narrowed(path, 1)
    # The devices are those of the calibration on one host: here, ranks of other processes share the cores.
    return [reports.compared(row, own, cluster, where) for row, own in zip(rows, told["rows"], strict=True)]
