"""Which checkpoints stay: the newest, one of every so many steps, and those with the lowest validation loss.

A function of steps and losses alone, so that the same checkpoints stay whoever asks, and however often.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcdist.checkpoint import manifest
from hpcdist.errors import StorageError

VAL_LOSS: Final = "val_loss"  # among the scalars of a checkpoint


@dataclass(frozen=True)
class Retention:
    """The rule. ``every_steps`` and ``best`` keep more than the ``last`` ones; 0: none.

    ``every_steps`` keeps the first checkpoint of each stretch of so many steps, from its multiples on: where a run
    saves at the multiples, these.
    """

    last: int = 2
    every_steps: int = 0
    best: int = 0

    def __post_init__(self) -> None:
        assert self.last >= 1, f"{self.last} checkpoints are kept: one that is thrown away at once saves nothing"
        assert self.every_steps >= 0 and self.best >= 0

    @classmethod
    def of(cls, keep: "int | Retention") -> "Retention":
        """Return the rule that ``keep`` stands for: a number keeps the newest so many (local)."""
        return keep if isinstance(keep, Retention) else cls(keep)

    def kept(self, losses: Mapping[int, float]) -> set[int]:
        """Return the steps that stay of those in ``losses``, which has a NaN where no loss is known (local)."""
        steps = sorted(losses)
        stay = set(steps[-self.last :])
        if self.every_steps:
            first = {step // self.every_steps: step for step in reversed(steps)}
            stay |= {step for stretch, step in first.items() if stretch}
        known = [step for step in steps if not math.isnan(losses[step])]
        # Of equal losses the later: the earlier one is no better and has less behind it.
        return stay | set(sorted(known, key=lambda step: (losses[step], -step))[: self.best])


def loss_of(path: Path) -> float:
    """Return the validation loss that the checkpoint at ``path`` was saved with; NaN where none is known (local)."""
    try:
        found = manifest.load(path).scalars.get(VAL_LOSS)
        return float(found) if isinstance(found, int | float) else math.nan
    except (StorageError, OverflowError):
        return math.nan
