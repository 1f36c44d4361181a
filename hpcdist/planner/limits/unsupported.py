"""Layouts that are possible, but that this version of hpcdist cannot run.

The rules of a recipe are asked: what becomes possible there becomes possible here.
"""

from functools import lru_cache
from typing import Final

from hpcdist.optim.config import OptimizerConfig
from hpcdist.planner.layout import ParallelLayout
from hpcdist.reporting.rules import refusals, section_values
from hpcdist.strategies import rules
from hpcdist.strategies.compressed.config import MOMENTUM_OPTIMIZERS
from hpcdist.strategies.config import RULES as PARALLEL_RULES

_DEFAULTS: Final = {**rules.DEFAULTS, **section_values("optimizer", OptimizerConfig())}
_SELECTIVE: Final = (
    "recompute = 'selective' is not built in this version: attention is computed in tiles, and its scores again in any "
    "case; choose 'none' or 'full'"
)


def unsupported(layout: ParallelLayout) -> tuple[str, ...]:
    """Return what hpcdist itself cannot run of a layout that is possible; nothing where it runs (local)."""
    if layout.implementation == "megatron":
        return ()  # the estimate is of another program
    overlaps = layout.overlap > 0 and layout.data > 1
    return _refusals(
        layout.but(data=1, microbatch=1, servers=min(layout.servers, 1), overlap=float(overlaps), algorithm="auto")
    )


@lru_cache(maxsize=1 << 14)
def _refusals(layout: ParallelLayout) -> tuple[str, ...]:
    values = {
        **_DEFAULTS,
        "parallel.context": layout.context,
        "parallel.pipeline": layout.pipeline,
        "parallel.tensor": layout.tensor,
        "parallel.strategy": layout.strategy,
        "parallel.schedule": layout.schedule if layout.pipeline > 1 else "auto",
        "parallel.chunks": layout.chunks,
        "parallel.recompute": layout.recompute == "full",
        "parallel.sequence_parallel": layout.sequence_parallel,
        "communication.compression": layout.compression,
        "communication.overlap": "thread" if layout.overlap else "none",
        "precision.mode": layout.precision,
    }
    if layout.strategy == "parameter_server" and not layout.servers:
        values["parameter_server.placement"] = "colocated"
    if layout.compression in MOMENTUM_OPTIMIZERS:
        values["optimizer.name"] = MOMENTUM_OPTIMIZERS[layout.compression]
        values["compression.warmup_steps"] = 1
    reasons = (*refusals(PARALLEL_RULES, values), *rules.refusals(values))
    if layout.expert > 1:
        reasons += (f"expert = {layout.expert} is not built in this version; set it to 1",)
    return (*reasons, _SELECTIVE) if layout.recompute == "selective" else reasons
