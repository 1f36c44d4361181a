"""`hpcdist bench collectives` on real ranks, and what it refuses before it measures."""

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
def measured(tmp_path_factory, mpi):
    path = tmp_path_factory.mktemp("bench") / "c.h5"
    done = hpcdist("run", "-n", 2, "bench", "collectives", *FEW, "--output", path, "--json", "--anonymous")
    assert done.returncode == 0, done.stderr
    return path, json.loads(done.stdout.strip().splitlines()[-1])


def test_two_ranks_measure_and_every_sample_is_kept(measured):
    path, told = measured
    rows = told["configurations"]
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
    "arguments, code, said",
    (["--output", "/proc/results.h5"], STORAGE, "/proc/results.h5: cannot be written"),
    (["--algorithm", "rings"], USAGE, "choose from native, ring"),
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(mpi, arguments, code, said):
    done = hpcdist("run", "-n", 2, "bench", "collectives", "--bytes", "4K", *arguments)
    assert done.returncode == code
    assert said in done.stderr and "median" not in done.stdout


def test_the_driver_measures_a_library_beside_ours_and_prints_the_ratio(tmp_path, mpi):
    clone = Path(__file__).parents[3]
    output = tmp_path / "all.h5"
    only = ["--only", "^hpcdist|default", "--ranks", "2", "--bytes", "4K", "--seconds", "0.05", "--rounds", "1"]
    line = [sys.executable, "-m", "benchmarks", "libraries", "--mpi", f"Here={sys.executable}@{mpi.path}", *only]
    line += ["--output", str(output)]
    done = jobs.run(line, cwd=clone)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results.read(output).configurations
    assert {one.key.implementation for one in found} == {"hpcdist", "Here"}
    assert {"default", "default, to a result"} == {
        one.key.algorithm for one in found if one.key.implementation == "Here"
    }
    for one in found:
        assert one.reference or one.verified >= len(one.time_s) > 0  # the file keeps some of the iterations
    row = next(text for text in done.stdout.splitlines() if text.split()[:2] == ["2", "4096"])
    assert "Here default" in row and row.count("x") == 2
