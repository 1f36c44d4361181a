"""The benchmark of training steps: arithmetic, measurements, the results file and the report."""

import json
import os
import threading
from collections import Counter
from dataclasses import asdict, replace

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from hpcdist.bench.step import report, run
from hpcdist.bench.step import results as step_results
from hpcdist.bench.step.request import (
    CONTENDERS,
    EAGER,
    OURS,
    PHASES,
    RECOMPUTING,
    WRAPPED_JAX,
    WRAPPED_TORCH,
    StepRequest,
    StepShape,
)
from hpcdist.bench.step.results import StepCase, StepResults
from hpcdist.cli.bench import step
from hpcdist.cli.bench.group import command
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import StorageError, UsageError
from hpcdist.models.counts import counts

TINY = StepShape(layers=2, hidden=16, heads=2, context=12, samples=3, vocabulary=30)
WANTED = StepRequest(TINY, (OURS, RECOMPUTING), ranks=1, steps=3, warmup=1, profiled=2, seed=5)


def case(name, step_s, loss, **more):
    times = np.array(step_s)
    phases = np.full((*times.shape, len(PHASES)), np.nan)
    phases[:, :, 0], phases[:, :, 1] = times / 4, times / 2
    given = {"operation_s": {}, "activation_bytes": None, "activation_closed_bytes": None} | more
    return StepCase(name=name, step_s=times, cpu_s=times / 2, phase_s=phases, loss=np.array(loss), **given)


def results(*cases):
    about = {"ranks": 2, "threads": 1, "parameters": 1000, "forward_flops": 100, "backward_flops": 200, "blas": "mine"}
    rates = {"numpy": np.array([[50.0, 40.0], [45.0, 80.0]]), "torch": np.array([[30.0, 30.0], [30.0, 42.0]])}
    return StepResults(about, TINY, rates, cases, {"torch.compile": "no compiler"})


def test_figures_use_the_slowest_rank():
    ours = case(
        OURS, [[2.0, 1.0], [1.0, 3.0], [2.0, 2.0]], [3.0, 2.0], activation_bytes=110, activation_closed_bytes=100
    )
    eager = case(EAGER, [[4.0, 1.0], [1.0, 3.0], [1.0, 1.0]], [3.0, 2.0002])
    first, second = report.rows(results(ours, eager))
    assert (first.step_s, first.cpu_s) == (2.0, 2.0)
    samples = 2 * TINY.samples
    assert first.tokens_per_s == samples * TINY.context / 2.0
    # The speed of a turn's product is the slowest rank's: 45 for each rank in the second turn.
    assert report.peak_flops_per_s(results(ours)) == {"numpy": 90.0, "torch": 60.0}
    assert first.flops_per_s == samples * 300 / 2.0 and first.mfu == first.flops_per_s / 90.0
    assert first.x_eager == np.median([4 / 2, 3 / 3, 1 / 2]) and second.x_eager == 1.0
    assert first.x_eager_cpu == np.median([5 / 3, 4 / 4, 2 / 4])
    assert first.phases_s["forward"] == 0.5 and first.phases_s["communication"] is None
    assert second.loss_difference == pytest.approx(1e-4) and first.loss_difference == 0.0
    lines = report.text(results(ours, eager)).splitlines()
    assert lines[-1] == "left out: torch.compile: no compiler"
    assert any(line.startswith(OURS) and line.endswith("1.100 of the closed form") for line in lines)
    assert not any("more than" in line for line in lines)
    far = replace(eager, loss=np.array([3.0, 2.001]))
    assert "more than 0.0001" in report.text(results(ours, far))


def test_unexplained_time_is_reported_as_other():
    taken = {("matmul", "forward"): [1.0, 3.0], ("matmul", "backward"): [2.0, 2.0], ("all", "step"): [6.0, 8.0]}
    one = case(OURS, [[1.0]], [1.0], operation_s={key: np.array(value) for key, value in taken.items()})
    assert report.operations(one) == {("matmul", "forward"): 2.0, ("matmul", "backward"): 2.0, ("other", "step"): 3.0}
    document = json.loads(json.dumps(report.jsonable(results(one))))
    assert document["operations_s"][OURS]["other step"] == 3.0
    assert document["rows"][0]["x_eager"] is None and document["rows"][0]["phases_s"]["update"] is None


def test_batches_are_equal_on_all_ranks_and_learnable():
    changed = replace(WANTED, ranks=2)
    first, again = (list(step_results.batches(changed, 3)) for _ in range(2))
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
    assert first[0].shape == (6, 13) and first[0].dtype == np.uint8 and first[0].max() < 30
    assert not np.array_equal(first[0], first[1])
    followers = Counter(
        (int(a), int(b)) for batch in first for row in batch for a, b in zip(row, row[1:], strict=False)
    )
    assert max(Counter(a for a, _ in followers).values()) <= step_results.CHOICES
    wide = replace(WANTED, shape=replace(TINY, vocabulary=70_000))
    assert next(step_results.batches(wide, 1)).dtype == np.uint32


@pytest.fixture(scope="module")
def measurements():
    """Results of both built-in contenders on two ranks in one process. The times have no meaning."""
    messages = []

    outcomes = run_threads(
        2, lambda comm: run.run(comm, replace(WANTED, ranks=2), {"git_commit": "abc"}, messages.append)
    )
    assert outcomes[1] is None and outcomes[0] is not None and len(messages) == 1
    return outcomes[0]


@pytest.mark.full
def test_phases_and_operations_are_timed(measurements):
    assert [one.name for one in measurements.cases] == [OURS, RECOMPUTING]
    assert measurements.matmul_flops_per_s["numpy"].shape == (3, 2) and measurements.left_out == {}
    for one in measurements.cases:
        assert one.step_s.shape == one.cpu_s.shape == (3, 2) and one.phase_s.shape == (3, 2, len(PHASES))
        assert one.loss.shape == (4,)
        assert (one.phase_s > 0).all() and (one.phase_s.sum(axis=2) <= one.step_s).all()
        for kind in ("matmul", "attention", "norm", "activation", "cross_entropy", "embedding"):
            for way in ("forward", "backward"):
                assert (one.operation_s[kind, way] > 0).all(), (kind, way)
        assert {("update", "step"), ("clipping", "step"), ("all", "step")} <= one.operation_s.keys()
        assert report.operations(one)["other", "step"] < np.median(one.operation_s["all", "step"])
    assert measurements.provenance["ranks"] == 2 and measurements.provenance["git_commit"] == "abc"


def test_recomputation_changes_only_memory(measurements):
    ours, again = measurements.cases
    assert np.array_equal(ours.loss, again.loss)
    assert again.activation_bytes is not None and ours.activation_bytes is not None
    assert again.activation_bytes < ours.activation_bytes
    numbers = counts(run.model_config(TINY), context=TINY.context)
    assert ours.activation_closed_bytes == numbers.activation_bytes(TINY.samples)
    assert again.activation_closed_bytes == numbers.activation_bytes(TINY.samples, recompute=True)


def test_results_file_layout(measurements, tmp_path):
    both = replace(measurements, cases=(*measurements.cases, case(EAGER, [[1.0, 2.0]] * 3, [3.0] * 4)))
    step_results.write(tmp_path / "s.h5", both)
    with h5py.File(tmp_path / "s.h5") as file:
        about = asdict(TINY) | {"git_commit": "abc", "ranks": 2, "schema": "hpcdist.step"}
        assert {name: file.attrs[name] for name in about} == about
        assert file["phases"].asstr()[...].tolist() == list(PHASES)
        np.testing.assert_array_equal(file["matmul_flops_per_s/numpy"], both.matmul_flops_per_s["numpy"])
        for number, one in enumerate(both.cases):
            group = file[f"cases/{number}"]
            assert group.attrs["name"] == one.name
            for name in ("step_s", "cpu_s", "phase_s", "loss"):
                np.testing.assert_array_equal(group[name], getattr(one, name))
        ours, eager = both.cases[0], file["cases/2"]
        kinds = [tuple(key.split(" | ")) for key in file["cases/0/operations"].asstr()[...]]
        np.testing.assert_array_equal(file["cases/0/operation_s"], [ours.operation_s[key] for key in kinds])
        assert len(kinds) == len(ours.operation_s) and "operations" not in eager
        assert file["cases/0"].attrs["activation_bytes"] == ours.activation_bytes
        assert np.isnan(eager.attrs["activation_bytes"])


def test_plot_is_written(measurements, tmp_path):
    pytest.importorskip("matplotlib")
    from hpcdist.bench.step.report import plot

    plot(measurements, tmp_path / "a.png")
    plot(replace(measurements, cases=measurements.cases[:1]), tmp_path / "b.svg")
    assert (tmp_path / "a.png").stat().st_size > 5000 and (tmp_path / "b.svg").stat().st_size > 5000


@pytest.mark.full
def test_pytorch_and_jax_have_the_same_losses(monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    monkeypatch.setenv("XLA_FLAGS", "")
    changed = replace(WANTED, names=(OURS, WRAPPED_TORCH, WRAPPED_JAX, EAGER), steps=11, warmup=4, profiled=0)
    result = run.run(solo(), changed, {}, lambda line: None)
    assert result is not None and result.left_out == {}
    assert [one.name for one in result.cases] == [OURS, WRAPPED_TORCH, WRAPPED_JAX, EAGER]
    assert max(row.loss_difference for row in report.rows(result)) < 1e-5
    ours, wrapped, _, eager = result.cases
    assert ours.loss[-1] < 0.99 * ours.loss[0], "steps that change nothing would agree too"
    assert wrapped.activation_bytes is None and wrapped.operation_s == {}
    assert np.isnan(eager.phase_s[:, :, PHASES.index("communication")]).all()
    assert (np.nansum(eager.phase_s, axis=2) <= eager.step_s * (1 + 1e-9)).all()
    assert set(result.matmul_flops_per_s) == {"numpy", "torch"}


def test_missing_framework_is_left_out(monkeypatch):
    from hpcdist.bench.step import contenders
    from hpcdist.errors import MissingCapabilityError

    def raise_missing_torch():
        raise MissingCapabilityError("PyTorch is not installed")

    monkeypatch.setattr(contenders, "load_torch", raise_missing_torch)
    changed = replace(WANTED, names=(OURS, EAGER), steps=1, profiled=0)
    result = run.run(solo(), changed, {}, lambda line: None)
    assert result is not None and result.left_out == {EAGER: "PyTorch is not installed"}
    assert report.rows(result)[0].x_eager is None
    with pytest.raises(UsageError, match="can run here: PyTorch eager: PyTorch is not installed"):
        run.run(solo(), replace(changed, names=(EAGER,)), {}, lambda line: None)


def test_no_rank_waits_for_a_rank_without_pytorch(monkeypatch):
    from hpcdist.bench.step import contenders
    from hpcdist.errors import MissingCapabilityError

    place, began = threading.local(), []

    def load_torch_except_on_rank_1():
        if place.rank == 1:
            raise MissingCapabilityError("PyTorch is not installed")

    def record_begin(comm, folder, threads):
        began.append(comm.rank)  # the other ranks would wait here

    def body(comm):
        place.rank = comm.rank
        changed = replace(WANTED, names=(OURS, EAGER), ranks=2, steps=1, profiled=0)
        return run.run(comm, changed, {}, lambda line: None)

    monkeypatch.setattr(contenders, "load_torch", load_torch_except_on_rank_1)
    monkeypatch.setattr(contenders, "begin_torch", record_begin)
    result = run_threads(2, body)[0]
    assert result is not None and result.left_out == {EAGER: "PyTorch is not installed"}
    assert began == []


def test_invalid_options_are_rejected(monkeypatch):
    def invoke_step(*arguments):
        return CliRunner().invoke(command, ["step", *arguments])

    assert len(invoke_step("--list").output.splitlines()) == len(CONTENDERS)
    assert "choose from 'hpcdist'" in str(invoke_step("--only", "tensorflow").exception)
    assert "not a multiple" in str(invoke_step("--heads", "3").exception)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS=1" in str(invoke_step("-n", "2", "--threads", "2").exception)
    for option, name in (("-o", "x.h5"), ("--plot", "x.png")):
        assert isinstance(invoke_step("-n", "2", option, f"/proc/no/{name}").exception, StorageError)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert "started 2 ranks" in str(invoke_step("-n", "3").exception)


def test_command_restarts_itself_with_the_requested_threads(monkeypatch):
    started = []

    def run(line, env, check):
        started.append((line, env))
        return type("Done", (), {"returncode": 7})

    monkeypatch.setattr(step.subprocess, "run", run)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = ["--threads", "2", "--steps", "3", "--profiled", "0"]
    result = CliRunner().invoke(command, ["step", *options], standalone_mode=False)
    assert result.return_value == 7
    ((line, env),) = started
    assert env["OMP_NUM_THREADS"] == env["OPENBLAS_NUM_THREADS"] == "2" and env["PATH"] == os.environ["PATH"]
    assert all(line[line.index(name) + 1] == value for name, value in zip(options[::2], options[1::2], strict=True))
