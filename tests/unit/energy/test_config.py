"""The energy section of a recipe refuses what cannot be measured."""

import math

import pytest

from harness.marks import cases
from hpcdist.energy.config import EnergyConfig
from hpcdist.errors import ConfigurationError


@pytest.mark.parametrize(("name", "value"), [("sources", "nvlm"), ("interval_s", 0.0), ("interval_s", math.nan)])
def test_values_that_make_no_sense(name, value):
    with pytest.raises(ConfigurationError, match=rf"energy\.{name} = "):
        EnergyConfig(**{name: value})


def test_an_interval_in_which_a_counter_may_wrap_unseen():
    with pytest.raises(ConfigurationError, match=r"energy\.interval_s"):
        EnergyConfig(interval_s=60.0)


@pytest.mark.parametrize(
    ("sources", "wanted"), [("auto", [True, True]), ("rapl", [False, True]), ("none", [False] * 2)]
)
def test_what_is_wanted(sources, wanted):
    assert [EnergyConfig(sources=sources).wants(source) for source in ("nvml", "rapl")] == wanted


@cases(
    "values, message",
    ({"cpu_tdp_w": 100.0}, "no effect with energy.sources = 'auto'"),
    ({"sources": "declared"}, "needs energy.cpu_tdp_w"),
    ({"sources": "declared", "cpu_tdp_w": math.inf}, "cpu_tdp_w = inf"),
    ({"sources": "declared", "cpu_tdp_w": 9.0, "idle_fraction": 1.5}, "idle_fraction = 1.5"),
    ({"pue": 0.9}, "pue = 0.9"),
    ({"utilisation_s": -1.0}, "utilisation_s"),
    ({"carbon_g_per_kwh": 300.0}, "carbon_source"),
    ({"carbon_source": "somebody"}, "no effect with energy.carbon_g_per_kwh = 0.0"),
    ({"currency": "EUR"}, "no effect with energy.price_per_kwh = 0.0"),
    ({"price_per_kwh": 0.3}, "with energy.currency = ''"),
    ({"sensor_window_s": 11.0}, "sensor_window_s = 11.0"),
    ({"shift": True, "sources": "rapl"}, "no effect with energy.sources = 'rapl'"),
)
def test_what_contradicts_itself(values, message):
    with pytest.raises(ConfigurationError, match=message):
        EnergyConfig(**values)


def test_the_model_is_never_meant_by_auto():
    assert not EnergyConfig().wants("declared")
    assert EnergyConfig(sources="declared", cpu_tdp_w=100.0).wants("declared")
