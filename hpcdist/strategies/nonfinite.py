"""After a loss or gradient that is not finite: which rank, and which tensor, it came from.

The parameters have not been touched yet when the step stops, so its local part can be computed again and looked at
unit by unit: first the parameters, then the outputs going forward, then the gradients going back.
"""

from collections.abc import Sequence

import numpy as np

from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import NonFiniteError
from hpcdist.optim import clip
from hpcdist.strategies.schedule.executor import Executor, MicroBatch


def explain(
    comm: Communicator,
    executor: Executor,
    parameters: FlatStore,
    gradients: FlatStore,
    batches: Sequence[MicroBatch],
    error: NonFiniteError,
) -> NonFiniteError:
    """Return ``error`` with the ranks and tensors where the first value that is not finite appeared. Collective."""
    findings = comm.allgather_object(_first(executor, parameters, gradients, batches))
    places = [f"rank {rank}: {finding}" for rank, finding in enumerate(findings) if finding]
    where = "; ".join(places) or "every rank's own part is finite, so the sum over the ranks overflowed"
    return NonFiniteError(
        f"{error}. {where}. Nothing was updated: lower optimizer.learning_rate, set optimizer.clip_norm, "
        "or look at the samples of this step"
    )


def _first(
    executor: Executor, parameters: FlatStore, gradients: FlatStore, batches: Sequence[MicroBatch]
) -> str | None:
    tensor = clip.first_nonfinite(parameters, parameters.part)
    if tensor:
        return f"parameter {tensor}"
    for microbatch, (inputs, targets) in enumerate(batches):
        if not len(inputs):
            continue
        for layer, finite in executor.finite_outputs(inputs):
            if not finite:
                return f"output of layer {layer} in micro-batch {microbatch}"
        if not np.isfinite(executor.evaluate(inputs, targets)):
            return f"loss of micro-batch {microbatch}"
    executor.local_gradients(batches)
    tensor = clip.first_nonfinite(gradients, gradients.part)
    return f"gradient of {tensor}" if tensor else None
