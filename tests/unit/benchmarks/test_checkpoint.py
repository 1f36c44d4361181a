"""The study of checkpoints: all rounds are recorded, files are removed, wrong bits are an error."""

import os
from argparse import Namespace

import numpy as np
import pytest

from benchmarks.harness import Results
from benchmarks.operations import checkpoint
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import StorageError, UsageError


def alternate(folder, contender):
    def body(comm):
        state = checkpoint.make_state(comm, 1 << 16, 3)
        assert sum(comm.allgather_object(sum(array.nbytes for array in state.values()))) == 1 << 16
        return checkpoint.alternate(comm, state, {"one": contender(comm, state)}, folder, 2)

    return run_threads(3, body)[0]


def test_all_rounds_are_recorded_and_no_files_are_left(tmp_path):
    times = alternate(tmp_path, checkpoint.plain_files)
    assert times.shape == (1, 3, 2, 3) and (times > 0).all()
    assert os.listdir(tmp_path) == []


def test_contender_that_reads_other_bits_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="one: rank 0 read other values"):
        alternate(tmp_path, lambda comm, state: (lambda folder: None, lambda folder: None))


def test_study_measures_hpcdist_and_plain_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda name: None)
    options = Namespace(bytes="64K", tensors=3, rounds=2, writers="rank", directory=str(tmp_path))

    def body(comm):
        return checkpoint.measure(options, Session(comm, None, "threads", None))

    results = run_threads(2, body)[0]
    assert results.names() == ["hpcdist", "plain files"] and results.arrays["time_s"].shape == (2, 3, 2, 2)
    assert any("64.0 KiB" in line for line in checkpoint.lines(results))
    options.bytes = "many"
    with pytest.raises(UsageError, match="--bytes"):
        body(None)


def test_ratio_takes_the_slowest_rank_of_each_round():
    times = np.array([[[[1.0, 2.0]] * 2] * 3, [[[4.0, 3.0]] * 2] * 3])
    ratios = checkpoint.ratios(Results({"time_s": times}, {}, {"contenders": "hpcdist;plain files"}))
    assert ratios["write, hpcdist / plain files"].tolist() == [0.5, 0.5] and len(ratios) == 3


def test_disk_without_room_is_rejected(tmp_path):
    with pytest.raises(StorageError, match="choose another --directory"):
        checkpoint.check_space(tmp_path, 1 << 60)
