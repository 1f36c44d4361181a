"""Where measured times jump over sizes, sizes between are measured until the jump is hemmed in."""

import pytest

from hpcdist.bench.calibrate import links as borders
from hpcdist.bench.calibrate.device import sizes

OCTAVES = sizes(1 << 10, 1 << 20)


def series(*times):
    """Return series over `OCTAVES`, a list of the rounds that are measured, and what measures."""
    rounds = []

    def measure(nbytes):
        rounds.append(list(nbytes))
        return at(nbytes)

    def at(nbytes):
        return {str(number): {each: one(each) for each in nbytes} for number, one in enumerate(times)}

    return at(OCTAVES), rounds, measure


def slope(nbytes):
    return 1e-6 + 1e-10 * nbytes


@pytest.mark.parametrize("factor", [0.6, 1.3, 2.5])
def test_a_jump_is_hemmed_in(rng, factor):
    where = int(rng.integers(1 << 14, 1 << 17))  # below, multiples of 64 are too far apart to halve often
    known, rounds, measure = series(lambda nbytes: slope(nbytes) * (factor if nbytes > where else 1.0))
    found = borders.borders(known, measure).between["0"]
    assert len(rounds) == 1 + borders.HALVINGS
    everything = sorted({*OCTAVES, *found})
    below, above = max(n for n in everything if n <= where), min(n for n in everything if n > where)
    step = 2**0.25 ** (0.5**borders.HALVINGS)
    assert above <= below * step + 2 * borders.MULTIPLE
    assert all(n % borders.MULTIPLE == 0 for n in found)
    assert found == {n: slope(n) * (factor if n > where else 1.0) for n in found}


def test_times_that_a_line_can_have_are_left_alone(rng):
    alpha, beta = rng.uniform(1e-6, 1e-4), rng.uniform(1e-11, 1e-8)
    known, rounds, measure = series(lambda nbytes: alpha, lambda nbytes: beta * nbytes, slope)
    assert borders.borders(known, measure) == ({}, {})
    assert rounds == []


def test_a_bend_is_no_jump():
    known, rounds, measure = series(lambda nbytes: 1e-6 + 2e-11 * (nbytes + max(0, nbytes - 40_000)))
    assert borders.borders(known, measure) == ({}, {})
    assert rounds == []


def test_a_jump_that_is_not_there_again_was_a_disturbance():
    once = OCTAVES[9]
    known, rounds, measure = series(slope)
    disturbed = {"0": {nbytes: time * (3 if nbytes == once else 1) for nbytes, time in known["0"].items()}}
    found = borders.borders(disturbed, measure)
    assert found.between == {}
    assert len(rounds) == 1
    assert {**disturbed["0"], **found.remeasured["0"]} == known["0"]


def test_series_are_searched_together_and_their_jumps_apart():
    def jump(where):
        return lambda nbytes: slope(nbytes) * (3.0 if nbytes > where else 1.0)

    known, rounds, measure = series(jump(5000), jump(200_000), slope)
    again, between = borders.borders(known, measure)
    assert [len(each) for each in rounds[1:]] == [2] * borders.HALVINGS
    assert again.keys() == between.keys() == {"0", "1"}
    for name, where in (("0", 5000), ("1", 200_000)):
        assert min(between[name]) <= where < max(between[name])
        assert all(where / 1.2 < nbytes < where * 1.2 for nbytes in between[name])


def test_noise_asks_for_the_greatest_jumps_only(rng):
    known, rounds, measure = series(lambda nbytes: slope(nbytes) * rng.uniform(1.0, 9.0))
    borders.borders(known, measure)
    assert 1 <= len(rounds) <= 1 + borders.HALVINGS
    assert len(rounds[0]) <= 2 * borders.JUMPS
    assert all(len(each) <= borders.JUMPS for each in rounds[1:])
