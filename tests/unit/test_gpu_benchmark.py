"""benchmarks/gpu_step.py: it compares, measures and writes on the double, and leaves with 69 without a GPU."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import h5py
import numpy as np
import pytest

from hpcdist.arrays import device
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
