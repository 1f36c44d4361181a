"""How often a job of Slurm that is preempted saves, is requeued and goes on, and whether its bits stay the same.

    python benchmarks/preemptions.py --launcher mpirun --preemptions 10

Needs what tests/launch/test_slurm_preemption.py needs: Slurm, munge and root; for `--launcher srun` with Open MPI also
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
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from node_crashes import SITES, Victim, same_bits

from hpcdist.batch import ledger

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "doubles"))

from slurm_cluster import Cluster, Jobs

NODES: Final = 2
STEP_S: Final = 0.1
STEPS_A_PREEMPTION: Final = 60
LAUNCHERS: Final = SITES | {"hydra": "based_on = 'slurm-mpich'\n[launcher]\nkind = 'mpirun'\npmi = ''\n"}


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="mpirun", help="(default mpirun)")
    parser.add_argument("--preemptions", type=int, default=10, help="in a row, of one job (default 10)")
    parser.add_argument("--grace", type=int, default=120, help="GraceTime in seconds (default 120)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    return parser.parse_args()


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
    starts, said = victim.starts(), len(jobs.log(number))
    if in_step:
        victim.wait(lambda: re.search(r"\nstep \d+/", jobs.log(number)[said:]), "step")
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


def main() -> None:
    """Preempt the job, and print what came of it."""
    options = arguments()
    draw = random.Random(options.seed)
    steps = STEPS_A_PREEMPTION * (options.preemptions + 1)
    passed, in_step = 0, False
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder), count=NODES, requeue_s=5, grace_s=options.grace)
        try:
            cluster.start()
            jobs = Jobs(cluster, cluster.folder / "jobs")
            (jobs.folder / "site.toml").write_text(LAUNCHERS[options.launcher])
            jobs.until(begin(jobs, "whole", 0.0, steps), JobState="COMPLETED")
            victim = Victim(jobs, begin(jobs, "crashed", STEP_S, steps))
            for number in range(options.preemptions):
                in_step = not in_step or draw.random() < 0.7  # of starts in vain, three in a row are refused
                is_passed, what = preempt(victim, in_step, draw)
                passed += is_passed
                moment = "step" if in_step else "start"
                print(f"{options.launcher} {number + 1:2}: {moment:<5} {what}", flush=True)
            jobs.until(victim.number, JobState="COMPLETED")
            losses, parameters = same_bits(jobs)
        finally:
            cluster.stop()
    print(
        f"{options.launcher}: {passed} of {options.preemptions} preemptions passed; losses "
        f"{'equal' if losses else 'DIFFER'}, parameters {'equal' if parameters else 'DIFFER'}"
    )
    sys.exit(passed < options.preemptions or not (losses and parameters))


if __name__ == "__main__":
    main()
