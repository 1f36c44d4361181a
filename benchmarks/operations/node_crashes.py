"""Downtime of a Slurm job when one of its nodes crashes, and whether its results stay bitwise identical.

    python -m benchmarks node_crashes --launcher mpirun --crashes 10 -o crashes.h5 --anonymous

Needs Slurm, munge, root and namespaces, like tests/launch/slurm/test_crash.py; `--launcher srun` with Open MPI also
needs libpmix-dev. Each virtual node is a slurmd in separate namespaces. A crash sends SIGKILL to all processes of the
node; Slurm notices only by its SlurmdTimeout. The node (first, middle or last of the job) and the moment (after the
start, in a step after a checkpoint, or during a save) are random. One node is spare, and a crashed node returns after
Slurm has declared it down.

For each crash the table has the seconds until Slurm declared the node down (nan: never) and until the training resumed,
and the first step, which must not precede the newest checkpoint. At the end the losses of all steps and the parameters
must be bitwise equal to a training without crashes.
"""

import argparse
import contextlib
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist.batch import ledger
from hpcdist.comm.start import Session
from hpcdist.constants import METRICS_FILE
from hpcdist.telemetry.metrics import step_metrics

sys.path.insert(0, str(harness.ROOT / "tests"))

from stubs.slurm_cluster import Cluster, Jobs, isolation_refused

SCHEMA = "hpcdist-benchmark-node-crashes"
NO_CHECK = "a crash takes a minute and needs Slurm; run it with --crashes 1"

NODES: Final = 3  # nodes of the job
MOMENTS: Final = ("start", "step", "save")
STEP_S: Final = 0.1
STEPS_A_CRASH: Final = 50
EVERY: Final = 10  # steps between two checkpoints
LIMIT_S: Final = 600.0  # timeout of every wait
SITES: Final = {
    "mpirun": "based_on = 'slurm-openmpi'\n",
    "srun": "based_on = 'slurm-openmpi'\n[launcher]\nkind = 'srun'\npmi = 'pmix'\n",
    "mpich": "based_on = 'slurm-mpich'\n",
}
# slurmd_timeout: SlurmdTimeout in seconds; requeue_delay: cred_expire in seconds (Slurm's default is 120)
OPTIONS: Final = {"crashes": 10, "seed": 0, "slurmd_timeout": 15, "requeue_delay": 5, "launcher": SITES}


@dataclass(frozen=True)
class Crash:
    """Result of a crash. Times are seconds after the crash; ``moment`` and ``node`` are indices."""

    moment: int
    node: int
    down_s: float
    resumed_s: float
    saved: int  # steps of the newest checkpoint when the node crashed
    resumed: int  # steps of the checkpoint that the training resumed from


@contextlib.contextmanager
def started(chosen: argparse.Namespace) -> Iterator[Cluster]:
    refused = isolation_refused()
    if refused:
        sys.exit(refused)
    times = {"timeout_s": chosen.slurmd_timeout, "requeue_s": chosen.requeue_delay}
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder), count=NODES + 1, isolated=True, **times)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def begin(jobs: Jobs, name: str, step_s: float, steps: int) -> str:
    keys = (f"--set=chaos.step_s={step_s}", f"--set=checkpoint.every_steps={EVERY}")
    return jobs.begin(f"--out={name}", "--site=site.toml", *keys, nodes=NODES, ranks=1, steps=steps)


class Victim:
    """A job in the directory `crashed` whose nodes crash one after another."""

    def __init__(self, jobs: Jobs, number: str, seed: int = 0) -> None:
        self.jobs, self.cluster, self.number = jobs, jobs.cluster, number
        self.draw = random.Random(seed)
        self.run_dir = jobs.folder / "crashed"
        self.wait(lambda: self.starts() == 1, "first start")

    def wait(self, condition: Callable[[], object], what: str, pause_s: float = 0.2) -> None:
        """Wait for ``condition``. On a timeout or an ended job, exit with the job's log."""
        limit, look = time.monotonic() + LIMIT_S, 0.0
        while not condition():
            now = time.monotonic()
            if now > look:  # query Slurm rarely, because a save lasts milliseconds
                look, state = now + 2.0, self.state()
                if now > limit or state not in ("PENDING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED"):
                    log = self.jobs.log(self.number)
                    sys.exit(f"no {what}; job {self.number} is {state}\n{log[-8000:]}")
            time.sleep(pause_s)

    def state(self) -> str:
        return self.cluster.job(self.number).get("JobState", "gone")

    def starts(self) -> int:
        return sum(entry.event == ledger.BEGAN for entry in ledger.read(self.run_dir))

    def saved(self) -> int:
        """Return the steps of the newest checkpoint, or 0."""
        folder = self.run_dir / "checkpoints"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return max((int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name)), default=0)

    def saves(self) -> bool:
        return any((self.run_dir / "checkpoints").glob("step-*.tmp"))

    def reach(self, moment: str, first: bool) -> None:
        before = self.saved()
        if moment == "start":
            if not first:  # stop the job after a save, and wait for its restart
                starts = self.starts()
                self.jobs.stop(self.number)
                self.wait(lambda: self.starts() > starts, "start after SIGUSR1")
            time.sleep(self.draw.uniform(0.0, 8.0))
            return
        self.wait(lambda: self.saved() > before, "new checkpoint")
        if moment == "step":
            time.sleep(self.draw.uniform(0.0, 2.0))
        else:
            self.wait(self.saves, "save", 0.0005)

    def crash(self, moment: str, place: int, first: bool) -> Crash:
        """Crash the node with index ``place`` at ``moment``, wait until the job trains again, and return the result."""
        self.reach(moment, first)
        shown = self.cluster.run("scontrol", "show", "hostnames", self.cluster.job(self.number)["NodeList"])
        node = shown.stdout.split()[place]
        if moment == "save":
            self.wait(self.saves, "save", 0.0005)
        saved, starts, logged, crashed = self.saved(), self.starts(), len(self.jobs.log(self.number)), time.monotonic()
        self.cluster.crash(node)
        down_s = resumed_s = 0.0
        resumed = -1

        def trains() -> bool:
            nonlocal down_s, resumed_s, resumed
            state = self.cluster.run("sinfo", "-h", "-n", node, "-o", "%T").stdout
            passed = time.monotonic() - crashed
            # Slurm shows mixed* forever if the restarted job still occupies the node's cores in its accounting.
            late = resumed_s and passed > self.cluster.timeout_s + 30
            if not down_s and (late or state.startswith("down")):
                down_s = math.nan if late else passed
                self.cluster.revive(node)
            shown_steps = re.findall(r"\nrun directory .*\nstep (\d+)/", self.jobs.log(self.number)[logged:])
            if not resumed_s and self.starts() > starts and shown_steps:
                resumed_s, resumed = time.monotonic() - crashed, int(shown_steps[-1]) - 1
            return bool(down_s and resumed_s)

        self.wait(trains, f"training after the crash of {node}")
        return Crash(MOMENTS.index(moment), place, down_s, resumed_s, saved, resumed)


def same_bits(jobs: Jobs) -> tuple[bool, bool]:
    """Compare with the training without crashes: return (losses are equal, parameters are equal)."""
    runs = [jobs.folder / name for name in ("whole", "crashed")]
    whole_losses, crashed_losses = (step_metrics.read(run / METRICS_FILE).steps["loss"] for run in runs)
    for run in runs:
        line = [sys.executable, "-P", "-m", "hpcdist", "checkpoint", "export", str(run), f"{run}.safetensors"]
        subprocess.run(line, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    exported = [Path(f"{run}.safetensors").read_bytes() for run in runs]
    tensors = [data[8 + int.from_bytes(data[:8], "little") :] for data in exported]  # skip the header, which has times
    return np.array_equal(whole_losses, crashed_losses), tensors[0] == tensors[1]


def campaign(cluster: Cluster, chosen: argparse.Namespace) -> tuple[list[Crash], tuple[bool, bool]]:
    """Crash nodes one after another; return the crashes, and whether losses and parameters stayed equal."""
    jobs = Jobs(cluster, cluster.folder / "jobs")
    (jobs.folder / "site.toml").write_text(SITES[chosen.launcher])
    steps = STEPS_A_CRASH * (chosen.crashes + 1)
    whole = begin(jobs, "whole", 0.0, steps)
    jobs.until(whole, JobState="COMPLETED")
    victim = Victim(jobs, begin(jobs, "crashed", STEP_S, steps), chosen.seed)
    crashes: list[Crash] = []
    for number in range(chosen.crashes):
        moment, place = victim.draw.choice(MOMENTS), victim.draw.randrange(NODES)
        crashes.append(crash := victim.crash(moment, place, number == 0))
        print(
            f"{chosen.launcher} {number + 1:2}: {moment:<5} {('first', 'middle', 'last')[place]:<6} "
            f"down after {crash.down_s:5.1f} s, trains after {crash.resumed_s:5.1f} s, from step {crash.resumed} "
            f"(saved {crash.saved})",
            flush=True,
        )
    jobs.until(victim.number, JobState="COMPLETED")
    return crashes, same_bits(jobs)


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    with started(chosen) as cluster:
        crashes, (losses, parameters) = campaign(cluster, chosen)
    about = {"launcher": chosen.launcher, "slurmd_timeout_s": chosen.slurmd_timeout, "seed": chosen.seed}
    about |= {"same_losses": losses, "same_parameters": parameters, "requeue_delay_s": chosen.requeue_delay}
    rows = np.array([astuple(crash) for crash in crashes], dtype=np.float64)
    columns = ", ".join(field.name for field in fields(Crash))
    return Results({"crashes": rows}, {"crashes": f"crashes, ({columns})"}, about | {"moments": ", ".join(MOMENTS)})


def lines(results: Results) -> Sequence[str]:
    resumed_s = results.arrays["crashes"][:, 3]
    after = f"training again after {np.median(resumed_s):.0f} s, at most {resumed_s.max():.0f} s"
    return [f"{results.attributes['launcher']}: {len(resumed_s)} crashes, {after}"]


def failures(results: Results) -> list[str]:
    rows, about = results.arrays["crashes"], results.attributes
    late, lost = (rows[:, 3] > about["slurmd_timeout_s"] + 60).sum(), (rows[:, 5] < rows[:, 4]).sum()
    missed = [f"{late} of {len(rows)} went on later than SlurmdTimeout + 60 s"] if late else []
    missed += [f"{lost} began before their newest checkpoint"] if lost else []
    return missed + [f"{name} differ" for name in ("losses", "parameters") if not about[f"same_{name}"]]
