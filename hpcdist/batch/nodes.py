"""The nodes that a job of Slurm still has: those that failed are taken from one that was submitted with --no-kill.

Slurm's own variables stay what they were at the start of the job, and a node that is back again is not given back.
"""

import os
import subprocess
from collections.abc import Mapping
from typing import Final

LIMIT_S: Final = 60.0  # a busy controller answers late


def lost(environment: Mapping[str, str] = os.environ) -> tuple[list[str], list[str]]:
    """Return the nodes that this job has lost, and those that are left.

    Nothing is lost outside of a job, and where Slurm does not say.
    """
    job, before = environment.get("SLURM_JOB_ID"), environment.get("SLURM_JOB_NODELIST")
    if not job or not before:
        return [], []
    left = _names(_said(["squeue", "-h", "-j", job, "-o", "%N"], environment).strip(), environment)
    return ([name for name in _names(before, environment) if name not in left], left) if left else ([], [])


def _names(short: str, environment: Mapping[str, str]) -> list[str]:
    """Return the names in ``short``, as Slurm writes them: n[1-2,4]."""
    return _said(["scontrol", "show", "hostnames", short], environment).split() if short else []


def _said(line: list[str], environment: Mapping[str, str]) -> str:
    """Return what a command of Slurm prints, "" where it is not there or fails."""
    try:
        done = subprocess.run(
            line,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            timeout=LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
