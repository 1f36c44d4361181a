"""Preemptions of a job of Slurm that saves, is requeued and goes on, and whether its bits stay the same.

    python -m benchmarks preemptions --launcher mpirun --preemptions 10

Needs what tests/launch/slurm/test_preemption.py needs: Slurm, munge and root; for `--launcher srun` with Open MPI also
libpmix-dev. `hydra` and `mpich` (srun) need an environment with MPICH. A job of a partition of higher priority takes
all nodes from one training again and again, in a step, or in a start (which checks its nodes, or loads). Slurm tells it
so (PreemptMode=REQUEUE with GraceTime), and by itself the training saves at no other time.

A preemption counts as passed when the job has ended by itself before the GraceTime was over, and goes on from a
checkpoint of that moment: none of the steps that its log showed is lost. In the end the losses of all steps and the
parameters are compared with those of the same training that nobody preempted, to the bit.
"""

import argparse
import random
import re
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.harness import Results
from benchmarks.operations.node_crashes import SITES, Cluster, Jobs, Victim, same_bits
from hpcdist.batch import ledger
from hpcdist.comm.start import Session

SCHEMA = "hpcdist-benchmark-preemptions"

NODES: Final = 2
STEP_S: Final = 0.1
STEPS_A_PREEMPTION: Final = 60
LAUNCHERS: Final = SITES | {"hydra": "based_on = 'slurm-mpich'\n[launcher]\nkind = 'mpirun'\npmi = ''\n"}
OPTIONS: Final = {"preemptions": 10, "grace": 120, "seed": 0, "launcher": LAUNCHERS}  # grace: GraceTime in seconds


def begin(jobs: Jobs, name: str, step_s: float, steps: int) -> str:
    """Submit the training, which saves when it is told to, and return the number of the job."""
    keys = (f"--set=chaos.step_s={step_s}", f"--set=checkpoint.every_steps={steps}")
    return jobs.begin(f"--out={name}", "--site=site.toml", *keys, nodes=NODES, ranks=1, steps=steps)


def shown(jobs: Jobs, number: str) -> int:
    """Return the last step that the log of the job shows; 0 where there is none."""
    return max((int(step) for step in re.findall(r"\nstep (\d+)/", jobs.log(number))), default=0)


def preempt(victim: Victim, in_step: bool, draw: random.Random) -> tuple[bool, str]:
    """Preempt the job once; return whether it went on as it should, and what became of it."""
    jobs, number = victim.jobs, victim.number
    starts, logged = victim.starts(), len(jobs.log(number))
    if in_step:
        victim.wait(lambda: re.search(r"\nstep \d+/", jobs.log(number)[logged:]), "step")
        time.sleep(draw.uniform(0.0, 2.0))
    else:
        time.sleep(draw.uniform(0.0, 6.0))
    before, began = shown(jobs, number), time.monotonic()
    jobs.cluster.preempt()
    victim.wait(lambda: victim.starts() > starts, "start after the preemption")
    took_s, saved = time.monotonic() - began, victim.saved()
    ends = [entry for entry in ledger.read(victim.run_dir) if entry.event == ledger.ENDED]
    by_itself = len(ends) == starts and ends[-1].text("word") == ledger.AGAIN
    end = f"exit code {ends[-1].number('code')}" if by_itself else "ended by Slurm"
    return by_itself and saved >= before, f"{end}, begins again after {took_s:4.1f} s, saved {saved}, shown {before}"


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Preempt the job again and again, and return what came of it."""
    draw, in_step, passed = random.Random(chosen.seed), False, []
    steps = STEPS_A_PREEMPTION * (chosen.preemptions + 1)
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder), count=NODES, requeue_s=5, grace_s=chosen.grace)
        try:
            cluster.start()
            jobs = Jobs(cluster, cluster.folder / "jobs")
            (jobs.folder / "site.toml").write_text(LAUNCHERS[chosen.launcher])
            jobs.until(begin(jobs, "whole", 0.0, steps), JobState="COMPLETED")
            victim = Victim(jobs, begin(jobs, "crashed", STEP_S, steps))
            for number in range(chosen.preemptions):
                in_step = not in_step or draw.random() < 0.7  # of starts in vain, three in a row are refused
                is_passed, what = preempt(victim, in_step, draw)
                passed.append(is_passed)
                moment = "step" if in_step else "start"
                print(f"{chosen.launcher} {number + 1:2}: {moment:<5} {what}", flush=True)
            jobs.until(victim.number, JobState="COMPLETED")
            losses, parameters = same_bits(jobs)
        finally:
            cluster.stop()
    about = {"launcher": chosen.launcher, "same_losses": losses, "same_parameters": parameters}
    return Results({"passed": np.array(passed, np.int8)}, {"passed": "preemptions"}, about)


def failures(results: Results) -> list[str]:
    passed = results.arrays["passed"]
    missed = [f"{passed.sum()} of {len(passed)} passed"] if not passed.all() else []
    return missed + [f"{name} differ" for name in ("losses", "parameters") if not results.attributes[f"same_{name}"]]


def lines(results):
    return [f"{results.arrays['passed'].sum()} of {len(results.arrays['passed'])} preemptions passed"]
