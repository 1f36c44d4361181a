"""Checks of replicas: name the ranks and tensors that differ, or that first became non-finite.

`check_parameters` costs one pass over the parameters, `check_batch` one over the batch. `explain_nonfinite` computes a
failed step again.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import Segment
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import DataError, DivergenceError, NonFiniteError
from hpcdist.optim import norms
from hpcdist.strategies.core.exchange import have_equal_digests
from hpcdist.strategies.core.operations import Operation
from hpcdist.strategies.schedule.executor import Executor
from hpcdist.strategies.schedule.stages import MicroBatch


def check_parameters(executor: Executor, step: int) -> None:
    """Raise DivergenceError if ranks hold different bits of the same parameter in ``executor``. Collective."""
    context, exchange, copies = executor.context, executor.exchange, executor.copies.parameters
    replicated = [(context.data, store) for store in (exchange.parameters, copies) if exchange.traits.identical]
    for comm, store in (*replicated, *exchange.other_replicas):
        if store.size:
            check_replicas(comm, store, step, context.agree_algorithm)
    for store in (*exchange.parameter_stores, copies) if context.tensor.size > 1 else ():
        if store.size:
            check_tensor_axis(context.tensor, store, step, context.agree_algorithm)


def check_replicas(comm: Communicator, store: FlatStore, step: int, algorithm: str = "native") -> None:
    """Raise DivergenceError on all ranks of ``comm`` if the copies of ``store`` differ. Collective over ``comm``.

    ``step``: step number for the message. ``algorithm``: allreduce algorithm with which the copies are compared.
    """
    if have_equal_digests(comm, _digest(backend.to_host(store.array)), algorithm):
        return
    _name_the_first(comm, store, list(store.tensors()), step)
    raise DivergenceError(f"step {step}: replicas differ in the padding between tensors; restart from a checkpoint")


def check_tensor_axis(comm: Communicator, store: FlatStore, step: int, algorithm: str = "native") -> None:
    """Raise DivergenceError on all ranks if the ranks' values of unsharded tensors in ``store`` differ.

    Collective over the tensor axis ``comm``. ``algorithm``: allreduce algorithm with which the values are compared.
    """
    whole = [(segment, touched) for segment, touched in store.tensors() if segment.spec.cut is None]
    values = [store.range(touched) for _, touched in whole] or [store.array[:0]]
    together = backend.namespace(store.array).concatenate(values)  # one copy from the GPU
    if not have_equal_digests(comm, _digest(backend.to_host(together)), algorithm):
        _name_the_first(comm, store, whole, step)


def check_batch(comm: Communicator, replica: int, inputs: Array, targets: Array, what: str, *, looks: bool) -> None:
    """Raise DataError on all ranks if the ranks of one ``replica`` have different batches. Collective over ``comm``.

    ``replica``: number of this rank's replica. ``what``: text that names the batch in the error message.
    """
    row = np.array([replica, _digest_batch(inputs), _digest_batch(targets)], np.int64)
    table = np.zeros((comm.size, row.size), np.int64)
    table[comm.rank] = row if looks else -1
    comm.all_gather(table.reshape(-1), [Range(rank * row.size, (rank + 1) * row.size) for rank in range(comm.size)])
    for number in sorted({*table[:, 0].tolist()} - {-1}):
        ranks = np.flatnonzero(table[:, 0] == number)
        for column, name in ((1, "inputs"), (2, "targets")):
            digests = table[ranks, column]
            others = ranks[digests != digests[0]]
            if len(others):
                raise DataError(
                    f"{what}: rank(s) {', '.join(map(str, others))} have other {name} than rank {ranks[0]}, but these "
                    f"ranks all compute replica {number} and need the same samples; use training.data_rank and "
                    "training.data_size to draw samples, not training.rank and training.world, or pass "
                    "batch_sampler=training.sampler(dataset) to the DataLoader"
                )


def _name_the_first(comm: Communicator, store: FlatStore, tensors: list[tuple[Segment, Range]], step: int) -> None:
    digests_here = [_digest(backend.to_host(store.range(touched))) for _, touched in tensors]
    all_digests = comm.allgather_object(digests_here)
    for index, (segment, _) in enumerate(tensors):
        hashes = [digests[index] for digests in all_digests]
        if len(set(hashes)) > 1:
            common = max(set(hashes), key=hashes.count)
            odd = [rank for rank, value in enumerate(hashes) if value != common]
            difference = f"rank(s) {odd} hold other bits than the rest of the {comm.size} ranks"
            if 2 * len(odd) >= comm.size:
                difference = f"no majority of the {comm.size} ranks has equal bits, so the correct bits are unknown"
            raise DivergenceError(
                f"step {step}: replicas differ, first in tensor {segment.key} of shape {segment.spec.shape}: "
                f"{difference}. Restart from the last checkpoint, and look for a skipped reduction or faulty node"
            )


def _digest_batch(values: Array) -> int:
    digest = xxhash.xxh3_64()
    for array in map(backend.to_host, backend.arrays_in(values)):
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.intdigest() >> 1


def _digest(data: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(data.view(np.uint8).data)


def explain_nonfinite(
    comm: Communicator,
    executor: Executor,
    operations: Sequence[Operation],
    batches: Sequence[MicroBatch],
    error: NonFiniteError,
) -> NonFiniteError:
    """Repeat a failed step to find the first non-finite value on each rank. Collective.

    Return ``error`` with these values in the text. ``operations``, ``batches``: operations and micro-batches to repeat.
    """
    findings = comm.allgather_object(executor.inspect(operations, batches))
    locations = [f"rank {rank}: {finding}" for rank, finding in enumerate(findings) if finding]
    location, suspect = "; ".join(locations), "this step"
    exchange = executor.exchange
    if not location and exchange.traits.alternates and (tensor := norms.first_nonfinite(exchange.gradients)):
        location, suspect = f"the step before left it in the gradient of {tensor}, summed over all ranks", "that step"
    location = location or "the gradients of each rank are finite, so their sum over the ranks overflowed"
    return NonFiniteError(
        f"{error}. {location}. Nothing was updated: lower optimizer.learning_rate, set optimizer.clip_norm, "
        f"or look at the samples of {suspect}"
    )
