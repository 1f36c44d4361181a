"""Fits of measured times: piecewise lines, curves, shares, and the cluster that they describe."""

import math
import tomllib
from dataclasses import replace

import numpy as np
import pytest

from harness.marks import cases
from hpcdist.errors import UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.planner.calibrate import cluster_fit, device_fits, line_fits
from hpcdist.planner.calibrate.cluster_fit import ClusterMeasurements, TimingSeries
from hpcdist.planner.calibrate.device_fits import MeasuredProduct, MeasuredStep
from hpcdist.planner.calibrate.line_fits import FittedLine
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import EfficiencyCurve
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model import transformer
from hpcdist.planner.model.stage_split import attention_flops
from hpcdist.planner.time import network
from hpcdist.planner.time.compute import MOVED_BACK, TILED_BACK, peak_share_of

SIZES = tuple(round(1024 * 2 ** (step / 2)) for step in range(31))
EAGER, RENDEZVOUS = FittedLine(2e-6, 1e-10), FittedLine(9e-6, 1 / 12e9)
BEYOND_CACHE = FittedLine(0.0, 1 / 4e9)


def machine(nbytes):
    """Return the time of a message on a machine with a protocol up to 10,000 bytes and a cache up to 4 MB."""
    line = EAGER if nbytes <= 10_000 else RENDEZVOUS if nbytes <= 4_000_000 else BEYOND_CACHE
    return line.at(nbytes)


def noisy(seconds, percent, seed=0):
    draw = np.random.default_rng(seed)
    return [value * float(1 + percent / 100 * draw.standard_normal()) for value in seconds]


def test_piecewise_fit_finds_protocols_and_predicts_unseen_sizes():
    borders = (9_960, 10_040, 3_990_000, 4_010_000)
    sizes = sorted([*SIZES, *borders])
    result = line_fits.fit_pieces(sizes, noisy([machine(size) for size in sizes], 2), required_sizes=borders)
    assert len(result.lines) == 3
    assert result.until_bytes[0] == pytest.approx(10_000, rel=0.005)
    assert result.until_bytes[1] == pytest.approx(4e6, rel=0.005)
    assert result.until_bytes[2] == SIZES[-1]
    assert result.lines[0].latency_s == pytest.approx(2e-6, rel=0.1)
    assert 1 / result.lines[1].s_per_byte == pytest.approx(12e9, rel=0.1)
    assert 1 / result.lines[2].s_per_byte == pytest.approx(4e9, rel=0.1)
    for size in (1500, 7000, 50_000, 1_000_000, 20_000_000):
        assert result.seconds(size) == pytest.approx(machine(size), rel=0.1)
    assert len(result.unseen_bytes) == len(SIZES) // 2
    assert result.error < 0.2
    assert not set(result.unseen_bytes) & {SIZES[0], SIZES[-1]}


def test_outlier_does_not_bend_a_single_line_fit():
    times = noisy([FittedLine(5e-6, 1e-9).at(size) for size in SIZES], 1)
    times[8] *= 12
    result = line_fits.fit_pieces(SIZES, times)
    assert len(result.lines) == 1
    assert result.lines[0].latency_s == pytest.approx(5e-6, rel=0.05)
    assert result.lines[0].s_per_byte == pytest.approx(1e-9, rel=0.05)


def test_fit_errors_are_measured_on_unseen_sizes():
    times = [FittedLine(5e-6, 1e-9).at(size) for size in SIZES]
    times[7] *= 2  # an odd place: not fitted
    result = line_fits.fit_pieces(SIZES, times)
    assert result.errors[result.unseen_bytes.index(SIZES[7])] == pytest.approx(-0.5, abs=0.01)
    assert result.error == pytest.approx(0.5, abs=0.01)


def test_sizes_at_a_protocol_border_locate_it():
    sizes = sorted([*SIZES, 9_960, 10_040])
    plain = line_fits.fit_pieces(SIZES, [machine(size) for size in SIZES])
    result = line_fits.fit_pieces(sizes, [machine(size) for size in sizes], required_sizes=(9_960, 10_040))
    assert plain.until_bytes[0] == pytest.approx(10_000, rel=0.4)
    assert result.until_bytes[0] == pytest.approx(10_000, rel=0.005)
    assert not {9_960, 10_040} & set(result.unseen_bytes)
    assert result.unseen_bytes == plain.unseen_bytes


def test_repeated_times_of_a_size_count_as_their_median():
    sizes = [size for size in SIZES for _ in range(3)]
    times = [FittedLine(5e-6, 1e-9).at(size) * factor for size in SIZES for factor in (1, 1, 50)]
    assert line_fits.fit_pieces(sizes, times).lines[0].latency_s == pytest.approx(5e-6)


def test_pieces_cover_exactly_the_measured_sizes():
    result = line_fits.fit_pieces(SIZES, [machine(size) for size in SIZES])
    assert (result.from_bytes, result.until_bytes[-1]) == (SIZES[0], SIZES[-1])
    assert result.seconds(10 * SIZES[-1]) == pytest.approx(machine(10 * SIZES[-1]), rel=0.05)


def test_fitted_constants_are_never_negative():
    result = line_fits.fit_pieces(
        SIZES, [1e-3 / (1 + n) for n in range(len(SIZES))]
    )  # a machine that is faster with more
    assert all(line.latency_s >= 0 and line.s_per_byte >= 0 for line in result.lines)


@cases(
    "sizes, seconds, output",
    ((1, 2, 3, 4), (1, 1, 1, 1), "5 different sizes in bytes, got 4"),
    ((1, 2, 3, 4, 5), (1, 1, 0, 1, 1), "got 0.0 s for 3 bytes"),
    ((1, 2, 3, 4, 5), (1, 1, math.nan, 1, 1), "got nan s"),
    ((1, 2, 3, 4, 5), (1, 1, 1), "one time for each size"),
    ((1, 1, 1, 1, 1), (1, 1, 1, 1, 1), "5 different sizes in bytes, got 1"),
)
def test_measurements_that_cannot_be_fitted_are_rejected(sizes, seconds, output):
    with pytest.raises(UsageError, match=output):
        line_fits.fit_pieces(sizes, seconds)


TRUE = EfficiencyCurve(sizes=(16, 64, 256, 1024), shares=(0.02, 0.4, 0.9, 1.0))
PEAK = 1e11


def products():
    results = []
    for m in (16, 32, 64, 100, 128, 256, 512, 1024):
        for k, n in ((m, m), (m, 4 * m), (2 * m, 16)):
            one = MeasuredProduct(m, k, n, 1.0)
            results.append(one._replace(seconds=one.flops / (PEAK * peak_share_of(TRUE, one.size)[0])))
    return results


def test_fitted_curve_reproduces_the_times_of_products():
    whole = products()
    noise = noisy([one.seconds for one in whole], 3)
    result = device_fits.fit_curve([one._replace(seconds=took) for one, took in zip(whole, noise, strict=True)])
    assert result.peak_flops == pytest.approx(PEAK, rel=0.1)
    assert result.error < 0.1
    for one in whole:
        if one.size > 30:
            assert device_fits.product_seconds(result, one) == pytest.approx(one.seconds, rel=0.2)
    assert len(result.unseen) == len(whole) // 3
    assert all(0 < share <= 1 for share in result.curve.shares)
    assert list(result.curve.sizes) == sorted(result.curve.sizes)


def test_products_without_time_or_of_one_size_are_rejected():
    with pytest.raises(UsageError, match="took 0 s"):
        device_fits.fit_curve([*products(), MeasuredProduct(8, 8, 8, 0)])
    with pytest.raises(UsageError, match="3 different sizes"):
        device_fits.fit_curve([MeasuredProduct(8, 8, 8, 1e-6)] * 9)


def cluster_to_recover():
    """Return the shipped workstation with constants that a fit must recover."""
    base = toml_file.read("workstation")
    device = replace(
        base.device,
        peak_flops={"float32": PEAK},
        matmul={"float32": TRUE},
        memory_bytes_per_s=50e9,
        memory_share=0.6,
        attention_share=0.35,
        kernel_s=7e-6,
    )
    return replace(base, device=device)


def steps(cluster):
    """Return steps with the times that the planner predicts, by kinds of operation."""
    results = []
    for hidden, context, samples in ((128, 64, 1), (128, 64, 4), (256, 128, 2), (256, 128, 8), (256, 256, 1)):
        description = transformer.of_config(
            ModelConfig(layers=2, hidden=hidden, heads=hidden // 64, vocabulary=64), context=context
        )
        device = cluster.device
        flops = samples * sum(unit.count * attention_flops(unit, exact=True) for unit in description.units)
        forward_s = flops / (device.peak_flops["float32"] * device.attention_share)
        moved = 4 * samples * sum(unit.count * unit.moved for unit in description.units)
        moves = device.memory_bytes_per_s * device.memory_share
        kernels = sum(unit.count * unit.kernels for unit in description.units)
        back = sum(unit.count * unit.kernels * (1 + bool(unit.products)) for unit in description.units)
        plain = [replace(unit, attention=None, moved=0.0, moved_cut=0.0, kernels=0) for unit in description.units]
        products_alone = replace(description, units=tuple(plain))
        bare = MeasuredStep(products_alone, samples, (1.0, 1.0), (0.0, 0.0), (0.0, 0.0))
        product_s = device_fits.predicted_s(bare, cluster) / 3
        results.append(
            bare._replace(
                description=description,
                products_s=(product_s, 2 * product_s),
                attention_s=(forward_s, TILED_BACK * forward_s),
                elementwise_s=(
                    kernels * device.kernel_s + moved / moves,
                    back * device.kernel_s + MOVED_BACK * moved / moves,
                ),
            )
        )
    return results


def test_shares_and_kernel_time_are_recovered():
    cluster = cluster_to_recover()
    blank = replace(cluster, device=replace(cluster.device, memory_share=0.9, attention_share=0.9, kernel_s=0.0))
    result = device_fits.fit_shares(steps(cluster), blank)
    assert result.memory_share == pytest.approx(0.6, rel=0.02)
    assert result.attention_share == pytest.approx(0.35, rel=0.02)
    assert result.kernel_s == pytest.approx(7e-6, rel=0.05)
    assert len(result.errors) == 1
    assert result.error < 0.05


def test_fit_of_shares_with_too_few_steps_is_rejected():
    with pytest.raises(UsageError, match="3 measured steps, got 2"):
        device_fits.fit_shares(steps(cluster_to_recover())[:2], cluster_to_recover())


def cluster_measurements(series=(), hosts=1):
    return ClusterMeasurements(
        date="2026-01-02",
        device="core of a test",
        hosts=hosts,
        ranks_per_host=2,
        devices_per_host=2,
        memory_bytes=4e9,
        host_memory_bytes=8e9,
        products={"float32": products()},
        moves=[(1e6, 1e6 / 90e9), (2e8, 2e8 / 50e9)],
        steps=steps(cluster_to_recover()),
        series=series,
        by="a library",
    )


def timing_series(operation, algorithm, level, ranks, factor=1.0):
    times = tuple(factor * machine(size) for size in SIZES)
    return TimingSeries(
        operation=operation,
        algorithm=algorithm,
        level=level,
        ranks=ranks,
        nbytes=tuple(map(float, SIZES)),
        seconds=times,
        alone_s=tuple(time / 2 for time in times) if operation == "message" else (),
    )


TWO_LEVELS = (
    timing_series("message", "auto", "node", 2),
    timing_series("message", "auto", "network", 2, 10),
    timing_series("allreduce", "auto", "node", 2, 3),
    timing_series("allreduce", "ring", "network", 4, 30),
)


def test_calibrated_cluster_survives_a_round_trip(tmp_path):
    result = cluster_fit.assemble("here", toml_file.read("workstation"), cluster_measurements(TWO_LEVELS, hosts=2))
    path = tmp_path / "here.toml"
    path.write_text(toml_file.dump(result.cluster))
    again = toml_file.read(str(path))
    assert again.calibrated == result.cluster.calibrated
    assert "2026-01-02; 2 hosts" in again.calibrated
    assert "1.0 KiB to 32.0 MiB" in again.calibrated
    assert (again.devices, again.node.devices, again.nodes) == (4, 2, 2)
    assert [(level.name, level.devices) for level in again.levels] == [("node", 2), ("network", 0)]
    assert again.levels[0].alone_bytes_per_s == pytest.approx(2 * again.levels[0].bytes_per_s, rel=0.01)
    assert again.levels[0].latency_s == pytest.approx(machine(1024), rel=0.01)
    assert again.levels[0].bytes_per_s == pytest.approx(4e9, rel=0.01)
    assert [(fit.operation, fit.algorithm, fit.level, fit.ranks) for fit in again.fits] == [
        ("message", "auto", "node", 2),
        ("message", "auto", "network", 2),
        ("allreduce", "auto", "node", 2),
        ("allreduce", "ring", "network", 4),
    ]
    assert {fit.library for fit in again.fits} == {"mpi"}
    assert all(fit.from_bytes == SIZES[0] and fit.until_bytes[-1] == SIZES[-1] for fit in again.fits)
    assert again.device.memory_bytes_per_s == pytest.approx(50e9)
    assert again.device.attention_share == pytest.approx(0.35, rel=0.05)


def test_unmeasured_sections_are_listed_as_assumptions():
    result = cluster_fit.assemble("here", toml_file.read("workstation"), cluster_measurements(TWO_LEVELS)).cluster
    output = " ".join(toml_file.assumptions(result))
    assert all(section in output for section in ("storage", "failures", "site", "power"))
    assert "matmul" not in output
    assert "fit" not in [one.partition(":")[0] for one in toml_file.assumptions(result)]
    assert result.storage == toml_file.read("workstation").storage


def test_calibration_of_one_device_keeps_the_links_of_the_base():
    base = toml_file.read("workstation")
    result = cluster_fit.assemble("here", base, cluster_measurements()).cluster
    assert result.levels == base.levels
    assert result.fits == ()
    assert "assumption" in result.sources["level"]


def read_back(cluster):
    return toml_file.of_tree(tomllib.loads(toml_file.dump(cluster)), "here.toml")


@pytest.mark.parametrize(("ranks", "devices"), [(3, 8), (2, 2), (2, 3)])
def test_levels_hold_whole_nodes_for_any_number_of_ranks(ranks, devices):
    base = replace(cluster_measurements(TWO_LEVELS, hosts=2), ranks_per_host=ranks, devices_per_host=devices)
    result = read_back(cluster_fit.assemble("here", toml_file.read("workstation"), base).cluster)
    assert (result.devices, result.node.devices) == (2 * devices, devices)
    assert [(level.name, level.devices) for level in result.levels] == [("node", devices), ("network", 0)]
    messages = [one for one in toml_file.assumptions(result) if f"measured with {ranks} of {devices} devices" in one]
    assert [one.partition(":")[0] for one in messages] == (["device", "level"] if ranks < devices else [])


def test_network_faster_than_a_node_is_reported_and_read_back():
    slow = timing_series("message", "auto", "node", 2, 20)
    result = cluster_fit.assemble(
        "here", toml_file.read("workstation"), cluster_measurements((slow, *TWO_LEVELS[1:]), hosts=2)
    ).cluster
    again = read_back(result)
    assert again.levels[1].bytes_per_s == again.levels[0].bytes_per_s
    assert [fit.s_per_byte for fit in again.fits] == [fit.s_per_byte for fit in result.fits]
    assert any("'network' are as fast as those of 'node'" in one for one in toml_file.assumptions(again))


def test_fastest_longest_message_still_gives_a_bandwidth():
    odd = replace(TWO_LEVELS[0], seconds=(*TWO_LEVELS[0].seconds[:-1], 1e-6), alone_s=())
    result = cluster_fit.assemble("here", toml_file.read("workstation"), cluster_measurements((odd,))).cluster
    assert 1e9 < read_back(result).levels[0].bytes_per_s < 1e11


def test_one_rank_per_node_measures_no_links_inside_a_node():
    alone = replace(cluster_measurements(TWO_LEVELS[1:2], hosts=2), ranks_per_host=1, devices_per_host=4)
    again = read_back(cluster_fit.assemble("here", toml_file.read("workstation"), alone).cluster)
    assert [(level.name, level.devices) for level in again.levels] == [("network", 0)]
    assert any("links inside a node are as fast as 'network'" in one for one in toml_file.assumptions(again))


@pytest.mark.parametrize("devices", [1, 3, 6, 64])
def test_levels_of_the_base_cluster_are_kept_if_they_nest(devices):
    alone = replace(cluster_measurements(), ranks_per_host=1, devices_per_host=devices)
    for name in toml_file.names():
        base = toml_file.read(name)
        again = read_back(cluster_fit.assemble("here", base, alone).cluster)
        assert {level.name for level in again.levels} <= {level.name for level in base.levels}


def test_busy_machine_is_an_assumption_of_each_plan():
    base = replace(cluster_measurements(TWO_LEVELS), busy="a load of 7.0; much")
    result = cluster_fit.assemble("here", toml_file.read("workstation"), base)
    assert any("the machine was busy (a load of 7.0, much)" in one for one in toml_file.assumptions(result.cluster))
    assert any("busy" in one for one in result.lines)
    quiet = cluster_fit.assemble("here", toml_file.read("workstation"), cluster_measurements(TWO_LEVELS))
    assert not any("busy" in one for one in (*toml_file.assumptions(quiet.cluster), *quiet.lines))


def test_planner_uses_measurements_and_flags_missing_ones():
    result = cluster_fit.assemble("here", toml_file.read("workstation"), cluster_measurements(TWO_LEVELS)).cluster
    group = network.span(ParallelLayout(data=2), "data", result)
    inside = network.collective("allreduce", 2e6, group, result)
    assert inside.seconds == pytest.approx(3 * machine(2e6), rel=0.1)
    assert inside.flags == ()
    assert "extrapolated" in network.collective("allreduce", 1e9, group, result).flags[0]
    assert "extrapolated" in network.collective("allreduce", 100, group, result).flags[0]


def test_calibration_without_memory_copies_is_rejected():
    with pytest.raises(UsageError, match="memory bandwidth"):
        cluster_fit.assemble("here", toml_file.read("workstation"), replace(cluster_measurements(), moves=()))
