"""The commands that inspect a run: on any number of ranks, without its data, and with each error reported once."""

import json

import pytest

from harness import jobs
from harness.jobs import hpcdist
from harness.trainings import recipe_keys

SETTINGS = recipe_keys("layers=1 hidden=32 heads=2 data.context=16 steps=8 global_batch=6 strategy=zero3")


def settings(data):
    return jobs.settings({**SETTINGS, "data.path": data})


def count_messages(done, words):
    return (done.stdout + (done.stderr or "")).count(words)


@pytest.mark.full
def test_run_is_evaluated_on_any_number_of_ranks(tmp_path, rng):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(30)]
    text.write_text(" ".join(rng.choice(words, 2000)))
    trained = hpcdist("run", "-n", 2, "train", *settings(text), "--out", run, "--json")
    assert trained.returncode == 0, trained.stderr
    before = sorted(run.iterdir())
    figures = jobs.figures(hpcdist("run", "-n", 3, "evaluate", run, "--json"))
    assert figures["steps"] == SETTINGS["run.steps"]
    assert figures["val_loss"] == pytest.approx(json.loads(trained.stdout.splitlines()[-1])["val_loss"], rel=1e-5)

    text.unlink()
    sampled = hpcdist("run", "-n", 2, "sample", run, "--prompt", "zyx", "--tokens", 20, "--temperature", 0)
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.startswith("zyx") and count_messages(sampled, "zyx") == 1, "one rank writes"
    refused = hpcdist("run", "-n", 4, "evaluate", run)
    assert refused.returncode == 78, refused.stderr
    assert count_messages(refused, f"{text}: there is no such file") == 1, refused.stderr
    assert "Traceback" not in refused.stderr
    assert sorted(run.iterdir()) == before, "a look leaves nothing behind"


def test_error_of_all_ranks_is_reported_once(mpiexec, tmp_path):
    """The test does not use `hpcdist run`, which would print the first failure again."""
    line = ["-m", "hpcdist", "train", *settings(tmp_path / "missing.txt"), "--out", str(tmp_path / "run")]
    done = mpiexec(4, line)
    assert done.returncode == 78, done.stdout
    assert count_messages(done, "missing.txt: there is no such file") == 1, done.stdout
    assert "[rank 0] every rank failed alike: exit code 78" in done.stdout
