"""The benchmarks of kernels and of a 16-bit step measure and write on the double, and leave with 69 without a GPU."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import h5py
import numpy as np
import pytest

from hpcdist.arrays.gpu import device
from hpcdist.errors import MISSING_CAPABILITY, MissingCapabilityError


def benchmark(name: str) -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_kernel_is_set_against_its_bytes(
    gpu: ModuleType, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, file = benchmark("gpu_kernels"), tmp_path / "kernels.h5"
    sizes = ["--dtype", dtype, "--tokens", "3", "--hidden", "64", "--rounds", "2", "--copied", "4096"]
    module.main([*sizes, "-o", str(file), "--anonymous"])
    copy, *rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    itemsize = 2 if dtype == "bfloat16" else 4
    found = {row["kernel"]: row for row in rows}
    assert copy["copy_gb_per_s"] > 0 and found["gelu"]["bytes"] == 8 * 3 * 64 * itemsize
    for row in rows:
        assert row["ratio"] == pytest.approx(row["us"] / row["floor_us"], rel=0.05, abs=1)
    with h5py.File(file) as written:
        assert written["norm_backward_s"].shape == (2,) and written.attrs["dtype"] == dtype
        assert len(written) == len(rows) + 1


def test_a_16_bit_step_has_the_losses_of_pytorch(gpu: ModuleType) -> None:
    pytest.importorskip("torch")
    module = benchmark("gpu_eager")
    shape = module.StepShape(layers=1, hidden=32, heads=2, context=16, samples=2, vocabulary=17)
    found = module.measure(shape, "bfloat16", steps=4, where="cpu")
    assert found["ours_s"].shape == (4,)
    np.testing.assert_allclose(found["ours_loss"], found["torch_loss"], rtol=2e-2)
    said = module.report(shape, 1000, found)
    assert said["ratio"] > 0 and said["ours_tflop_per_s"] >= 0


@pytest.mark.parametrize("name", ["gpu_kernels", "gpu_eager"])
def test_without_a_gpu_they_leave_with_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> ModuleType:
        raise MissingCapabilityError("no GPU is usable")

    monkeypatch.setattr(device, "cupy", missing)
    with pytest.raises(SystemExit) as left:
        benchmark(name).main([])
    assert left.value.code == MISSING_CAPABILITY and f"{name}: no GPU is usable" in capsys.readouterr().err
