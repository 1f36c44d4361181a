"""The ``[parameter_server]`` section of a recipe: servers, placement, consistency, transport.

Also staleness and backup workers. Light: imports nothing but the errors and the names of compressors.
"""

import math
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.strategies.compressed.config import QUANTISED, SPARSE

PLACEMENTS: Final = ("dedicated", "colocated")
CONSISTENCIES: Final = ("bsp", "ssp", "asp")
TRANSPORTS: Final = ("messages", "shared", "rma")
PUSHED: Final = (*QUANTISED, *SPARSE)  # compressors of which a server takes payloads
_NOT_PUSHED: Final = {
    "auto": "it measures sums that workers make among themselves",
    "powersgd": "its second factor follows from the sum of the first over all workers, and they ask servers once",
}
_CLIPPED: Final = "a push is clipped by the norm of its worker's own gradient, and what is sent is another one"
# Which values of keys do not go with compressed gradients, and why.
_UNCOMPRESSED: Final = {
    ("consistency", "ssp"): _CLIPPED,
    ("consistency", "asp"): _CLIPPED,
    ("transport", "shared"): "what ranks of a node read in shared memory does not travel, and to encode it costs time",
    ("transport", "rma"): "servers add what lies in their windows, and do not decode it in this version",
}
# Of servers in a product of data with pipeline or tensor ranks.
IN_PRODUCTS: Final = {
    "placement": "colocated",
    "consistency": "bsp",
    "backup_workers": 0,
    "transport": "messages",
    "mirrored": False,
}


@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig:
    """Section ``[parameter_server]``: servers, placement, consistency and transport.

    ``dedicated``: the last ``servers`` ranks only serve, the others only compute (0: one server). ``colocated``: every
    rank computes and the first ``servers`` ranks serve too (0: all).

    ``bsp``: all workers take every step together, and the result is that of one process. ``asp``: nobody waits for
    another worker; a server applies each push as it comes. ``ssp``: the same, but a worker that is more than
    ``staleness`` steps ahead of the slowest waits; with 0 it is bsp. ``staleness_aware`` divides the rate of an update
    by the age of its gradient. ``backup_workers``, under bsp: a step takes the gradients of all workers but so many,
    those that come first.

    In lock-step, ``transport`` says how gradients and parameters travel: as messages, through memory that the ranks of
    a node share (messages between nodes), or by one-sided communication; the bits are the same. ``mirrored``: a second
    server keeps what each one has, and takes the same steps.
    """

    servers: int = 0
    placement: str = "dedicated"
    consistency: str = "bsp"
    staleness: int = 0
    staleness_aware: bool = False
    backup_workers: int = 0
    transport: str = "messages"
    mirrored: bool = False

    @property
    def lock_step(self) -> bool:
        """Whether all ranks make each step together."""
        return self.backup_workers == 0 and (self.consistency == "bsp" or self.bound == 0)

    @property
    def bound(self) -> float:
        """Number of steps that a worker may be ahead of the slowest."""
        return {"bsp": 0, "ssp": self.staleness, "asp": math.inf}[self.consistency]

    @property
    def described(self) -> str:
        """Consistency in a few words."""
        if self.backup_workers:
            return f"bsp, {self.backup_workers} backup worker{'s' if self.backup_workers > 1 else ''}"
        aware = ", rate by staleness" if self.staleness_aware else ""
        return f"{self.consistency}{f' of {self.staleness}' if self.consistency == 'ssp' else ''}{aware}"

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
        if self.consistency not in CONSISTENCIES:
            raise ConfigurationError(
                f"parameter_server.consistency = {self.consistency!r}; choose one of {', '.join(CONSISTENCIES)}"
            )
        self._check_staleness()
        if self.backup_workers < 0:
            raise ConfigurationError(
                f"parameter_server.backup_workers = {self.backup_workers}; give a number of workers, at least 0"
            )
        if self.backup_workers and self.consistency != "bsp":
            raise ConfigurationError(
                f"parameter_server.backup_workers = {self.backup_workers} with parameter_server.consistency = "
                f"{self.consistency!r}: only in lock-step is there a step for which a gradient can come too late; set "
                "consistency = 'bsp', or backup_workers = 0"
            )
        self._check_lock_step()

    def _check_staleness(self) -> None:
        if self.staleness < 0:
            raise ConfigurationError(
                f"parameter_server.staleness = {self.staleness}; give the steps that a worker may be ahead of the "
                "slowest, at least 0"
            )
        if self.staleness and self.consistency != "ssp":
            raise ConfigurationError(
                f"parameter_server.staleness = {self.staleness} has no effect with parameter_server.consistency = "
                f"{self.consistency!r}; remove it, or set consistency = 'ssp'"
            )
        if self.staleness_aware and self.bound == 0:
            raise ConfigurationError(
                "parameter_server.staleness_aware = true has no effect where all workers take every step together: no "
                "gradient is stale; remove it, or set consistency = 'asp', or 'ssp' with a staleness above 0"
            )

    def _check_lock_step(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ConfigurationError(
                f"parameter_server.transport = {self.transport!r}; choose one of {', '.join(TRANSPORTS)}"
            )
        if not self.lock_step and (self.transport != "messages" or self.mirrored):
            given = "mirrored = true" if self.mirrored else f"transport = {self.transport!r}"
            other = "mirrored = false" if self.mirrored else "transport = 'messages'"
            raise ConfigurationError(
                f"parameter_server.{given} with {self.described}: it is built for steps that all workers take "
                f"together; set {other}, or consistency = 'bsp' without backup workers"
            )
        servers = self.servers or (1 if self.placement == "dedicated" else 2)
        if self.mirrored and servers < 2:
            raise ConfigurationError(
                f"parameter_server.mirrored = true with parameter_server.servers = {self.servers} "
                f"({self.placement}): the state of a server needs another one to be kept on; use at least 2 servers"
            )

    def check_beside(self, pipeline: int, tensor: int) -> None:
        """Raise ConfigurationError for servers that each place in a product of axes cannot have for itself (local)."""
        if pipeline * tensor == 1:
            return
        for name, only in IN_PRODUCTS.items():
            given = getattr(self, name)
            if given != only:
                raise ConfigurationError(
                    f"parameter_server.{name} = {given!r} with parallel.pipeline = {pipeline} and parallel.tensor = "
                    f"{tensor} is not built in this version: there every rank serves what its replicas share; set it "
                    f"to {only!r}"
                )

    def check_compressed(self, name: str, algorithm: str, *, across_nodes: bool) -> None:
        """Raise ConfigurationError where gradients compressed by ``name`` cannot be pushed (local)."""
        asked = f"communication.compression = {name!r}"
        if name not in PUSHED:
            raise ConfigurationError(
                f"{asked} with parallel.strategy = 'parameter_server': "
                f"{_NOT_PUSHED.get(name, 'not built in this version')}; choose one of {', '.join(PUSHED)}, or the "
                "strategy 'allreduce'"
            )
        if self.backup_workers:
            raise ConfigurationError(
                f"{asked} with parameter_server.backup_workers = {self.backup_workers}: a gradient that comes too late "
                "is left out, and its worker has already taken it for sent; set it to 0, or the "
                "compression to 'none'"
            )
        for key, only in (("consistency", "bsp"), ("transport", "messages")):
            given = getattr(self, key)
            if given != only and not (key == "consistency" and self.bound == 0):
                raise ConfigurationError(
                    f"{asked} with parameter_server.{key} = {given!r}: {_UNCOMPRESSED[key, given]}; set it to {only!r},"
                    " or the compression to 'none'"
                )
        if across_nodes and algorithm != "hierarchical":
            raise ConfigurationError(
                f"compression.across_nodes = true with parameter_server and communication.algorithm = {algorithm!r}: "
                "workers of a node sum before one of them encodes only where the algorithm is 'hierarchical'; set "
                "communication.algorithm = 'hierarchical', or across_nodes = false"
            )
