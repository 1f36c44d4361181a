"""Shared-memory allreduce, reduce-scatter and all-gather between the ranks of a node.

With n bytes on p ranks, memory bandwidth 1/μ of a rank, and flags that take σ to be seen:

    buffers from `allocate`     2 σ + 2 n μ             the owner of a range reads it p times and writes it p times
    any other buffer            about 2 σ a piece + 2 n μ, and as much between the caches for the copies in and out
    small buffers               σ + p n μ               every rank sums everything

An MPI library cannot do the first: its buffers are the caller's, and the other ranks cannot see them. Gradients that
lie in `allocate` are summed where backward left them. Each element is summed in the order of the ranks, by every rank
that needs it or by one whose bits are copied: all ways give all ranks the same bits.

`NodeMemory` is the memory of a communicator: flags, slots, staging areas, and regions for buffers. It is made at the
first call, and `release` gives it back.
"""

import os
import time
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import FLOATS, INTEGERS, accumulation_dtype, name_of
from hpcdist.arrays.ranges import ALIGN_BYTES, Range, split
from hpcdist.collectives import segments
from hpcdist.collectives.half_precision import multiply
from hpcdist.collectives.node import kernels, protocol
from hpcdist.collectives.reduction import check_buffer, check_op
from hpcdist.collectives.segments import check_ranges
from hpcdist.comm.communicator import Communicator, SharedBlock
from hpcdist.errors import CommunicationError, MissingCapabilityError, UsageError

SLOTS_BYTES: Final = 64 << 10  # of all ranks: what fits a slot is summed by everybody, in one meeting (empirical)
HALF_BYTES: Final = 256 << 10  # of a staging area: with the other half and those of a peer in the second cache

SPINS: Final = 4000  # looks at a flag before the core is offered to others, where each rank has a core of its own
SPINS_CROWDED: Final = 1
YIELDS: Final = 500  # offers before the loop comes back to Python: about a millisecond
YIELDS_CROWDED: Final = 20
NAPS_S: Final = (1e-4, 1e-3)  # then, on crowded cores: to the kernel, who offers its core counts as who computes

PLANS_KEPT: Final = 4096  # of calls that differ in size, dtype, op or ranges

_DTYPES: Final = tuple(FLOATS | INTEGERS)  # their places are what the ranks compare


def slot_bytes(ranks: int) -> int:
    """Return the size of a slot of one of so many ranks (local)."""
    return SLOTS_BYTES // ranks // ALIGN_BYTES * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Plan:
    """Arguments of equal calls, as compiled loops take them; ``bounds`` are (2, ranks), in bytes."""

    words: np.ndarray
    bounds: np.ndarray


class NodeMemory:
    """Made at the first collective of ``comm``. Collective over ``comm``, whose ranks are all on one node."""

    def __init__(self, comm: Communicator) -> None:
        # Not the communicator itself: it is the key under which this is kept, and would never be let go.
        self._rank, self._ranks = comm.rank, comm.size
        self._slot, self._half = slot_bytes(comm.size), HALF_BYTES
        self._block = comm.shared(protocol.LINE_BYTES + 2 * self._slot + 2 * self._half)
        self.is_shared = self._block.is_shared
        self._blocks: list[SharedBlock] = [self._block]
        if not self.is_shared:
            return
        segments.count_in_ledger(self._block.views[comm.rank])
        base = np.array([view.ctypes.data for view in self._block.views], np.int64)
        # Offsets in a rank's memory: the line of flags, two slots, two halves of the staging area.
        steps = [0, protocol.LINE_BYTES, self._slot, self._slot, self._half]
        self._places = np.array([base + step for step in np.cumsum(steps)])  # (5, ranks)
        self._regions = np.zeros((0, 2 + comm.size), np.int64)
        self._state = np.zeros(protocol.SCRATCH + comm.size + 2, np.int64)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._blocks_of: dict[
            int, np.ndarray
        ] = {}  # by dtype: memory that the reduction works in; plans have its address
        self._common: list[tuple[int, int]] = []
        self._given_up: BaseException | None = None
        cores = set().union(*comm.allgather_object(os.sched_getaffinity(0)))
        is_crowded = comm.size > len(cores)
        self._patience = (SPINS_CROWDED, YIELDS_CROWDED) if is_crowded else (SPINS, YIELDS)
        self._naps = is_crowded

    def common(self, comm: Communicator, nbytes: int) -> np.ndarray:
        """Return ``nbytes`` bytes that are the same for all ranks, or memory of their own. Collective."""
        # Rank 0 holds the bytes; the others contribute an empty block and map that of rank 0.
        rank = comm.rank if not self.is_shared else 0
        block = comm.shared(nbytes if comm.rank == rank else 0)
        self._blocks.append(block)
        if not block.is_shared:
            return np.zeros(nbytes, np.uint8)
        self._common.append((block.views[0].ctypes.data, nbytes))
        return block.views[0]

    def is_common(self, address: int, nbytes: int) -> bool:
        """Whether the memory is some that `common` returned (local)."""
        return any(first <= address and address + nbytes <= first + size for first, size in self._common)

    def region(self, comm: Communicator, nbytes: int) -> np.ndarray:
        """Return ``nbytes`` bytes of this rank that the others can read; plain memory where they cannot. Collective."""
        block = comm.shared(nbytes)
        own = block.views[self._rank]
        if block.is_shared:
            addresses = [view.ctypes.data for view in block.views]
            first = addresses[self._rank]
            row = np.array([[first, first + nbytes, *addresses]], np.int64)
            self._regions = np.concatenate([self._regions, row])
        self._blocks.append(block)
        return own

    def run(
        self, buffer: np.ndarray, op: str, scale: float, mode: int, ranges: Sequence[Range] | None, target: int = 0
    ) -> bool:
        """Run a collective; return whether the calls of all ranks were alike. Collective. None: balanced ranges.

        ``target`` is the address of an array for all ranks that takes the result, or 0.
        """
        if self._given_up is not None:
            raise CommunicationError(
                "an earlier collective in this shared memory was given up half-way, and the ranks are out of step; "
                "end the job, or call collectives.release on all ranks"
            ) from self._given_up
        ends = None if ranges is None else tuple((part.start, part.stop) for part in ranges)
        key = (buffer.size, buffer.dtype.num, op, mode, ends)
        plan = self._plans.get(key) or self._plan(key, buffer, ranges)
        arguments = (
            self._state, self._places, self._regions, plan.bounds, plan.words, scale, buffer.view(np.uint8)
        )  # fmt: skip
        try:
            answer = protocol.start_call(*arguments, target)
            if answer == protocol.WAITING:
                since, nap_s = time.monotonic(), NAPS_S[0]
                while answer == protocol.WAITING:
                    self._block.check_alive(since)
                    if self._naps:
                        time.sleep(nap_s)
                        nap_s = min(2 * nap_s, NAPS_S[1])
                    answer = protocol.advance(*arguments)
        except BaseException as error:  # also of a signal handler: the flags of the ranks are out of step from here on
            self._given_up = error
            raise
        return bool(answer == protocol.DONE)

    def _plan(self, key: tuple[Any, ...], buffer: np.ndarray, ranges: Sequence[Range] | None) -> Plan:
        _, _, op, mode, _ = key
        parts = split(buffer.size, self._ranks, buffer.itemsize) if ranges is None else ranges
        _check_disjoint(parts)
        bounds = np.array([(part.start, part.stop) for part in parts], np.int64).T.copy() * buffer.itemsize
        row = self._half // self._ranks // ALIGN_BYTES * ALIGN_BYTES
        blocks = self._blocks_of.get(buffer.dtype.num)
        if blocks is None:
            blocks = np.empty(2 * kernels.BLOCK, accumulation_dtype(buffer.dtype))
            self._blocks_of[buffer.dtype.num] = blocks
        words = np.zeros(protocol.PLAN_WORDS, np.int64)
        words[: protocol.PLAN_RECORD] = (
            mode, self._rank, self._slot, row, -(-int((bounds[1] - bounds[0]).max()) // row),
            kernels.address_of(buffer.dtype), kernels.OPS[op], blocks.ctypes.data, *self._patience,
        )  # fmt: skip
        kind = _DTYPES.index(name_of(buffer.dtype)) << 8 | kernels.OPS[op] << 4 | mode
        words[protocol.PLAN_RECORD :] = (
            buffer.size,
            kind,
            0,
            zlib.crc32(bounds.tobytes()),
        )  # the scale is that of a call
        if len(self._plans) >= PLANS_KEPT:
            self._plans.clear()
        plan = self._plans[key] = Plan(words, bounds)
        return plan

    def records(self) -> list[str]:
        """Return a description of each rank's record of the call under way, for an error message (local)."""
        parity = int(self._state[protocol.CALL]) % 2
        begin = protocol.RECORDS + parity * protocol.RECORD_WORDS
        return [
            _described(view[: protocol.LINE_BYTES].view(np.int64)[begin:][: protocol.RECORD_WORDS])
            for view in self._block.views
        ]

    def close(self) -> None:
        """Give everything back. Collective."""
        for block in self._blocks:
            block.close()


def _check_disjoint(ranges: Sequence[Range]) -> None:
    """Raise UsageError when two ranks would own the same element (local)."""
    ordered = sorted(part for part in ranges if part)
    if any(part.stop > after.start for part, after in zip(ordered, ordered[1:], strict=False)):
        raise UsageError(f"the ranges of two ranks overlap: {[(part.start, part.stop) for part in ranges]}")


def _described(words: Any) -> str:
    kind, scale = int(words[protocol.KIND]), float(words[protocol.SCALE : protocol.SCALE + 1].view(np.float64)[0])
    op = next(name for name, code in kernels.OPS.items() if code == kind >> 4 & 3)
    what = {protocol.REDUCE: "reduce-scatter", protocol.GATHER: "all-gather"}.get(kind & 7, "allreduce")
    times = "" if scale == 1 else f" times {scale!r}"
    ranges = "" if what == "allreduce" else f" by ranges {int(words[protocol.RANGES]):08x}"
    return f"{what} ({op}{times}) of {words[protocol.COUNT]} {_DTYPES[kind >> 8]}{ranges}"


_memory: weakref.WeakKeyDictionary[Communicator, NodeMemory] = weakref.WeakKeyDictionary()
_inside: weakref.WeakKeyDictionary[Communicator, Communicator] = weakref.WeakKeyDictionary()  # whose node holds arrays


def node_shared_allreduce(comm: Communicator, buffer: Array, op: str = "sum", *, scale: float = 1.0) -> None:
    """Reduce ``buffer`` times ``scale`` in place to the same bits on every rank. Collective over ``comm``, on one node.

    Any dtype, 16-bit floats included: those are summed in float32 and rounded once. The shared memory is taken at the
    first call and kept for ``comm``. Raises UsageError over several nodes, MissingCapabilityError where no memory can
    be shared, CommunicationError when the ranks bring different buffers or one of them has died; at the first call,
    which sends messages, the MPI library raises an error of its own (see `hpcdist.comm.failure.rank_failures`).
    """
    check_buffer(buffer)
    check_op(op)
    _check_scale(buffer, scale)
    if comm.size == 1:
        if scale != 1.0:
            multiply(buffer, scale)
    else:
        host = backend.to_host(buffer)
        _carry_out(comm, _shared_memory_of(comm), host, op, scale, None, protocol.REDUCE | protocol.GATHER)
        if host is not buffer:
            buffer[...] = backend.namespace(buffer).asarray(host)


def allreduce_into(
    comm: Communicator, buffer: np.ndarray, result: np.ndarray, op: str = "sum", *, scale: float = 1.0
) -> None:
    """Reduce ``buffer`` times ``scale`` into ``result``, one array for all. Collective over ``comm``, on one node.

    ``result`` is memory from `allocate_common`, of the size and dtype of ``buffer``, which keeps its values. Written
    once instead of once a rank: (p+1) n bytes instead of 2 p n. No rank may still read it when another one calls.
    """
    check_buffer(buffer)
    check_buffer(result)
    check_op(op)
    _check_scale(buffer, scale)
    memory = _shared_memory_of(comm) if comm.size > 1 else None
    if result.shape != buffer.shape or result.dtype != buffer.dtype:
        raise UsageError(
            f"the result has {result.size} {name_of(result.dtype)}, the buffer {buffer.size} {name_of(buffer.dtype)}; "
            "they must be alike"
        )
    if memory is None:
        result[...] = buffer
        multiply(result, scale)
        return
    address = result.ctypes.data
    if not memory.is_common(address, result.nbytes):
        raise UsageError("the result does not lie in memory of node_shared.allocate_common(comm, ...)")
    _carry_out(comm, memory, buffer, op, scale, None, protocol.REDUCE | protocol.ELSEWHERE, address)


def reduce_scatter(
    comm: Communicator, buffer: Array, ranges: Sequence[Range], op: str = "sum", result: np.ndarray | None = None
) -> None:
    """Reduce in place: afterwards ``buffer[ranges[rank]]`` is the result. Collective over ``comm``, on one node.

    The rest is undefined. ``ranges`` are one for each rank, the same on every rank, disjoint; any may be empty. With a
    ``result``, as long as the own range, the sum goes there, and ``buffer``, in host memory, keeps its values.
    """
    check_buffer(buffer)
    check_op(op)
    check_ranges(comm, buffer, ranges)
    if comm.size > 1:
        host = backend.to_host(buffer)
        target = 0
        if result is not None and result.size:  # where the buffer would begin if the result were the own range of it
            target = result.ctypes.data - ranges[comm.rank].start * host.itemsize
        _carry_out(comm, _shared_memory_of(comm), host, op, 1.0, ranges, protocol.REDUCE, target)
        if host is not buffer:
            own = ranges[comm.rank].slice
            buffer[own] = backend.namespace(buffer).asarray(host[own])


def all_gather(comm: Communicator, buffer: Array, ranges: Sequence[Range]) -> None:
    """Give ``buffer[ranges[rank]]`` to all and fill the other ranges. Collective over ``comm``, on one node."""
    check_buffer(buffer)
    check_ranges(comm, buffer, ranges)
    if comm.size > 1:
        host = backend.to_host(buffer)
        _carry_out(comm, _shared_memory_of(comm), host, "sum", 1.0, ranges, protocol.GATHER)
        if host is not buffer:
            buffer[...] = backend.namespace(buffer).asarray(host)


def allocate(comm: Communicator, size: int, dtype: np.dtype) -> np.ndarray:
    """Return zeroed memory that the other ranks of the node can read. Collective over ``comm``.

    Collectives over ``comm``, or over its ``nodes().intra`` where it spans nodes, then need no copy of what lies there.
    Every rank asks for the same. Plain memory where nothing can be shared. It is kept until `release`.
    """
    nodes = comm.nodes()
    on = comm if nodes.count == 1 else nodes.intra
    memory = None if on.size == 1 else _memory_of(on)
    if memory is None or not memory.is_shared:
        return np.zeros(size, dtype)
    if on is not comm:
        _inside[comm] = on
    return memory.region(on, size * np.dtype(dtype).itemsize).view(dtype)


def allocate_common(comm: Communicator, size: int, dtype: np.dtype) -> np.ndarray:
    """Return zeroed memory that is one and the same for all ranks. Collective over ``comm``, on one node.

    It is kept until `release`. Raises MissingCapabilityError where nothing can be shared.
    """
    nbytes = size * np.dtype(dtype).itemsize
    if comm.size == 1:
        return np.zeros(size, dtype)
    return _shared_memory_of(comm).common(comm, nbytes).view(dtype)


def is_available(comm: Communicator) -> bool:
    """Whether all ranks of ``comm`` are on one node that lets them share memory. Collective over ``comm``."""
    return comm.size > 1 and comm.nodes().count == 1 and _memory_of(comm).is_shared


def release(comm: Communicator) -> None:
    """Give back what is shared for ``comm``: arrays of `allocate` must not be used again. Collective over ``comm``."""
    for owner in (comm, _inside.pop(comm, None)):
        memory = None if owner is None else _memory.pop(owner, None)
        if memory is not None:
            memory.close()


def _memory_of(comm: Communicator) -> NodeMemory:
    memory = _memory.get(comm)
    if memory is None:
        if comm.nodes().count > 1:
            raise UsageError(
                f"node_shared needs all ranks on one node, and the {comm.size} ranks of {comm.name} are on "
                f"{comm.nodes().count}; choose hierarchical, or another algorithm that sends messages"
            )
        memory = _memory[comm] = NodeMemory(comm)
    return memory


def _shared_memory_of(comm: Communicator) -> NodeMemory:
    memory = _memory.get(comm) or _memory_of(comm)
    if not memory.is_shared:
        raise MissingCapabilityError(
            f"the {comm.size} ranks of {comm.name} cannot share memory (neither an anonymous mapping nor an MPI "
            "window: see the free memory, /dev/shm and the containers' process namespaces); choose another "
            "communication.algorithm than node_shared"
        )
    return memory


def _check_scale(buffer: Array, scale: float) -> None:
    if scale != 1.0 and buffer.dtype.kind in "iu":
        raise UsageError(f"{name_of(buffer.dtype)} cannot be multiplied by {scale!r}; leave scale = 1, or pass floats")


def _carry_out(
    comm: Communicator,
    memory: NodeMemory,
    buffer: np.ndarray,
    op: str,
    scale: float,
    ranges: Sequence[Range] | None,
    mode: int,
    target: int = 0,
) -> None:
    """Run one collective on a host buffer. Raises CommunicationError where the ranks' calls differ."""
    if not memory.run(buffer, op, float(scale), mode, ranges, target):
        records = memory.records()
        raise CommunicationError(
            f"the ranks of {comm.name} brought different buffers: "
            + "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(records))
        )
