"""Refit the layout of a run to fewer or more ranks: the same recipe, samples and steps.

The global batch stays, so every replica takes more samples, or fewer. First the data axis gives way; where not even
one replica is left, the pipeline is cut into fewer stages, and then the tensor axis. Every change is made from what
the recipe said: with the ranks it was begun with, a run has its own layout again.
"""

from dataclasses import replace
from typing import Any

from hpcdist.errors import ConfigurationError
from hpcdist.strategies.config import DEFAULT_PARTITION as PARTITION
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.strategies.zero.config import STAGES
from hpcdist.training.recipe.recipe import Recipe


def refit(recipe: Recipe, ranks: int) -> tuple[Recipe, int] | None:
    """Return the layout of ``recipe`` on at most ``ranks`` ranks, and how many of them it takes; None for none."""
    if _is_runnable(recipe, ranks):
        return recipe, ranks
    parallel = recipe.parallel
    for pipeline in range(parallel.pipeline, 0, -1):
        for tensor in range(parallel.tensor, 0, -1):
            for used in range(ranks, 0, -1):
                found = _with_degrees(recipe, pipeline, tensor)
                if found is not None and _is_runnable(found, used):
                    return found, used
    if recipe.run.noise_scale_every_steps:  # what needs several replicas to be measured shall not end a run
        return refit(replace(recipe, run=replace(recipe.run, noise_scale_every_steps=0)), ranks)
    return None


def _with_degrees(recipe: Recipe, pipeline: int, tensor: int) -> Recipe | None:
    """Return ``recipe`` with other degrees; None where its other keys forbid them."""
    before = recipe.parallel
    try:
        cut = _with_stages(before, pipeline)
        rows = before.sequence_parallel and tensor > 1
        return replace(recipe, parallel=replace(cut, data=0, tensor=tensor, sequence_parallel=rows))
    except ConfigurationError:
        return None


def _with_stages(parallel: ParallelConfig, pipeline: int) -> ParallelConfig:
    """Return ``parallel`` with so many stages: what was said of each of them has no meaning any more."""
    if pipeline == parallel.pipeline:
        return parallel
    of_stages: dict[str, Any] = {"stage_units": (), "stage_speeds": (), "stage_memory_bytes": ()}
    if pipeline == 1:
        of_stages |= {"schedule": "auto", "chunks": 1, "recompute": False, "partition": PARTITION}
    return replace(parallel, pipeline=pipeline, **of_stages)


def _is_runnable(recipe: Recipe, ranks: int) -> bool:
    """Whether exactly ``ranks`` ranks can train ``recipe``."""
    parallel = recipe.parallel
    try:
        roles = Roles.of(recipe.parameter_server, ranks) if parallel.has_roles else None
        grid = ProcessGrid.of(
            ranks,
            data=parallel.data,
            pipeline=parallel.pipeline,
            tensor=parallel.tensor,
            context=parallel.context,
            servers=ranks - len(roles.workers) if roles else 0,
        )
        recipe.check_world(grid.data)
        if parallel.strategy in STAGES:
            recipe.zero.degrees(STAGES[parallel.strategy], grid.data)
    except ConfigurationError:
        return False
    return True
