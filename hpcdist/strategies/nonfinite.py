"""After a loss or gradient that is not finite: which rank, and which tensor, it came from.

The parameters have not been touched yet when the step stops, so it can be computed again and looked at unit by unit:
first the parameters, then the outputs going forward, then the gradients before they are reduced.
"""

from collections.abc import Sequence

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import NonFiniteError
from hpcdist.strategies.schedule.executor import Executor, MicroBatch
from hpcdist.strategies.schedule.operations import Operation


def explain(
    comm: Communicator,
    executor: Executor,
    operations: Sequence[Operation],
    batches: Sequence[MicroBatch],
    error: NonFiniteError,
) -> NonFiniteError:
    """Return ``error`` with the ranks and tensors where the first value that is not finite appeared. Collective."""
    findings = comm.allgather_object(executor.inspect(operations, batches))
    places = [f"rank {rank}: {finding}" for rank, finding in enumerate(findings) if finding]
    where = "; ".join(places) or "every rank's own part is finite, so the sum over the ranks overflowed"
    return NonFiniteError(
        f"{error}. {where}. Nothing was updated: lower optimizer.learning_rate, set optimizer.clip_norm, "
        "or look at the samples of this step"
    )
