"""Submit jobs to Slurm by sbatch, which is first asked whether it would take the job.

The environment of sbatch is cleaned of variables that would override the directives of the script.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hpcdist.batch.schedulers import base
from hpcdist.errors import ConfigurationError, MissingCapabilityError

# Option of sbatch -> the variable that overrides its directive; those of other options have the option's name.
_VARIABLES: Final = {"--time": "SBATCH_TIMELIMIT", "--array": "SBATCH_ARRAY_INX", "--mem": "SBATCH_MEM_PER_NODE"}
# Variables that an allocation sets for its own steps, and launchers for their ranks: none is of the new job.
_ALLOCATION_VARIABLES: Final = re.compile(
    r"(SLURM|SLURMD|SRUN|OMPI_COMM|PMI)_.*|PMIX_(?!MCA_).*|SBATCH_(CPU|MEM)_BIND.*", re.ASCII
)
# Settings of the commands and of the site, which no allocation makes.
_USER_VARIABLES: Final = frozenset(
    {
        *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT"),
        *("SLURM_BITSTR_LEN", "SLURM_DEBUG_FLAGS", "SLURM_EXIT_ERROR", "SLURM_EXIT_IMMEDIATE"),
    }
)
# What --test-only says of a job that has to wait for nodes to come back, and of one that none of them could run.
_NO_NODES: Final = re.compile(
    "requested node configuration is not available|required node not available|nodes required for job are down"
    "|requested nodes are busy",
    re.IGNORECASE,
)
_USABLE: Final = re.compile(r"(alloc|comp|idle|mix|plan|power)[a-z_]*[^*a-z]*", re.IGNORECASE)  # states of sinfo


def submit(script: str, after: str | None = None) -> str:
    """Submit ``script`` and return the job's number; it waits for the end of the job ``after``, however that ends.

    Where only nodes that are down or drained keep the job from its start, that is told, and the job waits for them.

    Raises ConfigurationError when Slurm would not run it, MissingCapabilityError where there is no sbatch, or no Slurm
    that answers it.
    """
    try:
        # Asked first, because sbatch itself takes a job that can never start, and leaves it pending.
        _sbatch(script, "--test-only")
    except ConfigurationError as error:
        absent = _unavailable_nodes(script) if _NO_NODES.search(str(error)) else ""
        if not absent:
            raise  # the reason is in the job, and waiting does not help
        if after is None:  # of a later link of a chain: the first has said it
            print(f"hpcdist submit: warning: the job waits for nodes: now {absent}", file=sys.stderr)
    # afterany: also after a failure. The script of the next link asks the ledger whether there is anything left to do.
    dependency = [] if after is None else [f"--dependency=afterany:{after}"]
    output = _sbatch(script, "--parsable", *dependency)
    # With several clusters it is "number;cluster"; and some sites have sbatch print a greeting before.
    numbers = re.findall(r"^(\d+)(?:;.*)?$", output, re.MULTILINE)
    if not numbers:
        raise ConfigurationError(
            f"sbatch has said no number of a job, but {output.strip()!r}; see squeue whether there is one, and "
            "cancel it"
        )
    return str(numbers[-1])


def _sbatch(script: str, *options: str) -> str:
    """Run sbatch with ``script`` as its input and return what it prints."""
    absent = (
        "there is no sbatch on PATH; submit from a login node of the cluster (its Slurm may be a module to load), "
        "print the script with --dry-run and submit it there, or run it on this machine: --site workstation"
    )
    environment = clean_environment(script)
    answer = base.run_command(["sbatch", *options], absent, "is Slurm up? try sinfo", script, environment=environment)
    if answer.code != 0 and _unreachable(answer.complaint):
        raise MissingCapabilityError(
            f"Slurm does not answer: {answer.complaint}; try sinfo, and submit from a login node"
        )
    if answer.code != 0:
        raise ConfigurationError(
            f"Slurm refuses the job (sbatch {options[0]}, exit code {answer.code}): {answer.complaint}; "
            "change the option it names, or see `sinfo` for partitions and their limits"
        )
    return answer.output


def clean_environment(script: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environment`` without what sbatch would take in place of the directives of ``script`` (pure).

    Nor does it have what the allocation around this process, where there is one, has set for its own steps: the new job
    would hand that on to srun, which refuses what contradicts the new job.
    """
    options = set(re.findall(r"^#SBATCH (--[a-z-]+)", script, re.MULTILINE))
    # To sbatch variables win over directives, and either of these two undoes the other.
    if options & {"--requeue", "--no-requeue"}:
        options |= {"--requeue", "--no-requeue"}
    over = {_VARIABLES.get(option, "SBATCH_" + option[2:].upper().replace("-", "_")) for option in options}
    if "SLURM_JOB_ID" in environment:
        # In a step srun has set SLURM_MPI_TYPE; outside of one it is the choice of the user.
        user_variables = _USER_VARIABLES if "SLURM_STEP_ID" in environment else _USER_VARIABLES | {"SLURM_MPI_TYPE"}
        over |= {name for name in environment if _ALLOCATION_VARIABLES.fullmatch(name) and name not in user_variables}
    return {name: value for name, value in environment.items() if name not in over}


def _unavailable_nodes(script: str) -> str:
    """Return which nodes are down or drained of those that ``script`` could run on; "" where that is not the reason.

    It is none where the partition has fewer nodes, or too few that have the cores: such a job would wait for ever.
    """
    absent = []
    # Each component of a heterogeneous job has a partition and a node count of its own.
    for component in script.split("\n#SBATCH hetjob\n"):
        requested = _requested_options(component)
        partition = requested.get("partition") or os.environ.get("SBATCH_PARTITION", "")
        where = [f"--partition={partition}"] if partition else ["--all"]
        table = _output_of(["sinfo", "--noheader", "--Node", *where, "--format=%N %c %T %P"])
        rows = [line.split(maxsplit=3) for line in table.splitlines()]
        states = {
            row[0]: row[2]
            for row in rows
            if len(row) == 4 and (partition or row[3].endswith("*")) and int(row[1]) >= _cores(requested)
        }
        if len(states) < _number(requested, "nodes"):
            return ""
        absent += [f"{name} is {state}" for name, state in states.items() if not _USABLE.fullmatch(state)]
    return ", ".join(absent)


def _requested_options(script: str) -> dict[str, str]:
    """Return the options of the directives of ``script`` without their dashes: the last of each, as sbatch does."""
    return dict(re.findall(r'^#SBATCH --([a-z-]+)(?:[= ]"?([^"\s]*))?', script, re.MULTILINE))


def _number(requested: Mapping[str, str], option: str) -> int:
    value = requested.get(option, "")
    return int(value) if value.isdecimal() else 1


def _cores(requested: Mapping[str, str]) -> int:
    return _number(requested, "ntasks-per-node") * _number(requested, "cpus-per-task")


def check_folder(folder: Path) -> None:
    """Raise ConfigurationError where no log could go into ``folder``: Slurm reads a whole path as a pattern."""
    pattern = re.search(r"\\|%[0-9A-Za-z%]+", str(folder))
    if pattern is not None:
        raise ConfigurationError(
            f"{folder}, where the log goes, has {pattern[0]} in its name, which Slurm reads as a pattern: the job "
            "would end without a log; submit from another directory"
        )


def is_this_machine() -> bool:
    """Whether all nodes of the cluster are this machine, so that they see its files; False where Slurm does not say."""
    nodes = _output_of(["scontrol", "--oneliner", "show", "node"])
    hosts = set(re.findall(r"\bNodeHostName=(\S+)", nodes))
    return hosts == {socket.gethostname().partition(".")[0]}


def _output_of(line: list[str]) -> str:
    """Return what a command of Slurm prints, "" where it is not there or fails."""
    try:
        answer = base.run_command(line, "", "")
    except MissingCapabilityError:
        return ""
    return answer.output if answer.code == 0 else ""


def _unreachable(complaint: str) -> bool:
    words = ("contact slurm controller", "connect to slurm", "configuration source", "slurm_conf", "munge")
    return any(word in complaint.lower() for word in words)
