"""The way to Slurm: its own commands, asked first whether it would take the job."""

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hpcdist.batch import command
from hpcdist.errors import ConfigurationError, MissingCapabilityError

_VARIABLES: Final = {"--time": "SBATCH_TIMELIMIT", "--array": "SBATCH_ARRAY_INX"}  # others have the option's name


def submit(script: str, after: str | None = None) -> str:
    """Submit ``script`` and return the job's number; it waits for the end of the job ``after``, however that ends.

    Raises ConfigurationError when Slurm would not run it, MissingCapabilityError where there is no sbatch, or no Slurm
    that answers it.
    """
    _sbatch(script, "--test-only")
    dependency = [] if after is None else [f"--dependency=afterany:{after}"]
    said = _sbatch(script, "--parsable", *dependency)
    # With several clusters it is "number;cluster"; and some sites have sbatch print a greeting before.
    numbers = re.findall(r"^(\d+)(?:;.*)?$", said, re.MULTILINE)
    if not numbers:
        raise ConfigurationError(
            f"sbatch has said no number of a job, but {said.strip()!r}; see squeue whether there is one, and cancel it"
        )
    return str(numbers[-1])


def _sbatch(script: str, *options: str) -> str:
    """Run sbatch with ``script`` as its input and return what it prints."""
    absent = (
        "there is no sbatch on PATH; submit from a login node of the cluster (its Slurm may be a module to load), "
        "print the script with --dry-run and submit it there, or run it on this machine: --site workstation"
    )
    environment = undisturbed(script)
    answer = command.ask(["sbatch", *options], absent, "is Slurm up? try sinfo", script, environment=environment)
    if answer.code != 0 and _unreachable(answer.complaint):
        raise MissingCapabilityError(
            f"Slurm does not answer: {answer.complaint}; try sinfo, and submit from a login node"
        )
    if answer.code != 0:
        raise ConfigurationError(
            f"Slurm refuses the job (sbatch {options[0]}, exit code {answer.code}): {answer.complaint}; "
            "change the option it names, or see `sinfo` for partitions and their limits"
        )
    return answer.said


def undisturbed(script: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environment`` without what sbatch would take in place of the directives of ``script`` (pure)."""
    options = set(re.findall(r"^#SBATCH (--[a-z-]+)", script, re.MULTILINE))
    if options & {"--requeue", "--no-requeue"}:
        options |= {"--requeue", "--no-requeue"}
    over = {_VARIABLES.get(option, "SBATCH_" + option[2:].upper().replace("-", "_")) for option in options}
    return {name: value for name, value in environment.items() if name not in over}


def check_folder(folder: Path) -> None:
    """Raise ConfigurationError where no log could go into ``folder``: Slurm reads a whole path as a pattern."""
    found = re.search(r"\\|%[0-9A-Za-z%]+", str(folder))
    if found is not None:
        raise ConfigurationError(
            f"{folder}, where the log goes, has {found[0]} in its name, which Slurm reads as a pattern: the job "
            "would end without a log; submit from another directory"
        )


def is_this_machine() -> bool:
    """Whether all nodes of the cluster are this machine, so that they see its files; False where Slurm does not say."""
    done = _asked(["scontrol", "--oneliner", "show", "node"])
    hosts = set(re.findall(r"\bNodeHostName=(\S+)", done))
    return hosts == {socket.gethostname().partition(".")[0]}


def _asked(line: list[str]) -> str:
    """Return what a command of Slurm prints, "" where it is not there or fails."""
    try:
        answer = command.ask(line, "", "")
    except MissingCapabilityError:
        return ""
    return answer.said if answer.code == 0 else ""


def _unreachable(said: str) -> bool:
    words = ("contact slurm controller", "connect to slurm", "configuration source", "slurm_conf", "munge")
    return any(word in said.lower() for word in words)
