"""Which ranks compute and which serve."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcdist.arrays.sizes import counted
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.parameter_server.config import ParameterServerConfig

if TYPE_CHECKING:  # as in `grid`
    from hpcdist.comm.communicator import Communicator


@dataclass(frozen=True)
class Roles:
    """The ranks of the world that are ``workers`` and those that are ``servers``; colocated ranks are both."""

    workers: range
    servers: range

    @classmethod
    def of(cls, config: ParameterServerConfig, world: int) -> "Roles":
        """Return the roles in a world of so many ranks.

        Raises ConfigurationError, with the whole equation, when nobody would be left to compute, or to be waited for.
        """
        roles = cls._of(config, world)
        workers, backup = len(roles.workers), config.backup_workers
        if backup >= workers:
            raise ConfigurationError(
                f"parameter_server.backup_workers = {backup}, but there are {workers} workers: a step must take at "
                f"least one gradient; use at most {workers - 1}, or more ranks"
            )
        return roles

    @classmethod
    def _of(cls, config: ParameterServerConfig, world: int) -> "Roles":
        if config.placement == "colocated":
            servers = config.servers or world
            if servers > world:
                raise ConfigurationError(
                    f"parameter_server.servers = {servers} colocated, but the world has {counted(world, 'rank')}: "
                    f"at most every rank can serve; use at most {world} servers (0: all), or more ranks"
                )
            return cls(range(world), range(servers))
        servers = config.servers or 1
        if servers >= world:
            raise ConfigurationError(
                f"world {world} - parameter_server.servers {servers} = {world - servers} workers, but at least 1 must "
                f"compute; start at least {servers + 1} ranks, use fewer servers, or set "
                "parameter_server.placement = 'colocated'"
            )
        return cls(range(world - servers), range(world - servers, world))

    def part_of(self, world: "Communicator") -> "Communicator":
        """Return the communicator of the workers to a worker, that of the servers to a dedicated server.

        Collective over ``world``.
        """
        part = world.split(int(world.rank not in self.workers), world.rank, "role")
        assert part is not None
        return part
