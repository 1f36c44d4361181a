"""Where times over sizes jump, as a library changes its ways there, or a cache is full: found by bisection. Pure.

Between two sizes next to each other, times that a line through alpha and beta can have grow by a factor between 1 and
that of the sizes, and lie on the lines through the next two to the left and to the right. What clearly does neither is
a jump. What disturbs a machine also looks like one, so both sides are measured again, and the lesser time counts: what
disturbs makes times longer and none shorter. Where there still is a jump, sizes between are measured until it is hemmed
in.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

Times = Mapping[int, float]  # bytes -> seconds
Series = Mapping[str, Times]  # of each algorithm or level

STEP: Final = 1.12  # what times may be off before it counts as a jump
HALVINGS: Final = 4
JUMPS: Final = 4  # of a series at most, the greatest ones: on a busy machine everything jumps
MULTIPLE: Final = 64  # bytes: what all operations can divide


class Found(NamedTuple):
    """Times of the sizes at the jumps of each series, measured ``again`` or newly ``between`` (bytes -> seconds)."""

    again: dict[str, dict[int, float]]
    between: dict[str, dict[int, float]]


class _Bracket(NamedTuple):
    """The sizes to both sides of a jump of a series."""

    name: str
    left: int
    right: int

    @property
    def middle(self) -> int:
        """The geometric one, a multiple of `MULTIPLE`."""
        return round((self.left * self.right) ** 0.5 / MULTIPLE) * MULTIPLE

    @property
    def is_open(self) -> bool:
        """Whether there is a size between."""
        return self.left < self.middle < self.right


def borders(series: Series, measure: Callable[[Sequence[int]], Series]) -> Found:
    """Return what was measured at the jumps of each of ``series``, of four sizes or more, that has any.

    ``measure`` gets all sizes of a round at once, and returns the times of every series at these. Where it is
    collective, the times must be the same on all ranks, and so is this.
    """
    found = Found({}, {})
    suspects = {name: _jumps(times) for name, times in series.items()}
    sides = sorted({side for pairs in suspects.values() for pair in pairs for side in pair})
    if not sides:
        return found
    second = measure(sides)
    known = {name: dict(times) for name, times in series.items()}
    for name, pairs in suspects.items():
        own = {side for pair in pairs for side in pair}
        known[name].update({side: min(known[name][side], second[name][side]) for side in own})
        found.again.update({name: {side: known[name][side] for side in own}} if own else {})
    brackets = [_Bracket(name, *pair) for name, times in known.items() for pair in _jumps(times)]
    for _ in range(HALVINGS):
        brackets = [one for one in brackets if one.is_open]
        if not brackets:
            break
        times = measure(sorted({one.middle for one in brackets}))
        for one in brackets:
            found.between.setdefault(one.name, {})[one.middle] = times[one.name][one.middle]
            known[one.name][one.middle] = times[one.name][one.middle]
        brackets = [_half(known[one.name], one) for one in brackets]
    return found


def _jumps(times: Times) -> list[tuple[int, int]]:
    """Return the neighbours between which the greatest jumps are."""
    points = sorted(times.items())
    found = [(_jump(points, at), points[at][0], points[at + 1][0]) for at in range(len(points) - 1)]
    return [(left, right) for much, left, right in sorted(found, reverse=True)[:JUMPS] if much > STEP]


def _jump(points: Sequence[tuple[int, float]], at: int) -> float:
    """Return by what factor the times at ``at`` and after it are off any line that others would be on; 1 for none."""
    (left, left_s), (right, right_s) = points[at], points[at + 1]
    grows = right_s / left_s
    alone = max(grows / (right / left), 1 / grows)
    if at == 0 or at + 2 == len(points):
        return max(alone, 1.0)
    up = right_s / _through(points[at - 1], points[at], right)
    back = _through(points[at + 1], points[at + 2], left) / left_s
    # A bend, where the slope changes, is off on one side only, or to different ones.
    steps = math.sqrt(up * back) if (up > 1) == (back > 1) else 1.0
    return max(alone, steps, 1 / steps, 1.0)


def _through(first: tuple[int, float], second: tuple[int, float], size: int) -> float:
    """Return what the line through two points says of ``size``; neither its slope nor its latency is negative."""
    slope = max(0.0, (second[1] - first[1]) / (second[0] - first[0]))
    near = second if abs(second[0] - size) < abs(first[0] - size) else first
    return near[1] * size / near[0] if slope * near[0] > near[1] else near[1] + slope * (size - near[0])


def _half(times: Times, one: _Bracket) -> _Bracket:
    """Return the half in which times change by the greater factor."""
    below, above = (abs(math.log(times[b] / times[a])) for a, b in ((one.left, one.middle), (one.middle, one.right)))
    return one._replace(left=one.middle) if above > below else one._replace(right=one.middle)
