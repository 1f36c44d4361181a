"""What a calibration measures: products, moves, models, messages and collectives, and the file of all of it."""

import h5py
import numpy as np
import pytest

from hpcdist.bench import calibrate, calibrate_device, calibrate_file, calibrate_links, collectives_buffers
from hpcdist.bench.calibrate_points import OPERATIONS, Busy, LinkPoint, Wanted, default_models, sizes
from hpcdist.cli import plan_calibrate
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.solo import solo
from hpcdist.comm.threads import run_threads
from hpcdist.errors import UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.planner import calibrate_cluster, cluster_file

TINY = ModelConfig(layers=1, hidden=16, heads=2, vocabulary=17)
FEW = ((8, 8, 8), (16, 16, 16), (16, 32, 64), (64, 64, 64))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is multiplied and moved."""
    monkeypatch.setattr(calibrate_device, "shapes", lambda on: FEW)
    monkeypatch.setattr(calibrate_device, "MOVED", {"cpu": (1 << 10, 1 << 14), "gpu": (1 << 10, 1 << 14)})
    monkeypatch.setattr(calibrate_device, "STEPS", 2)
    monkeypatch.setattr(collectives_buffers, "last_level_cache_bytes", lambda: 1 << 16)


def wanted(**more: object) -> Wanted:
    models = tuple((TINY, context, (1, 2)) for context in (4, 8))
    values = {"models": models, "least_bytes": 1 << 10, "most_bytes": 1 << 16, "seconds": 0.2, **more}
    return Wanted(**values)  # type: ignore[arg-type]


def run(comm: Communicator, **more: object) -> calibrate.Points:
    return calibrate.run(comm, wanted(**more), "a library", "a core", lambda text: None)


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
    point = calibrate_device.model(solo(), TINY, 8, 2, "cpu")
    kinds = {one.kind: one for one in point.kinds}
    assert {"matmul", "attention", "norm", "activation", "embedding", "cross_entropy"} <= set(kinds)
    for name in ("matmul", "attention", "norm", "activation"):
        assert kinds[name].forward.all > 0
        assert kinds[name].backward.all > 0
    assert point.update.all > 0
    assert point.norm.all > 0
    assert point.step.all > point.update.all
    step = plan_calibrate.step(point)
    assert step.products_s == (kinds["matmul"].forward.all, kinds["matmul"].backward.all)
    assert step.attention_s == (kinds["attention"].forward.all, kinds["attention"].backward.all)
    rest = sum(one.forward.all for name, one in kinds.items() if name not in ("matmul", "attention"))
    assert step.elementwise_s[0] == pytest.approx(rest)
    assert step.description.tokens == 8


def test_a_gpu_is_measured_by_the_same_code_and_waited_for(gpu):
    products = calibrate_device.products(solo(), "float32", "gpu", 0.05)
    moves = calibrate_device.moves(solo(), "gpu", 0.05)
    assert len(products) == len(FEW)
    assert {one.operation for one in moves} == {"copy", "add"}
    waits = [event for event in gpu.LOG.of() if event.kind == "synchronise"]
    assert len(waits) >= calibrate_device.LEAST_ROUNDS * (len(products) + len(moves))


def test_ranks_measure_alone_and_side_by_side():
    def body(comm: Communicator) -> list[Busy]:
        return [one.seconds for one in calibrate_device.products(comm, "float32", "cpu", 0.1)]

    first, second = run_threads(2, body)
    assert first == second
    assert all(one.one > 0 and one.all > 0 for one in first)


def test_two_ranks_measure_messages_and_collectives_of_all_sizes():
    def body(comm: Communicator) -> calibrate.Points:
        return run(comm, models=())

    first, second = run_threads(2, body)
    assert first.links == second.links
    assert first.collectives == second.collectives
    plain = [one for one in first.links if not one.border]
    assert [one.nbytes for one in plain] == list(sizes(1 << 10, 1 << 16))
    assert {one.level for one in first.links} == {calibrate_links.INSIDE}
    assert all(one.seconds.one > 0 and one.seconds.all > 0 for one in first.links)
    for operation in OPERATIONS:
        for algorithm in ("auto", "ring"):
            own = [one for one in first.collectives if (one.operation, one.algorithm) == (operation, algorithm)]
            assert sorted(one.nbytes for one in own) == list(sizes(1 << 10, 1 << 16, per_octave=1))
            assert all(one.seconds > 0 and one.ranks == 2 for one in own)


def test_a_jump_is_bisected_and_a_slope_is_not(monkeypatch):
    level = calibrate_links._Level.__new__(calibrate_links._Level)
    asked: list[int] = []

    def at(nbytes: int, *, border: bool = False) -> LinkPoint:
        asked.append(nbytes)
        seconds = 1e-6 + 1e-10 * nbytes + (5e-6 if nbytes > 6000 else 0.0)
        return LinkPoint("node", 2, nbytes, Busy(seconds, seconds), border)

    monkeypatch.setattr(level, "at", at, raising=False)
    points = [at(nbytes) for nbytes in (1024, 2048, 4096, 8192, 16384)]
    asked.clear()
    found = level.borders(points)
    assert len(found) == calibrate_links.HALVINGS
    assert all(4096 < nbytes < 8192 for nbytes in asked)
    below, above = max(n for n in asked if n <= 6000), min(n for n in asked if n > 6000)
    assert above / below < 1.05
    assert all(one.border for one in found)


def test_sizes_are_multiples_of_a_cache_line_without_doubles():
    found = sizes(64, 1 << 20)
    assert found[0] == 64
    assert found[-1] == 1 << 20
    assert all(size % 64 == 0 for size in found)
    assert list(found) == sorted(set(found))


def test_too_few_sizes_are_refused():
    with pytest.raises(UsageError, match="too few to fit"):
        Wanted(least_bytes=1024, most_bytes=4096)


def test_the_models_of_a_calibration_are_none_that_validate_it():
    assert {config.hidden for config, _, _ in default_models()} == {128, 256}
    assert all(config.layers == 2 for config, _, _ in default_models())


def test_points_become_a_cluster_and_a_file(tmp_path):
    def body(comm: Communicator) -> calibrate.Points:
        return run(comm)

    found = run_threads(2, body)[0]
    made = calibrate_cluster.assemble("here", cluster_file.read("workstation"), plan_calibrate.findings(found))
    assert made.cluster.device.name == "a core"
    assert {fit.operation for fit in made.cluster.fits} == {*OPERATIONS, "message"}
    assert "a library" in made.cluster.sources["fit"]
    path = tmp_path / "points.h5"
    calibrate_file.write(path, found, {"origin": "a test"})
    with h5py.File(path) as file:
        assert file.attrs["origin"] == "a test"
        assert file["products/float32/seconds"].shape == (len(FEW), 2)
        assert np.array_equal(file["products/float32/m"], [m for m, _, _ in FEW])
        assert len(file["models"]) == 4
        assert b"matmul" in set(file["models/0/kind"][:])
        assert len(file["messages/nbytes"]) == len(found.links)
        assert len(file["collectives/nbytes"]) == len(found.collectives)
