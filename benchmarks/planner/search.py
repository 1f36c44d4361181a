"""Seconds of a search for the best layout of large models on 16,384 devices, on one core, with the best that it finds.

    python -m benchmarks planner.search
    python -m benchmarks planner.search --models gpt3-175b --objectives time energy -o plan_search.h5 --anonymous

Each search is a process of its own, so that nothing is known from the one before: its seconds are those of the search
alone, finalists simulated and explained, without reading the cluster. "core s" are seconds of the processor, which
other programs on the machine hardly change. The goal is 10 s.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist.comm.start import Session
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.layout import IMPLEMENTATIONS, ParallelLayout
from hpcdist.planner.model import transformer
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.report.quantities import figures, seconds
from hpcdist.planner.search.best_layouts import layout_line, search
from hpcdist.planner.search.space import OBJECTIVES, SearchSpec
from hpcdist.reporting.table import aligned

SCHEMA = "hpcdist.benchmark.plan_search"

BATCHES: Final = {"gpt3-175b": 2048, "megatron-1t": 3072}  # samples a step, where the command names none
NUMBERS: Final = ("wall_s", "core_s", "value", "mfu", "layouts", "estimated", "refused", "left_out")
# batch: samples of a step, 0: as is usual for the model; closed: do not simulate the finalists
OPTIONS: Final = {"models": list(BATCHES), "cluster": "h100-hgx", "devices": 16384, "batch": 0, "closed": False}
OPTIONS |= {"implementations": tuple(IMPLEMENTATIONS), "objectives": tuple(OBJECTIVES)}


def search_here(options: argparse.Namespace, model: str, implementation: str, objective: str) -> dict[str, Any]:
    """Search once, in this process, and return what came of it."""
    cluster = toml_file.read(options.cluster)
    cluster = replace(cluster, devices=max(cluster.devices, options.devices))
    if objective == "cost" and cluster.site.device_hour_price is None:  # any price will do for the seconds
        cluster = replace(cluster, site=replace(cluster.site, device_hour_price=1.0, currency="device hour"))
    description = describe(transformer.named(model), model)
    wanted = SearchSpec(
        objective=objective, base=ParallelLayout(implementation=implementation), simulate=not options.closed
    )
    wall_s, core_s = time.perf_counter(), time.process_time()
    outcome = search(description, cluster, options.devices, options.batch or BATCHES.get(model, 2048), wanted)
    wall_s, core_s = time.perf_counter() - wall_s, time.process_time() - core_s
    row: dict[str, Any] = {"wall_s": wall_s, "core_s": core_s}
    row |= {name: getattr(outcome, name) for name in ("layouts", "estimated", "left_out")}
    row["refused"] = sum(each.count for each in outcome.refused if each.of == "layouts")
    if outcome.found:
        best = outcome.found[0]
        row |= {"value": best.value, "unit": best.unit, "mfu": best.estimate.mfu, "step_s": best.estimate.step_s}
        row |= {"best": layout_line(best.estimate.layout), "layout": asdict(best.estimate.layout)}
    else:
        row |= {"value": float("nan"), "mfu": float("nan"), "best": outcome.nothing[0]}
    return row


def search_alone(chosen: argparse.Namespace, case: Sequence[str]) -> dict[str, Any]:
    """Search in a process of its own, on one core."""
    asked = {name: getattr(chosen, name) for name in ("cluster", "devices", "batch", "closed")}
    line = [sys.executable, "-m", __spec__.name, json.dumps(asked), *case]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": harness.search_path()}
    done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True, timeout=1800, env=environment)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Return the figures of all searches."""
    cases = list(product(chosen.models, chosen.implementations, chosen.objectives))
    rows = [search_alone(chosen, case) for case in cases]
    arrays = {name: np.array([float(row[name]) for row in rows]) for name in NUMBERS}
    best = [
        f"{figures(row['value'])} {row['unit']}, {seconds(row['step_s'])} a step: {row['best']}"
        if "unit" in row
        else row["best"]
        for row in rows
    ]
    about = {"devices": chosen.devices, "cluster": chosen.cluster, "best": best}
    return Results(arrays, dict.fromkeys(arrays, "searches"), about | {"searches": [", ".join(case) for case in cases]})


def lines(results: Results) -> Sequence[str]:
    """Return the table, and the slowest search."""
    columns = ("wall_s", "core_s", "layouts", "estimated")
    rows = [["model, kernels, objective", *columns]]
    for place, name in enumerate(results.attributes["searches"]):
        rows.append([name, *(f"{results.arrays[column][place]:,.4g}" for column in columns)])
    shown = [f"{line}  {best}" for line, best in zip(aligned(rows), ("best", *results.attributes["best"]), strict=True)]
    return [*shown, f"slowest: {results.arrays['core_s'].max():.2f} core seconds"]


if __name__ == "__main__":
    print(json.dumps(search_here(argparse.Namespace(**json.loads(sys.argv[1])), *sys.argv[2:])))
