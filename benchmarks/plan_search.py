"""Seconds of a search for the best layout of large models on 16,384 devices, on one core, with the best that it finds.

    python benchmarks/plan_search.py
    python benchmarks/plan_search.py --models gpt3-175b --objectives time energy -o plan_search.h5 --anonymous

Each search is a process of its own, so that nothing is known from the one before: its seconds are those of the search
alone, finalists simulated and explained, without reading the cluster. "core s" are seconds of the processor, which
other programs on the machine hardly change.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.hdf5 import files
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.layout import IMPLEMENTATIONS, ParallelLayout
from hpcdist.planner.model import transformer
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.report.quantities import figures, seconds
from hpcdist.planner.search.best_layouts import layout_line, search
from hpcdist.planner.search.space import OBJECTIVES, SearchSpec
from hpcdist.telemetry.provenance import provenance

SCHEMA, VERSION = "hpcdist.benchmark.plan_search", 1
GOAL_S: Final = 10.0
BATCHES: Final = {"gpt3-175b": 2048, "megatron-1t": 3072}  # samples a step, where the command names none
NUMBERS: Final = ("wall_s", "core_s", "value", "mfu", "layouts", "estimated", "refused", "left_out")


def one(options: argparse.Namespace, model: str, implementation: str, objective: str) -> dict[str, Any]:
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
    found = search(description, cluster, options.devices, options.batch or BATCHES.get(model, 2048), wanted)
    wall_s, core_s = time.perf_counter() - wall_s, time.process_time() - core_s
    row: dict[str, Any] = {"wall_s": wall_s, "core_s": core_s}
    row |= {name: getattr(found, name) for name in ("layouts", "estimated", "left_out")}
    row["refused"] = sum(each.count for each in found.refused if each.of == "layouts")
    if found.found:
        best = found.found[0]
        row |= {"value": best.value, "unit": best.unit, "mfu": best.estimate.mfu, "step_s": best.estimate.step_s}
        row |= {"best": layout_line(best.estimate.layout), "layout": asdict(best.estimate.layout)}
    else:
        row |= {"value": float("nan"), "mfu": float("nan"), "best": found.nothing[0]}
    return row


def alone(options: argparse.Namespace, model: str, implementation: str, objective: str) -> dict[str, Any]:
    """Search in a process of its own, on one core."""
    command = [sys.executable, __file__, "--one", model, implementation, objective]
    command += ["--cluster", options.cluster, "--devices", str(options.devices), "--batch", str(options.batch)]
    command += ["--closed"] if options.closed else []
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=1800, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def main() -> None:
    """Search for each model, implementation and objective, and print a line and the best layout of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(BATCHES), metavar="NAME")
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS), choices=IMPLEMENTATIONS)
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), choices=OBJECTIVES)
    parser.add_argument("--cluster", default="h100-hgx")
    parser.add_argument("--devices", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=0, help="samples of a step; 0: as is usual for the model")
    parser.add_argument("--closed", action="store_true", help="do not simulate the finalists")
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file for the raw figures")
    parser.add_argument("--anonymous", action="store_true", help="no name of this machine in the file")
    parser.add_argument("--one", nargs=3, metavar="WORD", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options, *options.one)))
        return
    print(f"{options.devices:,} devices of {options.cluster}; the goal is {GOAL_S:g} s on one core")
    print(f"{'model':14}{'kernels':10}{'objective':14}{'wall s':>8}{'core s':>8}{'layouts':>10}{'planned':>9}  best")
    cases = [(m, i, o) for m in options.models for i in options.implementations for o in options.objectives]
    rows = []
    for model, implementation, objective in cases:
        row = alone(options, model, implementation, objective)
        rows.append(row)
        value = f"{figures(row['value'])} {row['unit']}, {seconds(row['step_s'])} a step: " if "unit" in row else ""
        print(
            f"{model:14}{implementation:10}{objective:14}{row['wall_s']:8.2f}{row['core_s']:8.2f}"
            f"{row['layouts']:10,}{row['estimated']:9,}  {value}{row['best']}",
            flush=True,
        )
    print(f"slowest: {max(row['core_s'] for row in rows):.2f} core seconds")
    if options.output:
        with files.edit(options.output, SCHEMA, VERSION) as file:
            for name in NUMBERS:
                file[name] = np.array([float(row[name]) for row in rows])
            for column, name in enumerate(("model", "implementation", "objective")):
                file[name] = [case[column] for case in cases]
            file["best"] = [row["best"] for row in rows]
            file.attrs.update(provenance(anonymous=options.anonymous) | {"devices": options.devices})


if __name__ == "__main__":
    main()
