"""The interval between two saves, compared with the slowdown curve that it minimises."""

import math

import pytest

from hpcdist.strategies.core import daly_interval


def curve_minimum(cost_s, mtbf_s):
    """Return the minimum of the curve, by golden section search."""
    low, high, ratio = 1e-9 * mtbf_s, 5 * mtbf_s, (math.sqrt(5) - 1) / 2
    for _ in range(200):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if daly_interval.slowdown(left, cost_s, mtbf_s) < daly_interval.slowdown(right, cost_s, mtbf_s):
            high = right
        else:
            low = left
    return low


@pytest.mark.parametrize("share", (1e-5, 1e-3, 1e-2, 0.1, 0.3))
def test_daly_interval_is_closer_to_the_minimum_than_first_order(share):
    mtbf_s = 3600.0
    cost_s = share * mtbf_s
    best = curve_minimum(cost_s, mtbf_s)
    first_order = math.sqrt(2 * cost_s * mtbf_s) - cost_s
    error, first = (abs(way / best - 1) for way in (daly_interval.daly(cost_s, mtbf_s), first_order))
    assert error < 0.01 and error < first
    at = daly_interval.slowdown(daly_interval.daly(cost_s, mtbf_s), cost_s, mtbf_s)
    assert at / daly_interval.slowdown(best, cost_s, mtbf_s) < 1.0005


def test_daly_interval_matches_the_equations():
    share = 0.0025
    assert daly_interval.daly(50, 10_000) == pytest.approx(1000 * (1 + math.sqrt(share) / 3 + share / 9) - 50)
    assert daly_interval.daly(200, 100) == daly_interval.daly(500, 100) == 100, "beyond 2M, one failure apart"
    assert daly_interval.daly(199.99, 100) == pytest.approx(100 * 2 * (1 + 1 / 3 + 1 / 9) - 200, rel=1e-3)
    assert daly_interval.daly(0, 100) == 0
    assert daly_interval.overhead(50, 10_000) == pytest.approx(50 / (daly_interval.daly(50, 10_000) + 50))


def test_restart_time_does_not_move_the_minimum():
    ratio = {daly_interval.slowdown(t, 5, 1000, 60) / daly_interval.slowdown(t, 5, 1000) for t in (10, 100, 700)}
    assert max(ratio) - min(ratio) < 1e-12
