"""After a loss or gradient that is not finite: which rank, and which tensor, it came from.

The parameters have not been touched yet when the step stops, so it can be computed again and looked at unit by unit:
first the parameters, then the outputs going forward, then the gradients before they are reduced. Where gradients are
applied one step late, those of the step before may be the cause: they are there as sums over all ranks.
"""

from collections.abc import Sequence

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import NonFiniteError
from hpcdist.optim import clip
from hpcdist.strategies.delayed import DelayedExchange
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
    where, which = "; ".join(places), "this step"
    exchange = executor.exchange
    if not where and isinstance(exchange, DelayedExchange) and (tensor := clip.first_nonfinite(exchange.gradients)):
        where, which = f"the step before left it in the gradient of {tensor}, summed over all ranks", "that step"
    where = where or "every rank's own part is finite, so the sum over the ranks overflowed"
    return NonFiniteError(
        f"{error}. {where}. Nothing was updated: lower optimizer.learning_rate, set optimizer.clip_norm, "
        f"or look at the samples of {which}"
    )
