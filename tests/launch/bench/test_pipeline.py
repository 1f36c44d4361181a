"""`hpcdist bench pipeline` on real ranks, which it starts itself."""

import sys

import h5py
import pytest

from harness import jobs
from harness.jobs import figures

FEW = ["--layers", 2, "--hidden", 8, "--context", 8, "--microbatches", 2, "--steps", 2, "--warmup", 1]


@pytest.mark.full_except("1")
def test_one_command_starts_the_ranks_and_saves_the_measurements(tmp_path, mpi):
    path = tmp_path / "p.h5"
    schedules = ["--schedule", "1f1b", "--schedule", "zb-v"]
    line = [sys.executable, "-P", "-m", "hpcdist", "bench", "pipeline", *FEW, *schedules, "-o", path, "--json"]
    rows = figures(jobs.run([*map(str, line), "--anonymous"]))["rows"]
    assert [(row["schedule"], row["microbatches"], row["ranks"], row["steps"]) for row in rows] == [
        ("1f1b", 2, 2, 2),
        ("zb-v", 2, 2, 2),
    ]
    assert all(0 < row["measured"] < 1 and row["x_ideal"] > 0 for row in rows)
    with h5py.File(path) as file:
        assert "hosts" not in file.attrs and file.attrs["mpi_library"]
        assert len(file["cases"]) == 2
