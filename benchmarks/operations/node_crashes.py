"""Time that a job of Slurm stands still when one of its nodes crashes, and whether its bits stay the same.

    python -m benchmarks node_crashes --launcher mpirun --crashes 10 -o crashes.h5 --anonymous

Needs what tests/launch/slurm/test_crash.py needs: Slurm, munge, root and namespaces; for `--launcher srun` with Open
MPI also libpmix-dev. The nodes are virtual: each is a slurmd in namespaces of its own, and a crash is SIGKILL of
everything there, of which Slurm learns by its SlurmdTimeout alone. Drawn are the node (the first of the job, with its
script, one in the middle, or the last) and the moment: after the job has begun (in its check, or before its first
step), in a step after a checkpoint, or while a checkpoint is written. There is one node more than the job needs, and a
crashed one comes back when Slurm has declared it down.

Told are, for each crash, when Slurm declared the node down (nan: not at all) and when the training went on, in seconds
after the crash, and from which step. It must not be before the newest checkpoint of the moment of the crash. In the end
the losses of all steps and the parameters are compared with those of the same training without a crash, to the bit.
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
from hpcdist.telemetry.metrics import step_metrics
from hpcdist.telemetry.metrics.step_metrics import METRICS_FILE

sys.path.insert(0, str(harness.ROOT / "tests"))

from stubs.slurm_cluster import Cluster, Jobs, isolation_refused

SCHEMA = "hpcdist-benchmark-node-crashes"
NO_CHECK = "a crash takes a minute and a Slurm; run it with --crashes 1"

NODES: Final = 3  # of the job
MOMENTS: Final = ("start", "step", "save")
STEP_S: Final = 0.1
STEPS_A_CRASH: Final = 50
EVERY: Final = 10  # steps between two checkpoints
LIMIT_S: Final = 600.0  # for whatever is waited for
SITES: Final = {
    "mpirun": "based_on = 'slurm-openmpi'\n",
    "srun": "based_on = 'slurm-openmpi'\n[launcher]\nkind = 'srun'\npmi = 'pmix'\n",
    "mpich": "based_on = 'slurm-mpich'\n",
}
# slurmd_timeout: SlurmdTimeout in seconds; requeue_delay: cred_expire in seconds (120 of Slurm itself)
OPTIONS: Final = {"crashes": 10, "seed": 0, "slurmd_timeout": 15, "requeue_delay": 5, "launcher": SITES}


@dataclass(frozen=True)
class Crash:
    """What came of one crash; times are seconds after it, ``moment`` and ``node`` are indices."""

    moment: int
    node: int
    down_s: float
    resumed_s: float
    saved: int  # steps of the newest checkpoint when the node crashed
    resumed: int  # steps from which the training went on


@contextlib.contextmanager
def started(chosen: argparse.Namespace) -> Iterator[Cluster]:
    """Start a cluster that has one node more than the job needs."""
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
    """Submit the training whose steps take ``step_s`` at the least, and return the number of the job."""
    keys = (f"--set=chaos.step_s={step_s}", f"--set=checkpoint.every_steps={EVERY}")
    return jobs.begin(f"--out={name}", "--site=site.toml", *keys, nodes=NODES, ranks=1, steps=steps)


class Victim:
    """A job, in the directory `crashed`, whose nodes crash one after another."""

    def __init__(self, jobs: Jobs, number: str, seed: int = 0) -> None:
        self.jobs, self.cluster, self.number = jobs, jobs.cluster, number
        self.draw = random.Random(seed)
        self.run_dir = jobs.folder / "crashed"
        self.wait(lambda: self.starts() == 1, "first start")

    def wait(self, condition: Callable[[], object], what: str, pause_s: float = 0.2) -> None:
        """Wait for ``condition``; end with the log where it does not come."""
        limit, look = time.monotonic() + LIMIT_S, 0.0
        while not condition():
            now = time.monotonic()
            if now > look:  # not each time: a save lasts milliseconds
                look, state = now + 2.0, self.state()
                if now > limit or state not in ("PENDING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED"):
                    log = self.jobs.log(self.number)
                    sys.exit(f"no {what}; job {self.number} is {state}\n{log[-8000:]}")
            time.sleep(pause_s)

    def state(self) -> str:
        """Return what Slurm calls the state of the job."""
        return self.cluster.job(self.number).get("JobState", "gone")

    def starts(self) -> int:
        """Return how often the job has begun."""
        return sum(entry.event == ledger.BEGAN for entry in ledger.read(self.run_dir))

    def saved(self) -> int:
        """Return the steps of the newest checkpoint; 0 where there is none."""
        folder = self.run_dir / "checkpoints"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return max((int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name)), default=0)

    def saves(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self.run_dir / "checkpoints").glob("step-*.tmp"))

    def reach(self, moment: str, first: bool) -> None:
        """Wait until the job is in the moment in which it is to crash."""
        before = self.saved()
        if moment == "start":
            if not first:  # let it save, and begin anew
                begun = self.starts()
                self.jobs.stop(self.number)
                self.wait(lambda: self.starts() > begun, "start after SIGUSR1")
            time.sleep(self.draw.uniform(0.0, 8.0))
            return
        self.wait(lambda: self.saved() > before, "new checkpoint")
        if moment == "step":
            time.sleep(self.draw.uniform(0.0, 2.0))
        else:
            self.wait(self.saves, "save", 0.0005)

    def crash(self, moment: str, place: int, first: bool) -> Crash:
        """Crash the node in ``place`` of the job in ``moment``, and return what came of it when it trains again."""
        self.reach(moment, first)
        shown = self.cluster.run("scontrol", "show", "hostnames", self.cluster.job(self.number)["NodeList"])
        node = shown.stdout.split()[place]
        if moment == "save":
            self.wait(self.saves, "save", 0.0005)
        saved, begun, logged, began = self.saved(), self.starts(), len(self.jobs.log(self.number)), time.monotonic()
        self.cluster.crash(node)
        down_s = resumed_s = 0.0
        resumed = -1

        def trains() -> bool:
            nonlocal down_s, resumed_s, resumed
            state = self.cluster.run("sinfo", "-h", "-n", node, "-o", "%T").stdout
            passed = time.monotonic() - began
            # Where its cores count as used by the job that has begun anew without it, Slurm calls it mixed* for ever.
            late = resumed_s and passed > self.cluster.timeout_s + 30
            if not down_s and (late or state.startswith("down")):
                down_s = math.nan if late else passed
                self.cluster.revive(node)
            shown_steps = re.findall(r"\nrun directory .*\nstep (\d+)/", self.jobs.log(self.number)[logged:])
            if not resumed_s and self.starts() > begun and shown_steps:
                resumed_s, resumed = time.monotonic() - began, int(shown_steps[-1]) - 1
            return bool(down_s and resumed_s)

        self.wait(trains, f"training after the crash of {node}")
        return Crash(MOMENTS.index(moment), place, down_s, resumed_s, saved, resumed)


def same_bits(jobs: Jobs) -> tuple[bool, bool]:
    """Return whether the losses of all steps, and the last parameters, are those of the training without a crash."""
    runs = [jobs.folder / name for name in ("whole", "crashed")]
    one, two = (step_metrics.read(run / METRICS_FILE).steps["loss"] for run in runs)
    for run in runs:
        line = [sys.executable, "-P", "-m", "hpcdist", "checkpoint", "export", str(run), f"{run}.safetensors"]
        subprocess.run(line, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    exported = [Path(f"{run}.safetensors").read_bytes() for run in runs]
    tensors = [data[8 + int.from_bytes(data[:8], "little") :] for data in exported]  # the header has times in it, too
    return np.array_equal(one, two), tensors[0] == tensors[1]


def campaign(cluster: Cluster, chosen: argparse.Namespace) -> tuple[list[Crash], tuple[bool, bool]]:
    """Crash nodes one after another, print each, and return all, and whether losses and parameters are the same."""
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
    """Make the crashes and return what came of them."""
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
