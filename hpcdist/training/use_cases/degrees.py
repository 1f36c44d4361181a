"""Check that a recipe fits a number of ranks, before anything is started and without MPI.

Returns the degrees of parallelism as text ("8 = data 4 x pipeline 2 x ...") or as a grid. Asked by `hpcdist run`,
`submit` and sweeps; it imports numpy only for the graphs of gossip.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcdist.strategies.core.grid import ProcessGrid
    from hpcdist.training.recipe.recipe import Recipe


def degrees_equation(recipe: "Recipe", world: int) -> str:
    """Return the degrees of parallelism of ``recipe`` on ``world`` ranks, or raise ConfigurationError."""
    grid = grid_of_recipe(recipe, world)
    if recipe.parallel.strategy == "gossip":
        from hpcdist.strategies.decentralised import gossip  # numpy takes its time

        gossip.build(recipe.decentralised.graph, grid.data, recipe.decentralised.edges)
    product = f"data {grid.data} x pipeline {grid.pipeline} x tensor {grid.tensor} x context {grid.context}"
    return f"{world} = {product}" + (f" + servers {world - grid.size}" if world != grid.size else "")


def grid_of_recipe(recipe: "Recipe", world: int) -> "ProcessGrid":
    """Return the grid of ``recipe`` on ``world`` ranks, or raise ConfigurationError; numpy is not needed."""
    from hpcdist.strategies.core.grid import ProcessGrid
    from hpcdist.strategies.parameter_server.partition import Roles
    from hpcdist.strategies.zero.config import STAGES

    parallel = recipe.parallel
    roles = Roles.of(recipe.parameter_server, world) if parallel.has_roles else None
    servers = world - len(roles.workers) if roles else 0
    grid = ProcessGrid.of(
        world,
        data=parallel.data,
        pipeline=parallel.pipeline,
        tensor=parallel.tensor,
        context=parallel.context,
        servers=servers,
    )
    if parallel.strategy == "parameter_server" and roles is None:
        Roles.of(recipe.parameter_server, grid.data)
    recipe.check_world(grid.data)
    recipe.chaos.check_world(world, world - servers, lock_step=recipe.parameter_server.lock_step)
    if parallel.strategy in STAGES:
        recipe.zero.degrees(STAGES[parallel.strategy], grid.data)
    return grid
