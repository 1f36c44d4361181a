"""GPU studies compare, measure and write on the cupy double, and exit with 69 without a GPU."""

from argparse import Namespace

import h5py
import numpy as np
import pytest

from benchmarks import __main__ as studies
from benchmarks import harness
from benchmarks.gpu import attention, collectives, eager, energy, kernels, pipeline, sanitizer, step, strategies
from harness.marks import cases
from hpcdist.arrays.gpu import device
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import MISSING_CAPABILITY, MissingCapabilityError, UsageError
from hpcdist.training.recipe import recipe as recipes

SMALL = ["model.layers=1", "model.hidden=16", "model.heads=2", "data.context=8"]


def small_settings(folder, *keys):
    (folder / "text.txt").write_text("the quick brown fox " * 40)
    return [*SMALL, f"data.path={folder / 'text.txt'}", *keys]


def run_on_threads(module, options, ranks):
    def body(comm):
        return module.measure(options, Session(comm, locate(comm, None), "threads", lambda code: None))

    return run_threads(ranks, body)[0]


@pytest.mark.full
def test_step_study_writes_every_step_with_provenance(gpu, tmp_path):
    words = ["--set", *small_settings(tmp_path, "run.global_batch=3"), "--steps", "4", "-o", str(tmp_path / "step.h5")]
    assert harness.run(step, "gpu.step", [*words, "--anonymous"]) == 0
    with h5py.File(tmp_path / "step.h5") as file:
        assert file.attrs["gpu"] == "double" and "hosts" not in file.attrs and file.attrs["numpy_version"]
        stored = tmp_path / "recipe.toml"
        stored.write_text(file.attrs["recipe"])
        assert recipes.load_stored(stored).model.hidden == 16
        times = {name: dataset[...] for name, dataset in file.items()}
    assert {"cpu_s", "gpu_s", "gpu_host_s", "gpu_compute_s", "cpu_update_s", "graph_s", "graph_host_s"} <= times.keys()
    assert all(values.shape == (4,) for values in times.values())


def test_step_study_rejects_a_different_loss(gpu, tmp_path, monkeypatch):
    right = step.step_on

    def return_wrong_result(side, on):
        times, done = right(side, on)
        done.loss *= 1.01 if on == "graph" else 1.0
        return times, done

    monkeypatch.setattr(step, "step_on", return_wrong_result)
    with pytest.raises(SystemExit, match=r"step 1: loss .* of the side graph, .* of the side cpu"):
        harness.run(step, "gpu.step", ["--set", *small_settings(tmp_path, "run.global_batch=3"), "--steps", "1"])


def test_collectives_study_includes_pageable_memory(gpu, capsys):
    results = run_on_threads(collectives, Namespace(bytes=[4096, 40000], repetitions=3), 3)
    ways = {"pageable", "pinned, native", "pinned, ring", "pinned, node_shared", "device memory of the others"}
    assert set(results.names()) == ways and results.arrays["bytes_4096"].shape == (5, 3)
    assert list(results.arrays) == ["bytes_4096", "bytes_40000"]
    assert (results.attributes["gpu"], results.attributes["gpus"], results.attributes["ranks"]) == ("double", 1, 3)
    assert "share GPU" in results.attributes["refused: nccl"]
    assert any(line.startswith("pinned, ring") for line in collectives.lines(results))
    stderr = capsys.readouterr().err
    assert "nccl: not run, 3 ranks share GPU" in stderr and "device pointers, ring: not run" in stderr


def test_collectives_study_rejects_a_wrong_result(gpu, monkeypatch):
    right = collectives.peer_memory.device_shared_allreduce

    def return_wrong_result(comm, buffer):
        right(comm, buffer)
        buffer[0] += 1

    monkeypatch.setattr(collectives.peer_memory, "device_shared_allreduce", return_wrong_result)
    with pytest.raises(SystemExit, match="device memory of the others gave rank . a wrong result"):
        run_on_threads(collectives, Namespace(bytes=[4096], repetitions=1), 2)


def run_pipeline_study(tmp_path, ranks=2):
    """Run the pipeline study on ``ranks`` threads and return its results."""
    keys = small_settings(tmp_path, "run.global_batch=2", "parallel.microbatches=2")
    return run_on_threads(pipeline, Namespace(set=keys, steps=2), ranks)


@pytest.mark.full
def test_pipeline_study_includes_one_rank_and_tensor_ranks(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "WARM_UP", 1)
    results = run_pipeline_study(tmp_path)
    assert list(results.arrays) == list(pipeline.CONTENDERS)
    assert (results.attributes["gpu"], results.attributes["gpus"]) == ("double", 1)
    for name, times in results.arrays.items():  # (ranks, steps, step and phases)
        assert times.shape == (2, 2, 1 + len(pipeline.PHASES))
        assert (times[0, :, 0] > 0).all()
        assert times[1, :, 1:].any() == (not name.startswith("one rank"))
        assert (times[..., 1:].sum(axis=2) <= times[..., 0]).all()
    assert pipeline.lines(results)[1].split()[:2] == ["one", "rank"]
    stored = tmp_path / "recipe.toml"
    stored.write_text(results.attributes["recipe of zb-h1"])
    assert recipes.load_stored(stored).parallel.schedule == "zb-h1"
    stored.write_text(results.attributes["recipe of tensor, dropout"])
    dropping = recipes.load_stored(stored)
    assert (dropping.parallel.tensor, dropping.model.dropout) == (2, 0.1)


def test_pipeline_study_rejects_a_different_loss(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "CONTENDERS", {name: pipeline.CONTENDERS[name] for name in ("one rank", "1f1b")})
    right = pipeline.Contender.step

    def return_wrong_result(self, comm):
        times, loss = right(self, comm)
        return times, loss * (1.01 if self.recipe.parallel.pipeline > 1 else 1)

    monkeypatch.setattr(pipeline.Contender, "step", return_wrong_result)
    with pytest.raises(SystemExit, match="step 1: 1f1b has loss .*, one rank has"):
        run_pipeline_study(tmp_path)


def test_pipeline_study_rejects_one_rank(gpu, tmp_path):
    with pytest.raises(UsageError, match="choose --ranks 2"):
        run_pipeline_study(tmp_path, ranks=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.full
def test_kernel_study_counts_bytes_of_every_kernel(gpu, dtype, tmp_path):
    file = tmp_path / "kernels.h5"
    words = ["--dtype", dtype, "--tokens", "3", "--hidden", "64", "--rounds", "2", "--copied", "4096", "-o", str(file)]
    assert harness.run(kernels, "gpu.kernels", [*words, "--anonymous"]) == 0
    itemsize = 2 if dtype == "bfloat16" else 4
    with h5py.File(file) as written:
        names = written.attrs["kernels"].split(";")
        assert written["norm_backward_s"].shape == (2,) and written.attrs["dtype"] == dtype
        assert written.attrs["bytes"][names.index("gelu")] == 8 * 3 * 64 * itemsize
        assert len(written) == len(names)


@pytest.mark.full
def test_16_bit_step_has_the_losses_of_pytorch(gpu):
    pytest.importorskip("torch")
    shape = eager.StepShape(layers=1, hidden=32, heads=2, context=16, samples=2, vocabulary=17)
    results = eager.timed(shape, "bfloat16", steps=4, where="cpu")
    assert results.arrays["ours_s"].shape == (4,)
    np.testing.assert_allclose(results.arrays["ours_loss"], results.arrays["eager_loss"], rtol=2e-2)
    assert len(eager.lines(results)) == 4 and "MFU" in eager.lines(results)[1]


def test_different_or_unsupported_strategies_are_reported(gpu, monkeypatch, capsys):
    monkeypatch.setattr(strategies, "MODEL", (*SMALL, "run.global_batch=4"))
    monkeypatch.setitem(strategies.LAYOUTS, "one expert", ("model.experts=1",))
    right = strategies.losses

    def return_wrong_result(session, keys, steps):
        values = right(session, keys, steps)
        return (
            [value * 1.001 for value in values]
            if "run.device=gpu" in keys and "parallel.strategy=zero1" in keys
            else values
        )

    monkeypatch.setattr(strategies, "losses", return_wrong_result)
    results = run_on_threads(strategies, Namespace(only=["ring", "zero1", "experts", "one expert"], steps=2, set=[]), 2)
    assert results.arrays["loss"].shape == (3, 2, 2) and list(strategies.ratios(results)) == [
        "ring",
        "zero1",
        "experts",
    ]
    assert strategies.failures(results) == ["zero1 is 1.0e-03 apart, more than 0.0001"]
    assert "a router must choose between experts" in results.attributes["refused: one expert"]
    assert "one expert: refused, " in capsys.readouterr().out


def test_attention_study_rejects_a_difference_from_pytorch(gpu, monkeypatch):
    pytest.importorskip("torch")
    chosen = Namespace(context=[16], tokens=32, heads=2, head_size=16, rounds=2, dtype="float16", where="cpu")
    results = run_on_threads(attention, chosen, 1)
    assert results.arrays["time_s"].shape == (1, 2, 2, 2) and len(attention.lines(results)) == 2
    right = attention.theirs

    def return_wrong_result(qkv, dy, size, where):
        forward, backward = right(qkv, dy, size, where)
        return forward, lambda: backward() * 1.1

    monkeypatch.setattr(attention, "theirs", return_wrong_result)
    with pytest.raises(SystemExit, match="context 16: the gradient differs by .* of its norm from PyTorch's"):
        run_on_threads(attention, chosen, 1)


def test_energy_study_fails_if_power_and_counter_disagree():
    measured = np.array([[10.0, 2e6, 1.92e6], [10.0, 1e6, 5e5], [10.0, 8e5, 8e5]])
    sampler = np.array([[100.0, 0.0], [99.0, 0.001]])
    about = {"loads": "products,bursts,idle", "power_field": "instant", "model": "one"}
    arrays = {"energy": measured, "sampler": sampler, "interval_s": np.array([0.0, 0.1])}
    result = energy.ratios(harness.Results(arrays, {}, about))
    assert result["products"] == [0.96] and result["sampled every 0.1 s"][0] == pytest.approx(1.0101, rel=1e-4)
    assert energy.failures(harness.Results(arrays, {}, about)) == []
    measured[0, 2] = 1.8e6
    assert energy.failures(harness.Results(arrays, {}, about)) == ["power and counter are 10.0% apart under products"]
    assert any("180.0" in line for line in energy.lines(harness.Results(arrays, {}, about)))


@pytest.mark.parametrize("name", [name for name in studies.STUDIES if name.startswith("gpu.")])
def test_studies_without_a_gpu_start_no_rank(name, monkeypatch, capsys):
    def raise_missing_cupy():
        raise MissingCapabilityError("cupy cannot be imported")

    monkeypatch.setattr(device, "cupy", raise_missing_cupy)
    assert studies.main([name]) == MISSING_CAPABILITY
    assert f"{name}: cupy cannot be imported" in capsys.readouterr().err


@cases(
    "printed, code, count, first",
    ("ERROR SUMMARY: 0 errors", 0, 0, ""),
    ("Invalid __global__ read\\n========= ERROR SUMMARY: 3 errors", 1, 3, "Invalid __global__ read"),
    ("RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", 0, 2, "RACECHECK SUMMARY: 2 hazards"),
    ("ERROR SUMMARY: 0 errors", 7, -1, "exit code 7: the program"),
    ("", 0, -1, "exit code 0: the program"),
)
def test_sanitizer_errors_are_counted(gpu, tmp_path, monkeypatch, capfd, printed, code, count, first):
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f"#!/bin/sh\nprintf '========= COMPUTE-SANITIZER\\n========= {printed}\\n'\necho the program >&2\nexit {code}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert harness.run(sanitizer, "gpu.sanitizer", ["--tools", "memcheck", "--programs", "kernels"]) == (count != 0)
    output = capfd.readouterr()
    assert first in output.out and (
        f"missed: kernels, memcheck: {'no answer' if count < 0 else count}" in output.err
    ) == bool(count)


def test_missing_sanitizer_error_names_the_cuda_toolkit(gpu, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(MissingCapabilityError, match="comes with the CUDA toolkit"):
        sanitizer.sanitizer()
