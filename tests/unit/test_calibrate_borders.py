"""Where measured times jump over sizes, sizes between are measured until the jump is hemmed in."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from hpcdist.bench import calibrate_borders as borders
from hpcdist.bench.calibrate_points import sizes

OCTAVES = sizes(1 << 10, 1 << 20)


def series(*times: Callable[[int], float]) -> tuple[Mapping[str, Mapping[int, float]], list[list[int]], Callable]:
    """Return series over `OCTAVES`, a list of the rounds that are measured, and what measures."""
    rounds: list[list[int]] = []

    def measure(nbytes: Sequence[int]) -> dict[str, dict[int, float]]:
        rounds.append(list(nbytes))
        return at(nbytes)

    def at(nbytes: Sequence[int]) -> dict[str, dict[int, float]]:
        return {str(number): {each: one(each) for each in nbytes} for number, one in enumerate(times)}

    return at(OCTAVES), rounds, measure


def slope(nbytes: int) -> float:
    return 1e-6 + 1e-10 * nbytes


@pytest.mark.parametrize("factor", [0.6, 2.5])
def test_a_jump_is_hemmed_in(rng: np.random.Generator, factor: float):
    where = int(rng.integers(2048, 1 << 17))
    known, rounds, measure = series(lambda nbytes: slope(nbytes) * (factor if nbytes > where else 1.0))
    found = borders.borders(known, measure)
    assert len(rounds) == borders.HALVINGS
    everything = sorted({*OCTAVES, *found})
    below, above = max(n for n in everything if n <= where), min(n for n in everything if n > where)
    step = 2**0.5 ** (0.5**borders.HALVINGS)
    assert above <= below * step + 2 * borders.MULTIPLE
    assert all(n % borders.MULTIPLE == 0 for n in found)


def test_times_that_a_line_can_have_are_left_alone(rng: np.random.Generator):
    alpha, beta = rng.uniform(1e-6, 1e-4), rng.uniform(1e-11, 1e-8)
    known, rounds, measure = series(lambda nbytes: alpha, lambda nbytes: beta * nbytes, slope)
    assert borders.borders(known, measure) == ()
    assert rounds == []


def test_series_are_searched_together_and_their_jumps_apart():
    def jump(where: int) -> Callable[[int], float]:
        return lambda nbytes: slope(nbytes) * (3.0 if nbytes > where else 1.0)

    known, rounds, measure = series(jump(5000), jump(200_000), slope)
    found = borders.borders(known, measure)
    assert [len(each) for each in rounds] == [2] * borders.HALVINGS
    for where in (5000, 200_000):
        near = [n for n in found if where / 1.05 < n < where * 1.05]
        assert min(near) <= where < max(near)


def test_noise_asks_for_the_greatest_jumps_only(rng: np.random.Generator):
    known, rounds, measure = series(lambda nbytes: slope(nbytes) * rng.uniform(1.0, 9.0))
    borders.borders(known, measure)
    assert 1 <= len(rounds) <= borders.HALVINGS
    assert max(map(len, rounds)) <= borders.JUMPS
