"""The energy section of a recipe rejects invalid and contradictory settings."""

import math

import pytest

from harness.marks import cases
from hpcdist.energy.config import EnergyConfig
from hpcdist.errors import ConfigurationError


@pytest.mark.parametrize(("name", "value"), [("sources", "nvlm"), ("interval_s", 0.0), ("interval_s", math.nan)])
def test_invalid_values_are_rejected(name, value):
    with pytest.raises(ConfigurationError, match=rf"energy\.{name} = "):
        EnergyConfig(**{name: value})


def test_interval_longer_than_a_counter_wrap_is_rejected():
    with pytest.raises(ConfigurationError, match=r"energy\.interval_s"):
        EnergyConfig(interval_s=60.0)


@pytest.mark.parametrize(
    ("sources", "expected"), [("auto", [True, True]), ("rapl", [False, True]), ("none", [False] * 2)]
)
def test_selected_sources_follow_the_setting(sources, expected):
    assert [EnergyConfig(sources=sources).wants(source) for source in ("nvml", "rapl")] == expected


@cases(
    "values, message",
    ({"cpu_tdp_w": 100.0}, "no effect with energy.sources = 'auto'"),
    ({"sources": "declared"}, "set energy.cpu_tdp_w"),
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
def test_contradictory_settings_are_rejected(values, message):
    with pytest.raises(ConfigurationError, match=message):
        EnergyConfig(**values)


def test_auto_never_selects_the_declared_model():
    assert not EnergyConfig().wants("declared")
    assert EnergyConfig(sources="declared", cpu_tdp_w=100.0).wants("declared")
