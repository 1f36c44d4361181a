"""The learning rate of each update: a linear warm-up, then cosine, polynomial or constant decay.

Warm-up is that of Goyal et al. 2017 (arXiv:1706.02677), section 2.2, the cosine equation 5 of Loshchilov & Hutter 2017
(SGDR, arXiv:1608.03983) without restarts. Updates count from 1 and include neither skipped ones nor micro-batches.
"""

import math
from collections.abc import Callable
from typing import Final

from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.scaling import Staged

# share of the way from the final rate to the peak, by progress in [0, 1] through the decay
SHAPES: Final[dict[str, Callable[[float, float], float]]] = {
    "cosine": lambda progress, power: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "polynomial": lambda progress, power: (1.0 - progress) ** power,
    "constant": lambda progress, power: 1.0,
}


def learning_rate(config: OptimizerConfig, update: int, total_steps: int) -> float:
    """Return the rate of the ``update``-th update (1 is the first) of a run of ``total_steps``.

    The first update has a rate above 0, update ``warmup_steps`` the peak, update ``total_steps`` and all that follow
    the final one. A warm-up that is longer than the run is cut off, not compressed. It need not be a whole number of
    updates: then the peak lies between two. ``config`` is `scaling.resolved` for the batches of the run; where they
    grow, so does the peak, by its rule.
    """
    assert not (config.base_batch or config.warmup_samples), "a rate per batch: see `scaling.resolved`"
    peak, ramp = config.learning_rate, update / config.warmup_steps if config.warmup_steps else 1.0
    if isinstance(config, Staged):
        peak, ramp = peak * config.growth(update), config.ramp(update)
    if update <= config.warmup_steps:
        return peak * ramp
    left = total_steps - config.warmup_steps
    progress = min(1.0, (update - config.warmup_steps) / left) if left > 0 else 1.0
    share = SHAPES[config.decay](progress, config.power)
    return peak * (config.final_fraction + (1.0 - config.final_fraction) * share)
