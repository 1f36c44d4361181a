"""If measured times jump between two sizes, sizes between them are measured until the jump is located."""

import pytest

from hpcdist.bench import link_speed as borders
from hpcdist.bench.device_speed import sizes

OCTAVES = sizes(1 << 10, 1 << 20)


def make_series(*times):
    """Return time series over `OCTAVES`, a list that records the measured sizes, and a measure function."""
    rounds = []

    def measure(nbytes):
        rounds.append(list(nbytes))
        return time_at(nbytes)

    def time_at(nbytes):
        return {str(number): {each: one(each) for each in nbytes} for number, one in enumerate(times)}

    return time_at(OCTAVES), rounds, measure


def linear_time(nbytes):
    return 1e-6 + 1e-10 * nbytes


@pytest.mark.parametrize("factor", [0.6, 1.3, 2.5])
def test_jump_is_located_by_halving(rng, factor):
    where = int(rng.integers(1 << 14, 1 << 17))  # for smaller sizes, multiples of 64 are too far apart to halve often
    reference, rounds, measure = make_series(lambda nbytes: linear_time(nbytes) * (factor if nbytes > where else 1.0))
    result = borders.borders(reference, measure).between["0"]
    assert len(rounds) == 1 + borders.HALVINGS
    everything = sorted({*OCTAVES, *result})
    below, above = max(n for n in everything if n <= where), min(n for n in everything if n > where)
    step = 2**0.25 ** (0.5**borders.HALVINGS)
    assert above <= below * step + 2 * borders.MULTIPLE
    assert all(n % borders.MULTIPLE == 0 for n in result)
    assert result == {n: linear_time(n) * (factor if n > where else 1.0) for n in result}


def test_linear_times_need_no_further_sizes(rng):
    alpha, beta = rng.uniform(1e-6, 1e-4), rng.uniform(1e-11, 1e-8)
    reference, rounds, measure = make_series(lambda nbytes: alpha, lambda nbytes: beta * nbytes, linear_time)
    assert borders.borders(reference, measure) == ({}, {})
    assert rounds == []


def test_bend_is_not_a_jump():
    reference, rounds, measure = make_series(lambda nbytes: 1e-6 + 2e-11 * (nbytes + max(0, nbytes - 40_000)))
    assert borders.borders(reference, measure) == ({}, {})
    assert rounds == []


def test_jump_that_does_not_repeat_is_dropped():
    once = OCTAVES[9]
    reference, rounds, measure = make_series(linear_time)
    disturbed = {"0": {nbytes: time * (3 if nbytes == once else 1) for nbytes, time in reference["0"].items()}}
    result = borders.borders(disturbed, measure)
    assert result.between == {}
    assert len(rounds) == 1
    assert {**disturbed["0"], **result.remeasured["0"]} == reference["0"]


def test_several_series_share_rounds_but_not_jumps():
    def time_with_jump(where):
        return lambda nbytes: linear_time(nbytes) * (3.0 if nbytes > where else 1.0)

    reference, rounds, measure = make_series(time_with_jump(5000), time_with_jump(200_000), linear_time)
    again, between = borders.borders(reference, measure)
    assert [len(each) for each in rounds[1:]] == [2] * borders.HALVINGS
    assert again.keys() == between.keys() == {"0", "1"}
    for name, where in (("0", 5000), ("1", 200_000)):
        assert min(between[name]) <= where < max(between[name])
        assert all(where / 1.2 < nbytes < where * 1.2 for nbytes in between[name])


def test_noise_measures_only_the_largest_jumps(rng):
    reference, rounds, measure = make_series(lambda nbytes: linear_time(nbytes) * rng.uniform(1.0, 9.0))
    borders.borders(reference, measure)
    assert 1 <= len(rounds) <= 1 + borders.HALVINGS
    assert len(rounds[0]) <= 2 * borders.JUMPS
    assert all(len(each) <= borders.JUMPS for each in rounds[1:])
