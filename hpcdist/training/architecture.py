"""The architecture of a run in one line, for people."""

from typing import Final

from hpcdist.models.config import FOREIGN
from hpcdist.strategies.core.sharded_update import ShardedUpdateExchange
from hpcdist.strategies.decentralised.replicas import Replicas
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.strategies.schedule.generate import registry
from hpcdist.strategies.tensor.model import CutModel
from hpcdist.strategies.zero.config import STAGES, ZeroConfig
from hpcdist.training.trainer import Trainer

MOST_OF_A_RANK: Final = 0.75  # of its parameters in one stage: sharding these saves little of their memory
OVERLAPPED: Final = {"thread": "overlapped by a thread", "poll": "overlapped by polling"}


def described(trainer: Trainer) -> str:
    """Return strategy, algorithm and, where there are any, servers, what a recipe changes of these, and the schedule.

    Local. A key that changes what a rank keeps, sends or waits for is named where it is not at its default.

    The bubble is the share of its span that a stage waits where all are alike, and forward and both halves of backward
    take equally long; schedules, or numbers of micro-batches, without a closed form have none here, and neither has
    recomputing, which fills a part of it.
    """
    recipe, grid = trainer.recipe, trainer.grid
    parallel, servers = recipe.parallel, recipe.parameter_server
    algorithms = list(dict.fromkeys(row.partition("<=")[0] for row in trainer.exchange.algorithm.split(",")))
    parts = [parallel.strategy, " or ".join(algorithms) + (" by size" if len(algorithms) > 1 else "")]
    if parallel.strategy == "parameter_server":
        roles = Roles.of(servers, trainer.seat.members.size)
        count = len(roles.servers)
        parts[1:] = [f"{count} {servers.placement} server{'s' if count > 1 else ''}", servers.described]
    if servers.transport != "messages":
        parts.append(f"transport {servers.transport}")
    if servers.mirrored:
        parts.append("mirrored")
    if isinstance(trainer.exchange, Replicas):
        parts.insert(1, trainer.exchange.described())
    parts += _where_states_lie(recipe.zero, trainer)
    if recipe.communication.overlap != "none":
        parts.append(OVERLAPPED[recipe.communication.overlap] + (", delayed" if recipe.communication.delayed else ""))
    if trainer.compression.name != "none":
        parts.append(f"gradients as {trainer.compression.name}")
    if recipe.compression.parameters != "none":
        parts.append(f"weights gathered as {recipe.compression.parameters}")
    if recipe.data.shares == "measured":
        parts.append("samples by measured speed")
    if recipe.precision.working is not None:
        parts.append(f"{recipe.precision.working} working copies")
    if isinstance(trainer.exchange, ShardedUpdateExchange) and trainer.exchange.shards is not None:
        shards = trainer.exchange.shards
        parts.append(f"{shards.count} logical shards, arithmetic {shards.arithmetic}")
    if isinstance(trainer.model, CutModel):
        rows = ", activations by rows" if parallel.sequence_parallel else ""
        parts.append(f"tensor by {trainer.model.axis.algorithm}{rows}")
    if grid.pipeline > 1:
        parts.append(f"{parallel.order} of {parallel.microbatches} micro-batches")
        bubble = registry.bubble(parallel.order, grid.pipeline, parallel.microbatches, chunks=parallel.chunks_each)
        if parallel.recompute:
            parts.append("recomputing")
        elif bubble is not None:
            parts.append(f"bubble {bubble:.0%}")
    elif parallel.microbatches > 1:
        parts.append(f"{parallel.microbatches} micro-batches")
    if parallel.recomputes_layers:
        parts.append("layers recomputed")
    return ", ".join(parts)


def _where_states_lie(zero: ZeroConfig, trainer: Trainer) -> list[str]:
    """Return what the keys of ZeRO change of its stage (local)."""
    stage = STAGES.get(trainer.recipe.parallel.strategy)
    if stage is None:
        return []
    parts = []
    if zero.parameters or zero.gradients or zero.optimizer:
        cut = zero.degrees(stage, trainer.grid.data)
        parts.append(f"degrees {cut.parameters}, {cut.gradients}, {cut.optimizer}")
    if zero.persistent_below:
        parts.append(f"layers below {zero.persistent_below:,} elements whole")
    if zero.prefetch:
        parts.append(f"{zero.prefetch} gathered ahead")
    if zero.shared_parameters:
        parts.append("parameters shared by a node")
    for place, what in ((zero.offload_optimizer, "optimizer state"), (zero.offload_parameters, "shards")):
        if place != "none":
            parts.append(f"{what} {'in files' if place == 'file' else 'on the host'}")
    return parts


def gathered_whole(trainer: Trainer) -> str:
    """Return a warning where ZeRO-3 gathers most of this rank's parameters at once; "" where it does not (local).

    A model of the library is cut already: the warning is for that of a user, who can cut it.
    """
    model, ranges = trainer.model, trainer.seat.ranges
    if trainer.recipe.model.kind not in FOREIGN or not trainer.exchange.gathers:
        return ""
    largest = max(ranges, key=lambda unit: ranges[unit].size)
    share = ranges[largest].size / sum(part.size for part in ranges.values())
    if share < MOST_OF_A_RANK:
        return ""
    stage = model.stages[largest]
    called = getattr(stage, "name", "")
    return (
        f"ZeRO-3 gathers stage by stage, and stage {stage.layer}{called and f', {called},'} has {share:.0%} of the "
        "parameters of this rank: within a step they are whole on every rank, and their gradients too; only the state "
        "of the optimizer stays cut. Wrap a list of smaller stages, such as [embedding, *blocks, head], of which each "
        "takes one tensor and returns one"
    )
