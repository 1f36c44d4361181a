"""The [zero] section: the rejected values, and the changes that the errors name."""

import pytest

from harness.marks import cases
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.core.grid import ShardingDegrees
from hpcdist.strategies.data.config import ZeroConfig
from hpcdist.training.recipe import recipe


def rejection(*overrides):
    with pytest.raises(ConfigurationError) as result:
        recipe.load(None, overrides, {})
    return str(result.value)


@cases(
    "overrides, output",
    (("zero.gradients=-1",), "it must be at least 0. Meaning: Ranks that shard the gradients"),
    (("zero.persistent_below=-1",), "0: shard all layers"),
    (("zero.parameters=2",), "no effect with parallel.strategy = 'allreduce'; remove it, or choose the strategy"),
    (("zero.shared_parameters=true", "parallel.strategy=zero1", "parallel.pipeline=2"), "parallel.pipeline = 1"),
    (("zero.persistent_below=5", "parallel.strategy=zero2"), "parameters are not sharded; remove it, or choose"),
    (("zero.shared_parameters=true", "parallel.strategy=zero3"), "choose zero1 or zero2"),
    (("zero.shared_parameters=true", "parallel.strategy=zero1", "run.device=gpu"), "run.device = 'cpu'"),
    (
        ("zero.shared_parameters=true", "parallel.strategy=zero1", "zero.optimizer=2"),
        "set zero.shared_parameters = false, or zero.optimizer = 0",
    ),
)
def test_useless_or_impossible_options_are_rejected(overrides, output):
    assert output in rejection(*overrides)


@cases(
    "config, stage, expected",
    (ZeroConfig(), 1, (1, 1, 12)),
    (ZeroConfig(), 2, (1, 12, 12)),
    (ZeroConfig(), 3, (12, 12, 12)),
    (ZeroConfig(parameters=4), 3, (4, 12, 12)),
    (ZeroConfig(gradients=2, optimizer=6), 2, (1, 2, 6)),
    (ZeroConfig(optimizer=3), 1, (1, 1, 3)),
)
def test_default_degrees_follow_the_stage(config, stage, expected):
    assert config.degrees(stage, 12) == ShardingDegrees(*expected)


@cases(
    "config, stage, output",
    (ZeroConfig(optimizer=2), 3, "zero.parameters = 4, zero.gradients = 4, zero.optimizer = 2 on 4 data ranks: each"),
    (ZeroConfig(parameters=2), 1, "zero.parameters = 2 does not divide zero.gradients = 1"),
    (
        ZeroConfig(optimizer=3),
        1,
        "zero.optimizer = 3 does not divide data ranks = 4; choose degrees among the divisors of 4",
    ),
)
def test_degrees_that_do_not_divide_are_rejected(config, stage, output):
    with pytest.raises(ConfigurationError) as result:
        config.degrees(stage, 4)
    assert output in str(result.value)
