"""How good the model is on data it has not seen."""

import numpy as np

from hpcdist.training.trainer import Trainer


def mean_validation_loss(trainer: Trainer) -> float:
    """Return the mean loss in nats over the validation windows; NaN where there are none. Collective.

    The windows are fixed by the data and the recipe and shared among the ranks, so the figure does not depend on the
    number of ranks.
    """
    computes, parts = trainer.seat.computes, trainer.grid.data
    sums = np.zeros(2)
    for batch in trainer.source.validation_batches(trainer.recipe, parts, trainer.data_axis.rank if computes else None):
        found = np.zeros(2)
        if computes:
            inputs, targets = trainer.place(batch)
            found += (trainer.executor.evaluate(inputs, targets), targets.size if trainer.last_stage else 0)
        # Batch by batch, since the deadline of a communication runs for servers that wait for the others.
        sums += trainer.exchange.agree(found)
    return float(sums[0] / sums[1]) if sums[1] else float("nan")
