"""Injected faults in a real job: the waiting rank and the rank that delays it are reported."""

import sys

import pytest

from harness import jobs
from hpcdist.telemetry.hang import analyse, load


@pytest.mark.usefixtures("mpi")
@pytest.mark.full
def test_stalled_rank_is_named(tmp_path, rng):
    (tmp_path / "text.txt").write_text(" ".join(rng.choice(["abba", "cede", "face", "hebe"], 2000)))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "hpcdist", "run", "-n", "2", "train", "--out", str(out)]
    for key in (
        *(f"data.path={tmp_path / 'text.txt'}", "model.layers=1", "model.hidden=16", "model.heads=2", "run.steps=50"),
        *("data.context=8", "run.global_batch=2", "communication.deadline_s=2", "chaos.stall=['1@6:600']"),
    ):
        command += ["--set", key]
    done = jobs.run(command)
    assert done.returncode not in (0, 75), done.stderr
    assert "rank 1 sleeps 600 s in step 6" in done.stderr and "rank 0 waited past its deadline" in done.stderr
    result = analyse(load(out)).findings[0]
    assert (result.kind, result.ranks) == ("absent", (1,)), result
    assert "in _meet" in (out / "recorder" / "rank-00001.stacks").read_text(), "the line that it sleeps in"
