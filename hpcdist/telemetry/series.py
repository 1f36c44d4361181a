"""Long series made short enough to draw, without losing what stands out."""

from typing import Final

import numpy as np

POINTS: Final = 2000  # of a line
BINS: Final = 400  # of areas and pictures


def decimate(x: np.ndarray, y: np.ndarray, most: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return at most ``most`` points of a line, both (n,): of each part its lowest and its highest, in their order.

    Extremes stay what and where they are, and so do the first and the last point. NaN is a gap: a part without any
    number keeps one of its NaN.
    """
    if len(x) <= most:
        return x, y
    parts = max(1, (most - 2) // 2)
    edges = np.linspace(0, len(x), parts + 1).astype(np.int64)
    starts, part = edges[:-1], np.repeat(np.arange(parts), np.diff(edges))
    known = np.isfinite(y)
    low = np.minimum.reduceat(np.where(known, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(known, y, -np.inf), starts)
    kept = [np.array([0, len(x) - 1])]
    for extreme in (low, high):
        at = np.flatnonzero(known & (y == extreme[part]))
        _, first = np.unique(part[at], return_index=True)
        kept.append(at[first])
    kept.append(starts[~np.isfinite(low)])
    chosen = np.unique(np.concatenate(kept))
    return x[chosen], y[chosen]


def edges_of(x: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Return where each of at most ``bins`` parts of the rows of ``x`` (n,) begins, and n."""
    return np.unique(np.linspace(0, len(x), min(bins, len(x)) + 1).astype(np.int64))


def means(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the mean over the rows of each part, NaN left out: (n,) -> (parts,), (n, ranks) -> (parts, ranks)."""
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), edges[:-1], axis=0)
    count = np.add.reduceat(known.astype(np.float64), edges[:-1], axis=0)
    return np.where(count > 0, sums / np.maximum(count, 1), np.nan)


def medians(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the median over the rows of each part, NaN left out; shapes as `means`."""
    found = np.full((len(edges) - 1, *values.shape[1:]), np.nan)
    for part, (start, stop) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        found[part] = median(values[start:stop])
    return found


def median(values: np.ndarray) -> np.ndarray:
    """Return the median over the first dim, NaN left out and without a warning where there is nothing else."""
    ordered = np.sort(values, axis=0)  # NaN last
    count = np.isfinite(values).sum(axis=0)
    low, high = np.maximum(count - 1, 0) // 2, count // 2
    high = np.minimum(high, np.maximum(count - 1, 0))
    pick = [np.take_along_axis(ordered, np.expand_dims(at, 0), axis=0)[0] for at in (low, high)]
    return np.where(count > 0, (pick[0] + pick[1]) / 2, np.nan)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean over the last ``window`` values that are numbers; at the begin, of those there are."""
    if window <= 1 or not len(values):
        return values
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(0, stop - window)
    number = count[stop] - count[start]
    return np.where(number > 0, (sums[stop] - sums[start]) / np.maximum(number, 1), np.nan)
