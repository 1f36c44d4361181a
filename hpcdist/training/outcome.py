"""The result of the steps that a process made, in memory that does not grow with their number."""

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hpcdist.training.survival import Wish

SAMPLED: Final = 2048  # steps of which the figures stay, for medians; of all others the sums


class Steps:
    """The figures of the steps of one rank: of the first step, sums over the others, and a sample of these.

    The first step, which compiles kernels and opens connections, stands by itself. Up to `SAMPLED` steps, the sample
    holds all of the others. Beyond, it is a uniform random sample of them (algorithm R of Vitter, 1985). The generator
    has a fixed seed: ranks that made equally many steps hold the same ones, in the same order.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first: dict[str, float] = {}
        self.sums: defaultdict[str, float] = defaultdict(float)  # of all but the first
        self.sample: list[tuple[float, float]] = []  # seconds and bytes sent
        self._random = random.Random(0)

    def add(self, step_s: float, sent_bytes: float, **figures: float) -> None:
        """Take a step; ``sent_bytes`` is NaN where the MPI library chose the algorithm."""
        self.count += 1
        figures |= {"step_s": step_s, "sent_bytes": sent_bytes}
        if self.count == 1:
            self.first = figures
            return
        for name, value in figures.items():
            self.sums[name] += value
        if len(self.sample) < SAMPLED:
            self.sample.append((step_s, sent_bytes))
        elif (place := self._random.randrange(self.count - 1)) < SAMPLED:
            self.sample[place] = step_s, sent_bytes

    def measured(self) -> dict[str, Any]:
        """Return what the ranks tell each other of their steps."""
        return {"count": self.count, "first": self.first, "sums": dict(self.sums), "sample": self.sample}


@dataclass
class Outcome:
    """What a run did in this process: steps from ``first`` to ``done``, and why it ended early, if it did."""

    first: int
    done: int
    wish: Wish | None = None
    loss: float = math.nan
    steps: Steps = field(default_factory=Steps)
    served_bytes: float = math.nan  # sent for each step, by a rank that serves workers that do not meet
    stalest: int = 0  # updates that this rank's gradients missed, at most
    dropped: int = 0  # gradients of this rank, that came too late
    checkpoint: Path | None = None
