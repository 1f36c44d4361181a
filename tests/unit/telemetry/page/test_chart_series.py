"""Decimation keeps extremes, ends and gaps; means and medians skip missing values."""

import numpy as np
import pytest

from hpcdist.telemetry.page import chart_series


@pytest.mark.parametrize("count", (1, 1999, 2000, 2001, 12_345, 300_000))
def test_decimation_keeps_extremes(rng, count):
    x, y = np.arange(count), rng.normal(size=count)
    spikes = rng.choice(count, min(count, 5), replace=False)
    y[spikes] = rng.permutation([50.0, -60.0, 70.0, -80.0, 90.0])[: len(spikes)]
    few_x, few_y = chart_series.decimate(x, y)
    assert len(few_x) <= chart_series.POINTS and (np.diff(few_x) > 0).all()
    assert (few_x[0], few_x[-1]) == (0, count - 1)
    assert (y[few_x] == few_y).all(), "points of the line, none made up"
    assert (few_y.max(), few_y.min()) == (y.max(), y.min())
    if count > chart_series.POINTS:
        # What a reader sees in a column of a picture: the lowest and the highest of each part.
        for part in np.array_split(np.arange(count), 100):
            local_data = few_y[np.isin(few_x, part)]
            inner = part[len(part) // 4 : -len(part) // 4]
            assert local_data.max() >= y[inner].max() and local_data.min() <= y[inner].min()


def test_decimation_keeps_gaps(rng):
    y = rng.normal(size=50_000)
    y[20_000:30_000] = np.nan
    y[7] = np.nan
    x, few = chart_series.decimate(np.arange(50_000), y)
    gap = x[np.isnan(few)]
    assert gap.size and gap.min() < 20_200 and gap.max() > 29_800
    assert few[(x >= 20_050) & (x < 29_950)].size == np.isnan(few[(x >= 20_050) & (x < 29_950)]).sum()
    assert np.isnan(chart_series.decimate(np.arange(9000), np.full(9000, np.nan))[1]).all()


@pytest.mark.parametrize("shape", ((997,), (997, 3)))
def test_means_and_medians_skip_missing_values(rng, shape):
    values = rng.normal(size=shape)
    values[rng.random(shape) < 0.2] = np.nan
    values[:300] = np.nan
    edges = chart_series.bin_edges(np.arange(997), 11)
    parts = [values[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
    assert np.isnan(chart_series.means(values, edges)[:3]).all()
    for result, exact in ((chart_series.means, np.nanmean), (chart_series.medians, np.nanmedian)):
        expected = [exact(part, axis=0) for part in parts if np.isfinite(part).any()]
        assert np.allclose(result(values, edges)[-len(expected) :], expected, equal_nan=True)


def test_smoothing_is_the_mean_of_preceding_values(rng):
    values = rng.normal(size=50)
    values[10] = np.nan
    result = chart_series.smooth(values, 7)
    for at in range(50):
        assert result[at] == pytest.approx(np.nanmean(values[max(0, at - 6) : at + 1]))
    assert chart_series.smooth(values, 1) is values


def test_edges_of_short_and_empty_series():
    assert chart_series.bin_edges(np.arange(3), 400).tolist() == [0, 1, 2, 3]
    assert len(chart_series.bin_edges(np.arange(0), 400)) == 1
