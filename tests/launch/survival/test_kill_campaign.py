"""SIGKILL of real jobs at random instants while every step is saved: checkpoints load, and the run resumes.


There are 3 kills, or HPCDIST_TEST_JOB_KILLS kills if it is set (200 take some minutes). The same run is started again
after each kill: one rank or the whole job dies, saves block the steps or run asynchronously, every rank writes or one
rank per node, and some kills hit a start. At the end of a full campaign the run has the bits of an undisturbed run.
"""

import collections
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import jobs
from harness.inputs import newest_intact_checkpoint
from harness.jobs import LIMIT_S
from hpcdist.checkpoint.listing import verify

KILLS = int(os.environ.get("HPCDIST_TEST_JOB_KILLS", "3"))
FULL = KILLS > 20
LONGEST_S = 0.4  # from the first new checkpoint of a job to its death
STARTING_S = 2.5  # within which a job dies that dies while it starts
SETTINGS = (
    *("model.layers=1", "model.hidden=16", "model.heads=2", "data.context=8", "run.global_batch=2"),
    *("parallel.strategy=zero1", "optimizer.decay=constant", "energy.sources=none", "run.sentinel_every_steps=0"),
    *("communication.algorithm=ring", "run.validation_samples=4"),
)
RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")

pytestmark = [pytest.mark.timeout(60 * KILLS + 1800), pytest.mark.full]


class Job:
    """One start of the run in ``out``, whose name is in the command lines of all its processes."""

    def __init__(self, text, out, steps, *keys):
        self.out, self.log = out, out.with_suffix(".log")
        command = [sys.executable, "-m", "hpcdist", "run", "-n", "2", "train", "--out", str(out), "--resume", "auto"]
        for key in (*SETTINGS, f"data.path={text}", f"run.steps={steps}", *keys):
            command += ["--set", key]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--json"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def pids(self, *, ranks=False):
        """Return the ids of the living processes of the job, or of its ranks alone."""
        results = []
        for entry in Path("/proc").iterdir():
            try:
                mine = entry.name.isdigit() and str(self.out).encode() in (entry / "cmdline").read_bytes()
                variables = (entry / "environ").read_bytes() if mine and ranks else b""
            except OSError:
                continue  # it has just ended
            if mine and (not ranks or any(name in variables for name in RANK_VARIABLES)):
                results.append(int(entry.name))
        return results

    def until(self, step):
        """Wait for the checkpoint of ``step`` or a later step. Return True if there is one."""
        limit = time.monotonic() + LIMIT_S
        while jobs.newest_step(self.out) < step:
            assert time.monotonic() < limit, self.log.read_text()
            if self.process.poll() is not None:
                return False
            time.sleep(0.002)
        return True

    def kill(self, *, whole, which):
        """Kill one rank, or all processes at once. Return when no process of the job is left."""
        ranks = sorted(self.pids(ranks=True))
        # Where no rank is there yet, the launcher dies.
        doomed = self.pids() if whole or not ranks else [ranks[which % len(ranks)]]
        for pid in doomed:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it died of another one's death
        limit = time.monotonic() + LIMIT_S
        while self.process.poll() is None or self.pids():
            assert time.monotonic() < limit, f"a process outlived its job\n{self.log.read_text()}"
            time.sleep(0.01)


@pytest.mark.usefixtures("mpi")
def test_killed_job_leaves_a_loadable_checkpoint(tmp_path, rng):
    text, out = tmp_path / "text.txt", tmp_path / "killed-run"
    text.write_text(" ".join(rng.choice(["abba", "cede", "face", "hebe"], 3000)))
    counts = collections.Counter()
    began, reached = time.monotonic(), 0
    for kill in range(KILLS):
        beside, writers, whole = kill % 2 == 1, ("rank", "node")[kill // 2 % 2], bool(rng.random() < 0.5)
        job = Job(
            text,
            out,
            10**6,
            "checkpoint.every_steps=1",
            f"checkpoint.asynchronous={str(beside).lower()}",
            f"checkpoint.writers={writers}",
        )
        starting = FULL and kill % 10 == 9
        if starting:
            time.sleep(float(rng.random()) * STARTING_S)
        else:
            assert job.until(reached + 1), job.log.read_text()
            time.sleep(float(rng.random()) * LONGEST_S)
        complete = jobs.newest_step(out)
        job.kill(whole=whole, which=int(rng.integers(2)))
        result = newest_intact_checkpoint(out)
        assert result is not None and not verify(result).damage, f"kill {kill}"
        step = int(result.name.removeprefix("step-"))
        assert step >= complete >= reached, f"kill {kill}: step {complete} was complete\n{job.log.read_text()}"
        assert not reached or starting or f"resumed from {out}" in job.log.read_text()
        reached = step
        counts["the whole job" if whole else "one rank"] += 1
        counts["beside the steps" if beside else "waiting"] += 1
        counts[f"writers = {writers}"] += 1
        counts["while it started"] += starting
    seconds = time.monotonic() - began
    print(f"{KILLS} jobs killed in {seconds:.0f} s, {seconds / KILLS:.1f} s each; {dict(counts)}; step {reached}")
    if FULL:
        last = reached + 5
        assert train_to_end(text, out, last) == train_to_end(text, tmp_path / "whole-run", last)


def train_to_end(text, out, steps):
    """Train the run in ``out`` up to ``steps``; return its losses."""
    job = Job(text, out, steps)
    assert job.process.wait(timeout=LIMIT_S) == 0, job.log.read_text()
    document = json.loads(job.log.read_text().splitlines()[-1])
    return document["train_loss"], document["val_loss"]
