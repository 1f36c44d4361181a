"""The ``[parameter_server]`` section of a recipe. Light: imports nothing but the errors."""

from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError

PLACEMENTS: Final = ("dedicated", "colocated")
CONSISTENCIES: Final = ("bsp", "asp")
TRANSPORTS: Final = ("messages", "shared", "rma")
# Names that mean something, but have no code behind them in this version: refused, never ignored.
UNBUILT_CONSISTENCIES: Final = ("ssp",)
LAYER_WISE: Final = ("lars", "lamb")


@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig:
    """Who serves the parameters, and how far workers may run apart.

    ``dedicated``: the last ``servers`` ranks only serve, the others only compute (0: one server). ``colocated``: every
    rank computes and the first ``servers`` ranks serve too (0: all). ``bsp``: all workers take every step together, and
    the result is that of one process. ``asp``: nobody waits for another worker; a server applies each push as it comes.

    In lock-step, ``transport`` says how gradients and parameters travel: as messages, through memory that the ranks of
    a node share (messages between nodes), or by one-sided communication; the bits are the same. ``mirrored``: a second
    server keeps what each one has, and takes the same steps.
    """

    servers: int = 0
    placement: str = "dedicated"
    consistency: str = "bsp"
    staleness: int = 0
    transport: str = "messages"
    mirrored: bool = False

    def __post_init__(self) -> None:
        if self.servers < 0:
            raise ConfigurationError(
                f"parameter_server.servers = {self.servers}; give a number of ranks, or 0 for one dedicated server or "
                "all ranks when colocated"
            )
        if self.placement not in PLACEMENTS:
            raise ConfigurationError(
                f"parameter_server.placement = {self.placement!r}; choose one of {', '.join(PLACEMENTS)}"
            )
        if self.consistency in UNBUILT_CONSISTENCIES:
            raise ConfigurationError(
                f"parameter_server.consistency = {self.consistency!r} is known, but not built in this version; "
                f"choose one of {', '.join(CONSISTENCIES)}"
            )
        if self.consistency not in CONSISTENCIES:
            raise ConfigurationError(
                f"parameter_server.consistency = {self.consistency!r}; choose one of {', '.join(CONSISTENCIES)}"
            )
        if self.staleness != 0:
            raise ConfigurationError(
                f"parameter_server.staleness = {self.staleness}: a bound on staleness is known, but not built in this "
                "version; set it to 0"
            )
        self._check_lock_step()

    def _check_lock_step(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ConfigurationError(
                f"parameter_server.transport = {self.transport!r}; choose one of {', '.join(TRANSPORTS)}"
            )
        if self.consistency != "bsp" and (self.transport != "messages" or self.mirrored):
            given = "mirrored = true" if self.mirrored else f"transport = {self.transport!r}"
            other = "mirrored = false" if self.mirrored else "transport = 'messages'"
            raise ConfigurationError(
                f"parameter_server.{given} with consistency = {self.consistency!r}: it is built for steps that all "
                f"workers take together; set {other}, or consistency = 'bsp'"
            )
        servers = self.servers or (1 if self.placement == "dedicated" else 2)
        if self.mirrored and servers < 2:
            raise ConfigurationError(
                f"parameter_server.mirrored = true with parameter_server.servers = {self.servers} "
                f"({self.placement}): the state of a server needs another one to be kept on; use at least 2 servers"
            )

    def check_beside(self, optimizer: str) -> None:
        """Raise ConfigurationError when servers could not run the optimizer of this name (local)."""
        if self.consistency == "asp" and optimizer in LAYER_WISE:
            raise ConfigurationError(
                f"optimizer.name = {optimizer!r} with parameter_server.consistency = 'asp': its rates need norms of "
                "whole tensors, tensors may be cut over servers, and under asp servers never wait for each other; "
                "choose sgd or adamw, or consistency = 'bsp'"
            )
