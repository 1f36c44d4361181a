"""The [zero] section: what is refused, and how it says what to change."""

import pytest

from harness.marks import cases
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.zero.config import ShardingDegrees, ZeroConfig
from hpcdist.training.recipe import recipe


def refused(*overrides):
    with pytest.raises(ConfigurationError) as found:
        recipe.load(None, overrides, {})
    return str(found.value)


@cases(
    "overrides, said",
    (("zero.gradients=-1",), "give a number of data ranks, or 0"),
    (("zero.persistent_below=-1",), "give a number of elements, or 0"),
    (("zero.parameters=2",), "no effect with parallel.strategy = 'allreduce'; remove it, or choose the strategy"),
    (("zero.shared_parameters=true", "parallel.strategy=zero1", "parallel.pipeline=2"), "parallel.pipeline = 1"),
    (("zero.persistent_below=5", "parallel.strategy=zero2"), "no parameters are cut; remove it, or choose"),
    (("zero.shared_parameters=true", "parallel.strategy=zero3"), "choose zero1 or zero2"),
    (("zero.shared_parameters=true", "parallel.strategy=zero1", "run.device=gpu"), "run.device = 'cpu'"),
    (
        ("zero.shared_parameters=true", "parallel.strategy=zero1", "zero.optimizer=2"),
        "set zero.shared_parameters = false, or zero.optimizer = 0",
    ),
)
def test_what_has_no_effect_or_cannot_be_is_refused(overrides, said):
    assert said in refused(*overrides)


@cases(
    "config, stage, expected",
    (ZeroConfig(), 1, (1, 1, 12)),
    (ZeroConfig(), 2, (1, 12, 12)),
    (ZeroConfig(), 3, (12, 12, 12)),
    (ZeroConfig(parameters=4), 3, (4, 12, 12)),
    (ZeroConfig(gradients=2, optimizer=6), 2, (1, 2, 6)),
    (ZeroConfig(optimizer=3), 1, (1, 1, 3)),
)
def test_degrees_are_those_of_the_stage_where_none_are_given(config, stage, expected):
    assert config.degrees(stage, 12) == ShardingDegrees(*expected)


@cases(
    "config, stage, said",
    (ZeroConfig(optimizer=2), 3, "zero.parameters 4 | zero.gradients 4 | zero.optimizer 2 | 4 data ranks: each"),
    (ZeroConfig(parameters=2), 1, "zero.parameters 2 does not divide zero.gradients 1"),
    (ZeroConfig(optimizer=3), 1, "zero.optimizer 3 does not divide data ranks 4; choose among the divisors of 4"),
)
def test_degrees_that_do_not_divide_are_refused_with_the_equation(config, stage, said):
    with pytest.raises(ConfigurationError) as found:
        config.degrees(stage, 4)
    assert said in str(found.value)
