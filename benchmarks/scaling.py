"""Weak scaling of the main job: tokens/s of N ranks over one rank with the same batch a rank.

    python benchmarks/scaling.py --ranks 2 --rounds 5 -o scaling.h5

Every round trains the default model for some steps on one rank and on N, in turns, so that drift of the machine hits
both alike; the figure is the median of the ratios of the rounds. One thread a rank.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from hpcdist.hdf5 import files
from hpcdist.telemetry.provenance import provenance

SCHEMA, VERSION = "hpcdist.benchmark.scaling", 1


def tokens_per_second(ranks: int, steps: int, per_rank: int, algorithm: str) -> float:
    """Train on ``ranks`` ranks and return the throughput that the summary reports."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hpcdist", "run", "-n", str(ranks), "train", "--json"]
        command += ["--out", f"{folder}/run", "--set", f"run.steps={steps}"]
        command += ["--set", f"run.global_batch={per_rank * ranks}", "--set", f"communication.algorithm={algorithm}"]
        done = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=600,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_s"])


def main() -> None:
    """Measure and print one line a round, then the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--per-rank", type=int, default=8, help="samples a rank and step")
    parser.add_argument("--algorithm", default="native")
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file for the raw figures")
    options = parser.parse_args()
    rates = np.zeros((options.rounds, 2))
    for number in range(options.rounds):
        order = (1, options.ranks) if number % 2 == 0 else (options.ranks, 1)
        for ranks in order:
            rates[number, int(ranks != 1)] = tokens_per_second(
                ranks, options.steps, options.per_rank, options.algorithm
            )
        print(
            f"round {number + 1}: 1 rank {rates[number, 0]:,.0f}, "
            f"{options.ranks} ranks {rates[number, 1]:,.0f} tokens/s"
        )
    ratios = rates[:, 1] / rates[:, 0]
    print(
        f"{options.ranks} ranks / 1 rank: median {statistics.median(ratios):.3f}, "
        f"{ratios.min():.3f} to {ratios.max():.3f}"
    )
    if options.output:
        attributes = provenance(anonymous=True) | {
            "ranks": options.ranks,
            "steps": options.steps,
            "samples_per_rank": options.per_rank,
            "algorithm": options.algorithm,
        }
        with files.edit(options.output, SCHEMA, VERSION) as file:
            file["tokens_per_s"] = rates  # (round, 1 rank | N ranks)
            file.attrs.update(attributes)


if __name__ == "__main__":
    main()
