"""Sharded reductions by name: reduce-scatter to the owners of shares, and all-gather back to all ranks.

Shares are in rank order, except for hierarchical. Costs are per half of an allreduce:

    native        MPI library
    ring          (p-1) α + (p-1)/p n β
    node_shared   shared memory of one node, no messages
    circulant     ceil(log2 p) α + (p-1)/p n β
    hierarchical  inside nodes (m-1) α + (m-1)/m n β, between nodes (k-1) α + (k-1)/k (n/m) β
    nccl          NCCL, between GPUs

Hierarchical is the 2D torus of H. Mikami et al., arXiv:1811.05233 (2018), with m ranks on each of k nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.dtypes import is_16bit_float, name_of
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives import nccl
from hpcdist.collectives.algorithms import circulant, ring
from hpcdist.collectives.algorithms.all_to_all import all_to_all_reduce_scatter
from hpcdist.collectives.dispatch import staged_all_gather, staged_reduce_scatter
from hpcdist.collectives.node import shared_memory
from hpcdist.collectives.reduction import REFUSALS, check_buffer, check_op, combiner, may_lose_nan
from hpcdist.collectives.segments import scratch
from hpcdist.comm import checks
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import HpcdistError, UsageError

SUM_16_BITS: Final = ("node_shared", "nccl")  # algorithms that sum 16-bit floats in float32 themselves


# Splits (size, itemsize) into one range per rank, which may be empty. Local, but the first call may be collective.
SharesFunction: TypeAlias = Callable[[Communicator, int, int], list[Range]]


class ReduceScatterFunction(Protocol):
    """Type of a function that reduces a buffer over all ranks, and leaves one range of the result on each rank."""

    def __call__(
        self, comm: Communicator, buffer: Array, shares: Sequence[Range], op: str = "sum", result: Array | None = None
    ) -> None:
        """Reduce ``buffer``, in place or into ``result``. Rank r gets only the range ``shares[r]`` of the result."""


# Fills ``buffer`` in place: each rank contributes ``buffer[shares[rank]]``. Collective over ``comm``.
AllGatherFunction: TypeAlias = Callable[[Communicator, Array, Sequence[Range]], None]


@dataclass(frozen=True)
class Sharding:
    """Algorithm that reduce-scatters a buffer to one element range per rank, and all-gathers these ranges."""

    shares: SharesFunction
    reduce_scatter: ReduceScatterFunction
    all_gather: AllGatherFunction


def _in_rank_order(comm: Communicator, size: int, itemsize: int) -> list[Range]:
    return split(size, comm.size, itemsize)


def _native_reduce_scatter(comm: Communicator, buffer: Array, shares: Sequence[Range], op: str) -> None:
    if is_device(buffer) and may_lose_nan(buffer, op):
        staged_reduce_scatter(_native_reduce_scatter, comm, buffer, shares, op)
    else:
        comm.reduce_scatter(buffer, shares, op)


def _into_result(
    reduce_scatter: Callable[[Communicator, Array, Sequence[Range], str], None], name: str, comm: Communicator,
    buffer: Array, shares: Sequence[Range], op: str, result: Array,
) -> None:  # fmt: skip
    if name == "node_shared" and not is_device(buffer):
        shared_memory.reduce_scatter(comm, buffer, shares, op, result)
        return
    copy = scratch("reduce-scatter", buffer.size, buffer.dtype, buffer)
    copy[...] = buffer
    reduce_scatter(comm, copy, shares, op)
    result[...] = copy[shares[comm.rank].slice]


def _node_shared_reduce_scatter(comm: Communicator, buffer: Array, shares: Sequence[Range], op: str) -> None:
    if is_device(buffer):
        staged_reduce_scatter(shared_memory.reduce_scatter, comm, buffer, shares, op)
    else:
        shared_memory.reduce_scatter(comm, buffer, shares, op)


def _node_shared_all_gather(comm: Communicator, buffer: Array, shares: Sequence[Range]) -> None:
    if is_device(buffer):
        staged_all_gather(shared_memory.all_gather, comm, buffer, shares)
    else:
        shared_memory.all_gather(comm, buffer, shares)


def _nested(comm: Communicator, size: int, itemsize: int) -> list[Range]:
    nodes = comm.nodes()
    if not nodes.uniform:
        return _in_rank_order(comm, size, itemsize)
    shares = [Range(0, 0)] * comm.size
    for chunk, peers in zip(split(size, nodes.intra.size, itemsize), _columns(comm), strict=True):
        for share, rank in zip(split(chunk.size, nodes.count, itemsize), peers, strict=True):
            shares[rank] = share.shift(chunk.start)
    return shares


def _hierarchical_reduce_scatter(comm: Communicator, buffer: Array, shares: Sequence[Range], op: str) -> None:
    nodes = comm.nodes()
    if not nodes.uniform:  # the chunks would differ between nodes
        ring.reduce_scatter(comm, buffer, shares, op)
        return
    chunks, shares_in_chunk = _levels(comm, shares)
    ring.reduce_scatter(nodes.intra, buffer, chunks, op)
    ring.reduce_scatter(nodes.peers, buffer, shares_in_chunk, op)


def _hierarchical_all_gather(comm: Communicator, buffer: Array, shares: Sequence[Range]) -> None:
    nodes = comm.nodes()
    if not nodes.uniform:
        ring.all_gather(comm, buffer, shares)
        return
    chunks, shares_in_chunk = _levels(comm, shares)
    ring.all_gather(nodes.peers, buffer, shares_in_chunk)
    ring.all_gather(nodes.intra, buffer, chunks)


def _columns(comm: Communicator) -> list[list[int]]:
    return [sorted(column) for column in zip(*comm.nodes().members, strict=True)]


def _levels(comm: Communicator, shares: Sequence[Range]) -> tuple[list[Range], list[Range]]:
    # Ranges of the first reduction, in each node, and of the second, between the nodes.
    columns = _columns(comm) if len(shares) == comm.size else []
    parts = [[shares[rank] for rank in column] for column in columns]
    joined = [a.stop == b.start for column in parts for a, b in zip(column, column[1:], strict=False)]
    if not columns or not all(joined):
        raise UsageError(
            f"the algorithm hierarchical got the shares {[(part.start, part.stop) for part in shares]}; for "
            f"{comm.size} ranks on {comm.nodes().count} nodes, shares must be the result of `Sharding.shares`"
        )
    return [Range(column[0].start, column[-1].stop) for column in parts], parts[comm.nodes().intra.rank]


def _check_result(buffer: Array, share: Range, result: Array) -> None:
    check_buffer(result)
    if result.dtype != buffer.dtype or result.size != share.size:
        raise UsageError(
            f"the result has {result.size} elements of {name_of(result.dtype)}, but this rank's share has "
            f"{share.size} of {name_of(buffer.dtype)}; size and dtype must be equal"
        )


class _Recorded:
    # After a failure, the records lack the end of the collective.
    __slots__ = ("_comm", "_token")

    def __init__(self, comm: Communicator, token: int) -> None:
        self._comm, self._token = comm, token

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None or issubclass(kind, REFUSALS):
            self._comm.events.end(self._token)


def _watched(
    name: str,
    shares: SharesFunction,
    reduce_scatter: Callable[[Communicator, Array, Sequence[Range], str], None],
    all_gather: AllGatherFunction,
) -> Sharding:

    def watched_reduce_scatter(
        comm: Communicator, buffer: Array, shares: Sequence[Range], op: str = "sum", result: Array | None = None
    ) -> None:
        halves = is_16bit_float(buffer.dtype)
        try:  # the same checks for every algorithm and number of ranks
            if halves:
                check_buffer(buffer)
                check_op(op)
            else:
                combiner(buffer, op)
            if result is not None:
                _check_result(buffer, shares[comm.rank], result)
        except HpcdistError as error:
            checks.announce_refusal(comm, checks.describe_call("reduce_scatter", name, buffer, op), error)
            raise
        if comm.size > 1:
            token = comm.events.begin(comm.name, f"{name}_reduce_scatter", name_of(buffer.dtype), buffer.size, 0, -1, 0)
            if comm.checked:
                fingerprint = checks.ranges_fingerprint(shares)
                checks.compare_calls(comm, checks.describe_call("reduce_scatter", name, buffer, op, fingerprint))
            run = all_to_all_reduce_scatter if halves and name not in SUM_16_BITS else reduce_scatter
            with _Recorded(comm, token):
                if result is None:
                    run(comm, buffer, shares, op)
                else:
                    _into_result(run, name, comm, buffer, shares, op, result)
        elif result is not None:
            result[...] = buffer[shares[0].slice]

    def watched_all_gather(comm: Communicator, buffer: Array, shares: Sequence[Range]) -> None:
        try:
            check_buffer(buffer)
        except HpcdistError as error:
            checks.announce_refusal(comm, checks.describe_call("all_gather", name, buffer), error)
            raise
        if comm.size > 1:
            token = comm.events.begin(comm.name, f"{name}_all_gather", name_of(buffer.dtype), buffer.size, 0, -1, 0)
            if comm.checked:
                fingerprint = checks.ranges_fingerprint(shares)
                checks.compare_calls(comm, checks.describe_call("all_gather", name, buffer, extra=fingerprint))
            with _Recorded(comm, token):
                all_gather(comm, buffer, shares)

    return Sharding(shares, watched_reduce_scatter, watched_all_gather)


SHARDED: Final[dict[str, Sharding]] = {
    "native": _watched("native", _in_rank_order, _native_reduce_scatter, Communicator.all_gather),
    "ring": _watched("ring", _in_rank_order, ring.reduce_scatter, ring.all_gather),
    "circulant": _watched("circulant", _in_rank_order, circulant.reduce_scatter, circulant.all_gather),
    "node_shared": _watched("node_shared", _in_rank_order, _node_shared_reduce_scatter, _node_shared_all_gather),
    "hierarchical": _watched("hierarchical", _nested, _hierarchical_reduce_scatter, _hierarchical_all_gather),
}
# For GPU buffers only; host buffers are rejected.
SHARDED_ON_GPUS: Final[dict[str, Sharding]] = {
    "nccl": _watched("nccl", _in_rank_order, nccl.reduce_scatter, nccl.all_gather)
}
