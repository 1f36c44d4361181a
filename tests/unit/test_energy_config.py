"""The energy section of a recipe refuses what cannot be measured."""

import math

import pytest

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
