"""What one step of a contender told. Light."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A step on one rank, from a barrier to its end.

    ``loss`` is the mean over the tokens of the whole batch, or of this rank's (``own_loss``). ``phases`` has seconds by
    the names of `hpcdist.bench.step_plan.PHASES`; what is missing was not told apart.
    """

    loss: float
    own_loss: bool
    step_s: float
    cpu_s: float
    phases: Mapping[str, float]
