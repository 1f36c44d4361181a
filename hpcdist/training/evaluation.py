"""How good the model is on data it has not seen."""

import numpy as np

from hpcdist.training.trainer import Trainer


def mean_validation_loss(trainer: Trainer) -> float:
    """Return the mean loss in nats over the validation windows; NaN where there are none. Collective.

    The windows are fixed by the data and the recipe and shared among the ranks, so the figure does not depend on the
    number of ranks.
    """
    sums = np.zeros(2)
    computed = trainer.source.validation_batches(trainer.recipe, trainer.data_axis) if trainer.seat.computes else ()
    for batch in computed:
        inputs, targets = trainer.place(batch)
        sums += (trainer.executor.evaluate(inputs, targets), targets.size if trainer.last_stage else 0)
    trainer.exchange.agree(sums)
    return float(sums[0] / sums[1]) if sums[1] else float("nan")
