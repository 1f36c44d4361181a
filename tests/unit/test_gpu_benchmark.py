"""The benchmarks of GPUs: they compare, measure and write on the double, and leave with 69 without a GPU."""

import importlib.util
import json
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import h5py
import numpy as np
import pytest

from hpcdist.arrays import device
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
from hpcdist.comm.threads import run_threads
from hpcdist.errors import MISSING_CAPABILITY, MissingCapabilityError
from hpcdist.training import recipe as recipes

SMALL = ["model.layers=1", "model.hidden=16", "model.heads=2", "data.context=8", "run.global_batch=3"]


@pytest.fixture
def gpu_step() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "gpu_step.py"
    spec = importlib.util.spec_from_file_location("gpu_step", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def collectives_benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "gpu_collectives.py"
    spec = importlib.util.spec_from_file_location("gpu_collectives", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_collectives_are_measured_beside_pageable_memory(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = collectives_benchmark()
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


def test_a_wrong_result_of_a_collective_is_refused(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = collectives_benchmark()
    right = module.device_shared.device_shared_allreduce

    def wrong(comm: Communicator, buffer: object) -> None:
        right(comm, buffer)
        buffer[0] += 1  # type: ignore[index]

    monkeypatch.setattr(module.device_shared, "device_shared_allreduce", wrong)

    def body(comm: Communicator) -> None:
        module.Measurement(comm, module.ways_of(comm)[0], 4096).times(1)

    with pytest.raises(SystemExit, match="device memory of the others gave rank . a wrong result"):
        run_threads(2, body)


def test_collectives_without_a_gpu_leave_with_69(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> ModuleType:
        raise MissingCapabilityError("cupy cannot be imported")

    monkeypatch.setattr(device, "cupy", missing)
    with pytest.raises(SystemExit) as left:
        collectives_benchmark().main([])
    assert left.value.code == MISSING_CAPABILITY
    assert "cupy cannot be imported" in capsys.readouterr().err
