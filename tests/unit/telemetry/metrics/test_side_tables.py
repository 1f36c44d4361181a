"""Rows in bounded memory: all rows of a small run, and blocks spread over a large run."""

import h5py
import numpy as np
import pytest

from hpcdist.errors import StorageError
from hpcdist.hdf5 import datasets
from hpcdist.telemetry.metrics import side_tables, step_metrics
from hpcdist.telemetry.metrics.step_metrics import MetricsWriter


def write(path, steps, ranks, rng):
    with MetricsWriter(path, ranks, attributes={"unigram_nats": 3.0}) as writer:
        for step in range(1, steps + 1):
            wide = {name: rng.random(ranks) for name in step_metrics.PER_RANK}
            writer.append(step=step, loss=float(step), learning_rate=0.1, tokens=10, **wide)
        writer.evaluation(steps, 1.5)


def test_small_run_is_read_completely(tmp_path, rng):
    write(tmp_path / "metrics.h5", 30, 3, rng)
    result, whole = side_tables.read(tmp_path / "metrics.h5"), step_metrics.read(tmp_path / "metrics.h5")
    assert result.complete and result.tables == {} and result.sample.attributes == whole.attributes
    for name, column in whole.steps.items():
        assert np.array_equal(result.sample.steps[name], column)
    assert np.array_equal(result.sample.evaluations["val_loss"], [1.5])


def test_large_run_is_sampled_evenly(tmp_path, rng, monkeypatch):
    monkeypatch.setattr("hpcdist.hdf5.datasets.CHUNK_BYTES", 4 * 8 * 5)  # 4 rows of 5 ranks in a chunk
    write(tmp_path / "metrics.h5", 1001, 5, rng)
    result = side_tables.read(tmp_path / "metrics.h5", wide_bytes=100 * 5 * 8)
    with h5py.File(tmp_path / "metrics.h5") as file:
        assert file["steps/step_s"].chunks[0] == 4
    assert not result.complete and 80 <= len(result.chosen) <= 104
    assert result.chosen[0] == 0 and result.chosen[-1] == 1000, "the first and the last step"
    assert np.diff(result.chosen).max() < 60
    assert len(result.steps["loss"]) == 1001, "what is one number a step is there in full"
    for name, column in step_metrics.read(tmp_path / "metrics.h5").steps.items():
        assert np.array_equal(result.sample.steps[name], column[result.chosen])


@pytest.mark.parametrize("chunk", (1, 8, 1000))
def test_blocks_are_disjoint_and_few(rng, chunk):
    for _ in range(50):
        rows, most = (int(rng.integers(1, 10**6)) for _ in range(2))
        blocks = datasets.spread_blocks(rows, chunk, most)
        assert blocks[0][0] == 0 and blocks[-1][1] == rows
        assert all(a < b <= c for (a, b), (c, _) in zip(blocks[:-1], blocks[1:], strict=True))
        total = sum(stop - start for start, stop in blocks)
        assert total <= max(most, 2 * chunk) and (rows > most or blocks == [(0, rows)])
        assert len(blocks) <= datasets.MAX_BLOCKS
    assert datasets.spread_blocks(0, chunk, 10) == []


@pytest.mark.full
def test_foreign_or_damaged_file_is_rejected(tmp_path):
    path = tmp_path / "metrics.h5"
    with h5py.File(path, "w") as file:
        file.attrs["schema"] = "somebody.else"
    with pytest.raises(StorageError, match="schema"):
        side_tables.read(path)
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + b"\0" * 100)
    with pytest.raises(StorageError):
        side_tables.read(path)
    with h5py.File(path, "w") as file:
        file.attrs.update({"schema": step_metrics.SCHEMA, "schema_version": 1})
    with pytest.raises(StorageError, match="damaged"):
        side_tables.read(path)
