"""Trainings and collectives between hosts with slow links. Root only.

Hosts are network namespaces of this machine (`benchmarks/hosts`). With one rank per host, the links are calibrated, and
trainings are predicted and measured as on one host. With two ranks per host, which share cores, only messages inside
and between hosts are calibrated. From these two levels the formulas of `hpcdist.planner.time.network` predict the
collectives of all four ranks, which are also measured.
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
BURST: Final = "80kb"  # bytes that a link passes at any speed after a pause: the least that sustains the rate
HOSTS: Final = 2
LEAST_BYTES: Final = 1 << 20  # smallest predicted collective; smaller ones only measure latency of shared cores
MAX_BYTES: Final = {1: "8M", 2: "4M"}  # by ranks per host, which share its link
LIMIT_S: Final = 1200.0


def measured(options: argparse.Namespace, base: Path, folder: Path) -> tuple[list[reports.Compared], list[Time]]:
    os.environ["PYTHONPATH"] = harness.search_path()  # inherited by the hosts
    launcher = mpirun.find()
    where = f"{HOSTS} hosts, {RATE}"
    with network.Hosts(HOSTS, RATE, BURST) as hosts:

        def run(ranks: int, program: list[str]) -> None:
            command = hosts.command(launcher, ranks, [*PINNED, *program], network.tuned(launcher))
            done = hosts.run(command, hosts.environment(launcher), LIMIT_S)
            if done.returncode != 0:
                raise SystemExit(f"between hosts: the ranks exited with code {done.returncode}\n{done.stdout}")

        def calibrate(ranks: int) -> tuple[Path, Path]:
            result = folder / f"hosts-{ranks}.toml", folder / f"hosts-{ranks}.h5"
            command = ["-P", "-m", "hpcdist", "plan", "calibrate", "-o", str(result[0]), "--points", str(result[1])]
            command += ["--from", str(base), "--max-bytes", MAX_BYTES[ranks], "--seconds", str(options.seconds)]
            run(ranks, [*command, *(f"--algorithm={name}" for name in ("auto", "ring", "hierarchical"))])
            return result

        print(f"{where}: links, one rank per host", flush=True)
        path, points = calibrate(1)
        times = fits.unseen(points, f"{where}, 1 rank each")
        compared = _trainings(options, path, run, folder, where)
        print(f"{where}: links, two ranks per host", flush=True)
        path, points = calibrate(2)
    cluster = replace(_narrowed(path, 2), fits=())
    times += fits.by_formula(points, cluster, f"{where}, 2 ranks each", LEAST_BYTES)
    return compared, times


def _narrowed(path: Path, ranks: int) -> Cluster:
    """Read a cluster and set its devices per host to ``ranks``."""
    result = toml_file.read(str(path))
    levels = (*(replace(level, devices=ranks) for level in result.levels[:-1]), result.levels[-1])
    return replace(result, devices=HOSTS * ranks, node=replace(result.node, devices=ranks), levels=levels)


def _trainings(options: argparse.Namespace, path: Path, run: Any, folder: Path, where: str) -> list[reports.Compared]:
    rows = chosen_rows(HOSTS, options.only, hosts=True)
    if not rows:
        return []
    measured = folder / "hosts.json"
    run(1, ["-m", "benchmarks.own_runs.worker", str(measured), str(options.turns), "cpu", "hosts", *options.only])
    document = json.loads(measured.read_text(encoding="utf-8"))
    cluster = _narrowed(path, 1)
    # Devices come from the calibration on one host, because here the ranks share cores with other processes.
    return [reports.compared(row, output, cluster, where) for row, output in zip(rows, document["rows"], strict=True)]
