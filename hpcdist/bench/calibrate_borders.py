"""Where times over sizes jump, as a library changes its ways there, or a cache is full: found by bisection. Pure.

Between two sizes next to each other, times that a line through alpha and beta can have grow by a factor between 1 and
that of the sizes. What falls or grows by clearly more is a jump, and sizes between are measured until it is hemmed in.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

Times = Mapping[int, float]  # bytes -> seconds
Series = Mapping[str, Times]  # of each algorithm or level

STEP: Final = 1.2  # times that grow by so much more than sizes, or fall, are a jump
HALVINGS: Final = 5
JUMPS: Final = 4  # of a series at most, the greatest ones: on a busy machine everything jumps
MULTIPLE: Final = 64  # bytes: what all operations can divide


def jump(left: tuple[int, float], right: tuple[int, float]) -> float:
    """Return how far two (bytes, seconds) are from any line through them that rises: 0 where it could be one."""
    grows, sizes_grow = right[1] / left[1], right[0] / left[0]
    if grows > STEP * sizes_grow:
        return grows / sizes_grow
    return 1 / grows if grows < 1 / STEP else 0.0


def borders(series: Series, measure: Callable[[Sequence[int]], Series]) -> tuple[int, ...]:
    """Return the sizes, ascending, that were measured to both sides of jumps between neighbours of each of ``series``.

    ``measure`` gets all sizes of a round at once, and returns the times of every series at these. Where it is
    collective, the times must be the same on all ranks, and so is this.
    """
    known = {name: dict(times) for name, times in series.items()}
    open_ = [(name, *pair) for name, times in known.items() for pair in _greatest(times)]
    asked: set[int] = set()
    for _ in range(HALVINGS):
        middles = [between(left, right) for _, left, right in open_]
        open_ = [one for one, middle in zip(open_, middles, strict=True) if one[1] < middle < one[2]]
        new = sorted({between(left, right) for _, left, right in open_} - asked)
        if not open_:
            break
        if new:
            for name, times in measure(new).items():
                known[name].update(times)
            asked.update(new)
        halves = [_half(name, known[name], left, right) for name, left, right in open_]
        open_ = [half for half in halves if half is not None]
    return tuple(sorted(asked))


def between(left: int, right: int) -> int:
    """Return the size in the geometric middle, a multiple of `MULTIPLE`."""
    return round((left * right) ** 0.5 / MULTIPLE) * MULTIPLE


def _greatest(times: Times) -> list[tuple[int, int]]:
    """Return the neighbours between which the greatest jumps are."""
    ordered = sorted(times)
    found = [(jump((a, times[a]), (b, times[b])), a, b) for a, b in zip(ordered, ordered[1:], strict=False)]
    return [(a, b) for much, a, b in sorted(found, reverse=True)[:JUMPS] if much]


def _half(name: str, times: Times, left: int, right: int) -> tuple[str, int, int] | None:
    """Return the half that the jump is in; None where it is in neither any more."""
    middle = between(left, right)
    points = [(size, times[size]) for size in (left, middle, right)]
    below, above = jump(*points[:2]), jump(*points[1:])
    if not (below or above):
        return None
    return (name, middle, right) if above > below else (name, left, middle)
