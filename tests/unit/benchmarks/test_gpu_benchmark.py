"""The benchmarks of GPUs: they compare, measure and write on the double, and leave with 69 without a GPU."""

import importlib.util
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest

from hpcdist.arrays.gpu import device
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import MISSING_CAPABILITY, MissingCapabilityError, UsageError
from hpcdist.training.recipe import recipe as recipes

SMALL = ["model.layers=1", "model.hidden=16", "model.heads=2", "data.context=8", "run.global_batch=3"]


def benchmark(name: str) -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu_step() -> ModuleType:
    return benchmark("gpu_step")


def arguments(folder: Path) -> list[str]:
    (folder / "text.txt").write_text("the quick brown fox " * 40)
    keys = [*SMALL, f"data.path={folder / 'text.txt'}"]
    return [
        *(word for key in keys for word in ("--set", key)),
        "--steps",
        "4",
        "-o",
        str(folder / "step.h5"),
        "--anonymous",
    ]


def test_it_writes_every_step_with_its_provenance(
    gpu: ModuleType, gpu_step: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_step.main(arguments(tmp_path))
    said = json.loads(capsys.readouterr().out)
    assert said["gpu"] == "double" and said["parameters"] > 0
    with h5py.File(tmp_path / "step.h5") as file:
        assert file.attrs["gpu"] == "double" and "hosts" not in file.attrs and file.attrs["numpy_version"]
        stored = tmp_path / "recipe.toml"
        stored.write_text(file.attrs["recipe"])
        assert recipes.load_stored(stored).model.hidden == 16
        times = {name: dataset[...] for name, dataset in file.items()}
    assert {"cpu_s", "gpu_s", "gpu_host_s", "gpu_compute_s", "cpu_update_s"} <= times.keys()
    assert all(values.shape == (4,) for values in times.values())
    assert said["gpu_s"] == pytest.approx(np.median(times["gpu_s"]), abs=1e-8)
    assert said["ratio"] == pytest.approx(np.median(times["cpu_s"]) / np.median(times["gpu_s"]), abs=1e-3)


def test_a_side_that_computes_something_else_is_refused(
    gpu: ModuleType, gpu_step: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(side: object) -> tuple[float, object]:
        elapsed, step = gpu_step.on_clock(side)
        step.loss *= 1.01
        return elapsed, step

    monkeypatch.setattr(gpu_step, "by_events", wrong)
    with pytest.raises(SystemExit, match=r"step 1: loss .* on the GPU, .* on the CPU"):
        gpu_step.main(arguments(tmp_path))


def test_without_a_gpu_it_leaves_with_69(
    gpu_step: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> ModuleType:
        raise MissingCapabilityError("cupy cannot be imported")

    monkeypatch.setattr(device, "cupy", missing)
    with pytest.raises(SystemExit) as left:
        gpu_step.main(arguments(tmp_path))
    assert left.value.code == MISSING_CAPABILITY
    assert "cupy cannot be imported" in capsys.readouterr().err
    assert not (tmp_path / "step.h5").exists()


def test_collectives_are_measured_beside_pageable_memory(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = benchmark("gpu_collectives")
    options = Namespace(bytes=[4096, 40000], repetitions=3, output=tmp_path / "gpu.h5", anonymous=True)

    def body(comm: Communicator) -> None:
        module.measure(Session(comm, locate(comm, None), "threads", lambda code: None), options)

    run_threads(3, body)
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [row["bytes"] for row in rows] == [4096, 40000]
    ways = {"pageable", "pinned, native", "pinned, ring", "pinned, node_shared", "device memory of the others"}
    for row in rows:
        assert set(row["median_s"]) == set(row["x_pageable"]) == ways and row["x_pageable"]["pageable"] == 1
        assert row["ranks"] == 3 and row["gpus"] == 1
    assert "nccl: not run, 3 ranks share GPU" in captured.err and "device pointers, ring: not run" in captured.err
    with h5py.File(tmp_path / "gpu.h5") as file:
        assert file["bytes_4096"].shape == (5, 3) and file.attrs["gpu"] == "double" and "hosts" not in file.attrs
        assert "share GPU" in file.attrs["refused: nccl"]


def piped(tmp_path: Path, ranks: int = 2) -> Callable[[ModuleType], None]:
    """Return what runs the benchmark of pipelines on ``ranks`` threads."""
    (tmp_path / "text.txt").write_text("the quick brown fox " * 40)
    few = [*SMALL, f"data.path={tmp_path / 'text.txt'}", "run.global_batch=2", "parallel.microbatches=2"]
    options = Namespace(set=few, steps=2, output=tmp_path / "pipeline.h5", anonymous=True)

    def start(module: ModuleType) -> None:
        def body(comm: Communicator) -> None:
            module.run(Session(comm, locate(comm, None), "threads", lambda code: None), options)

        run_threads(ranks, body)

    return start


def test_pipelines_and_tensor_ranks_are_measured_beside_one_rank(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = benchmark("gpu_pipeline")
    monkeypatch.setattr(module, "WARM_UP", 1)
    piped(tmp_path)(module)
    rows = {row["contender"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(rows) == list(module.CONTENDERS) and rows["one rank"]["x_one_rank"] == 1
    with h5py.File(tmp_path / "pipeline.h5") as file:
        assert file.attrs["gpu"] == "double" and file.attrs["gpus"] == 1 and "hosts" not in file.attrs
        for name, row in rows.items():
            times = file[name][...]  # (ranks, steps, step and phases)
            assert times.shape == (2, 2, 1 + len(module.PHASES))
            assert (times[0, :, 0] > 0).all() and (times[1, :, 0] > 0).all() == (not name.startswith("one rank"))
            assert row["step_s"] == pytest.approx(np.median(times[..., 0].max(axis=0)))
            assert (times[..., 1:].sum(axis=2) <= times[..., 0]).all()
        stored = tmp_path / "recipe.toml"
        stored.write_text(file["zb-h1"].attrs["recipe"])
        assert recipes.load_stored(stored).parallel.schedule == "zb-h1"
        stored.write_text(file["tensor, dropout"].attrs["recipe"])
        dropping = recipes.load_stored(stored)
    assert (dropping.parallel.tensor, dropping.model.dropout) == (2, 0.1)


def test_a_contender_with_another_loss_is_refused(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = benchmark("gpu_pipeline")
    monkeypatch.setattr(module, "CONTENDERS", {name: module.CONTENDERS[name] for name in ("one rank", "1f1b")})
    right = module.Contender.step

    def wrong(self: Any, comm: Communicator) -> tuple[list[float], float]:
        times, loss = right(self, comm)
        return times, loss * (1.01 if self.recipe.parallel.pipeline > 1 else 1)

    monkeypatch.setattr(module.Contender, "step", wrong)
    with pytest.raises(SystemExit, match="step 1: 1f1b has loss .*, one rank has"):
        piped(tmp_path)(module)


def test_a_pipeline_of_one_rank_is_no_comparison(gpu: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mpirun -n 2"):
        piped(tmp_path, ranks=1)(benchmark("gpu_pipeline"))


def test_a_wrong_result_of_a_collective_is_refused(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = benchmark("gpu_collectives")
    right = module.peer_memory.device_shared_allreduce

    def wrong(comm: Communicator, buffer: object) -> None:
        right(comm, buffer)
        buffer[0] += 1  # type: ignore[index]

    monkeypatch.setattr(module.peer_memory, "device_shared_allreduce", wrong)

    def body(comm: Communicator) -> None:
        module.Measurement(comm, module.ways_of(comm)[0], 4096).times(1)

    with pytest.raises(SystemExit, match="device memory of the others gave rank . a wrong result"):
        run_threads(2, body)


@pytest.mark.parametrize("name", ["gpu_collectives", "gpu_pipeline"])
def test_without_a_gpu_no_rank_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> ModuleType:
        raise MissingCapabilityError("cupy cannot be imported")

    monkeypatch.setattr(device, "cupy", missing)
    with pytest.raises(SystemExit) as left:
        benchmark(name).main([])
    assert left.value.code == MISSING_CAPABILITY
    assert "cupy cannot be imported" in capsys.readouterr().err
