"""Recipes that do not fit a number of ranks are rejected before anything starts."""

import pytest

from harness.marks import cases
from hpcdist.errors import ConfigurationError
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.requirements import degrees_equation


@cases(
    "overrides, words",
    (["parallel.strategy=zero3", "zero.parameters=3"], "zero.parameters = 3 does not divide"),
    (["parallel.strategy=gossip", "decentralised.graph=edges", "decentralised.edges=0-1, 1-4"], "1-4 names rank 4"),
    (["parallel.strategy=gossip", "decentralised.graph=edges", "decentralised.edges=0-1, 2-3"], "not connected"),
    (["chaos.slow_ranks=[4]"], "there is no rank 4"),
)
def test_degrees_that_do_not_fit_the_ranks_are_rejected(overrides, words):
    recipe = recipes.load(None, overrides, {}).recipe
    with pytest.raises(ConfigurationError, match=words):
        degrees_equation(recipe, 4)


@cases(
    "overrides",
    ["parallel.strategy=zero3", "zero.parameters=2"],
    ["parallel.strategy=gossip", "decentralised.graph=edges", "decentralised.edges=0-1, 1-2, 2-3"],
)
def test_degrees_that_fit_give_an_equation(overrides):
    assert degrees_equation(recipes.load(None, overrides, {}).recipe, 4).startswith("4 = data 4 x")
