"""The ``[parameter_server]`` section of a recipe. Imports only `reporting`."""

import math
from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import NO_EFFECT, rule
from hpcdist.reporting.schema import check_section, key

PLACEMENTS: Final = ("dedicated", "colocated")
CONSISTENCIES: Final = ("bsp", "ssp", "asp")
TRANSPORTS: Final = ("messages", "shared", "rma")
TOGETHER: Final = "it supports only steps that all workers make together"

RULES: Final = (
    rule("parameter_server.staleness with parameter_server.consistency!=ssp", NO_EFFECT),
    rule("parameter_server.staleness_aware with parameter_server.consistency!=asp|ssp", NO_EFFECT),
    rule(
        "parameter_server.staleness_aware with parameter_server.staleness=0 where parameter_server.consistency=ssp",
        NO_EFFECT,
        "remove it, or set consistency = 'asp', or a staleness above 0",
    ),
    rule(
        "parameter_server.backup_workers with parameter_server.consistency!=bsp",
        "only in lock-step can a gradient be too late for its step",
    ),
    rule("parameter_server.transport!=messages with own steps", TOGETHER),
    rule(
        "parameter_server.mirrored",
        "servers have no mirrors any more",
        "set it to false, and start the job with --survive, which keeps a copy of each server's state at a partner",
    ),
)


@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig:
    """Section ``[parameter_server]``: servers, placement, consistency and transport."""

    servers: int = key(0, "Number of server ranks. 0: 1 if dedicated, all ranks if colocated.", ge=0)
    placement: str = key(
        "dedicated", "dedicated: the last ranks only serve. colocated: workers serve, too.", choices=PLACEMENTS
    )
    consistency: str = key(
        "bsp",
        "bsp: workers step together. ssp: at most staleness steps ahead. asp: no worker waits.",
        choices=CONSISTENCIES,
    )
    staleness: int = key(0, "Number of steps that a worker may be ahead of the slowest worker. 0: like bsp.", ge=0)
    staleness_aware: bool = key(False, "Divide the learning rate of an update by the staleness of its gradient.")
    backup_workers: int = key(0, "Number of workers whose late gradients a step ignores.", ge=0)
    transport: str = key(
        "messages", "Messages, shared memory of a node, or one-sided MPI communication (rma).", choices=TRANSPORTS
    )
    mirrored: bool = key(False, "For recipes of earlier versions; must be false. `--survive` keeps copies of servers.")

    @property
    def lock_step(self) -> bool:
        """True if all workers make each step together."""
        return not self.own_steps

    @property
    def own_steps(self) -> str:
        """Recipe setting, as text, that lets workers step independently, or "" if workers step together."""
        return own_steps(self.consistency, self.staleness, self.backup_workers)

    @property
    def bound(self) -> float:
        """Number of steps that a worker may be ahead of the slowest worker, or infinity for no limit."""
        return {"bsp": 0, "ssp": self.staleness, "asp": math.inf}[self.consistency]

    @property
    def described(self) -> str:
        """The consistency settings as a short text."""
        if self.backup_workers:
            return f"bsp, {self.backup_workers} backup worker{'s' if self.backup_workers > 1 else ''}"
        aware = ", rate by staleness" if self.staleness_aware else ""
        return f"{self.consistency}{f' of {self.staleness}' if self.consistency == 'ssp' else ''}{aware}"

    def __post_init__(self) -> None:
        check_section(RULES, "parameter_server", self, **{"own steps": self.own_steps})


def own_steps(consistency: str, staleness: int, backup_workers: int) -> str:
    """Return the recipe setting, as text, that lets workers step independently, or "" if they step together. Local.

    The arguments are the keys of the same names in the section [parameter_server].
    """
    if backup_workers:
        return f"parameter_server.backup_workers = {backup_workers}"
    ahead = consistency == "asp" or (consistency == "ssp" and staleness > 0)
    return f"parameter_server.consistency = {consistency!r}" if ahead else ""
