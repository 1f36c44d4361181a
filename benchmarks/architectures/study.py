"""From a parameter server to ZeRO and pipelines: how far does each architecture scale, and what stops it? By plan.

    python -m benchmarks architectures -o architectures.h5 --plot architectures.png --anonymous
    python -m benchmarks architectures --scenarios large-weak --cluster a100-selene

The story of the field goes from parameter servers through rings, trees and hierarchies of allreduce to pipelines and
ZeRO (A. Singh, IJFMR 6(6), 2024, doi 10.36948/ijfmr.2024.v06i06.34214). Here `hpcdist.planner` tells it in numbers, on
8 to 131,072 devices of a cluster: seconds, bytes, memory, joules and failures of a step, for BERT-large and for a GPT
of 175 thousand million parameters, with a batch that stays and one that grows. For each architecture and number of
devices the fastest layout that fits into 95 % of the memory is taken; gradients have 16 bits and hide behind the
backward wherever the architecture lets them.

What computes is the published implementation ("megatron": Megatron-LM's kernels and memory, with attention scores),
whatever the architecture; what sends is library "nccl", a ring or tree for each link of a node, or "mpi", one ring or a
hierarchy, as the architecture says. It is not what hpcdist sends: of 16-bit gradients its allreduces sum float32.

Goodput is samples a second with saves, failures and restarts (Young/Daly). An architecture stops scaling at the last
number of devices to which doubling gave 1.5 times the goodput. Of the doubling after that each second is booked: what
computes, latency of the exchange (what the same layout would not wait for if messages began at once), its bytes, the
bubble, messages inside of layers, devices that serve, failures. What grew most is named. Nothing is measured here: it
takes half a minute on one core, and is as good as the planner (see the study `planner`). For ZeRO-3 that is not good:
of the six published rows there are, DeepSpeed's of early 2021, predictions are 26 to 92 % too fast. Latency is counted
for each message, so servers that take many at a time do better than here; lost packets, as incast brings on Ethernet,
worse.
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
OPTIONS: Final = {"cluster": "h100-hgx", "counts": list(COUNTS), "scenarios": tuple(NAMES)}  # counts: of devices


@dataclass(frozen=True)
class ScalingResults(Results):
    """Points as arrays, and all that they were made of."""

    scenarios: Sequence[Found] = ()


def measure(chosen: argparse.Namespace, session: Session) -> ScalingResults:
    """Return the plans of all scenarios."""
    cluster = toml_file.read(chosen.cluster)
    made = [
        study(scenario, cluster, tuple(chosen.counts)) for scenario in SCENARIOS if scenario.name in chosen.scenarios
    ]
    return ScalingResults(results.points(made), {}, {"cluster": toml_file.dump(cluster)}, made)


def ratios(found: Results) -> harness.Ratios:
    """Return the device-seconds of a sample, those of saves and failures included, by scenario, architecture, count."""
    rows = found.arrays
    keys = zip(rows["scenario"].tolist(), rows["architecture"].tolist(), rows["devices"].tolist(), strict=True)
    seconds = rows["devices"] / np.where(rows["goodput"] > 0, rows["goodput"], np.nan)
    return {
        f"{scenario.decode()}, {name.decode()}, {count} devices": np.array([value])
        for (scenario, name, count), value in zip(keys, seconds.tolist(), strict=True)
        if value == value
    }


def plot(found: Any, file: Path) -> None:
    pictures.plot(found.scenarios, file)


def write(path: Path, found: Any, origin: Any) -> None:
    results.write(path, found.scenarios, origin, found.attributes["cluster"])


def lines(found):
    return report.text(found.scenarios).splitlines()


def read(path):
    return Results(results.read(path), {})
