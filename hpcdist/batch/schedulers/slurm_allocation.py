"""Nodes of a running Slurm job that are alive, even before Slurm has noticed a crash.

Slurm needs up to SlurmdTimeout (default: five minutes) to declare a crashed node down. Therefore a small process probes
each node.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hpcdist.batch.schedulers.slurm import LIMIT_S

PROBE_S: Final = 30.0  # longer than srun's wait for silent nodes with the default MessageTimeout
MARGIN_S: Final = 30.0  # added to SlurmdTimeout, because Slurm checks nodes at intervals
LOOK_INTERVAL_S: Final = 5.0
_SLURMD_TIMEOUT_S: Final = 300.0  # Slurm's default
_MESSAGE_TIMEOUT_S: Final = 10.0
_PASSED_VARIABLES: Final = ("SLURM_CONF", "SLURM_CONF_SERVER")
_DEAD: Final = re.compile(r"down|.*\*$")  # states of `sinfo`; * means that the node does not respond


def lost_nodes(environment: Mapping[str, str] = os.environ) -> tuple[list[str], list[str]]:
    """Return (names of lost nodes, names of usable nodes) of the current Slurm job, or ([], []) if unknown.

    ``environment``: environment variables that name the job.
    """
    # A node is lost if Slurm removed it, reports it as down or not responding, or if a test process does not run in
    # time.
    job, before = environment.get("SLURM_JOB_ID"), environment.get("SLURM_JOB_NODELIST")
    if not job or not before:
        return [], []
    held = _allocated_nodes(environment)
    if not held:
        return [], []
    states = _states(held, environment)
    up = [name for name in held if not _DEAD.match(states.get(name, ""))]
    left = _answering(job, up, environment) or up
    return ([name for name in _names(before, environment) if name not in left], left) if left else ([], [])


class SlurmAllocation:
    """Nodes of the current Slurm job, and a check that enough nodes remain to restart the training."""

    # ``needed``: number of nodes that a restart needs (None: any). ``whole``: a restart needs all nodes of the job.
    def __init__(self, needed: int | None, *, whole: bool = False, environment: Mapping[str, str] = os.environ) -> None:
        self.lost: list[str] = []
        self.left: list[str] = []
        count = environment.get("SLURM_JOB_NUM_NODES", "")
        self._needed = int(count) if whole and count.isdecimal() else needed
        self._environment = environment

    def died(self) -> list[str]:
        """Probe all nodes of the job. Return the names of the nodes lost since the previous call."""
        before = self.lost
        self.lost, self.left = lost_nodes(self._environment)
        return [name for name in self.lost if name not in before]

    def shortage(self) -> str:
        """Return the reason why too few nodes remain for a restart, or "" if enough nodes remain."""
        if not self.lost or self._needed is None or len(self.left) >= self._needed:
            return ""
        return (
            f"the job has lost {', '.join(self.lost)} and needs {self._needed} nodes, but only {', '.join(self.left)} "
            "remain; use --spare-nodes for extra nodes"
        )

    def wait(
        self, pause: Callable[[float], signal.Signals | None], say: Callable[[str], None]
    ) -> signal.Signals | None:
        """Wait until enough nodes for a restart answer, or SlurmdTimeout has passed. Return a received signal or None.

        ``pause(seconds)`` sleeps, and returns a received signal or None. ``say(text)`` prints a message.
        """
        limit_s = 0.0
        began = time.monotonic()
        while self.shortage() and len(_allocated_nodes(self._environment)) >= (self._needed or 0):
            if not limit_s:
                limit_s = _setting_s("SlurmdTimeout", _SLURMD_TIMEOUT_S, self._environment) + MARGIN_S
                say(f"waiting up to {limit_s:g} s for {', '.join(self.lost)}, until Slurm declares them down")
            if time.monotonic() - began >= limit_s:
                return None
            received = pause(LOOK_INTERVAL_S)
            if received is not None:
                return received
            self.died()
        return None


def _allocated_nodes(environment: Mapping[str, str]) -> list[str]:
    job, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    number = f"{job}_{task}" if job and task else environment.get("SLURM_JOB_ID", "")
    rows = [row.split() for row in _output_of(["squeue", "-h", "-j", number, "-o", "%i %N"], environment).splitlines()]
    short = next((row[1] for row in rows if len(row) == 2 and row[0] in (number, f"{number}+0")), "")
    return _names(short, environment)


def _names(short: str, environment: Mapping[str, str]) -> list[str]:
    return _output_of(["scontrol", "show", "hostnames", short], environment).split() if short else []


def _states(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    lines = _output_of(["sinfo", "-h", "-N", "-n", ",".join(names), "-o", "%N %T"], environment).splitlines()
    return {name: state for name, _, state in (line.strip().partition(" ") for line in lines)}


def _answering(job: str, names: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    if not names:
        return []
    count = len(names)
    line = ["srun", f"--jobid={job}", "--job-name=probe", "--overlap", "--mpi=none", "--gres=none", "--mem=0"]
    line += [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    line += [f"--nodelist={','.join(names)}", "--kill-on-bad-exit=0", "--immediate=10", "--quiet"]
    # Settings for the job's steps must not apply to the probe.
    variables = {
        name: value for name, value in environment.items() if not name.startswith("SLURM_") or name in _PASSED_VARIABLES
    }
    # srun starts tasks over a tree of nodes: below a silent node it retries after MessageTimeout.
    limit_s = max(PROBE_S, 3 * _setting_s("MessageTimeout", _MESSAGE_TIMEOUT_S, environment))
    answers = _output_of([*line, "sh", "-c", 'echo "$SLURMD_NODENAME"'], variables, limit_s, whole=False).split()
    return [name for name in names if name in answers]


def _setting_s(name: str, otherwise: float, environment: Mapping[str, str]) -> float:
    match = re.search(rf"^{name}\s*=\s*(\d+)", _output_of(["scontrol", "show", "config"], environment), re.MULTILINE)
    return float(match[1]) if match and int(match[1]) else otherwise


def _output_of(line: list[str], environment: Mapping[str, str], limit_s: float = LIMIT_S, *, whole: bool = True) -> str:
    try:
        result = subprocess.run(
            line, capture_output=True, stdin=subprocess.DEVNULL, env=dict(environment), timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        return "" if whole else (error.stdout or b"").decode(errors="replace")
    except OSError:
        return ""
    return result.stdout.decode(errors="replace") if result.returncode == 0 or not whole else ""
