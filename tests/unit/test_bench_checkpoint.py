"""The benchmark of checkpoints: figures of known times, bits compared, and the command on one rank."""

import json
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest

from hpcdist.bench import checkpoint as bench
from hpcdist.bench.checkpoint_beside import Steps
from hpcdist.comm.threads import run_threads
from hpcdist.errors import StorageError


def test_ratios_are_medians_of_rounds_of_the_slowest_rank():
    def samples(name, *rounds):
        times = np.array(rounds)
        return bench.Samples(name, times, 2 * times)

    found = [
        samples(bench.OURS, (1.0, 2.0), (4.0, 3.0), (1.0, 1.0)),
        samples(bench.RAW, (1.0, 1.0), (8.0, 1.0), (3.0, 1.0)),
    ]
    told = bench.figures(found, 4000)
    assert told["write"]["raw"] == {"median_s": 3.0, "bytes_per_s": 4000 / 3, "ratio": 2.0}
    assert told["write"]["hpcdist"] == {"median_s": 2.0, "bytes_per_s": 2000.0, "ratio": 1.0}
    assert told["read"]["raw"]["median_s"] == 6.0 and "2.00x" in bench.text(told)
    steps = Steps([1.0, 3.0, 2.0], [2.2], [3.0, 5.0], [9.0]).figures()
    assert steps["saving_over_plain"] == 1.1 and steps["beside_over_plain"] == 2.0 and steps["save_s"] == 9.0


def measured(tmp_path, extra=()):
    def body(comm):
        state = bench.make_state(comm, 1 << 16, 3)
        assert sum(comm.allgather_object(sum(array.nbytes for array in state.values()))) == 1 << 16
        wanted = bench.Wanted(tmp_path / "here", 2, 1, False, 0)
        return bench.run(comm, state, [bench.raw(comm, state), *(make(state) for make in extra)], wanted, print)

    return run_threads(3, body)[0]


def test_every_round_of_every_rank_is_kept_and_nothing_is_left(tmp_path):
    (found,) = measured(tmp_path)
    assert found.write_s.shape == found.read_s.shape == (2, 3)
    assert (found.write_s > 0).all() and (found.read_s > 0).all()
    assert os.listdir(tmp_path / "here") == []


def test_who_does_not_bring_back_the_bits_is_no_contender(tmp_path):
    with pytest.raises(StorageError, match="forgetful: rank 0 read other bits"):
        measured(tmp_path, [lambda state: bench.Contender("forgetful", lambda folder: None, lambda folder: None)])


def test_the_command_on_one_rank(tmp_path):
    arguments = ["--bytes", "1M", "--rounds", "2", "--no-torch", "--asynchronous", "--step-s", "0.001", "--json"]
    line = [sys.executable, "-P", "-m", "hpcdist", "bench", "checkpoint", *arguments, "--output", "out.h5"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["bytes"] == 1 << 20 and set(told["write"]) == set(told["read"]) == {"hpcdist", "raw"}
    assert told["beside"]["saving_over_plain"] > 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["contenders/hpcdist/write_s"].shape == (2, 1) and file.attrs["bytes"] == 1 << 20
        assert len(file["beside/saving_s"]) == 2
    assert os.listdir(tmp_path) == ["out.h5"]
