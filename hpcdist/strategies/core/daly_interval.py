"""The optimum checkpoint interval of Daly: the least loss to saving and failures. Pure functions.

With failures at random times, M seconds apart in the mean, a save that holds the run up for d seconds, and t seconds
of work between two saves, a run spends (Daly 2006, eq. 13, for a restart of R seconds)

    wall / work = M e^(R/M) (e^((t + d)/M) - 1) / t

R changes the height of that curve and not the place of its minimum.

    t = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d, d < 2M     Daly 2006, eq. 37
    t = M                                                      d >= 2M

J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
Future Generation Computer Systems 22(3), 2006, doi 10.1016/j.future.2004.11.016. What counts of a save that goes on
in the background is the time for which it holds the steps up.
"""

import math


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between two saves; valid also for costs near the time between failures."""
    _check(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def slowdown(work_s: float, cost_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Return wall time over work of a run that saves after every ``work_s`` seconds of work: the curve above."""
    _check(cost_s, mtbf_s)
    assert work_s > 0 and restart_s >= 0
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((work_s + cost_s) / mtbf_s) / work_s


def overhead(cost_s: float, mtbf_s: float) -> float:
    """Return the share of a run that saving alone takes at the interval of `daly`."""
    work_s = daly(cost_s, mtbf_s)
    return cost_s / (work_s + cost_s)


def _check(cost_s: float, mtbf_s: float) -> None:
    assert cost_s >= 0 and mtbf_s > 0, f"a save of {cost_s} s, failures every {mtbf_s} s"
