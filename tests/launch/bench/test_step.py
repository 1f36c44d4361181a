"""`hpcdist bench step` on real ranks, which it starts itself."""

import sys

import h5py
import pytest

from harness import jobs
from harness.jobs import figures

FEW = ["--layers", 1, "--hidden", 16, "--heads", 2, "--context", 16, "--samples", 2, "--steps", 3, "--warmup", 1]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.full_except("1")
@pytest.mark.matrix_except("1")
def test_one_command_starts_the_ranks_and_prints_the_measurements(tmp_path, mpi, ranks):
    """On two ranks, PyTorch runs with DistributedDataParallel."""
    pytest.importorskip("torch")
    path, names = tmp_path / "s.h5", ["hpcdist", "wrapped PyTorch", "PyTorch eager"]
    only = [word for name in names for word in ("--only", name)]
    line = [sys.executable, "-P", "-m", "hpcdist", "bench", "step", "-n", ranks, *FEW, *only, "-o", path, "--json"]
    output = figures(jobs.run([*map(str, line), "--anonymous"]))
    assert [row["name"] for row in output["rows"]] == names and output["left_out"] == {}
    assert max(row["loss_difference"] for row in output["rows"]) < 1e-5
    assert all(0 < row["mfu"] < 1 and row["x_eager"] > 0 for row in output["rows"])
    with h5py.File(path) as file:
        assert "hosts" not in file.attrs and file.attrs["ranks"] == ranks
        assert file["cases/2/step_s"].shape == (3, ranks)
