"""A whole run: time between failures, saves, the best interval, expected wall time, carbon and price."""

import dataclasses
import math
import random

import pytest

from hpcdist.errors import UsageError
from hpcdist.planner import plan
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import ClusterSite, FailureRates
from hpcdist.planner.estimate import StepEnergy
from hpcdist.planner.layout import ParallelLayout
from hpcdist.strategies.core import daly_interval

H100 = toml_file.read("h100-hgx")
STEP = StepEnergy(terms={"devices": 5e6, "hosts": 1e6}, device_w=500.0)
DAY = 86400.0


def test_failure_rate_is_proportional_to_the_nodes():
    assert plan.mtbf_s(ParallelLayout(data=8), H100) == 264 * DAY
    assert plan.mtbf_s(ParallelLayout(data=9), H100) == 132 * DAY
    # What was published: 419 interruptions of 16,384 devices in 54 days.
    result = plan.mtbf_s(ParallelLayout(data=128, pipeline=16, tensor=8), H100)
    assert 54 * DAY / result == pytest.approx(419, rel=0.01)


@pytest.mark.parametrize(("devices", "hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_time_between_failures_matches_the_a100_projection(devices, hours):
    """Kokolis et al., arXiv:2410.21680, from 6.5 failures per 1000 node-days."""
    result = plan.mtbf_s(ParallelLayout(data=devices), toml_file.read("a100-selene"))
    assert result / 3600 == pytest.approx(hours, rel=0.03)


def test_server_nodes_count_for_failures():
    assert plan.mtbf_s(ParallelLayout(data=8, servers=8, strategy="parameter_server"), H100) == 132 * DAY


def test_save_time_is_limited_by_nodes_or_storage():
    one, many = ParallelLayout(data=8), ParallelLayout(data=4096)
    assert plan.save_s(1e12, one, H100) == pytest.approx(100)  # 10 GB/s
    assert plan.save_s(1e12, many, H100) == pytest.approx(0.5)  # 2 TB/s, and not 512 x 10 GB/s
    assert plan.restart_s(1e12, one, H100) == pytest.approx(600 + 50)
    assert plan.restart_s(1e12, many, H100) == pytest.approx(600 + 0.5)


def test_interval_is_the_daly_interval_in_whole_steps():
    layout, step_s = ParallelLayout(data=128, pipeline=16, tensor=8), 7.0
    run = plan.run(100_000, step_s, STEP, 5e12, layout, H100)
    best = daly_interval.daly(run.save_s, run.mtbf_s)
    assert run.interval_s == pytest.approx(best, abs=step_s / 2)
    assert run.interval_s / step_s == pytest.approx(round(run.interval_s / step_s))
    restart = plan.restart_s(5e12, layout, H100)
    assert run.slowdown == daly_interval.slowdown(run.interval_s, run.save_s, run.mtbf_s, restart)
    assert run.work_s == 700_000 and run.wall_s == run.work_s * run.slowdown
    assert run.failures == run.wall_s / run.mtbf_s
    for steps in (1, round(best / step_s) // 2, round(best / step_s) * 2):
        other = daly_interval.slowdown(steps * step_s, run.save_s, run.mtbf_s, restart)
        assert other > run.slowdown


def test_short_run_saves_once_at_its_end():
    run = plan.run(3, 7.0, STEP, 5e12, ParallelLayout(data=8), H100)
    assert run.interval_s == run.work_s == 21
    assert run.wall_s == pytest.approx(21 + run.save_s, rel=1e-3)


def test_free_save_is_made_after_every_step():
    run = plan.run(1000, 7.0, STEP, 1e-3, ParallelLayout(data=8), H100)
    assert run.interval_s == 7.0 and run.slowdown == pytest.approx(1, abs=1e-4)


def test_expected_wall_time_matches_simulated_failures():
    """The test simulates 100,000 intervals, each repeated until the interval and its save succeed.

    Restarts fail too.
    """
    bad = dataclasses.replace(H100, failures=FailureRates(node_mtbf_s=4000.0, restart_s=300.0))
    layout = ParallelLayout(data=8)
    run = plan.run(1000, 10.0, STEP, 1e12, layout, bad)  # a save of 100 s
    restart = plan.restart_s(1e12, layout, bad)
    drawn, elapsed, failed, segments = random.Random(11), 0.0, 0, 100_000
    for _ in range(segments):
        needed = run.interval_s + run.save_s
        while (lasted := drawn.expovariate(1 / run.mtbf_s)) < needed:
            elapsed, failed = elapsed + lasted, failed + 1
            while (lasted := drawn.expovariate(1 / run.mtbf_s)) < restart:
                elapsed, failed = elapsed + lasted, failed + 1
            elapsed += restart
        elapsed += needed
    work = segments * run.interval_s
    assert run.slowdown > 1.3, "or there is nothing to see"
    assert elapsed / work == pytest.approx(run.slowdown, rel=0.01)
    assert failed / work == pytest.approx(run.failures / run.work_s, rel=0.01)


def test_joules_include_work_and_waiting():
    layout = ParallelLayout(data=64)
    run = plan.run(10_000, 10.0, STEP, 8e12, layout, H100)
    waiting = run.work_s / run.interval_s * run.save_s + run.failures * plan.restart_s(8e12, layout, H100)
    expected = (run.wall_s - waiting) * 6e5 + waiting * plan.waiting_w(layout, H100)
    assert run.joules == pytest.approx(expected)
    assert run.carbon_g == pytest.approx(expected / 3.6e6 * 481)
    assert run.price == pytest.approx(64 * run.wall_s / 3600 * 3.0) and run.currency == "USD"


def test_prices_add_up_and_count_whole_nodes():
    site = ClusterSite(kwh_price=0.2, currency="EUR")
    layout = ParallelLayout(data=9)
    electricity = plan.run(1000, 10.0, STEP, 1e9, layout, dataclasses.replace(H100, site=site))
    assert electricity.price == pytest.approx(electricity.joules / 3.6e6 * 0.2)
    assert electricity.carbon_g is None, "no carbon intensity, so nothing is said"
    both = dataclasses.replace(site, device_hour_price=2.0)
    run = plan.run(1000, 10.0, STEP, 1e9, layout, dataclasses.replace(H100, site=both))
    assert run.price == pytest.approx(electricity.price + 16 * run.wall_s / 3600 * 2.0)


def test_price_and_carbon_are_none_without_inputs():
    free = plan.run(10, 1.0, STEP, 1e9, ParallelLayout(data=8), dataclasses.replace(H100, site=ClusterSite()))
    assert free.price is None and free.carbon_g is None and free.currency == ""
    dark = dataclasses.replace(
        H100,
        device=dataclasses.replace(H100.device, idle_w=0.0, peak_w=0.0),
        site=dataclasses.replace(H100.site, kwh_price=0.2),
    )
    run = plan.run(10, 1.0, STEP, 1e9, ParallelLayout(data=8), dark)
    assert run.price is None and run.carbon_g is None, "electricity of devices whose power is not known"


def test_more_devices_lose_more_time_to_failures():
    large = dataclasses.replace(H100, devices=1_000_000)
    lost = [
        plan.run(100_000, 5.0, STEP, 6e12, ParallelLayout(data=n), large).slowdown for n in (8, 1024, 16384, 100_000)
    ]
    assert lost == sorted(lost) and lost[0] < 1.01 < lost[-1]


def test_run_that_never_completes_is_infinite():
    hopeless = dataclasses.replace(H100, failures=FailureRates(node_mtbf_s=3600.0, restart_s=86400.0))
    run = plan.run(100, 10.0, STEP, 1e12, ParallelLayout(data=80_000), hopeless)
    assert math.isinf(run.wall_s) and math.isinf(run.joules) and math.isinf(run.slowdown)
    assert run.price is not None and math.isinf(run.price)


def test_run_with_absurd_slowdown_is_infinite():
    """A finite number with 95 digits is useless.

    A run that takes more than 1000 times its work is reported as endless.
    """
    layout, result = ParallelLayout(data=8), {}
    for mtbf in (1.0, 15.0, 30.0, 60.0):
        bad = dataclasses.replace(H100, failures=FailureRates(node_mtbf_s=mtbf, restart_s=120.0))
        run = plan.run(100, 1.0, STEP, 1e9, layout, bad)
        result[mtbf] = run.slowdown
        restart = plan.restart_s(1e9, layout, bad)
        formula = daly_interval.slowdown(run.interval_s, run.save_s, run.mtbf_s, restart)
        assert math.isfinite(formula), "the formula alone does not tell"
        assert run.slowdown == (formula if formula <= plan.ENDLESS else math.inf)
        assert math.isinf(run.wall_s) == math.isinf(run.joules) == (formula > plan.ENDLESS)
    assert math.isinf(result[1.0]) and math.isinf(result[15.0]) and result[30.0] < plan.ENDLESS


def test_run_without_steps_is_rejected():
    with pytest.raises(UsageError, match="run.steps must be at least 1, got 0"):
        plan.run(0, 10.0, STEP, 1e12, ParallelLayout(data=8), H100)
