"""Command line of the studies: ``python -m benchmarks STUDY [options]``, ``python -m benchmarks STUDY --check``."""

import ast
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

if sys.argv[1:2] != ["power"]:  # its trials select their number of threads
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy is imported: the studies compare ranks of one thread

STUDIES: Final = {
    "architectures": "architectures.study",
    "attention": "training.attention",
    "background_saves": "operations.background_saves",
    "checkpoint": "operations.checkpoint",
    "compression": "compression.study",
    "compressors": "compression.compressors",
    "context": "training.context",
    "data_sources": "operations.data_sources",
    "energy_sensor": "operations.energy_sensor",
    "exchanges": "training.exchanges",
    "experts": "training.experts",
    "experts.rows": "training.expert_rows",
    "experts.losses": "training.expert_losses",
    "extremes": "collectives.extremes",
    "generation": "training.generation",
    "gpu.attention": "gpu.attention",
    "gpu.campaign": "gpu.campaign.study",
    "gpu.collectives": "gpu.collectives",
    "gpu.eager": "gpu.eager",
    "gpu.energy": "gpu.energy",
    "gpu.kernels": "gpu.kernels",
    "gpu.pipeline": "gpu.pipeline",
    "gpu.sanitizer": "gpu.sanitizer",
    "gpu.step": "gpu.step",
    "gpu.strategies": "gpu.strategies",
    "hosts": "hosts.hierarchical",
    "hosts.torch": "hosts.torch",
    "huggingface": "operations.huggingface",
    "kills": "operations.kills",
    "large_batch": "large_batch.study",
    "libraries": "collectives.libraries",
    "memory": "training.memory",
    "node_crashes": "operations.node_crashes",
    "node_shared": "collectives.node_shared",
    "offload": "training.offload",
    "optimizers": "training.optimizers",
    "overhead": "collectives.overhead",
    "overlap": "training.overlap",
    "own_runs": "own_runs.study",
    "packing": "training.packing",
    "pipelines": "training.pipelines",
    "planner": "planner.validation",
    "power": "power.study",
    "real_model": "training.real_model",
    "startup": "operations.startup",
    "survival": "operations.survival",
    "telemetry": "operations.telemetry",
    "tensor": "training.tensor",
    "wrapped.checkpoints": "wrapped.checkpoints",
    "wrapped.overhead": "wrapped.overhead",
    "wrapped.process_groups": "wrapped.process_groups",
    "wrapped.torch": "wrapped.torch",
}


def summary(module: str) -> str:
    """Return the first docstring line of a study's module, without importing the module."""
    source = (Path(__file__).parent / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    return str(ast.get_docstring(ast.parse(source))).splitlines()[0]


def main(words: Sequence[str]) -> int:
    """Run the study named by ``words[0]``, or list all studies. Return the exit code."""
    if not words or words[0] in ("-h", "--help"):
        for name, module in STUDIES.items():
            print(f"{name:18} {summary(module)}")
        return 0
    if words[0] not in STUDIES:
        sys.exit(f"{words[0]!r}: choose a study from {', '.join(STUDIES)}")
    from benchmarks import harness

    module = importlib.import_module(f"benchmarks.{STUDIES[words[0]]}")
    return harness.run(module, words[0], list(words[1:]))


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda *_: sys.exit(1))  # so that cleanup ends the ranks and removes test hosts
    sys.exit(main(sys.argv[1:]))
