"""Traits of an exchange: constant facts for the operation list, the training loop, the planner and reports."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ShardingDegrees:
    """Numbers of ranks that shard parameters, gradients and optimizer state. Each number divides the next."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of a strategy (`Exchange`) that do not change after construction."""

    algorithm: str  # reduction algorithm, as stored in checkpoints
    lock_step: bool = True  # all ranks make each step together
    identical: bool = False  # parameters that ranks of the data axis keep have the same bits
    accumulates: bool = True  # gradients of all micro-batches are added up first, and exchanged once per step
    degrees: ShardingDegrees | None = None  # sharding degrees; None: every replica keeps everything
    # Per model stage: the stages whose parameters are gathered before it is computed, and freed afterwards.
    gathers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    keeps_parameters: bool = False  # gathered parameters stay from their first use in a step to their last
    # gradients of consecutive steps go to two alternating stores, and are applied one step late
    alternates: bool = False
    ahead: int = 0  # number of gathers that are started before they are needed
    whole_state: bool = False  # every data rank holds and updates the whole state
    serves: bool = False  # this rank is a parameter server, which answers workers between its computations
    drops_late: bool = False  # gradients that arrive too late are dropped
    fullest: float | None = None  # parameters of the largest server / mean per server; None without servers
    corrects: bool = True  # the exchange can multiply gradients by an `Exchange.correction` other than 1
    restores: Collection[str] = ()  # scalars of a checkpoint that only some exchanges can restore, such as "pending"
    sums: str = ""  # summation order that does not depend on the ranks, as text
    mixing: str = ""  # method that mixes or averages differing replicas, as text
