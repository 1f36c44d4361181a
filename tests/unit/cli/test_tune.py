"""`hpcdist tune` in one process: its output, --show and --clear. Tests with ranks cover the measurement."""

import json
import os
import sys

import pytest

from harness import jobs
from hpcdist.collectives import tuning_cache
from hpcdist.collectives.tuning_cache import Tuning, TuningRow

KEY = {"kind": "allreduce", "ranks": 2, "mpi_library": "an MPI", "settings": {}, "software": {}}
TUNED = Tuning("native<=64,ring", (TuningRow(64, {"ring": 1e-6}, {"native": 1e-6, "ring": 2e-6}, "native"),), None, 0.5)


def tune(home, *arguments, **variables):
    env = {**os.environ, "XDG_CACHE_HOME": str(home), **variables}
    return jobs.run([sys.executable, "-m", "hpcdist", "tune", *arguments], env=env)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_one_rank_has_nothing_to_measure(home):
    done = tune(home, "--json", "--max-bytes", "1K")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["text"], document["rows"], document["ranks"]) == ("native", [], 1)
    assert list(home.iterdir()) == []


def test_show_lists_stored_and_damaged_entries(home):
    tuning_cache.save(TUNED, KEY)
    (tuning_cache.directory() / "damaged.json").write_text("{")
    done = tune(home, "--show")
    assert done.returncode == 0, done.stderr
    assert TUNED.text in done.stdout and "an MPI" in done.stdout
    assert "not used: the tuning cache file is damaged" in done.stdout
    document = json.loads(tune(home, "--show", "--json").stdout)
    assert {content.get("text") for content in document.values()} == {TUNED.text, None}


def test_clear_removes_entries(home):
    tuning_cache.save(TUNED, KEY)
    assert json.loads(tune(home, "--clear", "--json").stdout) == {"removed": 1}
    assert tune(home, "--show").stdout.startswith("0 in ")


@pytest.mark.parametrize("word", ["--show", "--clear"])
def test_only_rank_0_prints_and_clears(home, word):
    tuning_cache.save(TUNED, KEY)
    for rank in (1, 0):  # rank 1 first: it must remove nothing
        done = tune(home, word, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK=str(rank))
        assert done.returncode == 0, done.stderr
        assert bool(done.stdout) == (rank == 0)
        assert len(list(tuning_cache.directory().glob("*.json"))) == (word == "--show" or rank == 1)


@pytest.mark.parametrize("arguments", [("--show", "--clear"), ("--max-bytes", "much"), ("--dtype", "float16")])
def test_usage_errors(home, arguments):
    done = tune(home, *arguments)
    assert done.returncode == 2, done.stderr
