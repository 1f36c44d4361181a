"""Kernels and a training step under compute-sanitizer: invalid accesses, races, missing barriers, unset memory.

    python -m benchmarks gpu.sanitizer -o gpu_sanitizer.h5
    python -m benchmarks gpu.sanitizer --tools memcheck --programs kernels

Runs `gpu.kernels` with sizes that no vector or block width divides, and `gpu.step` of a small GPT, under each tool of
CUDA's compute-sanitizer. The sanitizer is searched in PATH, $CUDA_HOME and /usr/local/cuda. cupy's memory pool is off,
because it would hide accesses outside an array. The table has the number of errors and the first message; any error
gives exit code 1. A step takes minutes under a tool. Exit code 69 without the sanitizer or a GPU.
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
NO_CHECK = "it counts errors, and no error is allowed"

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
    folders = [f"{home}/{subfolder}" for home in homes if home for subfolder in ("bin", "compute-sanitizer")]
    path = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if path is None:
        raise MissingCapabilityError(
            "compute-sanitizer is not installed; it comes with the CUDA toolkit: set CUDA_HOME"
        )
    return path


def checked(tool: str, program: str, limit_s: float) -> tuple[int, str]:
    """Run ``program`` under ``tool``; return the number of errors, or -1 if unknown, and the first message."""
    line = [sanitizer(), "--tool", tool, sys.executable, "-c", CODE, *PROGRAMS[program]]
    try:
        done = subprocess.run(line, capture_output=True, text=True, cwd=harness.ROOT, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return -1, f"timed out after {limit_s:g} s"
    messages = [line.removeprefix("========= ") for line in done.stdout.splitlines() if line.startswith("=========")]
    total = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", done.stdout)
    if total and (int(total[1]) or done.returncode == 0):
        return int(total[1]), next((line for line in messages[1:] if int(total[1])), "")
    return -1, f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['nothing printed'])[-1]}"


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    results = [[checked(tool, program, chosen.limit) for tool in chosen.tools] for program in chosen.programs]
    arrays = {"errors": np.array([[count for count, _ in row] for row in results])}
    texts = [text for row in results for _, text in row]
    about = card() | {"tools": ";".join(chosen.tools), "programs": ";".join(chosen.programs), "texts": texts}
    return Results(arrays, {"errors": "programs, tools; -1: no answer"}, about)


def _cells(results: Results) -> list[tuple[str, int]]:
    names = [f"{program}, {tool}" for program in results.names("programs") for tool in results.names("tools")]
    return list(zip(names, results.arrays["errors"].ravel().tolist(), strict=True))


def ratios(results: Results) -> harness.Ratios:
    return {name: np.array([count]) for name, count in _cells(results)}


def lines(results: Results) -> Sequence[str]:
    rows = [("program, tool", "errors", "first")]
    for (name, count), text in zip(_cells(results), results.attributes["texts"], strict=True):
        rows.append((name, str(count) if count >= 0 else "?", str(text)))
    return aligned(rows)


def failures(results: Results) -> list[str]:
    return [f"{name}: {count if count >= 0 else 'no answer'}" for name, count in _cells(results) if count]
