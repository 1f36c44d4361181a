"""The way to Slurm: its own commands, asked first whether it would take the job."""

import os
import shutil
import subprocess
from typing import Final

from hpcdist.errors import ConfigurationError, MissingCapabilityError

LIMIT_S: Final = 120.0  # a busy controller answers late


def submit(script: str) -> str:
    """Submit ``script`` and return the job's number. Raises ConfigurationError when Slurm would not run it.

    Raises MissingCapabilityError where there is no sbatch, or no Slurm that answers it.
    """
    _sbatch(script, "--test-only")
    # With several clusters it is "number;cluster".
    return _sbatch(script, "--parsable").strip().partition(";")[0]


def _sbatch(script: str, option: str) -> str:
    """Run sbatch with ``script`` as its input and return what it prints."""
    program = shutil.which("sbatch")
    if program is None:
        raise MissingCapabilityError(
            "there is no sbatch on PATH; submit from a login node of the cluster (its Slurm may be a module to load), "
            "or print the script with --dry-run and submit it there"
        )
    try:
        done = subprocess.run(
            [program, option], input=os.fsencode(script), capture_output=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingCapabilityError(f"{program} {option} did not run ({error}); is Slurm up? try sinfo") from error
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0 and _unreachable(said):
        raise MissingCapabilityError(f"Slurm does not answer: {said}; try sinfo, and submit from a login node")
    if done.returncode != 0:
        raise ConfigurationError(
            f"Slurm refuses the job ({os.path.basename(program)} {option}, exit code {done.returncode}): {said}; "
            "change the option it names, or see `sinfo` for partitions and their limits"
        )
    return done.stdout.decode()


def _unreachable(said: str) -> bool:
    words = ("contact slurm controller", "connect to slurm", "configuration source", "slurm_conf", "munge")
    return any(word in said.lower() for word in words)
