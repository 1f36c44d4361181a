"""Shared-memory all-to-all of uneven parts between the ranks of a node, without a barrier.

Every pair of ranks has a channel in the memory of the sender: SLOTS slots, a counter of the pieces that were written,
and in the memory of the receiver one of those that were read. A rank goes round its channels, writes a piece wherever
there is a free slot, reads one wherever there is a new one, and returns when all of its own are done: what it has
written may be read later. Pieces are so small that the slots of a pair stay in the second cache, so that n bytes cost
n writes and n reads of memory, as a copy does.

    private buffers             (p-1)/p n (μ + copies in the cache)    n bytes of a rank, 1/μ memory bandwidth of a rank
    buffer from `allocate`      (p-1)/p n μ                            the receiver reads the sender's buffer in place

In place a channel carries one piece, the whole part: its length and where it lies, and the sender returns when it was
read. Counters only grow, over all calls; they are published by a release store after what they count, and read by an
acquire load, and each has a cache line that one rank writes. After an interrupted call later ones are refused.
"""

import os
import time
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.intrinsics import copy_bytes, load_acquire, pause, store_release, yield_core
from hpcdist.arrays.jit import jit
from hpcdist.arrays.ranges import ALIGN_BYTES, Range
from hpcdist.collectives import segments
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.communicator import Communicator, SharedBlock
from hpcdist.errors import CommunicationError, MissingCapabilityError, UsageError

NAME: Final = "node_shared"
SLOTS: Final = 4
SLOT_BYTES: Final = 64 << 10  # of a pair: with its four slots in the second cache (empirical)
MOST_BYTES: Final = 16 << 20  # of the channels of a rank: with very many ranks the slots are smaller
LINE_BYTES: Final = 128  # cores fetch lines of 64 bytes by pairs
SPINS: Final = 2000  # rounds without a piece before the core is offered to others, where each rank has one of its own
SPINS_CROWDED: Final = 1
YIELDS: Final = 500  # offers before the loop comes back to Python

# Words of 8 bytes in the line of a sender; its receiver has the number of pieces that it has read in another line.
WRITTEN, REGION, OFFSET = 0, 8, 16  # pieces; the region of the piece, from 1, or 0: a slot; the place in the region
OUT, LEFT_OUT, NUMBER_OUT, IN, LEFT_IN, NUMBER_IN = range(6)  # rows of the state, by peer


@jit
def _written(lines: Any, owner: int, peer: int) -> int:
    line: int = lines[owner] + 2 * LINE_BYTES * peer
    return line


@jit
def _read(lines: Any, owner: int, peer: int) -> int:
    line: int = lines[owner] + 2 * LINE_BYTES * peer + LINE_BYTES
    return line


@jit
def _push(state: Any, lines: Any, slots: Any, rank: int, peer: int, size: int) -> bool:
    """Write the next piece for ``peer`` where there is a free slot; return whether there was."""
    number, line = state[NUMBER_OUT, peer], _written(lines, rank, peer)
    if number - load_acquire(_read(lines, peer, rank)) >= SLOTS:
        return False
    nbytes = min(size, state[LEFT_OUT, peer])
    copy_bytes(state[OUT, peer], slots[rank] + (peer * SLOTS + number % SLOTS) * size, nbytes)
    state[OUT, peer] += nbytes
    state[LEFT_OUT, peer] -= nbytes
    state[NUMBER_OUT, peer] = number + 1
    store_release(line + REGION, 0)
    store_release(line + WRITTEN, number + 1)
    return True


@jit
def _show(state: Any, lines: Any, rank: int, peer: int, region: int, first: int) -> bool:
    """Say where the part for ``peer`` lies; once it was read, it is done. Return whether anything has happened."""
    number, line = state[NUMBER_OUT, peer], _written(lines, rank, peer)
    read = load_acquire(_read(lines, peer, rank))
    if state[OUT, peer] != 0:
        if read < number:  # earlier pieces, whose line this is, too
            return False
        store_release(line + OFFSET, state[OUT, peer] - first)
        store_release(line + REGION, region)
        state[OUT, peer], state[NUMBER_OUT, peer] = 0, number + 1
        store_release(line + WRITTEN, number + 1)
        return True
    if read < number:
        return False
    state[LEFT_OUT, peer] = 0
    return True


@jit
def _pull(state: Any, lines: Any, slots: Any, regions: Any, rank: int, peer: int, size: int) -> bool:
    """Read the next piece of ``peer`` where it is there; return whether it was."""
    number, line = state[NUMBER_IN, peer], _written(lines, peer, rank)
    if load_acquire(line + WRITTEN) <= number:
        return False
    region, nbytes = load_acquire(line + REGION), state[LEFT_IN, peer]
    if region > 0:
        source = regions[region - 1, 2 + peer] + load_acquire(line + OFFSET)
    else:
        source, nbytes = slots[peer] + (rank * SLOTS + number % SLOTS) * size, min(size, nbytes)
    copy_bytes(source, state[IN, peer], nbytes)
    state[IN, peer] += nbytes
    state[LEFT_IN, peer] -= nbytes
    state[NUMBER_IN, peer] = number + 1
    store_release(_read(lines, rank, peer), number + 1)
    return True


@jit
def move(
    state: Any, lines: Any, slots: Any, regions: Any, own: int, rank: int, size: int, spins: int, yields: int
) -> bool:
    """Move pieces until all are done; return False where none has moved for a time.

    ``own`` is the region in which the parts to be sent lie, a row of ``regions`` from 1, or 0: in none.
    """
    ranks, idle = lines.size, 0
    while True:
        left, moved = False, False
        for step in range(1, ranks):
            to, source = (rank + step) % ranks, (rank - step) % ranks
            if state[LEFT_OUT, to] > 0:
                if own > 0:
                    moved |= _show(state, lines, rank, to, own, regions[own - 1, 0])
                else:
                    moved |= _push(state, lines, slots, rank, to, size)
                left |= state[LEFT_OUT, to] > 0
            if state[LEFT_IN, source] > 0:
                moved |= _pull(state, lines, slots, regions, rank, source, size)
                left |= state[LEFT_IN, source] > 0
        if not left:
            return True
        idle = 0 if moved else idle + 1
        if idle > spins + yields:
            return False
        if idle > spins:
            yield_core()
        elif idle:
            pause()


class ChannelMemory:
    """Channels of ``comm``, whose ranks are on one node. Collective over ``comm``."""

    def __init__(self, comm: Communicator) -> None:
        ranks, self.rank = comm.size, comm.rank
        self.slot = min(SLOT_BYTES, max(ALIGN_BYTES, MOST_BYTES // (ranks * SLOTS) // ALIGN_BYTES * ALIGN_BYTES))
        head = 2 * LINE_BYTES * ranks
        self.block: SharedBlock = comm.shared(head + ranks * SLOTS * self.slot)
        self.is_shared = self.block.is_shared
        self.is_busy = False  # during a call, and for good after one that was given up
        self._state = np.zeros((6, ranks), np.int64)
        if self.is_shared:
            segments.count_in_ledger(self.block.views[comm.rank])
            self._lines = np.array([view.ctypes.data for view in self.block.views], np.int64)
            self._slots = self._lines + head
        cores = set().union(*comm.allgather_object(os.sched_getaffinity(0)))
        self._spins = SPINS_CROWDED if ranks > len(cores) else SPINS

    def run(
        self,
        send: np.ndarray,
        receive: np.ndarray,
        send_ranges: Sequence[Range],
        receive_ranges: Sequence[Range],
        regions: np.ndarray,
    ) -> None:
        """Move the parts of all pairs of this rank. Collective. ``regions`` are those of `shared_memory.regions`."""
        if self.is_busy:
            raise CommunicationError(
                "an earlier all-to-all in this shared memory was given up half-way, and the ranks are out of step; end "
                "the job, or call collectives.release on all ranks"
            )
        self.is_busy, state, itemsize = True, self._state, send.itemsize
        for rows, array, ranges in ((OUT, send, send_ranges), (IN, receive, receive_ranges)):
            state[rows] = [array.ctypes.data + part.start * itemsize for part in ranges]
            state[rows + 1] = [part.size * itemsize for part in ranges]
        state[LEFT_OUT, self.rank] = state[LEFT_IN, self.rank] = 0
        first = send.ctypes.data
        inside = np.flatnonzero((regions[:, 0] <= first) & (first + send.nbytes <= regions[:, 1]))
        own = int(inside[0]) + 1 if inside.size else 0
        arguments = state, self._lines, self._slots, regions, own, self.rank, self.slot, self._spins, YIELDS
        since = time.monotonic()
        while not move(*arguments):
            self.block.progress()
            self.block.check_alive(since)
        self.is_busy = False


_memory: weakref.WeakKeyDictionary[Communicator, ChannelMemory] = weakref.WeakKeyDictionary()


def node_shared_all_to_all(
    comm: Communicator, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
) -> None:
    """Exchange through memory that the ranks share. Collective over ``comm``, on one node.

    Buffers are on the host. The shared memory is taken at the first call and kept for ``comm``. Raises UsageError over
    several nodes or for a GPU's buffers, and MissingCapabilityError where no memory can be shared.
    """
    receive[receive_ranges[comm.rank].slice] = send[send_ranges[comm.rank].slice]
    if comm.size == 1:
        return
    if not isinstance(send, np.ndarray):
        raise UsageError("a node_shared all-to-all takes buffers of the host; choose native or pairwise on a GPU")
    memory = _memory.get(comm) or _memory_of(comm)
    if not memory.is_shared:
        raise MissingCapabilityError(
            f"the {comm.size} ranks of {comm.name} cannot share memory; choose another all-to-all than node_shared"
        )
    memory.run(send, receive, send_ranges, receive_ranges, shared_memory.regions(comm))


def _memory_of(comm: Communicator) -> ChannelMemory:
    if comm.nodes().count > 1:
        raise UsageError(
            f"a node_shared all-to-all needs all ranks on one node, and the {comm.size} ranks of {comm.name} are on "
            f"{comm.nodes().count}; choose hierarchical, native or pairwise"
        )
    memory = _memory[comm] = ChannelMemory(comm)
    return memory


def is_available(comm: Communicator) -> bool:
    """Whether all ranks of ``comm`` are on one node that lets them share memory. Collective over ``comm``."""
    return comm.size > 1 and comm.nodes().count == 1 and (_memory.get(comm) or _memory_of(comm)).is_shared


def release(comm: Communicator) -> None:
    """Give back what is shared for ``comm``. Collective over ``comm``."""
    memory = _memory.pop(comm, None)
    if memory is not None:
        memory.block.close()


_LINE: Final = np.zeros(2 * LINE_BYTES, np.uint8)
_PLACES: Final = np.full(1, _LINE.ctypes.data)
_NONE: Final = np.zeros((0, 3), np.int64)
move.sample(lambda: (np.zeros((6, 1), np.int64), _PLACES, _PLACES, _NONE, 0, 0, SLOT_BYTES, SPINS, YIELDS))
