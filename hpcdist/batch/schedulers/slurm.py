"""Submit Slurm jobs by sbatch, query them by squeue and sacct, and cancel them by scancel.

A test with --test-only precedes each submission. squeue knows waiting and running jobs, and jobs that ended within
MinJobAge (default 300 s). sacct knows older jobs and energy, if accounting is on.
"""

import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hpcdist.batch.schedulers import base, slurm_energy
from hpcdist.batch.schedulers.base import FINAL_STATES, JobState, SchedulerState
from hpcdist.errors import ConfigurationError, MissingCapabilityError

LIMIT_S: Final = 60.0  # a busy controller responds slowly

# Fields of squeue. Only the last field may contain the separator "|".
_QUEUE: Final = (
    *("JobArrayID", "State", "RestartCnt", "TimeUsed", "TimeLeft", "NumNodes", "exit_code", "StartTime", "EndTime"),
    "Reason",
)
# Fields of sacct for jobs and steps. Only the last field may contain "|".
_ACCOUNTS: Final = (
    *("JobID", "State", "ElapsedRaw", "NNodes", "ExitCode", "Start", "End", "ConsumedEnergyRaw", "NodeList"),
    *("TRESUsageInMin", "TRESUsageInMinNode", "TRESUsageInMax", "TRESUsageInMaxNode", "Reason"),
)
_CLOCK: Final = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", re.ASCII)
_NAMED: Final = re.compile(r"(\d+(?:[_+][\d\[\],%.-]+)?)\|(.*)", re.ASCII)
_ENERGY: Final = re.compile(r"(?:^|,)energy=([^,]*)", re.ASCII)


def queued(jobs: Sequence[str]) -> list[JobState]:
    """Return a list of one `JobState` per array task or component of the job ids ``jobs``, from squeue.

    Raises MissingCapabilityError if squeue fails.
    """
    fields = ",".join(f"{name}:|" for name in _QUEUE)
    code, output, complaint = _run(
        "squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", f"--Format={fields}"
    )
    if code:
        if "invalid job id" in complaint.lower():
            return []
        raise MissingCapabilityError(
            f"squeue does not answer: {complaint or f'exit code {code}'}; run sinfo to see if Slurm is up"
        )
    rows = [line.split("|", len(_QUEUE) - 1) for line in output.splitlines()]
    return [_queued(row) for row in rows if len(row) == len(_QUEUE)]


def _queued(row: list[str]) -> JobState:
    job, state, restarts, used, left, nodes, code, start, end, reason = row
    ended = state in FINAL_STATES
    waits = state == SchedulerState.PENDING
    return JobState(
        id=job,
        state=state,
        reason=_reason(reason.removesuffix("|")),
        restarts=_whole(restarts),
        elapsed_s=_seconds(used),
        time_left_s=None if ended else _seconds(left),
        nodes=_whole(nodes),
        exit_code=_exit_code(code, state),
        energy_reason=slurm_energy.NOT_YET,
        begun_utc="" if waits else _utc(start),
        ended_utc=_utc(end) if ended else "",
    )


def accounted(jobs: Sequence[str]) -> list[JobState]:
    """Return a list of one `JobState` per execution of the job ids ``jobs``, from sacct.

    A requeued job has several executions. Raises MissingCapabilityError if sacct fails.
    """
    options = ["--noheader", "--parsable2", "--duplicates"]
    code, output, complaint = _run("sacct", *options, f"--jobs={','.join(jobs)}", f"--format={','.join(_ACCOUNTS)}")
    if code:
        raise MissingCapabilityError(f"sacct has no accounting data: {complaint or f'exit code {code}'}")
    starts: list[tuple[list[str], list[list[str]]]] = []  # rows of a start and of its steps, which follow it
    # A row without ".step" begins a start; a requeued job has several starts with the same id.
    for row in (line.split("|", len(_ACCOUNTS) - 1) for line in output.splitlines()):
        job, step, _ = row[0].partition(".")
        if len(row) != len(_ACCOUNTS):
            continue
        if not step:
            starts.append((row, []))
        elif starts and starts[-1][0][0] == job:  # otherwise a step of a start that sacct has not printed
            starts[-1][1].append(row)
    start_counts: dict[str, int] = {}
    states = []
    for row, steps in starts:
        start_counts[row[0]] = start_counts.get(row[0], -1) + 1
        states.append(_accounted(row, start_counts[row[0]], steps))
    return states


def _accounted(row: list[str], restarts: int, steps: Sequence[list[str]] = ()) -> JobState:
    job, words, elapsed, nodes, code, start, end, *_, reason = row
    state = words.partition(" ")[0]  # CANCELLED by 1000
    energy = slurm_energy.AccountedEnergy(None, slurm_energy.NOT_YET)
    if _utc(end):
        energy = slurm_energy.of_start(_accounted_step(row), [_accounted_step(step) for step in steps])
    return JobState(
        id=job,
        state=state,
        reason=_reason(reason),
        restarts=restarts,
        elapsed_s=_whole(elapsed),
        nodes=_whole(nodes),
        exit_code=_exit_code(code, state),
        energy_j=energy.joules,
        energy_reason=energy.missing_reason,
        begun_utc=_utc(start),
        ended_utc=_utc(end),
    )


def _accounted_step(row: list[str]) -> slurm_energy.AccountedStep:
    named, words, _, _, _, start, end, energy, where, least, least_node, most, most_node, _ = row
    # Slurm keeps the minimum and maximum over the nodes of a step: complete for one or two nodes.
    of_nodes: dict[str, float] = {}
    for values, places in ((least, least_node), (most, most_node)):
        value, node = _ENERGY.search(values), _ENERGY.search(places)
        if value and node and value[1].isdecimal():
            of_nodes[node[1]] = float(value[1])
    return slurm_energy.AccountedStep(
        name=named.partition(".")[2],
        state=words.partition(" ")[0],
        begin=_whole(start) or 0,
        end=_whole(end) or 0,
        nodes=slurm_energy.expand_hostlist(where),
        joules=slurm_energy.joules(energy),
        of_nodes=of_nodes,
    )


def job_names(jobs: Sequence[str] | None = None) -> dict[str, str]:
    """Return {job id: job name} for the ids ``jobs``, or for all jobs of this user if None. Return {} without Slurm."""
    selection = "--me" if jobs is None else f"--jobs={','.join(jobs)}"
    try:
        code, output, _ = _run("squeue", "--noheader", "--states=all", selection, "--Format=JobArrayID:|,Name:|")
    except MissingCapabilityError:
        return {}
    # A name may contain newlines that look like a row: the first row of each id is the real row.
    names: dict[str, str] = {}
    for line in output.removesuffix("\n").split("\n") if not code else ():
        match = _NAMED.fullmatch(line)
        if match and match[1] not in names:
            names[match[1]] = match[2].removesuffix("|")
    return names


def log_of(job: str) -> str:
    """Return the log path of the job with id ``job`` from squeue, or "" if unknown."""
    try:
        code, output, _ = _run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--Format=STDOUT:|")
    except MissingCapabilityError:
        return ""
    return "" if code else output.removesuffix("\n").partition("|\n")[0].removesuffix("|")


def cancel(jobs: Iterable[str]) -> None:
    """Cancel the unfinished jobs among ``jobs``, job or array task ids. Raises MissingCapabilityError on failure."""
    code, _, complaint = _run("scancel", *jobs)
    if code and "already completing or completed" not in complaint.lower():
        raise MissingCapabilityError(f"scancel failed: {complaint or f'exit code {code}'}; try again")


def forbid_requeue(job: str) -> str:
    """Prevent Slurm from requeueing ``job``. Return the error message, or "" on success."""
    try:
        code, _, why = _run("scontrol", "update", f"JobId={job}", "Requeue=0")
    except MissingCapabilityError as error:
        return str(error)
    return (why or f"exit code {code}") if code else ""


def _run(name: str, *arguments: str) -> tuple[int, str, str]:
    # User defaults for these commands must not change the output. Times are in seconds since 1970, and waiting array
    # tasks are listed in full.
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("SQUEUE_", "SACCT_", "SCANCEL_"))
    }
    settings = environment | {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
    absent = f"{name} is not on PATH; run this on a login node of the cluster"
    answer = base.run_command(
        [name, *arguments], absent, "is Slurm up? try sinfo", limit_s=LIMIT_S, environment=settings
    )
    return answer.code, answer.output, " ".join(answer.complaint.split())


def _exit_code(text: str, state: str) -> int | None:
    if state not in FINAL_STATES:
        return None
    parts = [_whole(part) for part in text.split(":")]
    if None in parts or len(parts) > 2:
        return None
    # sacct prints code:signal; squeue prints the status of wait(2), whose low byte is the signal.
    code, signal = (parts[0] or 0, parts[1] or 0) if len(parts) == 2 else divmod(parts[0] or 0, 256)
    shell_code = 128 + (signal & 127) if signal & 127 else code
    # A cancelled job, for example, has no exit code.
    return shell_code if shell_code or state == SchedulerState.COMPLETED else None


def _seconds(text: str) -> float | None:
    match = _CLOCK.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _utc(text: str) -> str:
    number = _whole(text)
    return "" if not number else datetime.fromtimestamp(number, UTC).isoformat(timespec="seconds")


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else None


def _reason(text: str) -> str:
    return "" if text in ("None", "NONE", "(null)") else text


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
# Errors of Slurm commands that do not reach the controller.
_UNREACHABLE: Final = ("contact slurm controller", "connect to slurm", "configuration source", "slurm_conf", "munge")
# Messages of --test-only if the job must wait for nodes, or could never run on them.
_NO_NODES: Final = re.compile(
    "requested node configuration is not available|required node not available|nodes required for job are down"
    "|requested nodes are busy",
    re.IGNORECASE,
)
_USABLE: Final = re.compile(r"(alloc|comp|idle|mix|plan|power)[a-z_]*[^*a-z]*", re.IGNORECASE)  # states of sinfo


def submit(script: str, after: str | None = None) -> str:
    """Submit a job with the script text ``script``, and return its id. ``after``: id of a job that must end first."""
    try:
        # Test first: sbatch accepts jobs that can never start, and leaves them pending.
        _sbatch(script, "--test-only")
    except ConfigurationError as error:
        absent = _unavailable_nodes(script) if _NO_NODES.search(str(error)) else ""
        if not absent:
            raise  # a job setting is the reason, so waiting does not help
        if after is None:  # print the warning only for the first job of a chain
            print(f"hpcdist submit: warning: the job waits for nodes: now {absent}", file=sys.stderr)
    # afterany: also after a failure. The next script asks the journal whether steps remain.
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
    if answer.code != 0 and any(words in answer.complaint.lower() for words in _UNREACHABLE):
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
    """Return ``environment`` without the variables that override srun options or the #SBATCH options in ``script``."""
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
        requested = dict(re.findall(r'^#SBATCH --([a-z-]+)(?:[= ]"?([^"\s]*))?', component, re.MULTILINE))
        cores = _number(requested, "ntasks-per-node") * _number(requested, "cpus-per-task")
        partition = requested.get("partition") or os.environ.get("SBATCH_PARTITION", "")
        where = [f"--partition={partition}"] if partition else ["--all"]
        table = _output_of(["sinfo", "--noheader", "--Node", *where, "--format=%N %c %T %P"])
        rows = [line.split(maxsplit=3) for line in table.splitlines()]
        states = {
            row[0]: row[2]
            for row in rows
            if len(row) == 4 and (partition or row[3].endswith("*")) and int(row[1]) >= cores
        }
        if len(states) < _number(requested, "nodes"):
            return ""
        absent += [f"{name} is {state}" for name, state in states.items() if not _USABLE.fullmatch(state)]
    return ", ".join(absent)


def _number(requested: Mapping[str, str], option: str) -> int:
    value = requested.get(option, "")
    return int(value) if value.isdecimal() else 1


def check_folder(folder: Path) -> None:
    """Raise ConfigurationError if the path ``folder`` of the logs has a pattern character of Slurm, such as %."""
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
