"""Allocation of a running Slurm job: its nodes that are alive, whether or not Slurm has noticed a crash.

Slurm needs up to SlurmdTimeout (five minutes by default) to declare a crashed node down. Only then it takes the node
from a job that was submitted with --no-kill, for good. Until then a step on it fails, or waits. So the nodes are
asked to run a process each, beside the processes that hold their cores: also the rest of a step that the crash has
ended.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

LIMIT_S: Final = 60.0  # a busy controller answers late
PROBE_S: Final = 30.0  # more than it takes srun to give up nodes that do not answer, if nobody has set MessageTimeout
MARGIN_S: Final = 30.0  # more than SlurmdTimeout, since Slurm looks at nodes now and then
LOOK_INTERVAL_S: Final = 5.0
_SLURMD_TIMEOUT_S: Final = 300.0  # of a Slurm that does not say
_MESSAGE_TIMEOUT_S: Final = 10.0
_PASSED_VARIABLES: Final = ("SLURM_CONF", "SLURM_CONF_SERVER")
_DEAD: Final = re.compile(r"down|.*\*$")  # states of `sinfo`; the star means that the node does not respond


def lost_nodes(environment: Mapping[str, str] = os.environ) -> tuple[list[str], list[str]]:
    """Return the nodes that this job has lost, and those that are left.

    Lost are those that Slurm has taken from the job, those that it says are down or do not respond, and those that do
    not run a process within PROBE_S, or more where messages may take longer. Where no node can be asked, the word of
    Slurm counts alone. Nothing is lost outside of a job, and where Slurm does not say.
    """
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
    """The nodes of the job in which this process runs, for starts that need ``needed`` of them (None: any).

    Where ``whole``, a start takes all nodes of the job, whatever it needs: its launcher cannot leave any out.
    """

    def __init__(self, needed: int | None, *, whole: bool = False, environment: Mapping[str, str] = os.environ) -> None:
        self.lost: list[str] = []
        self.left: list[str] = []
        count = environment.get("SLURM_JOB_NUM_NODES", "")
        self._needed = int(count) if whole and count.isdecimal() else needed
        self._environment = environment

    def died(self) -> list[str]:
        """Look at all nodes; return those that were there the last time, and are no more."""
        before = self.lost
        self.lost, self.left = lost_nodes(self._environment)
        return [name for name in self.lost if name not in before]

    def shortage(self) -> str:
        """Return why a start does not fit on the nodes that are left; "" where it does."""
        if not self.lost or self._needed is None or len(self.left) >= self._needed:
            return ""
        return (
            f"the job has lost {', '.join(self.lost)}, and needs {self._needed} nodes, of which {', '.join(self.left)} "
            "are left; more may be had with --spare-nodes"
        )

    def wait(
        self, pause: Callable[[float], signal.Signals | None], say: Callable[[str], None]
    ) -> signal.Signals | None:
        """Wait until enough nodes are back where too few are left; return the signal that ended that, if one did.

        A node that Slurm has declared down does not come back: it waits until Slurm has had the time to do so.
        """
        limit_s = 0.0
        began = time.monotonic()
        while self.shortage() and len(_allocated_nodes(self._environment)) >= (self._needed or 0):
            if not limit_s:
                limit_s = _setting_s("SlurmdTimeout", _SLURMD_TIMEOUT_S, self._environment) + MARGIN_S
                say(f"waiting up to {limit_s:g} s for {', '.join(self.lost)}: until Slurm has declared them down")
            if time.monotonic() - began >= limit_s:
                return None
            received = pause(LOOK_INTERVAL_S)
            if received is not None:
                return received
            self.died()
        return None


def _allocated_nodes(environment: Mapping[str, str]) -> list[str]:
    """Return the nodes that Slurm has not taken from this job: a task of an array, or a component of others."""
    job, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    number = f"{job}_{task}" if job and task else environment.get("SLURM_JOB_ID", "")
    rows = [row.split() for row in _output_of(["squeue", "-h", "-j", number, "-o", "%i %N"], environment).splitlines()]
    return _names(
        next((row[1] for row in rows if len(row) == 2 and row[0] in (number, f"{number}+0")), ""), environment
    )


def _names(short: str, environment: Mapping[str, str]) -> list[str]:
    """Return the names in ``short``, as Slurm writes them: n[1-2,4]."""
    return _output_of(["scontrol", "show", "hostnames", short], environment).split() if short else []


def _states(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return what Slurm says of each node: "mixed", or "down*"."""
    lines = _output_of(["sinfo", "-h", "-N", "-n", ",".join(names), "-o", "%N %T"], environment).splitlines()
    return {name: state for name, _, state in (line.strip().partition(" ") for line in lines)}


def _answering(job: str, names: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return those of ``names`` that run a process of the ``job``; none where srun cannot start any."""
    if not names:
        return []
    count = len(names)
    line = ["srun", f"--jobid={job}", "--job-name=probe", "--overlap", "--mpi=none", "--gres=none", "--mem=0"]
    line += [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    line += [f"--nodelist={','.join(names)}", "--kill-on-bad-exit=0", "--immediate=10", "--quiet"]
    # What the job has asked for its own steps is not meant for this one.
    own = {
        name: value for name, value in environment.items() if not name.startswith("SLURM_") or name in _PASSED_VARIABLES
    }
    # Slurm passes a start on from node to node, and tries those below one that is silent when it has waited for that.
    limit_s = max(PROBE_S, 3 * _setting_s("MessageTimeout", _MESSAGE_TIMEOUT_S, environment))
    answers = _output_of([*line, "sh", "-c", 'echo "$SLURMD_NODENAME"'], own, limit_s, whole=False).split()
    return [name for name in names if name in answers]


def _setting_s(name: str, otherwise: float, environment: Mapping[str, str]) -> float:
    """Return the seconds of a setting of Slurm; ``otherwise`` where it does not say, or says 0."""
    match = re.search(rf"^{name}\s*=\s*(\d+)", _output_of(["scontrol", "show", "config"], environment), re.MULTILINE)
    return float(match[1]) if match and int(match[1]) else otherwise


def _output_of(line: list[str], environment: Mapping[str, str], limit_s: float = LIMIT_S, *, whole: bool = True) -> str:
    """Return what a command of Slurm prints; where it fails or takes too long: "", or what it has, unless ``whole``."""
    try:
        result = subprocess.run(
            line, capture_output=True, stdin=subprocess.DEVNULL, env=dict(environment), timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        return "" if whole else (error.stdout or b"").decode(errors="replace")
    except OSError:
        return ""
    return result.stdout.decode(errors="replace") if result.returncode == 0 or not whole else ""
