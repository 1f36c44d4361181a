"""From the section of a recipe to the exchange of one rank."""

from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.strategies.exchange import Exchange
from hpcdist.strategies.logical_shards import LogicalShards
from hpcdist.strategies.parameter_server.asynchronous import AsynchronousExchange
from hpcdist.strategies.parameter_server.backup import BackupExchange
from hpcdist.strategies.parameter_server.compressed import CompressedServerExchange, Compression
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.strategies.parameter_server.lockstep import LockStepExchange
from hpcdist.strategies.parameter_server.roles import Roles
from hpcdist.strategies.seat import Seat

SERVED: Final = ("native", "ring")  # workers that reduce nothing among themselves


def algorithms(config: ParameterServerConfig) -> tuple[str, ...]:
    """Return the algorithms that such workers and servers know."""
    return (*SERVED, "hierarchical") if config.lock_step else SERVED


def exchange(
    seat: Seat,
    config: ParameterServerConfig,
    shards: LogicalShards | None = None,
    compression: Compression | None = None,
) -> Exchange:
    """Return the exchange of the rank in ``seat``, whose members have the roles of ``config``. Collective.

    ``shards``: in lock-step, sums follow these, or gradients are pushed with ``compression``. Raises ConfigurationError
    for an algorithm that says nothing about messages between workers and servers, and for servers that take no
    payloads.
    """
    known = algorithms(config)
    if shards is None and seat.algorithm not in known:
        raise ConfigurationError(
            f"communication.algorithm = {seat.algorithm!r} with a parameter server ({config.described}): workers do "
            f"not reduce among themselves{', but for those of a node' if 'hierarchical' in known else ''}; choose one "
            f"of {', '.join(known)}"
        )
    roles = Roles.of(config, seat.members.size)
    if compression is not None:
        assert shards is None
        config.check_compressed(compression.name, seat.algorithm, across_nodes=compression.config.across_nodes)
    if config.backup_workers:
        return BackupExchange(seat, roles, config.backup_workers)
    if not config.lock_step:
        return AsynchronousExchange(seat, roles, config.bound, staleness_aware=config.staleness_aware)
    serves = seat.members.rank in roles.servers
    servers = seat.members.split(0 if serves else None, seat.members.rank, "servers")
    if compression is not None:
        return CompressedServerExchange(seat, roles, servers, compression, mirrored=config.mirrored)
    return LockStepExchange(seat, roles, servers, transport=config.transport, mirrored=config.mirrored, shards=shards)
