"""Calibration: products, moves, models, messages and collectives, and the file with all measurements."""

import os
from dataclasses import replace

import h5py
import numpy as np
import pytest

from hpcdist.bench import calibration as calibrate_run
from hpcdist.bench import device_speed, link_speed
from hpcdist.bench.calibration import LoadSample
from hpcdist.bench.collectives import contenders
from hpcdist.bench.device_speed import OPERATIONS, BusySeconds, CalibrationRequest, default_models, sizes
from hpcdist.cli.plan import calibrate
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError, StorageError, UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.planner.calibrate import cluster_fit
from hpcdist.planner.cluster import toml_file
from hpcdist.reporting.machine import load_average

TINY = ModelConfig(layers=1, hidden=16, heads=2, vocabulary=17)
APART = calibrate_run.APART
FEW = ((8, 8, 8), (16, 16, 16), (16, 32, 64), (64, 64, 64))


@pytest.fixture(autouse=True)
def small_workload(monkeypatch):
    """Measure few and small products and moves, on a machine that counts as idle."""
    monkeypatch.setattr(device_speed, "shapes", lambda on: FEW)
    monkeypatch.setattr(device_speed, "MOVED", {"cpu": (1 << 10, 1 << 14), "gpu": (1 << 10, 1 << 14)})
    monkeypatch.setattr(device_speed, "STEPS", 2)
    monkeypatch.setattr(contenders, "last_level_cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(calibrate_run, "APART", 1e9)


def calibration_request(**more):
    models = tuple((TINY, context, (1, 2)) for context in (4, 8))
    values = {"models": models, "least_bytes": 1 << 10, "most_bytes": 1 << 16, "seconds": 0.2, **more}
    return CalibrationRequest(**values)


def run(comm, **more):
    return calibrate_run.run(comm, calibration_request(**more), "a library", "a core", lambda text: None)


def test_one_rank_measures_its_device_but_no_links():
    result = run(solo(), dtypes=("float32", "float64"))
    assert set(result.products) == {"float32", "float64"}
    assert [one[:3] for one in result.products["float64"]] == list(FEW)
    assert {one.operation for one in result.moves} == {"copy", "add"}
    assert all(one.seconds.one > 0 and one.seconds.one == one.seconds.all for one in result.moves)
    assert len(result.models) == 4
    assert result.links == ()
    assert result.collectives == ()
    assert (result.machine.hosts, result.machine.ranks_per_host) == (1, 1)


def test_model_step_time_is_split_by_operation_kind():
    point = device_speed.model(solo(), TINY, 8, 2, "cpu")
    kinds = {one.kind: one for one in point.kinds}
    assert {"matmul", "attention", "norm", "activation", "embedding", "cross_entropy"} <= set(kinds)
    for name in ("matmul", "attention", "norm", "activation"):
        assert kinds[name].forward.all > 0
        assert kinds[name].backward.all > 0
    assert point.update.all > 0
    assert point.norm.all > 0
    assert point.step.all > point.update.all
    step = calibrate.planner_step(point)
    assert step.products_s == (kinds["matmul"].forward.all, kinds["matmul"].backward.all)
    assert step.attention_s == (kinds["attention"].forward.all, kinds["attention"].backward.all)
    rest = sum(one.forward.all for name, one in kinds.items() if name not in ("matmul", "attention"))
    assert step.elementwise_s[0] == pytest.approx(rest)
    assert step.description.tokens == 8


def test_gpu_measurement_synchronises_every_round(gpu):
    products = device_speed.products(solo(), "float32", "gpu", 0.05)
    moves = device_speed.moves(solo(), "gpu", 0.05)
    assert len(products) == len(FEW)
    assert {one.operation for one in moves} == {"copy", "add"}
    waits = [event for event in gpu.LOG.of() if event.kind == "synchronise"]
    assert len(waits) >= device_speed.LEAST_ROUNDS * (len(products) + len(moves))


def test_products_are_measured_on_one_rank_and_on_all():
    first, second = run_threads(
        2, lambda comm: [one.seconds for one in device_speed.products(comm, "float32", "cpu", 0.1)]
    )
    assert first == second
    assert all(one.one > 0 and one.all > 0 for one in first)


@pytest.mark.full
def test_two_ranks_measure_messages_and_collectives_of_each_size():
    first, second = run_threads(2, lambda comm: run(comm, models=()))
    assert first.links == second.links
    assert first.collectives == second.collectives
    assert [one.nbytes for one in [one for one in first.links if not one.border]] == list(sizes(1 << 10, 1 << 16))
    assert {one.level for one in first.links} == {link_speed.INSIDE}
    assert all(one.seconds.one > 0 and one.seconds.all > 0 for one in first.links)
    for operation in OPERATIONS:
        for algorithm in ("auto", "ring"):
            local_values = [
                one for one in first.collectives if (one.operation, one.algorithm) == (operation, algorithm)
            ]
            assert [one.nbytes for one in local_values if not one.border] == list(sizes(1 << 10, 1 << 16))
            assert all(one.seconds > 0 and one.ranks == 2 for one in local_values)


def time_with_jump(nbytes):
    """Return the time of a message on a made-up machine that is slower beyond 100,000 bytes."""
    return 1e-6 + 1e-11 * nbytes + (5e-6 if nbytes > 100_000 else 0.0)


def test_message_border_points_are_marked_and_take_the_lower_time(monkeypatch):
    level = link_speed._Level.__new__(link_speed._Level)
    level._name = "node"
    expected, rounds = sizes(1 << 14, 1 << 19), []

    def time_at(nbytes):
        rounds.append(list(nbytes))
        slowdown = 3.0 if len(rounds) == 1 else 1.0  # only the first measurement of one size
        return {
            n: BusySeconds(time_with_jump(n) / 2, time_with_jump(n) * (slowdown if n == expected[3] else 1.0))
            for n in nbytes
        }

    monkeypatch.setattr(level, "_at", time_at, raising=False)
    points = level.points(expected)
    assert [one.nbytes for one in points if not one.border] == list(expected)
    assert all(one.seconds[:2] == (time_with_jump(one.nbytes) / 2, time_with_jump(one.nbytes)) for one in points)
    borders = [one.nbytes for one in points if one.border]
    assert len(borders) == 4
    assert min(borders) <= 100_000 < max(borders)
    assert sorted(one.nbytes for one in points) == [one.nbytes for one in points]


def test_border_points_belong_to_one_algorithm(monkeypatch):
    def timed(self, nbytes, seconds, memory):
        return {"auto": {n: time_with_jump(n) for n in nbytes}, "ring": {n: 2e-6 + 1e-11 * n for n in nbytes}}

    monkeypatch.setattr(link_speed._Operation, "_at", timed)
    monkeypatch.setattr(link_speed.run, "take_memory", lambda comm, expected, notes: notes.append("too small"))
    messages = []
    measure = link_speed._Operation(solo(), "all_gather", ("auto", "ring"), "a library", messages.append)
    points = measure.points("node", (1 << 14, 1 << 19), 1.0)
    assert {one.algorithm for one in points if one.border} == {"auto"}
    for name in ("auto", "ring"):
        local_values = [one for one in points if one.algorithm == name and not one.border]
        assert [one.nbytes for one in local_values] == list(sizes(1 << 14, 1 << 19))
    assert all(one.seconds == time_with_jump(one.nbytes) for one in points if one.algorithm == "auto")
    assert messages == ["too small"]


def test_sizes_are_distinct_multiples_of_a_cache_line():
    result = sizes(64, 1 << 20)
    assert result[0] == 64
    assert result[-1] == 1 << 20
    assert all(size % 64 == 0 for size in result)
    assert list(result) == sorted(set(result))


def test_too_few_sizes_are_rejected():
    with pytest.raises(UsageError, match="too similar for a fit"):
        CalibrationRequest(least_bytes=1024, most_bytes=4096)


def test_calibration_models_differ_from_validation_models():
    assert {config.hidden for config, _, _ in default_models()} == {128, 256}
    assert all(config.layers == 2 for config, _, _ in default_models())


@pytest.mark.full
def test_points_are_fitted_to_a_cluster_and_written(tmp_path):
    result = run_threads(2, run)[0]
    made = cluster_fit.assemble("here", toml_file.read("workstation"), calibrate.planner_measurements(result))
    assert made.cluster.device.name == "a core"
    assert {fit.operation for fit in made.cluster.fits} == {*OPERATIONS, "message"}
    assert "a library" in made.cluster.sources["fit"]
    path = tmp_path / "points.h5"
    calibrate_run.write_points(path, result, {"origin": "a test"})
    with h5py.File(path) as file:
        assert file.attrs["origin"] == "a test"
        assert file["products/float32/seconds"].shape == (len(FEW), 2)
        assert np.array_equal(file["products/float32/m"], [m for m, _, _ in FEW])
        assert len(file["models"]) == 4
        assert b"matmul" in set(file["models/0/kind"][:])
        assert len(file["messages/nbytes"]) == len(result.links)
        assert len(file["collectives/nbytes"]) == len(result.collectives)


def load_samples(load, local_data=2, cores=2):
    return (LoadSample(load, local_data, cores),)


def test_load_of_the_ranks_is_not_busy():
    assert calibrate_run.busy_before(load_samples(2.0)) == ""  # a job that has just ended shows for minutes
    assert calibrate_run.busy_meanwhile(load_samples(0.1), load_samples(1.9), 120, 0.02) == ""
    assert calibrate_run.busy_meanwhile(load_samples(1.9), load_samples(2.2), 60, 0.02) == ""
    # 3 more processes are 5 % of 64 cores
    assert calibrate_run.busy_meanwhile(load_samples(0.1, 2, 64), load_samples(4.9, 2, 64), 600, 0.02) == ""


def test_load_of_other_processes_is_busy():
    assert "a load of 6.9, of which this calibration causes 2" in calibrate_run.busy_before(load_samples(6.9))
    assert "a load of 5.0, of which this calibration causes 2" in calibrate_run.busy_meanwhile(
        load_samples(0.1), load_samples(5.0), 600, 0.02
    )
    assert "a load of 6.9, of which this calibration causes 2" in calibrate_run.busy_meanwhile(
        load_samples(6.9), load_samples(0.5), 600, 0.02
    )
    quiet = LoadSample(0.0, 2, 2)
    assert "8.0" in calibrate_run.busy_meanwhile((quiet, quiet), (quiet, LoadSample(8.0, 2, 2)), 600, None)


def test_earlier_load_is_subtracted_and_late_load_is_detected():
    # One other process runs all the time, for 45 s: the average has not yet risen to 3.
    late = 1.0 * np.exp(-45 / 60) + 3.0 * (1 - np.exp(-45 / 60))
    assert late < 2.5
    assert "a load of 3.0" in calibrate_run.busy_meanwhile(load_samples(1.0), load_samples(late), 45, 0.02)
    # A high load until the beginning, within the load of 8 ranks; 2 of the ranks run now.
    left = 2.4 * np.exp(-45 / 60) + 2.0 * (1 - np.exp(-45 / 60))
    assert calibrate_run.busy_meanwhile(load_samples(2.4), load_samples(left), 45, 0.02) == ""


def test_large_spread_is_busy_and_unknown_load_is_not(monkeypatch):
    monkeypatch.setattr(calibrate_run, "APART", APART)
    assert "60% more" in calibrate_run.busy_meanwhile(load_samples(0.0), load_samples(0.0), 60, 0.6)
    assert "60% more" in calibrate_run.busy_meanwhile(load_samples(np.nan), load_samples(np.nan), 60, 0.6)
    assert calibrate_run.busy_meanwhile(load_samples(np.nan), load_samples(np.nan), 60, None) == ""


def test_spread_is_relative_to_the_first_quartile(monkeypatch):
    now = [0.0]
    lasts = iter([50.0, *[1.0, 3.0] * 4])  # the first is dropped

    def call():
        now[0] += next(lasts)

    monkeypatch.setattr(device_speed.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(device_speed, "MOST_ROUNDS", 8)
    (result,) = device_speed.both(solo(), [call], 2000.0)
    assert result == BusySeconds(1.0, 1.0, pytest.approx(1.0))


def test_load_sample_counts_all_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (3.5, 0.0, 0.0))
    looks = run_threads(3, lambda comm: calibrate_run.sample_load(comm, 2))
    assert looks[0] == looks[2]
    assert [(one.load, one.threads) for one in looks[0]] == [(3.5, 6)]

    def raise_os_error():
        raise OSError

    monkeypatch.setattr(os, "getloadavg", raise_os_error)
    assert np.isnan(load_average())


def test_busy_machine_is_warned_about_and_flagged_in_the_file(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 0.0, 0.0))
    messages = []
    result = calibrate_run.run(solo(), calibration_request(), "a library", "a core", messages.append)
    warnings = [line for line in messages if line.startswith("warning")]
    assert len(warnings) == 2
    assert all("a load of 9.0" in line for line in warnings)
    path, points = tmp_path / "here.toml", tmp_path / "here.h5"
    calibrate.write_files(result, path, points, "workstation", "here", {})
    assert any("the machine was busy (a load of 9.0" in one for one in cluster_assumptions(path))
    assert "the machine was busy" in capsys.readouterr().out
    with h5py.File(points) as file:
        assert "a load of 9.0" in file.attrs["busy"]
        assert file["moves/spread"].shape == file["moves/bytes"].shape
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    quiet = calibrate_run.run(solo(), calibration_request(), "a library", "a core", messages.append)
    assert quiet.busy == ""


def cluster_assumptions(path):
    return toml_file.assumptions(toml_file.read(str(path)))


def test_points_are_kept_if_the_cluster_is_invalid(monkeypatch, tmp_path):
    result = run(solo())
    path, points = tmp_path / "here.toml", tmp_path / "mine.h5"

    def assemble_invalid(*given):
        made = cluster_fit.CalibratedCluster(cluster=toml_file.read("workstation"), lines=())
        return replace(made, cluster=replace(made.cluster, devices=0))

    monkeypatch.setattr(cluster_fit, "assemble", assemble_invalid)
    with pytest.raises(ConfigurationError, match=r"devices.* measurements are in .*here\.toml\.points\.h5"):
        calibrate.write_files(result, path, None, "workstation", "here", {})
    assert not path.exists()
    with h5py.File(tmp_path / "here.toml.points.h5") as file:
        assert len(file["products/float32/m"]) == len(FEW)
    with pytest.raises(ConfigurationError, match=r"measurements are in .*mine\.h5"):
        calibrate.write_files(result, path, points, "workstation", "here", {})
    assert points.exists()


def test_points_are_kept_if_the_cluster_cannot_be_written(tmp_path):
    result = run(solo())
    with pytest.raises(StorageError, match="cannot be written"):
        calibrate.write_files(result, tmp_path / "no" / "here.toml", tmp_path / "mine.h5", "workstation", "here", {})
    assert (tmp_path / "mine.h5").exists()


def test_written_cluster_is_the_measured_one(tmp_path, capsys):
    path = tmp_path / "here.toml"
    calibrate.write_files(run(solo()), path, None, "workstation", "here", {})
    result = toml_file.read(str(path))
    assert (result.name, result.device.name) == ("here", "a core")
    assert [one.name for one in tmp_path.iterdir()] == ["here.toml"]
    assert "here, measured in" in capsys.readouterr().out
