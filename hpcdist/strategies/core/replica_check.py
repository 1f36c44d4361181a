"""Checks of replicas: name the rank and the tensor that differ, or that were the first not to be finite.

A silent difference (a skipped reduction, a race, a bad memory cell, a script that draws other samples on each rank)
ruins a run long before its loss shows it. `check_parameters` costs one pass over the parameters and a small message or
two, `check_batch` one pass over the batch.

`explain_nonfinite` is called after a loss or gradient that is not finite. The parameters have not been touched yet
when the step stops, so it is computed again and looked at unit by unit: first the parameters, then the outputs going
forward, then the gradients before they are reduced. Where gradients are applied one step late, those of the step
before may be the cause: they are there as sums over all ranks.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import Segment
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import DataError, DivergenceError, NonFiniteError
from hpcdist.optim import norms
from hpcdist.strategies.delayed import DelayedExchange
from hpcdist.strategies.schedule.executor import Executor
from hpcdist.strategies.schedule.operations import Operation
from hpcdist.strategies.schedule.stages import MicroBatch


def check_parameters(executor: Executor, step: int) -> None:
    """Compare the parameters of all ranks that must hold the same bits. Collective over the world.

    Raises DivergenceError as `check_replicas` and `check_tensor_axis` do.
    """
    context, exchange, copies = executor.context, executor.exchange, executor.copies.parameters
    replicated = [(context.data, store) for store in (exchange.parameters, copies) if exchange.replicas_identical]
    for comm, store in (*replicated, *exchange.other_replicas):
        if store.size:
            check_replicas(comm, store, step, context.agree_algorithm)
    for store in (*exchange.parameter_stores, copies) if context.tensor.size > 1 else ():
        if store.size:
            check_tensor_axis(context.tensor, store, step, context.agree_algorithm)


def check_replicas(comm: Communicator, store: FlatStore, step: int, algorithm: str = "native") -> None:
    """Raise DivergenceError on every rank of ``comm``, naming the first tensor that differs and the ranks.

    Collective over ``comm``.

    ``store`` must hold the same range everywhere. A hash is equal on all ranks exactly when its maximum is the
    complement of the maximum of its complement, so one reduction of two numbers decides.
    """
    if _agree(comm, _digest(backend.to_host(store.array)), algorithm):
        return
    _name_the_first(comm, store, list(store.tensors()), step)
    raise DivergenceError(f"step {step}: replicas differ in the padding between tensors, which nothing should write")


def check_tensor_axis(comm: Communicator, store: FlatStore, step: int, algorithm: str = "native") -> None:
    """Raise DivergenceError on every rank of the tensor axis ``comm`` unless tensors that are not cut are the same.

    Collective over ``comm``. ``store`` must hold the same range everywhere.
    """
    whole = [(segment, touched) for segment, touched in store.tensors() if segment.spec.cut is None]
    values = [store.range(touched) for _, touched in whole] or [store.array[:0]]
    together = backend.namespace(store.array).concatenate(values)  # so that a GPU is asked once
    if not _agree(comm, _digest(backend.to_host(together)), algorithm):
        _name_the_first(comm, store, whole, step)


def check_batch(comm: Communicator, replica: int, inputs: Array, targets: Array, what: str, *, looks: bool) -> None:
    """Raise DataError on every rank of the world ``comm`` unless all ranks of each replica bring the same batch.

    Collective over ``comm``. ``replica`` is that of this rank, ``what`` the batch that messages name. Where a rank does
    not look at its batch, in the middle of a pipeline, anything may be in it.
    """
    row = np.array([replica, _digest_batch(inputs), _digest_batch(targets)], np.int64)
    every = np.zeros((comm.size, row.size), np.int64)
    every[comm.rank] = row if looks else -1
    comm.all_gather(every.reshape(-1), [Range(rank * row.size, (rank + 1) * row.size) for rank in range(comm.size)])
    for number in sorted({*every[:, 0].tolist()} - {-1}):
        ranks = np.flatnonzero(every[:, 0] == number)
        for column, name in ((1, "inputs"), (2, "targets")):
            digests = every[ranks, column]
            others = ranks[digests != digests[0]]
            if len(others):
                raise DataError(
                    f"{what}: rank(s) {', '.join(map(str, others))} bring other {name} than rank {ranks[0]}, and all "
                    f"of them compute replica {number}, on the same samples; draw by training.data_rank of "
                    "training.data_size and seed alike, not by training.rank of training.world, or let a DataLoader of "
                    "PyTorch take batch_sampler=training.sampler(dataset)"
                )


def _agree(comm: Communicator, digest: int, algorithm: str) -> bool:
    """Whether all ranks bring the same digest. Collective."""
    number = digest >> 1  # 63 bits fit an int64
    votes = np.array([number, ~number], np.int64)
    collectives.allreduce(comm, votes, algorithm, op="max")
    return bool(votes[0] == ~votes[1])


def _name_the_first(comm: Communicator, store: FlatStore, tensors: list[tuple[Segment, Range]], step: int) -> None:
    """Raise DivergenceError for the first of ``tensors`` that is not the same on all ranks. Collective."""
    mine = [_digest(backend.to_host(store.range(touched))) for _, touched in tensors]
    everyone = comm.allgather_object(mine)
    for index, (segment, _) in enumerate(tensors):
        hashes = [digests[index] for digests in everyone]
        if len(set(hashes)) > 1:
            common = max(set(hashes), key=hashes.count)
            odd = [rank for rank, value in enumerate(hashes) if value != common]
            who = f"rank(s) {odd} hold other bits than the rest of {comm.size}"
            if 2 * len(odd) >= comm.size:
                who = f"no bits are those of most of {comm.size} ranks, so nobody knows which are right"
            raise DivergenceError(
                f"step {step}: replicas differ, first in tensor {segment.key} {segment.spec.shape}: {who}; they are "
                "not one model any more. Restart from the last checkpoint, and look for a skipped reduction or a "
                "faulty node"
            )


def _digest_batch(values: Array) -> int:
    """Return 63 bits of the values, types and shapes of an array, or of several (local)."""
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
    """Return ``error`` with the ranks and tensors where the first value that is not finite appeared. Collective."""
    findings = comm.allgather_object(executor.inspect(operations, batches))
    places = [f"rank {rank}: {finding}" for rank, finding in enumerate(findings) if finding]
    where, which = "; ".join(places), "this step"
    exchange = executor.exchange
    if not where and isinstance(exchange, DelayedExchange) and (tensor := norms.first_nonfinite(exchange.gradients)):
        where, which = f"the step before left it in the gradient of {tensor}, summed over all ranks", "that step"
    where = where or "every rank's own part is finite, so the sum over the ranks overflowed"
    return NonFiniteError(
        f"{error}. {where}. Nothing was updated: lower optimizer.learning_rate, set optimizer.clip_norm, "
        f"or look at the samples of {which}"
    )
