"""`hpcdist bench collectives` on real ranks, and the options that it rejects before it measures."""

import json
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from harness import jobs
from harness.jobs import hpcdist
from harness.marks import cases
from hpcdist.bench.collectives import results
from hpcdist.errors import STORAGE, USAGE

pytestmark = pytest.mark.full

FEW = ["--algorithm", "ring", "--algorithm", "node_shared", "--bytes", "4K 64K", "--iterations", "12", "--hot"]


@pytest.fixture(scope="module")
def measured_output(tmp_path_factory, mpi):
    path = tmp_path_factory.mktemp("bench") / "c.h5"
    done = hpcdist("run", "-n", 2, "bench", "collectives", *FEW, "--output", path, "--json", "--anonymous")
    assert done.returncode == 0, done.stderr
    return path, json.loads(done.stdout.strip().splitlines()[-1])


def test_two_ranks_measure_and_all_samples_are_saved(measured_output):
    path, output = measured_output
    rows = output["configurations"]
    assert {(row["algorithm"], row["bytes"]) for row in rows if row["buffers"] == "ordinary"} == {
        (name, nbytes) for name in ("native", "ring", "node_shared", "memcpy") for nbytes in (4096, 65536)
    }
    assert any(row["buffers"] == "shared" and row["verified"] == 12 for row in rows)
    with h5py.File(path) as file:
        assert "hosts" not in file.attrs and file.attrs["mpi_library"] and len(file.attrs["cores_of_rank"]) == 2
        groups = list(file["configurations"].values())
        assert len(groups) == len(rows)
        for group in groups:
            assert group["time_s"].shape == (12, 2) and np.all(group["time_s"][...] > 0)


@cases(
    "arguments, code, output",
    (["--output", "/proc/results.h5"], STORAGE, "/proc/results.h5: cannot be written"),
    (["--algorithm", "rings"], USAGE, "choose from native, ring"),
)
def test_impossible_options_are_reported_before_the_measurement(mpi, arguments, code, output):
    done = hpcdist("run", "-n", 2, "bench", "collectives", "--bytes", "4K", *arguments)
    assert done.returncode == code
    assert output in done.stderr and "median" not in done.stdout


def test_driver_compares_with_another_library_and_prints_the_ratio(tmp_path, mpi):
    clone = Path(__file__).parents[3]
    output = tmp_path / "all.h5"
    only = ["--only", "^hpcdist|default", "--ranks", "2", "--bytes", "4K", "--seconds", "0.05", "--rounds", "1"]
    line = [sys.executable, "-m", "benchmarks", "libraries", "--mpi", f"Here={sys.executable}@{mpi.path}", *only]
    line += ["--output", str(output)]
    done = jobs.run(line, cwd=clone)
    assert done.returncode == 0, done.stdout + done.stderr
    result = results.read(output).configurations
    assert {one.key.implementation for one in result} == {"hpcdist", "Here"}
    assert {"default", "default, to a result"} == {
        one.key.algorithm for one in result if one.key.implementation == "Here"
    }
    for one in result:
        assert one.reference or one.verified >= len(one.time_s) > 0  # the file keeps some of the iterations
    row = next(text for text in done.stdout.splitlines() if text.split()[:2] == ["2", "4096"])
    assert "Here default" in row and row.count("x") == 2
