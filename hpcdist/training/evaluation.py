"""Validation loss of a run under way, the same figure on any number of ranks.

The windows are fixed by the data and the recipe and shared out over the replicas. Called by the loop (where the best
checkpoints stay) and by the job at its end. Collective.
"""

import numpy as np

from hpcdist.collectives.algorithms.fixed_tree import shards_of
from hpcdist.training.build.trainer import Trainer


def mean_validation_loss(trainer: Trainer) -> float:
    """Return the mean loss in nats over the validation windows; NaN where there are none. Collective.

    The windows are fixed by the data and the recipe and shared among the ranks, so the figure does not depend on the
    number of ranks; with logical shards, which are then shared out, not in a bit.
    """
    trainer.flush()
    computes, source = trainer.seat.computes, trainer.source
    parts = trainer.recipe.run.logical_shards or trainer.grid.data
    own = shards_of(parts, trainer.data_axis.size)[trainer.data_axis.rank] if computes else None
    speaks = trainer.last_stage and trainer.seat.tensor.rank == 0
    mine = [None] if own is None else list(range(own.start, own.stop))
    rounds = -(-parts // trainer.data_axis.size)  # the parts of a rank, or one more
    batches = [source.validation_batches(trainer.recipe, parts, part) for part in mine]
    total, count = 0.0, 0.0
    for together in zip(*batches, strict=True):
        placed = [trainer.place(batch) for batch in together] if computes else []
        losses = [trainer.executor.evaluate(*batch) for batch in placed]
        for inputs, targets in placed[: rounds - len(placed)]:  # layers may be gathered: all ranks come equally often
            trainer.executor.evaluate(inputs[:0], targets[:0])
        samples = sum(len(targets) for _, targets in placed)
        seen = samples * trainer.model.tokens_per_sample if speaks else 0
        # Batch by batch, since the deadline of a communication runs for servers that wait for the others.
        loss, found = trainer.exchange.agree_losses(losses, np.array([float(seen)]))
        total, count = total + loss, count + float(found[0])
    return total / count if count else float("nan")
