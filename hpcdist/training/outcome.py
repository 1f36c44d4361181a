"""What came of the steps that a process made."""

from dataclasses import dataclass, field
from pathlib import Path

from hpcdist.strategies.overlap import Fetched
from hpcdist.training.survival import Wish


@dataclass
class Outcome:
    """What a run did in this process: steps from ``first`` to ``done``, and why it ended early, if it did."""

    first: int
    done: int
    wish: Wish | None = None
    loss: float = float("nan")
    step_s: list[float] = field(default_factory=list)
    communication_s: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)  # NaN where the MPI library chose the algorithm
    targets: list[int] = field(default_factory=list)  # of this rank alone, where ranks do not share steps
    staleness: list[int] = field(default_factory=list)  # of this rank's gradients, where some are older than others
    dropped: int = 0  # gradients of this rank, that came too late
    checkpoint: Path | None = None
    # Of reductions beside the computation: seconds that the rank gave to them, and that they took; see `Overlap.taken`.
    overlapped: list[tuple[float, float]] = field(default_factory=list)
    fetched: list[Fetched] = field(default_factory=list)  # of parameters that were gathered ahead
