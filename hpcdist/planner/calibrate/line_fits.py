"""Fit measured times of messages and collectives by piecewise lines, with the error at sizes left out of the fit.

An n-byte message takes about alpha + beta n (Hockney, Parallel Computing 20 (1994) 389-398), with other constants in
each piece. The number and borders of pieces minimise Schwarz's criterion (Ann. Stat. 6 (1978) 461-464) with the Huber
loss of relative differences:

    points ln(loss / points) + constants ln(points)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from hpcdist.errors import UsageError

MOST_PIECES: Final = 12
LEAST_POINTS: Final = 2  # fitted points per piece
TURNS: Final = 12  # iterations of reweighting
HUBER: Final = 0.05  # relative difference above which a point counts less
FLOOR: Final = 0.02**2  # mean loss below which more pieces are no improvement (2 % deviation)
LEAST_SIZES: Final = 5


class FittedLine(NamedTuple):
    """Linear model of the time of a message or collective: seconds = ``latency_s`` + ``s_per_byte`` * bytes."""

    latency_s: float
    s_per_byte: float

    def at(self, nbytes: float) -> float:
        """Return the modelled seconds for ``nbytes`` bytes."""
        return self.latency_s + self.s_per_byte * nbytes


@dataclass(frozen=True, kw_only=True)
class FittedPieces:
    """Piecewise linear model of the time of a message or collective: one line per range of message sizes."""

    from_bytes: float
    until_bytes: tuple[float, ...]  # largest size of each range
    lines: tuple[FittedLine, ...]  # one line per range
    unseen_bytes: tuple[float, ...] = ()  # sizes that the fit did not use
    errors: tuple[float, ...] = ()  # relative errors at ``unseen_bytes``

    @property
    def error(self) -> float:
        """Largest absolute relative error at ``unseen_bytes``, or NaN if ``unseen_bytes`` is empty."""
        return max((abs(error) for error in self.errors), default=math.nan)

    def seconds(self, nbytes: float) -> float:
        """Return the modelled seconds for ``nbytes`` bytes. Outside all ranges, use the line of the nearest range."""
        for limit, line in zip(self.until_bytes, self.lines, strict=True):
            if nbytes <= limit:
                return line.at(nbytes)
        return self.lines[-1].at(nbytes)


def fit_pieces(nbytes: Sequence[float], seconds: Sequence[float], required_sizes: Sequence[float] = ()) -> FittedPieces:
    """Fit a piecewise linear function to ``seconds`` by message size ``nbytes``. Raises UsageError for invalid data.

    ``required_sizes``: sizes that the fit always uses. Of all other sizes, the fit leaves out every second size, to
    measure the error.
    """
    sizes, times = _medians(nbytes, seconds)
    # Every second size is left out, to measure the error of the fit. The largest size is always fitted.
    is_required = np.isin(sizes, required_sizes)
    others = np.flatnonzero(~is_required)
    fitted = np.unique(np.concatenate([others[::2], others[-1:], np.flatnonzero(is_required)]))
    rest = np.setdiff1d(np.arange(len(sizes)), fitted)
    pieces = _best(sizes[fitted], times[fitted])
    errors = [pieces.seconds(size) / time - 1.0 for size, time in zip(sizes[rest], times[rest], strict=True)]
    return FittedPieces(
        from_bytes=float(sizes[0]),
        until_bytes=pieces.until_bytes,
        lines=pieces.lines,
        unseen_bytes=tuple(sizes[rest].tolist()),
        errors=tuple(map(float, errors)),
    )


def _medians(nbytes: Sequence[float], seconds: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    size, time = np.asarray(nbytes, np.float64), np.asarray(seconds, np.float64)
    if size.shape != time.shape or size.ndim != 1:
        raise UsageError(
            "a fit of time against bytes needs one time for each size, got sizes of shape "
            f"{size.shape} and times of shape {time.shape}; pass two lists of equal length"
        )
    bad = np.flatnonzero(~(np.isfinite(time) & (time > 0) & np.isfinite(size) & (size >= 0)))
    if bad.size:
        raise UsageError(
            "a fit of time against bytes needs finite times above 0 s and finite sizes of at least 0 bytes, got "
            f"{time[bad[0]]} s for {size[bad[0]]:g} bytes; measure this size again"
        )
    sizes = np.unique(size)
    if len(sizes) < LEAST_SIZES:
        raise UsageError(
            f"a fit of time against bytes needs at least {LEAST_SIZES} different sizes in bytes, got {len(sizes)} "
            "sizes; measure more sizes"
        )
    return sizes, np.array([np.median(time[size == value]) for value in sizes])


def _best(sizes: np.ndarray, times: np.ndarray) -> FittedPieces:
    count = len(sizes)
    cache: dict[tuple[int, int], tuple[FittedLine, float]] = {}

    def piece(first: int, last: int) -> tuple[FittedLine, float]:
        if (first, last) not in cache:
            cache[first, last] = weighted_line(sizes[first:last], times[first:last])
        return cache[first, last]

    # least[k][i]: least loss of the first i points in k + 1 pieces, and the start of the last piece. The line of each
    # of O(count^2) ranges is fitted once.
    least = [[(piece(0, i)[1] if i >= LEAST_POINTS else math.inf, 0) for i in range(count + 1)]]
    for _ in range(1, min(MOST_PIECES, count // LEAST_POINTS)):
        least.append([_cheapest(least[-1], i, piece) for i in range(count + 1)])
    scores = [
        count * math.log(max(row[count][0] / count, FLOOR)) + (3 * lines - 1) * math.log(count)
        for lines, row in enumerate(least, 1)
    ]
    cuts, last = [count], count  # from the last piece back to the first
    for row in least[int(np.argmin(scores)) :: -1]:
        last = row[last][1]
        cuts.append(last)
    cuts.reverse()
    lines = [piece(first, last)[0] for first, last in zip(cuts, cuts[1:], strict=False)]
    borders = [_border(sizes[cut - 1], sizes[cut], *lines[at : at + 2]) for at, cut in enumerate(cuts[1:-1])]
    return FittedPieces(from_bytes=float(sizes[0]), until_bytes=(*borders, float(sizes[-1])), lines=tuple(lines))


def _cheapest(
    before: Sequence[tuple[float, int]], stop: int, piece: Callable[[int, int], tuple[FittedLine, float]]
) -> tuple[float, int]:
    candidates = [(before[at][0] + piece(at, stop)[1], at) for at in range(LEAST_POINTS, stop - LEAST_POINTS + 1)]
    return min(candidates, default=(math.inf, 0))


def weighted_line(sizes: np.ndarray, times: np.ndarray) -> tuple[FittedLine, float]:
    """Fit a line to ``times`` as a function of message ``sizes``. Return (line, Huber loss of the relative errors)."""
    weights = np.ones(len(sizes))
    line = FittedLine(float(np.median(times)), 0.0)
    # Iterative reweighting (P. J. Huber, Ann. Math. Stat. 35 (1964) 73-101). Intercept and slope are at least 0.
    for _ in range(TURNS):
        line = _least_squares(sizes / times, 1.0 / times, weights)  # divided by times: relative differences
        deviation = np.abs((line.latency_s + line.s_per_byte * sizes) / times - 1.0)
        weights = np.where(deviation <= HUBER, 1.0, HUBER / np.maximum(deviation, HUBER))  # weights of the Huber loss
    deviation = np.abs((line.latency_s + line.s_per_byte * sizes) / times - 1.0)
    loss = np.where(deviation <= HUBER, deviation**2, 2 * HUBER * deviation - HUBER**2)
    return line, float(loss.sum())


def _least_squares(slope: np.ndarray, constant: np.ndarray, weights: np.ndarray) -> FittedLine:
    aa, ab, bb = (float((weights * x * y).sum()) for x, y in ((constant, constant), (constant, slope), (slope, slope)))
    a1, b1 = float((weights * constant).sum()), float((weights * slope).sum())
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        a, b = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if a >= 0 and b >= 0:
            return FittedLine(a, b)
    # The loss is convex: if the free minimum has a negative constant, the constrained minimum has one constant 0.
    alone = FittedLine(a1 / aa, 0.0), FittedLine(0.0, b1 / bb if bb else 0.0)
    return min(
        alone, key=lambda line: float((weights * (line.latency_s * constant + line.s_per_byte * slope - 1) ** 2).sum())
    )


def _border(below: float, above: float, left: FittedLine, right: FittedLine) -> float:
    steeper = left.s_per_byte - right.s_per_byte
    if steeper:
        crossing = (right.latency_s - left.latency_s) / steeper
        if below <= crossing <= above:
            return crossing
    return math.sqrt(below * above) if below else above / 2
