"""Kernels and a training step under compute-sanitizer: accesses out of bounds, races, missing barriers, unset memory.

    python -m benchmarks gpu.sanitizer -o gpu_sanitizer.h5
    python -m benchmarks gpu.sanitizer --tools memcheck --programs kernels

It starts `gpu.kernels` at sizes that no vector and no block divides, and `gpu.step` of a small GPT, under each tool of
CUDA's compute-sanitizer, which is looked for in PATH, $CUDA_HOME and /usr/local/cuda. Memory is not taken from cupy's
pool, in which a kernel could leave its array unseen. Told are the errors of each, with the first one's text; any error
is exit code 1. A step takes minutes under a tool. Without the tool, or without a GPU, it leaves with 69.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.gpu.card import card
from benchmarks.harness import Results
from hpcdist.comm.start import Session
from hpcdist.errors import MissingCapabilityError
from hpcdist.reporting.table import aligned

SCHEMA, ON = "hpcdist.benchmark.gpu_sanitizer", "gpu"
NO_CHECK = "it counts errors, of which none is allowed"

TOOLS: Final = ("memcheck", "racecheck", "synccheck", "initcheck")
PROGRAMS: Final = {
    "kernels": ("gpu.kernels", "--tokens", "37", "--hidden", "72", "--rounds", "1", "--copied", "4096"),
    "step": (
        *("gpu.step", "--steps", "1", "--set", "model.layers=1", "model.hidden=24", "model.heads=2"),
        *("data.context=9", "run.global_batch=3", "model.dropout=0.1"),
    ),
}
CODE: Final = """
import sys
import cupy
from benchmarks.__main__ import main

cupy.cuda.set_allocator(None)
sys.exit(main(sys.argv[1:]))
"""
OPTIONS: Final = {"tools": TOOLS, "programs": tuple(PROGRAMS), "limit": 300.0}


def sanitizer() -> str:
    """Return the path of compute-sanitizer. Raises MissingCapabilityError."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    folders = [f"{home}/{part}" for home in homes if home for part in ("bin", "compute-sanitizer")]
    path = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if path is None:
        raise MissingCapabilityError(
            "compute-sanitizer is not installed; it comes with the CUDA toolkit: set CUDA_HOME"
        )
    return path


def checked(tool: str, program: str, limit_s: float) -> tuple[int, str]:
    """Run ``program`` under ``tool``; return how many errors it found, -1 for no answer, and the first line of one."""
    line = [sanitizer(), "--tool", tool, sys.executable, "-c", CODE, *PROGRAMS[program]]
    try:
        done = subprocess.run(line, capture_output=True, text=True, cwd=harness.ROOT, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return -1, f"not ended within {limit_s:g} s"
    told = [line.removeprefix("========= ") for line in done.stdout.splitlines() if line.startswith("=========")]
    total = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", done.stdout)
    if total and (int(total[1]) or done.returncode == 0):
        return int(total[1]), next((line for line in told[1:] if int(total[1])), "")
    return -1, f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['nothing printed'])[-1]}"


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Return the errors of each tool in each program."""
    found = [[checked(tool, program, chosen.limit) for tool in chosen.tools] for program in chosen.programs]
    arrays = {"errors": np.array([[count for count, _ in row] for row in found])}
    texts = [text for row in found for _, text in row]
    about = card() | {"tools": ";".join(chosen.tools), "programs": ";".join(chosen.programs), "texts": texts}
    return Results(arrays, {"errors": "programs, tools; -1: no answer"}, about)


def _cells(results: Results) -> list[tuple[str, int]]:
    names = [f"{program}, {tool}" for program in results.names("programs") for tool in results.names("tools")]
    return list(zip(names, results.arrays["errors"].ravel().tolist(), strict=True))


def ratios(results: Results) -> harness.Ratios:
    """Return the errors of each."""
    return {name: np.array([count]) for name, count in _cells(results)}


def lines(results: Results) -> Sequence[str]:
    rows = [("program, tool", "errors", "first")]
    for (name, count), text in zip(_cells(results), results.attributes["texts"], strict=True):
        rows.append((name, str(count) if count >= 0 else "?", str(text)))
    return aligned(rows)


def failures(results: Results) -> list[str]:
    return [f"{name}: {count if count >= 0 else 'no answer'}" for name, count in _cells(results) if count]
