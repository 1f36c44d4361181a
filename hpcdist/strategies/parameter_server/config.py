"""The ``[parameter_server]`` section of a recipe: servers, placement, consistency, transport.

Also staleness and backup workers. Light: imports nothing but `reporting`.
"""

import math
from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import NO_EFFECT, at_least, check_section, one_of, rule

PLACEMENTS: Final = ("dedicated", "colocated")
CONSISTENCIES: Final = ("bsp", "ssp", "asp")
TRANSPORTS: Final = ("messages", "shared", "rma")
TOGETHER: Final = "it is built for steps that all workers take together"

RULES: Final = (
    *at_least(
        0,
        "parameter_server.servers",
        expected="give a number of ranks, or 0 for one dedicated server or all ranks when colocated",
    ),
    one_of("parameter_server.placement", PLACEMENTS),
    one_of("parameter_server.consistency", CONSISTENCIES),
    *at_least(
        0, "parameter_server.staleness", expected="give the steps that a worker may be ahead of the slowest, at least 0"
    ),
    rule("parameter_server.staleness with parameter_server.consistency!=ssp", NO_EFFECT),
    rule("parameter_server.staleness_aware with parameter_server.consistency!=asp|ssp", NO_EFFECT),
    rule(
        "parameter_server.staleness_aware with parameter_server.staleness=0 where parameter_server.consistency=ssp",
        NO_EFFECT,
        "remove it, or set consistency = 'asp', or a staleness above 0",
    ),
    *at_least(0, "parameter_server.backup_workers", expected="give a number of workers, at least 0"),
    rule(
        "parameter_server.backup_workers with parameter_server.consistency!=bsp",
        "only in lock-step is there a step for which a gradient can come too late",
    ),
    one_of("parameter_server.transport", TRANSPORTS),
    rule("parameter_server.transport!=messages with own steps", TOGETHER),
    rule(
        "parameter_server.mirrored",
        "servers have no mirrors any more",
        "set it to false, and start the job with --survive, which keeps a copy of each server's state at a partner",
    ),
)


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
    a node share (messages between nodes), or by one-sided communication; the bits are the same.
    ``mirrored`` is read for recipes of earlier versions, and must be false.
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
        return not self.own_steps

    @property
    def own_steps(self) -> str:
        """The key by which workers make steps of their own, with its value; "" in lock-step."""
        return own_steps(self.consistency, self.staleness, self.backup_workers)

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
        check_section(RULES, "parameter_server", self, **{"own steps": self.own_steps})


def own_steps(consistency: str, staleness: int, backup_workers: int) -> str:
    """Return the key by which workers make steps of their own, with its value; "" in lock-step (local)."""
    if backup_workers:
        return f"parameter_server.backup_workers = {backup_workers}"
    ahead = consistency == "asp" or (consistency == "ssp" and staleness > 0)
    return f"parameter_server.consistency = {consistency!r}" if ahead else ""
