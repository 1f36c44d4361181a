"""How much of what the machine can compute a run used: operations of the model a second, and their share of a peak."""

import math
from typing import Any, Final

import numpy as np

from hpcdist.arrays.dtypes import is_16bit_float
from hpcdist.arrays.matmul_peak import matmul_flops_per_s
from hpcdist.comm.communicator import Communicator
from hpcdist.models.config import FOREIGN
from hpcdist.models.counts import counts
from hpcdist.training.trainer import Trainer

FIGURES: Final = ("flops_per_sample", "flops_per_s", "peak_flops_per_s", "mfu")
NOT_COUNTED: Final = "the model was brought along: what it computes is not counted"
NO_ROOM: Final = "there was no memory left for the matrix product that a peak is measured with"
SECONDS: Final = 0.03  # of products on each rank


def figures(comm: Communicator, trainer: Trainer, tokens_per_s: float, why_not: str) -> dict[str, Any]:
    """Return operations of a training step for a sample, and a second; the peak, and the share of it (MFU). Collective.

    The peak is that of a matrix product in the type that the model computes in, measured on all computing ranks at
    once, and summed over them. What is not known is None, with ``mfu_reason``: ``why_not`` where there is no speed.
    """
    found: dict[str, Any] = dict.fromkeys(FIGURES)
    if trainer.recipe.model.kind in FOREIGN:
        return found | {"mfu_reason": NOT_COUNTED}
    found["flops_per_sample"] = counts(trainer.recipe.model, **trainer.source.model_inputs()).flops
    if math.isnan(tokens_per_s):
        return found | {"mfu_reason": why_not}
    found["flops_per_s"] = tokens_per_s / trainer.model.tokens_per_sample * found["flops_per_sample"]
    comm.barrier()  # cores that ranks share, they share now, too
    own = _peak(trainer) if trainer.seat.computes else 0.0
    peak = sum(comm.allgather_object(own))
    if math.isnan(peak):
        return found | {"mfu_reason": NO_ROOM}
    return found | {"peak_flops_per_s": peak, "mfu": found["flops_per_s"] / peak}


def _peak(trainer: Trainer) -> float:
    """Return operations a second on this rank, NaN where it has no memory to find out (local)."""
    dtype = trainer.model.dtype
    # All 16-bit types are equally fast where they are used.
    measured = np.dtype(np.float16) if is_16bit_float(dtype) else dtype
    try:
        return matmul_flops_per_s(measured, trainer.recipe.run.device, SECONDS)
    except MemoryError:
        return math.nan


def described(summary: dict[str, Any]) -> list[str]:
    """Return the line that a person reads, none where there is no speed."""
    if summary["flops_per_s"] is None:
        return []
    speed = f"{summary['flops_per_s'] / 1e9:,.1f} GFLOP/s of the model"
    if summary["mfu"] is None:
        return [f"{speed}; {summary['mfu_reason']}"]
    return [f"{speed}, {summary['mfu']:.1%} of what matrix products reach ({summary['peak_flops_per_s'] / 1e9:,.0f})"]
