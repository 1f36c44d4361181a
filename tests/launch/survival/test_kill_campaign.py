"""SIGKILL of real jobs at random instants while every step is saved: what is left loads, and the run goes on from it.

3 kills; as many as HPCDIST_TEST_JOB_KILLS says where that is set (200 take some minutes). The same run is started again
after each: one rank or the whole job dies, saves wait for the disk or go on beside the steps, every rank writes or one
for the node, and some die while they start. At the end of a full campaign the run has the bits of one that nobody hurt.
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
from harness.inputs import newest
from harness.jobs import LIMIT_S
from hpcdist.checkpoint.verify import verify

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
    """One start of the run in ``out``; all of its processes have that name in their command lines."""

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
        """The processes of the job that live, or its ranks alone."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                mine = entry.name.isdigit() and str(self.out).encode() in (entry / "cmdline").read_bytes()
                variables = (entry / "environ").read_bytes() if mine and ranks else b""
            except OSError:
                continue  # it has just ended
            if mine and (not ranks or any(name in variables for name in RANK_VARIABLES)):
                found.append(int(entry.name))
        return found

    def until(self, step):
        """Wait for the checkpoint of ``step`` or a later one; whether there is one."""
        limit = time.monotonic() + LIMIT_S
        while jobs.newest(self.out) < step:
            assert time.monotonic() < limit, self.log.read_text()
            if self.process.poll() is not None:
                return False
            time.sleep(0.002)
        return True

    def kill(self, *, whole, which):
        """Kill one rank, or all processes at once; return when nothing is left of the job."""
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
def test_a_killed_job_leaves_a_checkpoint_that_loads(tmp_path, rng):
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
        complete = jobs.newest(out)
        job.kill(whole=whole, which=int(rng.integers(2)))
        found = newest(out)
        assert found is not None and not verify(found).damage, f"kill {kill}"
        step = int(found.name.removeprefix("step-"))
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
        assert end(text, out, last) == end(text, tmp_path / "whole-run", last)


def end(text, out, steps):
    """Train the run in ``out`` up to ``steps``; return its losses."""
    job = Job(text, out, steps)
    assert job.process.wait(timeout=LIMIT_S) == 0, job.log.read_text()
    found = json.loads(job.log.read_text().splitlines()[-1])
    return found["train_loss"], found["val_loss"]
