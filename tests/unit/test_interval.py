"""The interval between two saves, against the curve that it is to minimise."""

import math

import pytest

from hpcdist.strategies import interval


def least(cost_s, mtbf_s):
    """The minimum of the curve, by golden section."""
    low, high, ratio = 1e-9 * mtbf_s, 5 * mtbf_s, (math.sqrt(5) - 1) / 2
    for _ in range(200):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if interval.slowdown(left, cost_s, mtbf_s) < interval.slowdown(right, cost_s, mtbf_s):
            high = right
        else:
            low = left
    return low


@pytest.mark.parametrize("share", (1e-5, 1e-3, 1e-2, 0.1, 0.3))
def test_daly_is_near_the_minimum_of_the_curve_and_nearer_than_the_first_order(share):
    mtbf_s = 3600.0
    cost_s = share * mtbf_s
    best = least(cost_s, mtbf_s)
    error, first = (abs(way(cost_s, mtbf_s) / best - 1) for way in (interval.daly, interval.daly_first))
    assert error < 0.01 and error < first
    at = interval.slowdown(interval.daly(cost_s, mtbf_s), cost_s, mtbf_s)
    assert at / interval.slowdown(best, cost_s, mtbf_s) < 1.0005


def test_values_of_the_equations():
    assert interval.young(50, 10_000) == 1000
    assert interval.daly_first(50, 10_000) == 950
    share = 0.0025
    assert interval.daly(50, 10_000) == pytest.approx(1000 * (1 + math.sqrt(share) / 3 + share / 9) - 50)
    assert interval.daly(200, 100) == interval.daly(500, 100) == 100, "beyond 2M, one failure apart"
    assert interval.daly(199.99, 100) == pytest.approx(100 * 2 * (1 + 1 / 3 + 1 / 9) - 200, rel=1e-3)
    assert interval.daly(0, 100) == 0 and interval.daly_first(300, 100) == 0
    assert interval.overhead(50, 10_000) == pytest.approx(50 / (interval.daly(50, 10_000) + 50))


def test_a_restart_does_not_move_the_minimum():
    ratio = {interval.slowdown(t, 5, 1000, 60) / interval.slowdown(t, 5, 1000) for t in (10, 100, 700)}
    assert max(ratio) - min(ratio) < 1e-12
