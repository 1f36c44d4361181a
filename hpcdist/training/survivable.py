"""The message of a job that has outlived the death of ranks."""

from hpcdist.reporting.units import counted
from hpcdist.training import architecture
from hpcdist.training.origin import Origin
from hpcdist.training.team import Change
from hpcdist.training.trainer import Trainer


def told(change: Change, trainer: Trainer, origin: Origin | None, seconds: float) -> str:
    """Return what happened between two lives, for people (local)."""
    happened = []
    if change.lost:
        plural = "s" if len(change.lost) > 1 else ""
        happened.append(f"rank{plural} {', '.join(map(str, change.lost))} died")
    if change.added:
        happened.append(f"{change.added} new process{'es' if change.added > 1 else ''} started")
    grid, source = trainer.grid, "the beginning" if origin is None else str(origin)
    return (
        f"{' and '.join(happened) or 'the ranks met anew'}: on {counted(trainer.comm.size, 'rank')}, "
        f"data {grid.data} x pipeline {grid.pipeline} x tensor {grid.tensor}; {architecture.described(trainer)}; "
        f"after {trainer.first_step} steps, from {source}, in {seconds:.2f} s"
    )
