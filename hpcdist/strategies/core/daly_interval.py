"""Daly's optimum checkpoint interval: the least total loss to saving and to failures.

With M the mean time between failures, d the time for which a save delays the run, t the work between two saves and R
the restart time, all in seconds

    wall / work = M e^(R/M) (e^((t + d)/M) - 1) / t

    t = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d     if d < 2M, else t = M

Daly, Future Generation Computer Systems 22(3), 2006, eq. 13 and 37, doi 10.1016/j.future.2004.11.016.
"""

import math


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's optimal work time in seconds between checkpoints.

    ``cost_s``: seconds per save. ``mtbf_s``: mean time between failures in seconds.
    """
    _check(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def slowdown(work_s: float, cost_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Return the expected wall time divided by the work time, with a save after every ``work_s`` seconds of work.

    ``cost_s``: seconds per save. ``mtbf_s``: mean seconds between failures. ``restart_s``: seconds per restart.
    """
    _check(cost_s, mtbf_s)
    assert work_s > 0 and restart_s >= 0
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((work_s + cost_s) / mtbf_s) / work_s


def overhead(cost_s: float, mtbf_s: float) -> float:
    """Return the fraction of time spent on saves of ``cost_s`` seconds each, at Daly's optimal interval.

    ``mtbf_s``: mean time between failures in seconds.
    """
    work_s = daly(cost_s, mtbf_s)
    return cost_s / (work_s + cost_s)


def _check(cost_s: float, mtbf_s: float) -> None:
    assert cost_s >= 0 and mtbf_s > 0, f"a save of {cost_s} s, failures every {mtbf_s} s"
