"""Wall time of login-node commands, compared with an empty Python program.

    python -m benchmarks startup --rounds 20 --output startup.h5 --anonymous

The first call of each command fills the page cache and is not counted.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist.comm.start import Session

SCHEMA, COMMITTED = "hpcdist-benchmark-startup", "operations/2026-11-22-startup.h5"
SMALL = {"rounds": 5}

SUBMIT: Final = ("submit", "--nodes", "2", "--ranks-per-node", "4", "--dry-run")
COMMANDS: Final = {
    "hpcdist --help": ("--help",),
    "hpcdist submit --dry-run": SUBMIT,
    "hpcdist submit --site cray --dry-run": (*SUBMIT, "--site", "cray", "--account", "a"),
    "hpcdist submit --chain 10 --dry-run": (*SUBMIT, "--chain", "10"),
    "hpcdist site list": ("site", "list"),
    "hpcdist jobs status": ("jobs", "status"),
}
OPTIONS: Final = {"rounds": 15}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    programs = {"python -c pass": ["-P", "-c", "pass"]}
    programs |= {name: ["-P", "-m", "hpcdist", *arguments] for name, arguments in COMMANDS.items()}
    environment = {**os.environ, "PYTHONPATH": harness.search_path()}
    with tempfile.TemporaryDirectory() as folder:

        def call(arguments: Sequence[str]) -> None:
            line = [sys.executable, *arguments]
            subprocess.run(
                line, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60
            )

        calls = {
            name: lambda arguments=arguments: harness.seconds(lambda: call(arguments))
            for name, arguments in programs.items()
        }
        values = harness.alternate(calls, chosen.rounds, warm_up=1)
    about = {"commands": "; ".join(values)}
    return Results({"time_s": np.array(list(values.values()))}, {"time_s": "commands, rounds"}, about)
