"""The architecture of a run in one line, for people."""

from hpcdist.strategies.decentralised.replicas import Replicas
from hpcdist.strategies.fixed_tree import FixedTreeExchange
from hpcdist.strategies.parameter_server.roles import Roles
from hpcdist.training.trainer import Trainer


def described(trainer: Trainer) -> str:
    """Return strategy, algorithm and, where there are any, servers and the schedule with its bubble (local).

    The bubble is the share of a step that a stage waits when all take equally long: (p-1)/(m+p-1) for p stages and m
    micro-batches, in GPipe and 1F1B alike.
    """
    recipe, grid = trainer.recipe, trainer.grid
    parallel, servers = recipe.parallel, recipe.parameter_server
    parts = [parallel.strategy, trainer.exchange.algorithm]
    if parallel.strategy == "parameter_server":
        roles = Roles.of(servers, trainer.comm.size)
        count = len(roles.servers)
        parts[1:] = [f"{count} {servers.placement} server{'s' if count > 1 else ''}", servers.described]
    if servers.transport != "messages":
        parts.append(f"transport {servers.transport}")
    if servers.mirrored:
        parts.append("mirrored")
    if isinstance(trainer.exchange, Replicas):
        parts.insert(1, trainer.exchange.described())
    if recipe.precision.working is not None:
        parts.append(f"{recipe.precision.working} working copies")
    if isinstance(trainer.exchange, FixedTreeExchange):
        parts.append(f"{recipe.run.logical_shards} logical shards, arithmetic {trainer.exchange.arithmetic}")
    if grid.pipeline > 1:
        stages, microbatches = grid.pipeline, parallel.microbatches
        bubble = (stages - 1) / (microbatches + stages - 1)
        again = ", recomputing" if parallel.recompute else ""
        parts.append(f"{parallel.order} of {microbatches} micro-batches{again}, bubble {bubble:.0%}")
    elif parallel.microbatches > 1:
        parts.append(f"{parallel.microbatches} micro-batches")
    return ", ".join(parts)
