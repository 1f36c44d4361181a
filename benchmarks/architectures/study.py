"""From parameter servers to ZeRO and pipelines: how far each architecture scales, and what stops it (planned).

    python -m benchmarks architectures -o architectures.h5 --plot architectures.png --anonymous
    python -m benchmarks architectures --scenarios large-weak --cluster a100-selene

For each architecture on 8 to 131,072 devices of a cluster, `hpcdist.planner` finds the fastest layout that fits into
95 % of the memory: seconds, bytes, memory, joules and failures of a step, for BERT-large and a GPT of 175 billion
parameters, with strong and weak scaling. The architectures follow A. Singh, IJFMR 6(6), 2024, doi
10.36948/ijfmr.2024.v06i06.34214. Gradients have 16 bits and overlap with the backward pass if possible.

All architectures compute with the published implementation ("megatron-2022": Megatron-LM's kernels and memory, with
attention scores). Their library is "nccl" (a ring or tree for each link of a node) or "mpi" (one ring or a hierarchy).
This is not what hpcdist sends: its allreduces of 16-bit gradients sum float32.

Goodput is samples per second including saves, failures and restarts (Young/Daly). An architecture stops scaling at the
last number of devices to which doubling gave 1.5 times the goodput. The next doubling's time is split into computing,
latency of the exchange (saved if messages started instantly), bytes of the exchange, pipeline bubble, messages inside
layers, servers and failures; the report names the part that grew most. Nothing is measured, so the planner limits the
accuracy. For the six published rows of ZeRO-3 (DeepSpeed, early 2021), predictions are 26 to 92 % too fast. Servers
that receive many messages at once would be faster than here; packet loss by incast would make them slower.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.architectures import plot as pictures
from benchmarks.architectures import report, results
from benchmarks.architectures.catalogue import COUNTS, SCENARIOS
from benchmarks.architectures.scaling import Found, study
from benchmarks.harness import Results
from hpcdist.comm.start import Session
from hpcdist.planner.cluster import toml_file

SCHEMA, COMMITTED = results.SCHEMA, "architectures/2026-11-22-architectures-study.h5"
SMALL, WORSE = {"scenarios": ["small-weak"], "counts": [64, 1024]}, 1.02

NAMES: Final = [scenario.name for scenario in SCENARIOS]
OPTIONS: Final = {"cluster": "h100-hgx", "counts": list(COUNTS), "scenarios": tuple(NAMES)}  # counts: device counts


@dataclass(frozen=True)
class ScalingResults(Results):
    scenarios: Sequence[Found] = ()


def measure(chosen: argparse.Namespace, session: Session) -> ScalingResults:
    cluster = toml_file.read(chosen.cluster)
    scenario_results = [
        study(scenario, cluster, tuple(chosen.counts)) for scenario in SCENARIOS if scenario.name in chosen.scenarios
    ]
    return ScalingResults(results.points(scenario_results), {}, {"cluster": toml_file.dump(cluster)}, scenario_results)


def ratios(result: Results) -> harness.Ratios:
    """Return device-seconds per sample, including saves and failures, by scenario, architecture and count."""
    rows = result.arrays
    keys = zip(rows["scenario"].tolist(), rows["architecture"].tolist(), rows["devices"].tolist(), strict=True)
    seconds = rows["devices"] / np.where(rows["goodput"] > 0, rows["goodput"], np.nan)
    return {
        f"{scenario.decode()}, {name.decode()}, {count} devices": np.array([value])
        for (scenario, name, count), value in zip(keys, seconds.tolist(), strict=True)
        if value == value
    }


def plot(result: Any, file: Path) -> None:
    pictures.plot(result.scenarios, file)


def write(path: Path, result: Any, origin: Any) -> None:
    results.write(path, result.scenarios, origin, result.attributes["cluster"])


def lines(result):
    return report.text(result.scenarios).splitlines()


def read(path):
    return Results(results.read(path), {})
