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
    """Properties of a strategy (`Exchange`) that do not change after construction.

    - ``algorithm``: name of the reduction algorithm, as stored in checkpoints.
    - ``lock_step``: all ranks make each step together.
    - ``identical``: the parameters that ranks of the data axis keep have the same bits.
    - ``accumulates``: the gradients of all micro-batches are added up first, and exchanged once per step.
    - ``degrees``: sharding degrees, or None if every replica keeps everything.
    - ``gathers``: dict from model stage to the stages whose parameters are gathered before the stage is computed, and
      freed afterwards. The dict is empty if no parameters are gathered.
    - ``keeps_parameters``: gathered parameters stay from their first use in a step to their last.
    - ``alternates``: the gradients of consecutive steps go to two stores in turn, and are applied one step late.
    - ``ahead``: number of gathers that are started before they are needed.
    - ``whole_state``: every data rank holds the whole state and updates all of it.
    - ``serves``: this rank is a parameter server, and answers requests of workers between its own computations.
    - ``drops_late``: gradients that arrive too late are dropped.
    - ``fullest``: parameters of the largest parameter server, divided by the mean per server; None without servers.
    - ``corrects``: the exchange can multiply gradients by an `Exchange.correction` other than 1.
    - ``restores``: scalars of a checkpoint that only some exchanges can restore, such as "pending".
    - ``sums``: description of a summation order that does not depend on the ranks, or "".
    - ``mixing``: description of how differing replicas are mixed or averaged, or "".
    """

    algorithm: str
    lock_step: bool = True
    identical: bool = False
    accumulates: bool = True
    degrees: ShardingDegrees | None = None
    gathers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    keeps_parameters: bool = False
    alternates: bool = False
    ahead: int = 0
    whole_state: bool = False
    serves: bool = False
    drops_late: bool = False
    fullest: float | None = None
    corrects: bool = True
    restores: Collection[str] = ()
    sums: str = ""
    mixing: str = ""
