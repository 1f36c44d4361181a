"""Metrics derived from joules: closed forms, and None with a reason for unknown values."""

import json
import math

import numpy as np
import pytest

from hpcdist.energy import energy_metrics
from hpcdist.energy.energy_metrics import CarbonIntensity


def test_emissions_are_kwh_times_pue_times_intensity(rng):
    energy_j, pue, grams = rng.uniform(1e3, 1e12), rng.uniform(1, 2), rng.uniform(5, 900)
    intensity = CarbonIntensity(grams, "grid operator", "2025", 0.8 * grams, 1.5 * grams)
    result = energy_metrics.emissions(energy_j, pue, intensity)
    assert result.grams == pytest.approx(energy_j / 3.6e6 * pue * grams) and not result.reason
    assert (result.low, result.high) == (pytest.approx(0.8 * result.grams), pytest.approx(1.5 * result.grams))
    assert energy_metrics.emissions(3.6e6, 1.0, CarbonIntensity(100.0)).low == 100


def test_unknown_figures_are_none_with_reason():
    figures = energy_metrics.figures(math.nan, 10.0)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert figures["emissions_g"] is figures["energy_kwh"] is figures["energy_delay_product_js"] is None
    assert figures["emissions_reason"] == "the energy is not known"
    figures = energy_metrics.figures(7.2e6, 100.0, pue=1.5)
    assert figures["energy_kwh"] == 2 and figures["facility_kwh"] == 3 and figures["average_w"] == 72e3
    assert figures["emissions_g"] is None and "energy.carbon_g_per_kwh" in figures["emissions_reason"]
    assert figures["cost"] is None and "price" in figures["cost_reason"]
    assert (figures["energy_delay_product_js"], figures["energy_delay_squared_js2"]) == (7.2e8, 7.2e10)
    figures = energy_metrics.figures(
        7.2e6, 100.0, pue=1.5, intensity=CarbonIntensity(50.0, "s", "d"), price_per_kwh=0.2, currency="E"
    )
    assert figures["cost"] == pytest.approx(0.6) and figures["emissions_g"] == 150 and figures["cost_reason"] is None
    assert (figures["carbon_source"], figures["carbon_date"], figures["currency"]) == ("s", "d", "E")


def test_rates_without_a_count_are_none():
    assert energy_metrics.rates(90.0, 30, 60, math.nan) == {"j_per_step": 3.0, "j_per_sample": 1.5, "j_per_token": None}
    assert energy_metrics.rates(math.nan, 30, 0, 90) == dict.fromkeys(("j_per_step", "j_per_sample", "j_per_token"))


def test_intensity_over_time_is_weighted_by_joules(rng):
    """Half of the joules fall into an hour at 100 g, the rest equally into hours at 100 g and 400 g."""
    edges, grams = np.array([0.0, 3600, 7200, 10800]), np.array([100.0, 400, 900])
    mean, low, high = energy_metrics.over_time(
        edges, grams, np.array([0, 1800]), np.array([1800, 5400]), np.array([5.0, 5.0])
    )
    assert mean == pytest.approx(0.5 * 100 + 0.5 * 250) and (low, high) == (100, 400)
    grid = np.sort(rng.uniform(0, 10800, 50))
    joules = rng.uniform(0, 1, 49)
    mean, _, _ = energy_metrics.over_time(edges, grams, grid[:-1], grid[1:], joules)
    fine = np.linspace(0, 1, 2001)[:-1] + 0.00025
    expected = sum(
        j * grams[np.searchsorted(edges, a + fine * (b - a)) - 1].mean()
        for a, b, j in zip(grid[:-1], grid[1:], joules, strict=True)
    )
    assert mean == pytest.approx(expected / joules.sum(), rel=1e-3)
    assert math.isnan(energy_metrics.over_time(edges, grams, np.array([-1]), np.array([5]), np.array([1.0]))[0])
    assert math.isnan(energy_metrics.over_time(edges, grams, np.array([5]), np.array([10801]), np.array([1.0]))[0])


def test_target_is_interpolated_between_two_steps():
    steps = np.arange(1, 101)  # the mean of five lags by two
    result = energy_metrics.to_target(0.5, steps, 1 - steps / 100, 2.0 * steps, 30.0 * steps)
    assert (result.step, result.seconds, result.joules) == (pytest.approx(52), pytest.approx(104), pytest.approx(1560))
    result = energy_metrics.to_target(0.505, steps, 1 - steps / 100, 2.0 * steps, 30.0 * steps)
    assert result.step == pytest.approx(51.5) and result.joules == pytest.approx(1545)
    at_once = energy_metrics.to_target(5.0, steps, 1 - steps / 100, 2.0 * steps, 30.0 * steps)
    assert at_once.step == 1 and at_once.joules == 30


def test_single_low_loss_does_not_reach_the_target(rng):
    steps = np.arange(1, 501)
    losses = 2.0 - steps / 500
    losses[100] = 0.0
    result = energy_metrics.to_target(1.5, steps, losses, steps, steps)
    assert result.step == pytest.approx(250 + 4.5, abs=1.5), "the mean of ten lags by four and a half"
    assert energy_metrics.smoothed(losses)[250] == pytest.approx(losses[241:251].mean())


def test_unreached_target_has_a_reason():
    steps = np.arange(1, 11)
    result = energy_metrics.to_target(0.1, steps, np.full(10, 1.5), steps, steps)
    assert math.isnan(result.joules) and result.reason == (
        "the loss never reached 0.1; the smallest was 1.5 after step 10"
    )
    assert energy_metrics.to_target(0.1, steps, np.full(10, math.nan), steps, steps).reason == "no loss is known"
    unknown = energy_metrics.to_target(2.0, steps, np.full(10, 1.5), steps, np.full(10, math.nan))
    assert math.isnan(unknown.joules) and unknown.seconds == 1 and "not known" in unknown.reason
