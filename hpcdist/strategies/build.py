"""Construction of one rank's strategy, of its executor, and of its proven operations.

`build_exchange` selects the strategy. `data.catalogue` composes allreduce and ZeRO.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.arrays.ranges import Range
from hpcdist.comm.record.spans import NULL_SPANS, SpanSink
from hpcdist.errors import ConfigurationError, ScheduleError
from hpcdist.models.arena import Arena
from hpcdist.reporting.rules import section_values
from hpcdist.strategies import rules
from hpcdist.strategies.compressed.registry import Compression
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.context.operations import Messages
from hpcdist.strategies.context.proof import prove_messages
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.grid import ProcessGrid, ShardingDegrees
from hpcdist.strategies.core.logical_shards import LogicalShards
from hpcdist.strategies.core.mixed_precision import NoLossScale
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.tied import TiedCopies, tied_tensors
from hpcdist.strategies.data import catalogue
from hpcdist.strategies.data.config import STAGES, ZeroConfig
from hpcdist.strategies.decentralised.config import DecentralisedConfig
from hpcdist.strategies.decentralised.gossip import GossipExchange
from hpcdist.strategies.decentralised.replicas import LocalSgdExchange, Replicas
from hpcdist.strategies.expert.axis import expert_replicas
from hpcdist.strategies.expert.exchange import ExpertExchange
from hpcdist.strategies.parameter_server.backup_workers import BackupExchange
from hpcdist.strategies.parameter_server.bounded_staleness import AsynchronousExchange
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.strategies.parameter_server.lockstep import LockStepExchange
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.strategies.schedule.executor import Executor
from hpcdist.strategies.schedule.graphs import StageGraphs
from hpcdist.strategies.schedule.operation_list import (
    compute_operations,
    insert_exchange,
    insert_gathers,
    insert_polls,
    overlap_reductions,
    prefetch_gathers,
)
from hpcdist.strategies.schedule.passes import Passes
from hpcdist.strategies.schedule.step import StepObserver
from hpcdist.strategies.schedule.verify.deadlock import PeerRanks
from hpcdist.strategies.schedule.verify.proof import Proof, verify


@dataclass(frozen=True)
class StrategySettings:
    """Settings of a recipe that select a strategy and its options."""

    strategy: str  # parallel.strategy
    zero: ZeroConfig
    parameter_server: ParameterServerConfig
    decentralised: DecentralisedConfig
    compression: Compression  # the name "none": uncompressed
    delayed: bool = False  # communication.delayed
    logical_shards: int = 0  # run.logical_shards


def build_exchange(context: RankContext, settings: StrategySettings) -> Exchange:
    """Return this rank's gradient exchange, which ``settings`` select. Collective over the world."""
    shards = LogicalShards(context, settings.logical_shards) if settings.logical_shards else None
    if context.experts.size > 1 and not context.portion:
        replicas = expert_replicas(context.data, context.experts.size)
        return ExpertExchange(context, replicas, lambda portion: build_exchange(portion, settings))
    strategy, compression = settings.strategy, settings.compression
    compresses = compression.name != "none"
    if strategy == "parameter_server":
        return server_exchange(context, settings.parameter_server, shards, compression if compresses else None)
    if strategy in DECENTRALISED_EXCHANGES:
        return DECENTRALISED_EXCHANGES[strategy](context, settings.decentralised)
    if strategy in STAGES:
        return catalogue.zero(context, STAGES[strategy], settings.zero, shards, compression)
    if settings.delayed:
        return catalogue.delayed(context)
    return catalogue.compressed(context, compression) if compresses else catalogue.allreduce(context, shards)


# By strategy. Construction is collective over the data axis, and raises ConfigurationError on every rank for a graph
# that does not fit the ranks.
DECENTRALISED_EXCHANGES: Final[dict[str, Callable[[RankContext, DecentralisedConfig], Replicas]]] = {
    "gossip": GossipExchange,
    "local_sgd": LocalSgdExchange,
}


SERVER_ALGORITHMS: Final = ("native", "ring")  # values for workers, which reduce nothing among themselves


def server_algorithms(config: ParameterServerConfig) -> tuple[str, ...]:
    """Return a tuple of the values of ``communication.algorithm`` that a parameter server with ``config`` supports."""
    return (*SERVER_ALGORITHMS, "hierarchical") if config.lock_step else SERVER_ALGORITHMS


def server_exchange(
    context: RankContext,
    config: ParameterServerConfig,
    shards: LogicalShards | None = None,
    compression: Compression | None = None,
) -> Exchange:
    """Return the parameter-server exchange of this rank: a server, a worker or both. Collective over the world.

    ``shards``: logical shards to sum over in a fixed order, or None. ``compression``: gradient compressor, or None.
    """
    algorithms = server_algorithms(config)
    if shards is None and context.algorithm not in algorithms:
        raise ConfigurationError(
            f"communication.algorithm = {context.algorithm!r} is not supported by a parameter server with the "
            f"consistency {config.described}, because the workers do not allreduce "
            f"gradients{', except within a node' if 'hierarchical' in algorithms else ''}; choose one of "
            f"{', '.join(algorithms)}"
        )
    roles = Roles.of(config, context.members.size)
    if compression is not None:
        assert shards is None
        rules.check(
            {
                **section_values("parameter_server", config),
                "compression.across_nodes": compression.config.across_nodes,
                "parallel.strategy": "parameter_server",
                "communication.compression": compression.name,
                "communication.algorithm": context.algorithm,
            }
        )
    if config.backup_workers:
        return BackupExchange(context, roles, config.backup_workers)
    if not config.lock_step:
        return AsynchronousExchange(context, roles, config.bound, staleness_aware=config.staleness_aware)
    serves = context.members.rank in roles.servers
    servers = context.members.split(0 if serves else None, context.members.rank, "servers")
    if compression is not None:
        return LockStepExchange(context, roles, servers, compression=compression)
    return LockStepExchange(context, roles, servers, transport=config.transport, shards=shards)


PROVEN_RANKS: Final = 64  # largest number of ranks whose lists are gathered and proven
IN_FLIGHT: Final = 2  # whole layers of gradients in flight at once, if they are freed afterwards


def build_executor(
    context: RankContext,
    exchange: Exchange,
    *,
    loss_scale: NoLossScale | None = None,
    seed: int = 0,
    spans: SpanSink = NULL_SPANS,
    observers: Sequence[StepObserver] = (),
    cuda_graph: bool = False,  # run stages as CUDA graphs
    drops: bool = False,  # a stage uses dropout
) -> Executor:
    """Return the executor that runs this rank's operations with ``exchange``. Collective over the pipeline."""
    copies = TiedCopies(context, tied_tensors(context.model, context.placed), exchange)
    arena = Arena(context.ledger, context.on)
    launches = StageGraphs(arena, drops=drops, ledger=context.ledger) if cuda_graph else None
    parts = context, exchange, copies, arena, context.optimizer.clip_norm
    return Executor(*parts, loss_scale=loss_scale, seed=seed, spans=spans, observers=observers, launches=launches)


def operations(
    context: RankContext,
    exchange: Exchange,
    copies: TiedCopies,
    parallel: ParallelConfig,
    schedule: Sequence[Passes] | None = None,
) -> list[Operation]:
    """Return a list of this rank's operations for one training step: passes, messages and updates. Local.

    ``copies``: this rank's copies of tied tensors. ``schedule``: passes of each rank, or None for ``parallel.order``.
    """
    traits, steps = exchange.traits, list[Operation]()
    if context.computes:
        position = context.placed, context.pipeline.rank
        steps = compute_operations(
            schedule or parallel.order, parallel.microbatches, *position, recompute=parallel.recompute
        )
    if traits.gathers:
        steps = insert_gathers(steps, traits.gathers, keep=traits.keeps_parameters)
    steps += copies.after_backward()
    plan = exchange.plan()
    if parallel.tensor > 1 and context.layout.has_partial:
        plan.insert(plan.index(Operation(Kind.AGREE)), Operation(Kind.SUM_ROWS))
    merged = insert_exchange(steps, plan, context.ranges, every_microbatch=not traits.accumulates)
    if exchange.background is not None:
        most = None if traits.accumulates else IN_FLIGHT
        merged = prefetch_gathers(overlap_reductions(merged, context.ranges, context.model.needs, most), traits.ahead)
    if Kind.MIX_START in exchange.handlers or (exchange.background is not None and exchange.background.polls):
        merged = insert_polls(merged)
    return merged + copies.after_update()


def _shared_out(context: RankContext) -> dict[int, Range]:
    parts = {unit: context.layout.range_of(stage.layer, "expert") for unit, stage in enumerate(context.model.stages)}
    return {unit: part for unit, part in parts.items() if part}


def prove(
    context: RankContext,
    grid: ProcessGrid,
    steps: list[Operation],
    microbatches: int,
    *,
    accumulates: bool,
    degrees: ShardingDegrees | None = None,
) -> Proof | None:
    """Return a proof that the operations of all ranks form one correct step. Collective over the world.

    ``steps``: this rank's operations. ``microbatches``: number of micro-batches per step. Raises ScheduleError if the
    step is incorrect. Returns None if the world has more than `PROVEN_RANKS` ranks.
    """
    if context.world.size > PROVEN_RANKS:
        return None  # too many lists to gather
    axis = context.context_axis
    inside = None if axis is None else axis.messages(axis.window)
    written = context.world.allgather_object(pickle.dumps((steps, inside)))  # pickled: only rank 0 unpickles the lists
    verdict: Proof | ScheduleError | None = None
    if context.world.rank == 0:
        units = {unit: context.layout.units[stage.layer] for unit, stage in enumerate(context.model.stages)}
        lists, messages = zip(*map(pickle.loads, written), strict=True)
        try:
            if grid.context > 1:
                assert axis is not None
                _prove_attention(grid, messages, axis.visited(axis.window))
            verdict = verify(
                lists,
                grid=grid,
                units=units,
                microbatches=microbatches,
                needs=context.model.needs,
                placement=context.placed,
                accumulates=accumulates,
                degrees=degrees,
                experts=_shared_out(context) if grid.expert > 1 else None,
            )
        except ScheduleError as error:
            verdict = error
    verdict = context.world.broadcast_object(verdict)
    if isinstance(verdict, ScheduleError):
        raise verdict
    return verdict


def _prove_attention(
    grid: ProcessGrid, messages: Sequence[Sequence[Messages]], visited: Sequence[Sequence[int]]
) -> None:
    neighbours = PeerRanks(grid, grid.size)
    for members in dict.fromkeys(neighbours.along(("context",), rank) for rank in neighbours.workers):
        for back in (False, True):
            prove_messages([messages[rank][back] for rank in members], members, visited, back=back)
