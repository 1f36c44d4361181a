"""The study of compressed gradients: the order of trainings, resume, the speed bound, and the tables."""

import math
import os

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.compression import plan, ranks, report, results, study
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import MISSING_CAPABILITY, UsageError

RATES = (1e-3, 2e-3)


def make_study(*names, seeds=2):
    return plan.Study(20, RATES, seeds, names)


def ended_training(loss, sent=100.0):
    return results.Ended(loss, sent, sent / 20, 1.0, np.array([[10.0, 2.0, 2.1, sent / 2], [20.0, loss, 1.9, sent]]))


def test_all_contenders_use_the_best_rate_of_dense_gradients():
    one = make_study("dense", "int8", "powersgd 4")
    training = plan.Training
    assert one.next({}, []) == [training("dense", True, rate) for rate in RATES]
    losses = {training("dense", True, 1e-3): math.nan, training("dense", True, 2e-3): 1.9}
    assert one.next(losses, []) == [training(name, True, 2e-3) for name in ("int8", "powersgd 4")]
    losses |= {training("int8", True, 2e-3): 1.9, training("powersgd 4", True, 2e-3): 2.0}
    assert one.next(losses, []) == [training("powersgd 4", True, 1e-3)]
    losses[training("powersgd 4", True, 1e-3)] = 1.95
    assert one.next(losses, []) == [training("dense", True, 2e-3, 1), training("int8", True, 2e-3, 1)]
    losses |= {training("dense", True, 2e-3, 1): 1.9, training("int8", True, 2e-3, 1): 1.9}
    assert one.next(losses, [training("int8", False, 2e-3)]) == [training("powersgd 4", False, 2e-3)]
    losses[training("powersgd 4", False, 2e-3)] = 2.5
    assert one.next(losses, [training("int8", False, 2e-3)]) == []


def test_sgd_methods_are_compared_with_dense_sgd():
    one = make_study("dense", "dgc 1 %", "powersgd 4, sgd")
    first = one.next({}, [])
    assert [training.contender for training in first] == ["dense", "dense", "dense, sgd", "dense, sgd"]
    assert first[2].learning_rate == pytest.approx(RATES[0] * 25)
    keys = one.settings(first[2])
    assert keys["optimizer.name"] == "sgd" and "communication.compression" not in keys


def test_unsupported_training_is_refused_with_a_reason():
    one = make_study("dense", "qsgd, 4 bits", "sign")
    assert "compression.bits" in one.refusal(plan.Training("qsgd, 4 bits", True, 1e-3))
    for good in (("qsgd, 4 bits", False), ("sign", True), ("sign", False)):
        assert one.refusal(plan.Training(*good, 1e-3)) == ""


def test_warm_up_is_a_share_of_the_steps():
    assert plan.Study(500, RATES, 1).keys("powersgd 4, 10 % dense")["compression.warmup_steps"] == 50
    assert "compression.warmup_steps" not in make_study().keys("powersgd 4")


def test_stopped_study_resumes_from_its_file(tmp_path):
    path, training = tmp_path / "study.h5", plan.Training
    records = results.Records(path, {"made": "here"}, {"steps": 20})
    given = {
        training("dense", True, 1e-3): ended_training(1.5),
        training("int8", False, 1e-3, 2): ended_training(math.nan),
    }
    for one, result in given.items():
        records.add(one, result)
    again = results.Records(path, {"made": "elsewhere"}, {"steps": 20})
    assert list(again.known) == list(given)
    np.testing.assert_allclose(again.known[training("dense", True, 1e-3)].points, ended_training(1.5).points, rtol=1e-6)
    assert math.isnan(again.known[training("int8", False, 1e-3, 2)].loss)
    with pytest.raises(UsageError, match="steps = 20, these would have 30"):
        results.Records(path, {}, {"steps": 30})


def test_file_keeps_every_timed_step(tmp_path):
    records = results.Records(tmp_path / "study.h5", {}, {})
    assert not records.times().figures
    figures = np.arange(2 * 2 * 3 * 4 * 5, dtype=float).reshape(
        2, 2, 3, 4, 5
    )  # ranks, contenders, rounds, steps, phases
    for _ in range(2):  # the second call replaces the first
        records.put_times(["dense", "int8"], figures, [1e6, 2e6, 3e6])
    times = records.times()
    assert times.bytes_per_s.tolist() == [1e6, 2e6, 3e6]
    for place, name in enumerate(("dense", "int8")):
        np.testing.assert_array_equal(times.figures[name], figures[:, place].transpose(1, 2, 0, 3))


def test_bound_is_slowest_rank_plus_link_time():
    step = [[0.5, 0.1, 0.02, 0.03, 2e6], [0.4, 0.2, 0.01, 0.04, 1e6]]  # of two ranks
    result = report.pace(np.array([[step, step]]), 1e7)
    assert (result.compute_s, result.update_s, result.codec_s) == (0.2, 0.01, 0.04)
    assert (result.wire_s, result.step_s) == (pytest.approx(0.2), 0.5)
    assert result.bound_s == pytest.approx(0.45)
    assert result.of_bound == pytest.approx(0.9)


def test_tables_compare_with_dense_training_of_the_same_optimizer():
    training = plan.Training
    trainings = {
        training("dense", True, 1e-3): ended_training(2.0, 1e9),
        training("int8", True, 1e-3): ended_training(2.01, 2.5e8),
        training("int8", False, 1e-3): ended_training(2.2, 2.5e8),
        training("dense, sgd", True, 0.03333): ended_training(3.0, 1e9),
        training("dgc 1 %", True, 0.03333): ended_training(3.3, 1e7),
        training("sign", True, 1e-3): ended_training(math.nan),
    }
    figures = {name: np.array([[[[step_s, 0.1, 0, 0, 1e6]] * 2]]) for name, step_s in (("dense", 0.5), ("int8", 0.25))}
    times = results.Times(figures, np.array([1e7]))
    names = ("dense", "int8", "sign", "dgc 1 %", "dense, sgd")
    refused = {training("topk", True, 1e-3): "because"}
    output = report.text(report.Found(make_study(*names, seeds=1), trainings, times, refused))
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in reversed(output.splitlines()) if "|" in line}
    rows = [line for line in output.splitlines() if line.startswith(("| int8", "| dgc", "| sign"))]
    assert rows[0] == "| int8 | 0.001 | 2.0100 | +0.50 % | 2.2000 +10.00 % | 250.0 | 4.00 | 4.00 |"
    assert rows[1].startswith("| sign | 0.001 | diverged |")
    assert rows[2] == "| dgc 1 % | 0.03333 | 3.3000 | +10.00 % |  | 10.0 | 100.00 | 100.00 |"
    assert "| int8 | 4.00 | 2.00 | 0.800 | 100.0 | 0.0 | 100.0 | 1,000.0 |" in output
    assert lines["dense"].startswith("| dense | 0.001 | 2.0000 |  |")
    assert "Refused: topk: because" in output


def test_warm_up_steps_take_the_time_of_dense_steps():
    assert report.clock(ended_training(1.0), 12, 1.0, 0.1).tolist() == pytest.approx([10.0, 12.8])


def test_nested_calls_are_timed_once(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(harness.time, "perf_counter", lambda: float(next(now)))
    watch = harness.Stopwatch()
    inner = watch.around(lambda: None)
    watch.around(lambda: (inner(), inner()))()
    assert watch.taken() == 1.0
    assert watch.taken() == 0.0


def test_study_without_root_reports_missing_capability(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert harness.run(study, "compression", ["-o", str(tmp_path / "study.h5")]) == MISSING_CAPABILITY
    assert any(reason in capsys.readouterr().err for reason in ("needs root", "not found"))
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_ranks_return_losses_and_sent_bytes(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(np.random.default_rng(0).integers(97, 105, 20_000).astype(np.uint8).tobytes())
    small = {"model.layers": 1, "model.hidden": 64, "data.context": 16, "data.path": str(text), "run.global_batch": 4}
    more = (*small.items(), ("run.validation_samples", 4), ("optimizer.warmup_steps", 2))
    one = plan.Study(6, RATES, 1, more=more)

    def run(comm):
        session = Session(comm, locate(comm, None), "none", os._exit)
        trainings = [plan.Training(name, True, 1e-3) for name in ("dense", "int8", "powersgd 4, 10 % dense")]
        return [ranks.train(session, one.settings(training), 3) for training in trainings]

    dense, int8, low_rank = (results.ended(result) for result in run_threads(2, run)[0])
    assert dense.points[:, 0].tolist() == [2, 4, 6]
    assert dense.loss == dense.points[-1, 1] > 0
    parameters = dense.compressed_bytes / 4
    assert int8.sent_bytes == pytest.approx(6 * parameters * (1 + 4 / 256), rel=0.1)
    assert int8.loss == pytest.approx(dense.loss, rel=1e-2)
    # One step of six is dense.
    assert low_rank.sent_bytes == pytest.approx(dense.compressed_bytes + 5 * low_rank.compressed_bytes)
    assert low_rank.compressed_bytes < 0.3 * dense.compressed_bytes
