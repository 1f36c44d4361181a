"""The benchmark of checkpoints: figures from known times, bit comparison, and the command on one rank."""

import json
import os
import sys

import h5py
import numpy as np
import pytest

from harness import jobs
from hpcdist.bench.checkpoint import throughput as bench
from hpcdist.bench.checkpoint.background import SavingSteps, text
from hpcdist.bench.checkpoint.throughput import RAW, raw_files
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import StorageError


def test_ratios_are_medians_of_rounds_of_the_slowest_rank():
    def samples(name, *rounds):
        times = np.array(rounds)
        return bench.CheckpointSamples(name, times, {bench.CACHE: 2 * times})

    results = [
        samples(bench.OURS, (1.0, 2.0), (4.0, 3.0), (1.0, 1.0)),
        samples(RAW, (1.0, 1.0), (8.0, 1.0), (3.0, 1.0)),
    ]
    output = bench.figures(results, 4000)
    raw = {"median_s": 3.0, "bytes_per_s": 4000 / 3, "ratio": 2.0, "ratio_quartiles": [1.25, 2.5]}
    ours = {"median_s": 2.0, "bytes_per_s": 2000.0, "ratio": 1.0, "ratio_quartiles": [1.0, 1.0]}
    assert output["write"] == {"hpcdist": ours, "raw": raw}
    assert output["read from the cache"]["raw"]["median_s"] == 6.0 and "2.00x (1.25 - 2.50)" in bench.text(output)


def test_saving_steps_report_cost_and_overhead():
    output = SavingSteps([1.0, 3.0, 2.0], [2.2, 2.4], [3.0, 2.0, 2.0, 2.0], [9.0, 7.0]).figures(mtbf_s=1000.0)
    assert output["saving_over_plain"] == pytest.approx(1.15) and output["beside_over_plain"] == 1.0
    assert output["save_s"] == 8.0 and output["saving_quartiles"] == pytest.approx([1.125, 1.175])
    assert output["cost_s"] == pytest.approx((0.2 + 0.4 + 1.0) / 2)
    assert output["overhead"] == pytest.approx(0.8 / (0.8 + output["interval_s"])) and "0.800 s: 1.99 %" in text(output)


def run_benchmark(tmp_path, extra=()):
    def body(comm):
        state = bench.make_state(comm, 1 << 16, 3)
        assert sum(comm.allgather_object(sum(array.nbytes for array in state.values()))) == 1 << 16
        expected = bench.CheckpointRequest(tmp_path / "here", 2, 1, bench.READS, 0)
        return bench.run(comm, state, [raw_files(comm, state), *(make(state) for make in extra)], expected, print)

    return run_threads(3, body)[0]


def test_all_rounds_are_recorded_and_no_files_are_left(tmp_path):
    (result,) = run_benchmark(tmp_path)
    assert set(result.reads_s) == {"cache", "disk"}
    for times in (result.write_s, *result.reads_s.values()):
        assert times.shape == (2, 3) and (times > 0).all()
    assert os.listdir(tmp_path / "here") == []


def test_contender_that_reads_other_bits_is_rejected(tmp_path):
    with pytest.raises(StorageError, match="forgetful: rank 0 read other bits"):
        run_benchmark(
            tmp_path, [lambda state: bench.CheckpointContender("forgetful", lambda folder: None, lambda folder: None)]
        )


@pytest.mark.full
def test_command_on_one_rank(tmp_path):
    sizes = ["--bytes", "1M", "--bytes", "64k"]
    arguments = [*sizes, "--rounds", "2", "--no-torch", "--asynchronous", "--step-s", "0.001", "--json"]
    line = [sys.executable, "-P", "-m", "hpcdist", "bench", "checkpoint", *arguments, "--output", "out.h5"]
    done = jobs.run(line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [one["bytes"] for one in document["sizes"]] == [1 << 20, 1 << 16] and document["ranks"] == 1
    for one in document["sizes"]:
        assert set(one["speeds"]) == {"write", "read from the cache", "read from the disk"}
        assert all(set(rows) == {"hpcdist", "raw"} for rows in one["speeds"].values())
        assert one["beside"]["saving_over_plain"] > 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["1048576/contenders/hpcdist/write_s"].shape == (2, 1) and file.attrs["tensors"] == 24
        assert len(file["65536/beside/saving_s"]) == 2 and file["65536/contenders/raw/read_disk_s"].shape == (2, 1)
    assert os.listdir(tmp_path) == ["out.h5"]
