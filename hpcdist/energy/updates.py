"""Between which moments a counter had its new values, of somebody who reads it now and then. Pure.

A reading that differs from the one before says that a new value came in between. New values come at a steady pace: what
is known of one bounds all others. Where reading and updating drift through each other, that leaves next to nothing
open; where they are locked, the distance of two readings.
"""

import math
from typing import Final

import numpy as np

OFF: Final = 0.02  # how far the pace may be off that is expected
TRIED: Final = 9  # paces in this range
BEGINS: Final = 5  # and moments of the first, in a period
FINE: Final = 0.1  # of the time between readings: a shorter period need not be looked for
MOST: Final = 5  # answers
SHAKE: Final = 0.01  # of a period: new values are not as steady as a clock


def brackets(before_ns: np.ndarray, seen_ns: np.ndarray, update_s: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the earliest and the latest moments (n,) of new values that were seen first at ``seen_ns`` (n,).

    There is more than one answer where nobody can tell how many new values came between two that were seen.

    ``before_ns`` (n,) are the readings before; ``update_s`` is how often a new value is expected, NaN: nobody knows.
    Between two readings there may have been several: it is the last of them.
    """
    expected = update_s * 1e9
    span = float(seen_ns[-1] - seen_ns[0])
    if not (expected > 0 and span > 0):
        return [(before_ns, seen_ns)]
    if expected < FINE * float(np.median(seen_ns - before_ns)):
        return [(seen_ns - round(expected), seen_ns)]
    low, high = (before_ns - seen_ns[0]).astype(np.float64), (seen_ns - seen_ns[0]).astype(np.float64)
    steps = np.arange(len(seen_ns), dtype=np.float64)
    if np.diff(seen_ns).max() > 1.5 * (seen_ns - before_ns)[1:].max():
        # Readings in between found nothing new: they are closer than new values, of which none was missed.
        expected = span / (len(seen_ns) - 1)
        counts = [steps]
    else:
        low = np.maximum(low, high - expected)
        guesses = sorted(expected * np.linspace(1 - OFF, 1 + OFF, TRIED), key=lambda pace: abs(pace - expected))
        counts = [np.floor(high / pace + begin / BEGINS) for pace in guesses for begin in range(BEGINS)]
    found = []
    for count in {count.tobytes(): count for count in counts}.values():
        bounds = _bounded(low - SHAKE * expected, high, count)
        if bounds is not None:
            least, most = (seen_ns[0] + np.rint(bound).astype(np.int64) for bound in bounds)
            found.append((least, most))
    return found[:MOST] or [(seen_ns[0] + low.astype(np.int64), seen_ns)]


def _bounded(low: np.ndarray, high: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the tightest bounds when new value ``count[k]`` came between ``low[k]`` and ``high[k]``; None: it cannot.

    With a pace between p and q, and n new values later than k: low[k + n] - n q <= moment of k <= high[k + n] - n p.
    """
    apart = count[None, :] - count[:, None]  # (k, j): how many later j is
    later = apart > 0
    if not later.any():
        return None
    distance = np.where(later, apart, 1.0)
    slowest = np.where(later, (high[None, :] - low[:, None]) / distance, math.inf).min()
    fastest = np.where(later, (low[None, :] - high[:, None]) / distance, -math.inf).max()
    if fastest > slowest:
        return None
    least = np.where(apart >= 0, low[None, :] - apart * slowest, low[None, :] - apart * fastest).max(axis=1)
    most = np.where(apart >= 0, high[None, :] - apart * fastest, high[None, :] - apart * slowest).min(axis=1)
    return (least, most) if np.all(least <= most) else None
