"""Shared-memory allreduce, reduce-scatter and all-gather between the ranks of a node.

Costs, where 1/μ is the memory bandwidth of a rank, and σ is the time until a flag is seen:

    buffers from `allocate`     2 σ + 2 n μ             the owner of a range reads and writes the range p times
    any other buffer            2 σ per piece + 2 n μ, and as much cache traffic for the copies in and out
    small buffers               σ + p n μ               every rank sums everything
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
from hpcdist.collectives.node import kernels, protocol
from hpcdist.collectives.reduction import check_buffer, check_op, multiply
from hpcdist.collectives.segments import check_ranges
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import SharedBlock
from hpcdist.errors import CommunicationError, MissingCapabilityError, UsageError

SLOTS_BYTES: Final = 64 << 10  # total size of the slots: buffers that fit in a slot need only one barrier (empirical)
HALF_BYTES: Final = 256 << 10  # of a staging area: two ranks' areas then fit in the L2 cache

SPINS: Final = 4000  # polls of a flag before the core is yielded, if each rank has its own core
SPINS_CROWDED: Final = 1
YIELDS: Final = 500  # yields before the loop returns to Python, about 1 ms
YIELDS_CROWDED: Final = 20
NAPS_S: Final = (1e-4, 1e-3)  # shortest and longest sleep if ranks share cores, since a yielding rank counts as busy

PLANS_KEPT: Final = 4096  # for calls that differ in size, dtype, op or ranges

_DTYPES: Final = tuple(FLOATS | INTEGERS)  # the ranks compare indices in this tuple


def slot_bytes(ranks: int) -> int:
    """Return the size in bytes of each of a rank's two slots for small buffers, with ``ranks`` ranks on the node."""
    return SLOTS_BYTES // ranks // ALIGN_BYTES * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Plan:
    """Arguments of a collective for compiled code: integers (``words``) and each rank's byte range (``bounds``)."""

    words: np.ndarray
    bounds: np.ndarray


class NodeMemory:
    """Shared memory for collectives over ``comm``, whose ranks are all on one node. Construction is collective."""

    def __init__(self, comm: Communicator) -> None:
        # No reference to the communicator: it is the weak key of `_memory`, and would never be freed.
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
        self._blocks_of: dict[int, np.ndarray] = {}  # scratch buffers of the reduction by dtype; plans hold the address
        self._common: list[tuple[int, int]] = []
        self._given_up: BaseException | None = None
        cores = set().union(*comm.allgather_object(os.sched_getaffinity(0)))
        is_crowded = comm.size > len(cores)
        self._patience = (SPINS_CROWDED, YIELDS_CROWDED) if is_crowded else (SPINS, YIELDS)
        self._naps = is_crowded

    def common(self, comm: Communicator, nbytes: int) -> np.ndarray:
        """Allocate one block of ``nbytes`` bytes that all ranks share, or private blocks if that fails. Collective."""
        # Rank 0 allocates the bytes; the other ranks contribute an empty block and map the block of rank 0.
        rank = comm.rank if not self.is_shared else 0
        block = comm.shared(nbytes if comm.rank == rank else 0)
        self._blocks.append(block)
        if not block.is_shared:
            return np.zeros(nbytes, np.uint8)
        self._common.append((block.views[0].ctypes.data, nbytes))
        return block.views[0]

    def is_common(self, address: int, nbytes: int) -> bool:
        """Return True if the ``nbytes`` bytes at memory address ``address`` are in a block from `common`. Local."""
        return any(first <= address and address + nbytes <= first + size for first, size in self._common)

    def region(self, comm: Communicator, nbytes: int) -> np.ndarray:
        """Allocate ``nbytes`` bytes per rank that all ranks can access, or private bytes if that fails. Collective."""
        block = comm.shared(nbytes)
        local_bytes = block.views[self._rank]
        if block.is_shared:
            addresses = [view.ctypes.data for view in block.views]
            first = addresses[self._rank]
            row = np.array([[first, first + nbytes, *addresses]], np.int64)
            self._regions = np.concatenate([self._regions, row])
        self._blocks.append(block)
        return local_bytes

    def run(
        self, buffer: np.ndarray, op: str, scale: float, mode: int, ranges: Sequence[Range] | None, target: int = 0
    ) -> bool:
        """Run one collective on ``buffer``. Return False if the ranks made different calls. Collective.

        ``scale``: factor of the result. ``mode``: REDUCE (reduce-scatter), GATHER (all-gather) or both (allreduce), and
        ELSEWHERE if all ranks share one result array. ``ranges``: element range of each rank, or None for an even
        split. ``target``: address of the result, or 0 for ``buffer``.
        """
        if self._given_up is not None:
            raise CommunicationError(
                "an earlier collective in this shared memory was aborted, so the ranks may be at different calls; end "
                "the job, or call collectives.release on all ranks"
            ) from self._given_up
        ends = None if ranges is None else tuple((part.start, part.stop) for part in ranges)
        key = (buffer.size, buffer.dtype.num, op, mode, ends)
        plan = self._plans.get(key) or self._plan(key, buffer, ranges)
        arguments = (
            self._state, self._places, self._regions, plan.bounds, plan.words, scale, buffer.view(np.uint8)
        )  # fmt: skip
        try:
            status = protocol.start_call(*arguments, target)
            if status == protocol.WAITING:
                since, nap_s = time.monotonic(), NAPS_S[0]
                while status == protocol.WAITING:
                    self._block.check_alive(since)
                    if self._naps:
                        time.sleep(nap_s)
                        nap_s = min(2 * nap_s, NAPS_S[1])
                    status = protocol.advance(*arguments)
        except BaseException as error:  # also from a signal handler: the flags of the ranks are now out of step
            self._given_up = error
            raise
        return bool(status == protocol.DONE)

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
        words[protocol.PLAN_RECORD :] = (buffer.size, kind, 0, zlib.crc32(bounds.tobytes()))  # the call sets the scale
        if len(self._plans) >= PLANS_KEPT:
            self._plans.clear()
        plan = self._plans[key] = Plan(words, bounds)
        return plan

    def records(self) -> list[str]:
        """Return a list with a description of each rank's current collective, for error messages. Local."""
        parity = int(self._state[protocol.CALL]) % 2
        begin = protocol.RECORDS + parity * protocol.RECORD_WORDS
        return [
            _described(view[: protocol.LINE_BYTES].view(np.int64)[begin:][: protocol.RECORD_WORDS])
            for view in self._block.views
        ]

    def close(self) -> None:
        """Free all shared memory. Collective."""
        for block in self._blocks:
            block.close()


def _check_disjoint(ranges: Sequence[Range]) -> None:
    ordered = sorted(part for part in ranges if part)
    if any(part.stop > after.start for part, after in zip(ordered, ordered[1:], strict=False)):
        raise UsageError(
            f"the ranges of two ranks overlap: {[(part.start, part.stop) for part in ranges]}; give each rank a "
            "separate range of the buffer"
        )


def _described(words: Any) -> str:
    kind, scale = int(words[protocol.KIND]), float(words[protocol.SCALE : protocol.SCALE + 1].view(np.float64)[0])
    op = next(name for name, code in kernels.OPS.items() if code == kind >> 4 & 3)
    what = {protocol.REDUCE: "reduce-scatter", protocol.GATHER: "all-gather"}.get(kind & 7, "allreduce")
    times = "" if scale == 1 else f" times {scale!r}"
    ranges = "" if what == "allreduce" else f" by ranges {int(words[protocol.RANGES]):08x}"
    return f"{what} ({op}{times}) of {words[protocol.COUNT]} {_DTYPES[kind >> 8]}{ranges}"


_memory: weakref.WeakKeyDictionary[Communicator, NodeMemory] = weakref.WeakKeyDictionary()
_inside: weakref.WeakKeyDictionary[Communicator, Communicator] = weakref.WeakKeyDictionary()  # communicator -> its node


def node_shared_allreduce(comm: Communicator, buffer: Array, op: str = "sum", *, scale: float = 1.0) -> None:
    """Reduce ``buffer`` in place through the shared memory of one node, with equal bits on every rank. Collective."""
    # 16-bit floats are summed in float32 and rounded once.
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
    """Reduce ``buffer`` into ``result``, an array of `allocate_common` that no rank still reads. Collective."""
    # For p ranks and n bytes, this moves (p+1) n bytes, and `node_shared_allreduce` moves 2 p n bytes.
    check_buffer(buffer)
    check_buffer(result)
    check_op(op)
    _check_scale(buffer, scale)
    memory = _shared_memory_of(comm) if comm.size > 1 else None
    if result.shape != buffer.shape or result.dtype != buffer.dtype:
        raise UsageError(
            f"the result has {result.size} elements of {name_of(result.dtype)}, but the buffer has {buffer.size} of "
            f"{name_of(buffer.dtype)}; size and dtype must be equal; allocate the result like the buffer"
        )
    if memory is None:
        result[...] = buffer
        multiply(result, scale)
        return
    address = result.ctypes.data
    if not memory.is_common(address, result.nbytes):
        raise UsageError(
            "the argument result must be an array from shared_memory.allocate_common(comm, ...), got another array"
        )
    _carry_out(comm, memory, buffer, op, scale, None, protocol.REDUCE | protocol.ELSEWHERE, address)


def reduce_scatter(
    comm: Communicator, buffer: Array, ranges: Sequence[Range], op: str = "sum", result: np.ndarray | None = None
) -> None:
    """Reduce ``buffer``, in place or into ``result``, on one node. Rank r gets only ``ranges[r]``. Collective."""
    check_buffer(buffer)
    check_op(op)
    check_ranges(comm, buffer, ranges)
    if comm.size > 1:
        host = backend.to_host(buffer)
        target = 0
        if result is not None and result.size:  # address of a virtual buffer whose range of this rank is the result
            target = result.ctypes.data - ranges[comm.rank].start * host.itemsize
        _carry_out(comm, _shared_memory_of(comm), host, op, 1.0, ranges, protocol.REDUCE, target)
        if host is not buffer:
            local_slice = ranges[comm.rank].slice
            buffer[local_slice] = backend.namespace(buffer).asarray(host[local_slice])


def all_gather(comm: Communicator, buffer: Array, ranges: Sequence[Range]) -> None:
    """All-gather ``buffer`` on one node. Rank r contributes ``buffer[ranges[r]]``. Collective over ``comm``."""
    check_buffer(buffer)
    check_ranges(comm, buffer, ranges)
    if comm.size > 1:
        host = backend.to_host(buffer)
        _carry_out(comm, _shared_memory_of(comm), host, "sum", 1.0, ranges, protocol.GATHER)
        if host is not buffer:
            buffer[...] = backend.namespace(buffer).asarray(host)


def allocate(comm: Communicator, size: int, dtype: np.dtype) -> np.ndarray:
    """Allocate ``size`` zeroed elements per rank, in memory that a node's ranks share if possible. Collective."""
    # Collectives over ``comm`` or ``comm.nodes().intra`` need no extra copy of this memory.
    nodes = comm.nodes()
    on = comm if nodes.count == 1 else nodes.intra
    memory = None if on.size == 1 else _memory_of(on)
    if memory is None or not memory.is_shared:
        return np.zeros(size, dtype)
    if on is not comm:
        _inside[comm] = on
    return memory.region(on, size * np.dtype(dtype).itemsize).view(dtype)


def allocate_common(comm: Communicator, size: int, dtype: np.dtype) -> np.ndarray:
    """Return one zeroed array of ``size`` elements that all ranks of a node share. Collective.

    Raises MissingCapabilityError if the ranks cannot share memory.
    """
    nbytes = size * np.dtype(dtype).itemsize
    if comm.size == 1:
        return np.zeros(size, dtype)
    return _shared_memory_of(comm).common(comm, nbytes).view(dtype)


def is_available(comm: Communicator) -> bool:
    """Return True if all ranks of ``comm`` are on one node and can share memory. Collective over ``comm``."""
    return comm.size > 1 and comm.nodes().count == 1 and _memory_of(comm).is_shared


def release(comm: Communicator) -> None:
    """Free the shared memory of ``comm``, including arrays from `allocate`. Collective over ``comm``."""
    for owner in (comm, _inside.pop(comm, None)):
        memory = None if owner is None else _memory.pop(owner, None)
        if memory is not None:
            memory.close()


def _memory_of(comm: Communicator) -> NodeMemory:
    memory = _memory.get(comm)
    if memory is None:
        if comm.nodes().count > 1:
            raise UsageError(
                f"node_shared needs all ranks on one node, but the {comm.size} ranks of {comm.name} are on "
                f"{comm.nodes().count} nodes; choose hierarchical, or another algorithm that sends messages"
            )
        memory = _memory[comm] = NodeMemory(comm)
    return memory


def _shared_memory_of(comm: Communicator) -> NodeMemory:
    memory = _memory.get(comm) or _memory_of(comm)
    if not memory.is_shared:
        raise MissingCapabilityError(
            f"the {comm.size} ranks of {comm.name} cannot share memory, neither by an anonymous mapping nor by an MPI "
            "window; check the free memory, /dev/shm and the containers' process namespaces, or choose another "
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
    if not memory.run(buffer, op, float(scale), mode, ranges, target):
        records = memory.records()
        raise CommunicationError(
            f"the ranks of {comm.name} made different calls; make the same call on every rank: "
            + "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(records))
        )
