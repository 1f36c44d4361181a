"""The study of architectures: the device count at which a curve stops, the reason, and the results file."""

import math

import numpy as np
import pytest

from benchmarks.architectures import catalogue, plot, report, results, scaling, study
from harness.marks import cases
from hpcdist.hdf5 import datasets, files
from hpcdist.planner.cluster import toml_file

COUNTS = (8, 64, 1024)


@pytest.fixture(scope="module")
def scenario_studies():
    cluster = toml_file.read("h100-hgx")
    return {one.name: scaling.study(one, cluster, COUNTS) for one in catalogue.SCENARIOS}


class Curve:
    """A curve of points with made-up goodput."""

    def __init__(self, goodputs):
        self.points = []
        for place, goodput in enumerate(goodputs):
            point = scaling.Point(8 << place, 1, None, "" if goodput else "batch", 0.0, {})
            self.points.append(Fixed(*point, goodput=goodput))


class Fixed:
    """A point with a fixed goodput. Each doubling adds ten device-seconds of latency."""

    def __init__(self, devices, samples, estimate, reason, *rest, goodput):
        self.devices, self.samples, self.estimate, self.reason, self.goodput = (
            devices,
            samples,
            estimate,
            reason,
            goodput,
        )
        self.losses = {"computing": 1.0, "latency": 10.0 * math.log2(devices), "bubble": math.log2(devices)}


@cases(
    "goodputs, expected",
    ([8, 16, 32, 64], (8, 64, 64, 64, "")),
    ([8, 16, 17, 16], (8, 16, 32, 32, "latency")),
    ([8, 7, 14, 15], (8, 32, 8, 64, "latency")),  # the last doubling that improved the goodput
    ([0, 16, 32, 0], (16, 32, 32, 32, "batch")),
    ([8, 4, 2, 1], (8, 8, 8, 8, "latency")),
    ([0, 0, 0, 0], (0, 0, 0, 0, "batch")),
)
def test_curve_stops_if_doubling_no_longer_pays(goodputs, expected):
    stop = scaling.stop(Curve(goodputs).points, 1.0)
    assert (stop.first, stop.last, stop.half, stop.best, stop.reason) == expected
    if stop.reason == "latency":
        assert stop.share == pytest.approx(10 / 11)


@pytest.mark.full
def test_losses_sum_to_all_device_seconds(scenario_studies):
    for one in scenario_studies.values():
        for line in one.points.values():
            for point in line:
                if point.estimate is not None:
                    assert sum(point.losses.values()) == pytest.approx(point.devices / point.goodput)
                    assert all(seconds > -1e-9 for seconds in point.losses.values())
                    assert point.estimate.layout.devices == point.devices
                    memory = point.estimate.memory
                    assert point.least_bytes <= memory.bytes <= 0.95 * memory.limit_bytes


def test_study_supports_its_conclusions(scenario_studies):
    """Incast stops servers first and rings second. Models that do not fit need ZeRO-3 or model parallelism."""
    weak = scenario_studies["small-weak"]
    at = {name: line[-1].goodput for name, line in weak.points.items()}
    assert at["one-server"] < 0.05 * at["servers"] < 0.05 * at["colocated"]
    assert at["ring"] < at["rings"] < at["tree"]
    assert weak.stops["one-server"].reason == "bandwidth"
    assert (
        scenario_studies["small-slow"].points["compressed"][-1].goodput
        > 2 * scenario_studies["small-slow"].points["tree"][-1].goodput
    )
    large = scenario_studies["large-weak"].points
    fitting = {name for name, line in large.items() if line[-1].estimate is not None}
    assert fitting == {"zero3", "2d", "3d"}  # 96 blocks are 3 on each of 32 stages: too many for only a pipeline
    assert all(line[-1].reason == "memory" for name, line in large.items() if name not in fitting)
    states = {name: weak.points[name][-1].states_bytes for name in ("hierarchical", "zero1", "zero2", "zero3")}
    assert states["hierarchical"] / states["zero2"] == pytest.approx(16 / (2 + 14 / 1024), rel=0.01)


@pytest.mark.full
def test_tables_results_file_and_plots(scenario_studies, tmp_path):
    pytest.importorskip("matplotlib")
    text = report.text(list(scenario_studies.values()))
    for words in ("incast", "needs 2,8", "1,024 devices: ", "| memory |"):
        assert words in text
    path = tmp_path / "study.h5"
    results.write(path, list(scenario_studies.values()), {"git_commit": "none"}, "text")
    with files.open_read(path, results.SCHEMA, results.VERSION) as file:
        points, stops = datasets.read(file, "points"), datasets.read(file, "stops")
    many = len(scenario_studies) * len(catalogue.ARCHITECTURES)
    assert len(points["devices"]) == many * len(COUNTS) and len(stops["last"]) == many
    fits = points["reason"] == b""
    assert np.isfinite(points["step_s"][fits]).all() and np.isnan(points["step_s"][~fits]).all()
    plot.plot(list(scenario_studies.values()), tmp_path / "study.png")
    assert {file.name for file in tmp_path.iterdir()} == {"study.h5", "study.png", "study-costs.png"}


def test_study_models_published_implementations(scenario_studies):
    """Volumes are as published, 2 * psi parameters of 2 bytes. hpcdist itself sends float32 sums."""
    libraries = {"ring": {"mpi"}, "rings": {"nccl"}, "tree": {"nccl"}, "hierarchical": {"mpi"}}
    psi = 2 * scenario_studies["small-weak"].points["ring"][-1].estimate.parameters
    for name, line in scenario_studies["small-weak"].points.items():
        layout = line[-1].estimate.layout
        assert (layout.implementation, layout.main_gradients) == ("megatron-2022", "working")
        assert layout.library in libraries.get(name, {"mpi", "nccl"})
        if name in ("colocated", "ring", "rings", "hierarchical", "zero1"):
            assert line[-1].sent_bytes == pytest.approx(2 * psi * 1023 / 1024, rel=0.01)
    assert "megatron-2022" in study.__doc__ and "not what hpcdist sends" in study.__doc__


def test_batch_is_rounded_up_to_the_number_of_workers(scenario_studies):
    point = scenario_studies["small-weak"].points["servers"][-1]  # 896 workers of 1,024 devices
    batch = point.estimate.global_batch
    assert point.samples == 65536 <= batch < 1.1 * point.samples and batch % 896 == 0
    assert point.goodput == pytest.approx(65536 / (point.estimate.step_s * point.estimate.run.slowdown))
