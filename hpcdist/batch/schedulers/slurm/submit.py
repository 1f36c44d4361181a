"""Submit jobs to Slurm by sbatch, after a test with --test-only."""

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hpcdist.batch.schedulers import base
from hpcdist.errors import ConfigurationError, MissingCapabilityError

# sbatch option -> environment variable that overrides its directive, if the name differs from SBATCH_<OPTION>.
_VARIABLES: Final = {"--time": "SBATCH_TIMELIMIT", "--array": "SBATCH_ARRAY_INX", "--mem": "SBATCH_MEM_PER_NODE"}
# Variables that an allocation sets for its steps, and launchers for their ranks: not for a new job.
_ALLOCATION_VARIABLES: Final = re.compile(
    r"(SLURM|SLURMD|SRUN|OMPI_COMM|PMI)_.*|PMIX_(?!MCA_).*|SBATCH_(CPU|MEM)_BIND.*", re.ASCII
)
# User and site settings that an allocation does not set.
_USER_VARIABLES: Final = frozenset(
    {
        *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT"),
        *("SLURM_BITSTR_LEN", "SLURM_DEBUG_FLAGS", "SLURM_EXIT_ERROR", "SLURM_EXIT_IMMEDIATE"),
    }
)
# Messages of --test-only if the job must wait for nodes, or could never run on them.
_NO_NODES: Final = re.compile(
    "requested node configuration is not available|required node not available|nodes required for job are down"
    "|requested nodes are busy",
    re.IGNORECASE,
)
_USABLE: Final = re.compile(r"(alloc|comp|idle|mix|plan|power)[a-z_]*[^*a-z]*", re.IGNORECASE)  # states of sinfo


def submit(script: str, after: str | None = None) -> str:
    """Submit the job script text ``script`` to Slurm and return the job id.

    ``after``: id of a job that must end first, even if it fails. Raises ConfigurationError if Slurm would never run the
    job, and MissingCapabilityError if Slurm does not answer.
    """
    try:
        # Test first: sbatch accepts jobs that can never start, and leaves them pending.
        _sbatch(script, "--test-only")
    except ConfigurationError as error:
        absent = _unavailable_nodes(script) if _NO_NODES.search(str(error)) else ""
        if not absent:
            raise  # a job setting is the reason, so waiting does not help
        if after is None:  # print the warning only for the first job of a chain
            print(f"hpcdist submit: warning: the job waits for nodes: now {absent}", file=sys.stderr)
    # afterany: also after a failure. The next script asks the ledger whether steps remain.
    dependency = [] if after is None else [f"--dependency=afterany:{after}"]
    output = _sbatch(script, "--parsable", *dependency)
    # With several clusters the format is "number;cluster"; some sites print a greeting first.
    numbers = re.findall(r"^(\d+)(?:;.*)?$", output, re.MULTILINE)
    if not numbers:
        raise ConfigurationError(
            f"sbatch printed {output.strip()!r}, but no job number; check squeue for the job, and cancel it"
        )
    return str(numbers[-1])


def _sbatch(script: str, *options: str) -> str:
    absent = (
        "sbatch is not on PATH; submit from a login node of the cluster (Slurm may need a module), "
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
            f"Slurm refused the job (sbatch {options[0]}, exit code {answer.code}): {answer.complaint}; "
            "change the named option, or see `sinfo` for partitions and their limits"
        )
    return answer.output


def clean_environment(script: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables for sbatch, a dict. ``script``: text of the job script.

    Variables in ``environment`` that would override #SBATCH options of the script, or srun options, are left out.
    """
    options = set(re.findall(r"^#SBATCH (--[a-z-]+)", script, re.MULTILINE))
    # For sbatch variables override directives, and --requeue and --no-requeue override each other.
    if options & {"--requeue", "--no-requeue"}:
        options |= {"--requeue", "--no-requeue"}
    removed = {_VARIABLES.get(option, "SBATCH_" + option[2:].upper().replace("-", "_")) for option in options}
    if "SLURM_JOB_ID" in environment:
        # Inside a step srun sets SLURM_MPI_TYPE; outside it is the user's choice.
        kept = _USER_VARIABLES if "SLURM_STEP_ID" in environment else _USER_VARIABLES | {"SLURM_MPI_TYPE"}
        removed |= {name for name in environment if _ALLOCATION_VARIABLES.fullmatch(name) and name not in kept}
    return {name: value for name, value in environment.items() if name not in removed}


def _unavailable_nodes(script: str) -> str:
    # Only nodes that the job may be waiting for.
    absent = []
    # Each component of a heterogeneous job has its partition and node count.
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
    return dict(re.findall(r'^#SBATCH --([a-z-]+)(?:[= ]"?([^"\s]*))?', script, re.MULTILINE))


def _number(requested: Mapping[str, str], option: str) -> int:
    value = requested.get(option, "")
    return int(value) if value.isdecimal() else 1


def _cores(requested: Mapping[str, str]) -> int:
    return _number(requested, "ntasks-per-node") * _number(requested, "cpus-per-task")


def check_folder(folder: Path) -> None:
    """Raise ConfigurationError if Slurm would read the log ``folder`` as a file name pattern."""
    pattern = re.search(r"\\|%[0-9A-Za-z%]+", str(folder))
    if pattern is not None:
        raise ConfigurationError(
            f"the log folder {folder} contains {pattern[0]}, which Slurm reads as a pattern, so the job would have no "
            "log; submit from another directory"
        )


def is_this_machine() -> bool:
    """Return True if this machine is the only node of the cluster, False if not or if Slurm does not answer."""
    nodes = _output_of(["scontrol", "--oneliner", "show", "node"])
    hosts = set(re.findall(r"\bNodeHostName=(\S+)", nodes))
    return hosts == {socket.gethostname().partition(".")[0]}


def _output_of(line: list[str]) -> str:
    try:
        answer = base.run_command(line, "", "")
    except MissingCapabilityError:
        return ""
    return answer.output if answer.code == 0 else ""


def _unreachable(complaint: str) -> bool:
    words = ("contact slurm controller", "connect to slurm", "configuration source", "slurm_conf", "munge")
    return any(word in complaint.lower() for word in words)
