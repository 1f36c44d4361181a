"""What a calibration measures: products, moves, models, messages and collectives, and the file of all of it."""

import os
from dataclasses import replace

import h5py
import numpy as np
import pytest

from hpcdist.bench.calibrate import device, links
from hpcdist.bench.calibrate import run as calibrate_run
from hpcdist.bench.calibrate.device import OPERATIONS, BusySeconds, CalibrationRequest, default_models, sizes
from hpcdist.bench.calibrate.run import LoadSample
from hpcdist.bench.collectives import contenders
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
def few(monkeypatch):
    """Little is multiplied and moved, and the machine counts as idle."""
    monkeypatch.setattr(device, "shapes", lambda on: FEW)
    monkeypatch.setattr(device, "MOVED", {"cpu": (1 << 10, 1 << 14), "gpu": (1 << 10, 1 << 14)})
    monkeypatch.setattr(device, "STEPS", 2)
    monkeypatch.setattr(contenders, "last_level_cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(calibrate_run, "APART", 1e9)


def wanted(**more):
    models = tuple((TINY, context, (1, 2)) for context in (4, 8))
    values = {"models": models, "least_bytes": 1 << 10, "most_bytes": 1 << 16, "seconds": 0.2, **more}
    return CalibrationRequest(**values)


def run(comm, **more):
    return calibrate_run.run(comm, wanted(**more), "a library", "a core", lambda text: None)


def test_one_rank_measures_its_device_and_no_links():
    found = run(solo(), dtypes=("float32", "float64"))
    assert set(found.products) == {"float32", "float64"}
    assert [one[:3] for one in found.products["float64"]] == list(FEW)
    assert {one.operation for one in found.moves} == {"copy", "add"}
    assert all(one.seconds.one > 0 and one.seconds.one == one.seconds.all for one in found.moves)
    assert len(found.models) == 4
    assert found.links == ()
    assert found.collectives == ()
    assert (found.machine.hosts, found.machine.ranks_per_host) == (1, 1)


def test_steps_of_a_model_are_told_by_kinds_of_operation():
    point = device.model(solo(), TINY, 8, 2, "cpu")
    kinds = {one.kind: one for one in point.kinds}
    assert {"matmul", "attention", "norm", "activation", "embedding", "cross_entropy"} <= set(kinds)
    for name in ("matmul", "attention", "norm", "activation"):
        assert kinds[name].forward.all > 0
        assert kinds[name].backward.all > 0
    assert point.update.all > 0
    assert point.norm.all > 0
    assert point.step.all > point.update.all
    step = calibrate.step(point)
    assert step.products_s == (kinds["matmul"].forward.all, kinds["matmul"].backward.all)
    assert step.attention_s == (kinds["attention"].forward.all, kinds["attention"].backward.all)
    rest = sum(one.forward.all for name, one in kinds.items() if name not in ("matmul", "attention"))
    assert step.elementwise_s[0] == pytest.approx(rest)
    assert step.description.tokens == 8


def test_a_gpu_is_measured_by_the_same_code_and_waited_for(gpu):
    products = device.products(solo(), "float32", "gpu", 0.05)
    moves = device.moves(solo(), "gpu", 0.05)
    assert len(products) == len(FEW)
    assert {one.operation for one in moves} == {"copy", "add"}
    waits = [event for event in gpu.LOG.of() if event.kind == "synchronise"]
    assert len(waits) >= device.LEAST_ROUNDS * (len(products) + len(moves))


def test_ranks_measure_alone_and_side_by_side():
    first, second = run_threads(2, lambda comm: [one.seconds for one in device.products(comm, "float32", "cpu", 0.1)])
    assert first == second
    assert all(one.one > 0 and one.all > 0 for one in first)


@pytest.mark.full
def test_two_ranks_measure_messages_and_collectives_of_all_sizes():
    first, second = run_threads(2, lambda comm: run(comm, models=()))
    assert first.links == second.links
    assert first.collectives == second.collectives
    assert [one.nbytes for one in [one for one in first.links if not one.border]] == list(sizes(1 << 10, 1 << 16))
    assert {one.level for one in first.links} == {links.INSIDE}
    assert all(one.seconds.one > 0 and one.seconds.all > 0 for one in first.links)
    for operation in OPERATIONS:
        for algorithm in ("auto", "ring"):
            own = [one for one in first.collectives if (one.operation, one.algorithm) == (operation, algorithm)]
            assert [one.nbytes for one in own if not one.border] == list(sizes(1 << 10, 1 << 16))
            assert all(one.seconds > 0 and one.ranks == 2 for one in own)


def jumping(nbytes):
    """Seconds on this machine that never was: slow beyond 100,000 bytes."""
    return 1e-6 + 1e-11 * nbytes + (5e-6 if nbytes > 100_000 else 0.0)


def test_points_at_a_jump_of_messages_are_marked_and_those_measured_again_count_with_the_lesser(monkeypatch):
    level = links._Level.__new__(links._Level)
    level._name = "node"
    wanted, rounds = sizes(1 << 14, 1 << 19), []

    def at(nbytes):
        rounds.append(list(nbytes))
        slow = 3.0 if len(rounds) == 1 else 1.0  # once, of one size
        return {n: BusySeconds(jumping(n) / 2, jumping(n) * (slow if n == wanted[3] else 1.0)) for n in nbytes}

    monkeypatch.setattr(level, "_at", at, raising=False)
    points = level.points(wanted)
    assert [one.nbytes for one in points if not one.border] == list(wanted)
    assert all(one.seconds[:2] == (jumping(one.nbytes) / 2, jumping(one.nbytes)) for one in points)
    borders = [one.nbytes for one in points if one.border]
    assert len(borders) == 4
    assert min(borders) <= 100_000 < max(borders)
    assert sorted(one.nbytes for one in points) == [one.nbytes for one in points]


def test_points_at_a_jump_of_one_algorithm_are_borders_of_that_one_alone(monkeypatch):
    def timed(self, nbytes, seconds, memory):
        return {"auto": {n: jumping(n) for n in nbytes}, "ring": {n: 2e-6 + 1e-11 * n for n in nbytes}}

    monkeypatch.setattr(links._Operation, "_at", timed)
    monkeypatch.setattr(links.run, "take_memory", lambda comm, wanted, notes: notes.append("too small"))
    said = []
    measure = links._Operation(solo(), "all_gather", ("auto", "ring"), "a library", said.append)
    points = measure.points("node", (1 << 14, 1 << 19), 1.0)
    assert {one.algorithm for one in points if one.border} == {"auto"}
    for name in ("auto", "ring"):
        own = [one for one in points if one.algorithm == name and not one.border]
        assert [one.nbytes for one in own] == list(sizes(1 << 14, 1 << 19))
    assert all(one.seconds == jumping(one.nbytes) for one in points if one.algorithm == "auto")
    assert said == ["too small"]


def test_sizes_are_multiples_of_a_cache_line_without_doubles():
    found = sizes(64, 1 << 20)
    assert found[0] == 64
    assert found[-1] == 1 << 20
    assert all(size % 64 == 0 for size in found)
    assert list(found) == sorted(set(found))


def test_too_few_sizes_are_refused():
    with pytest.raises(UsageError, match="too few to fit"):
        CalibrationRequest(least_bytes=1024, most_bytes=4096)


def test_the_models_of_a_calibration_are_none_that_validate_it():
    assert {config.hidden for config, _, _ in default_models()} == {128, 256}
    assert all(config.layers == 2 for config, _, _ in default_models())


@pytest.mark.full
def test_points_become_a_cluster_and_a_file(tmp_path):
    found = run_threads(2, run)[0]
    made = cluster_fit.assemble("here", toml_file.read("workstation"), calibrate.findings(found))
    assert made.cluster.device.name == "a core"
    assert {fit.operation for fit in made.cluster.fits} == {*OPERATIONS, "message"}
    assert "a library" in made.cluster.sources["fit"]
    path = tmp_path / "points.h5"
    calibrate_run.write_points(path, found, {"origin": "a test"})
    with h5py.File(path) as file:
        assert file.attrs["origin"] == "a test"
        assert file["products/float32/seconds"].shape == (len(FEW), 2)
        assert np.array_equal(file["products/float32/m"], [m for m, _, _ in FEW])
        assert len(file["models"]) == 4
        assert b"matmul" in set(file["models/0/kind"][:])
        assert len(file["messages/nbytes"]) == len(found.links)
        assert len(file["collectives/nbytes"]) == len(found.collectives)


def look(load, own=2, cores=2):
    return (LoadSample(load, own, cores),)


def test_load_that_the_ranks_explain_is_not_busy():
    assert calibrate_run.busy_before(look(2.0)) == ""  # what has just ended shows for minutes
    assert calibrate_run.busy_meanwhile(look(0.1), look(1.9), 120, 0.02) == ""
    assert calibrate_run.busy_meanwhile(look(1.9), look(2.2), 60, 0.02) == ""
    assert calibrate_run.busy_meanwhile(look(0.1, 2, 64), look(4.9, 2, 64), 600, 0.02) == ""  # 5 % of the cores


def test_load_of_others_is_busy_before_or_meanwhile():
    assert "a load of 6.9 where 2" in calibrate_run.busy_before(look(6.9))
    assert "a load of 5.0 where 2" in calibrate_run.busy_meanwhile(look(0.1), look(5.0), 600, 0.02)
    assert "a load of 6.9 where 2" in calibrate_run.busy_meanwhile(look(6.9), look(0.5), 600, 0.02)
    quiet = LoadSample(0.0, 2, 2)
    assert "8.0" in calibrate_run.busy_meanwhile((quiet, quiet), (quiet, LoadSample(8.0, 2, 2)), 600, None)


def test_what_ran_before_is_taken_off_and_what_began_late_is_not_hidden():
    # One other process all the while, 45 s: the average has not yet risen to 3.
    late = 1.0 * np.exp(-45 / 60) + 3.0 * (1 - np.exp(-45 / 60))
    assert late < 2.5
    assert "a load of 3.0" in calibrate_run.busy_meanwhile(look(1.0), look(late), 45, 0.02)
    # Much ran until the beginning, within what 8 ranks make themselves; 2 of them now.
    left = 2.4 * np.exp(-45 / 60) + 2.0 * (1 - np.exp(-45 / 60))
    assert calibrate_run.busy_meanwhile(look(2.4), look(left), 45, 0.02) == ""


def test_repetitions_that_lie_apart_are_busy_and_an_unknown_load_is_none(monkeypatch):
    monkeypatch.setattr(calibrate_run, "APART", APART)
    assert "60% more" in calibrate_run.busy_meanwhile(look(0.0), look(0.0), 60, 0.6)
    assert "60% more" in calibrate_run.busy_meanwhile(look(np.nan), look(np.nan), 60, 0.6)
    assert calibrate_run.busy_meanwhile(look(np.nan), look(np.nan), 60, None) == ""


def test_spread_is_the_mean_over_the_first_quartile(monkeypatch):
    now = [0.0]
    lasts = iter([50.0, *[1.0, 3.0] * 4])  # the first is not kept

    def call():
        now[0] += next(lasts)

    monkeypatch.setattr(device.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(device, "MOST_ROUNDS", 8)
    (found,) = device.both(solo(), [call], 2000.0)
    assert found == BusySeconds(1.0, 1.0, pytest.approx(1.0))


def test_ranks_of_a_machine_are_counted_together(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (3.5, 0.0, 0.0))
    looks = run_threads(3, lambda comm: calibrate_run.sample_load(comm, 2))
    assert looks[0] == looks[2]
    assert [(one.load, one.own) for one in looks[0]] == [(3.5, 6)]

    def none():
        raise OSError

    monkeypatch.setattr(os, "getloadavg", none)
    assert np.isnan(load_average())


def test_a_busy_machine_is_warned_of_and_flagged_in_the_file(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 0.0, 0.0))
    said = []
    found = calibrate_run.run(solo(), wanted(), "a library", "a core", said.append)
    warnings = [line for line in said if line.startswith("warning")]
    assert len(warnings) == 2
    assert all("a load of 9.0" in line for line in warnings)
    path, points = tmp_path / "here.toml", tmp_path / "here.h5"
    calibrate.written(found, path, points, "workstation", "here", {})
    assert any("the machine was busy (a load of 9.0" in one for one in flags(path))
    assert "the machine was busy" in capsys.readouterr().out
    with h5py.File(points) as file:
        assert "a load of 9.0" in file.attrs["busy"]
        assert file["moves/spread"].shape == file["moves/bytes"].shape
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    quiet = calibrate_run.run(solo(), wanted(), "a library", "a core", said.append)
    assert quiet.busy == ""


def flags(path):
    return toml_file.assumptions(toml_file.read(str(path)))


def test_points_that_make_no_cluster_are_kept(monkeypatch, tmp_path):
    found = run(solo())
    path, points = tmp_path / "here.toml", tmp_path / "mine.h5"

    def slow(*given):
        made = cluster_fit.CalibratedCluster(cluster=toml_file.read("workstation"), lines=())
        return replace(made, cluster=replace(made.cluster, devices=0))

    monkeypatch.setattr(cluster_fit, "assemble", slow)
    with pytest.raises(ConfigurationError, match=r"devices.* are kept in .*here\.toml\.points\.h5"):
        calibrate.written(found, path, None, "workstation", "here", {})
    assert not path.exists()
    with h5py.File(tmp_path / "here.toml.points.h5") as file:
        assert len(file["products/float32/m"]) == len(FEW)
    with pytest.raises(ConfigurationError, match=r"are kept in .*mine\.h5"):
        calibrate.written(found, path, points, "workstation", "here", {})
    assert points.exists()


def test_a_cluster_that_cannot_be_written_leaves_its_points(tmp_path):
    found = run(solo())
    with pytest.raises(StorageError, match="cannot be written"):
        calibrate.written(found, tmp_path / "no" / "here.toml", tmp_path / "mine.h5", "workstation", "here", {})
    assert (tmp_path / "mine.h5").exists()


def test_what_is_written_is_the_cluster_that_was_measured(tmp_path, capsys):
    path = tmp_path / "here.toml"
    calibrate.written(run(solo()), path, None, "workstation", "here", {})
    found = toml_file.read(str(path))
    assert (found.name, found.device.name) == ("here", "a core")
    assert [one.name for one in tmp_path.iterdir()] == ["here.toml"]
    assert "here, measured in" in capsys.readouterr().out
