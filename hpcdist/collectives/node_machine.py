"""One collective through shared memory: which rank may touch what, and when. A compiled loop, without Python's lock.

Each rank owns, in memory that all can read,

    a line of flags   how far it is, and what it brought: twice, for calls of even and of odd number
    two slots         the whole of a small buffer, for everybody to reduce; they take turns
    two halves        of a staging area: row q holds elements that rank q owns; they take turns

A call begins with a meeting: every rank writes down what it brought, and sees that all brought alike. Then

    small     everybody reduces all slots to its own buffer
    direct    buffers in shared memory: the owner of a range reduces it from all buffers into all
    staged    piece by piece: the owner of a row reduces it from all staging areas, and the others fetch the result

Why nothing is overwritten that is still read: a rank writes the slot (and the words) of call e once it has met
everybody in call e-1, and whoever had come there had left call e-2, the last user. The half of piece k was last used by
piece k-2. Its rows of others are written after all ranks have finished piece k-2; its own row is written after all have
staged piece k, and they do so after they have fetched piece k-2.

The loop gives up waiting after a time, so that Python can answer signals, let MPI progress, and ask whether everybody
lives. Called again with the same state, it goes on where it was.

Here everything is bytes; the plan has the address of the code that knows the dtype (`node_kernels.address_of`).
``bounds`` are the first and the last byte of each rank's range, (2, ranks).
"""

from typing import Any

import numpy as np

from hpcdist.arrays.atomics import array_at, copy_bytes, store_release
from hpcdist.arrays.jit import jit
from hpcdist.collectives.node_pieces import run_pieces
from hpcdist.collectives.node_words import (
    ARRIVED,
    BRING,
    BRINGS,
    BROUGHT,
    BROUGHT_WORDS,
    CALL,
    COMPARED,
    DIFFERENT,
    DONE,
    FIRST_PIECE,
    GATHER,
    LEAVE,
    LEFT,
    MEET,
    MODE,
    OFFSET,
    PIECE,
    RANK,
    REDUCE,
    REGION,
    SCALE,
    SCRATCH,
    SLOT,
    SPINS,
    STAGE,
    TARGET,
    WAITING,
    YIELDS,
    all_have,
    reduce_to,
)


@jit
def write_down(line: int, parity: int, brought: Any) -> None:
    """Put what this rank brought where the others will look."""
    words = array_at(line, BROUGHT + 2 * BROUGHT_WORDS, brought)
    for word in range(brought.size):
        words[BROUGHT + parity * BROUGHT_WORDS + word] = brought[word]


@jit
def brought_alike(flags: Any, parity: int, brought: Any) -> bool:
    """Whether all ranks brought what this one did, wherever it lies."""
    for rank in range(flags.size):
        words = array_at(flags[rank], BROUGHT + 2 * BROUGHT_WORDS, brought)
        for word in range(COMPARED):
            if words[BROUGHT + parity * BROUGHT_WORDS + word] != brought[word]:
                return False
    return True


@jit
def all_in_place(flags: Any, parity: int, brought: Any) -> bool:
    """Whether the buffers of all ranks lie at the same place of the same shared region."""
    for rank in range(flags.size):
        words = array_at(flags[rank], BROUGHT + 2 * BROUGHT_WORDS, brought)
        for word in range(REGION, OFFSET + 1):
            if words[BROUGHT + parity * BROUGHT_WORDS + word] != brought[word]:
                return False
    return bool(brought[REGION] >= 0)


@jit
def find_region(regions: Any, address: int, nbytes: int, brought: Any) -> None:
    """Write down in which region the own buffer lies, and where: -1 when it is ordinary memory.

    A row of ``regions`` is the first address and the end of the own part, then the first address of every rank's.
    """
    brought[REGION], brought[OFFSET] = -1, 0
    for row in range(regions.shape[0]):
        if regions[row, 0] <= address and address + nbytes <= regions[row, 1]:
            brought[REGION], brought[OFFSET] = row, address - regions[row, 0]


@jit
def work_in_place(buffers: Any, bounds: Any, target: int, scratch: Any, plan: Any, scale: float) -> None:
    """Reduce the own range of all ``buffers``, or fetch the others'."""
    mode, rank = plan[MODE], plan[RANK]
    own, nbytes = bounds[0, rank], bounds[1, rank] - bounds[0, rank]
    if mode == REDUCE | GATHER:
        inputs = buffers + own
        reduce_to(inputs, inputs, nbytes, plan, scale)
    elif mode & REDUCE:
        scratch[0] = target + own
        reduce_to(buffers + own, scratch[:1], nbytes, plan, scale)
    else:
        for other in range(buffers.size):
            if other != rank:
                start = bounds[0, other]
                copy_bytes(buffers[other] + start, buffers[rank] + start, bounds[1, other] - start)


@jit
def meet(
    state: Any, flags: Any, slots: Any, regions: Any, bounds: Any, data: int, nbytes: int, plan: Any, scale: float
) -> int:
    """Go on with a call whose ranks are not known to have come, until it is seen how it is to be carried out."""
    rank, number = plan[RANK], state[CALL]
    parity, brought = number % 2, state[BRING:SCRATCH]
    if not all_have(flags, ARRIVED, number, plan[SPINS], plan[YIELDS]):
        return WAITING
    if not brought_alike(flags, parity, brought):
        return DIFFERENT
    if plan[MODE] == REDUCE | GATHER and nbytes <= plan[SLOT]:
        state[SCRATCH] = data
        reduce_to(slots[parity], state[SCRATCH : SCRATCH + 1], nbytes, plan, scale)
        return DONE
    if all_in_place(flags, parity, brought):
        buffers = regions[brought[REGION], 2:] + brought[OFFSET]
        work_in_place(buffers, bounds, state[TARGET], state[SCRATCH:], plan, scale)
        store_release(flags[rank] + 8 * LEFT, number)
        state[STAGE] = LEAVE
    else:
        state[STAGE] = FIRST_PIECE
    return WAITING


@jit
def go_on(state: Any, places: Any, regions: Any, bounds: Any, plan: Any, scale: float, buffer: Any) -> int:
    """Go on with a call until it is DONE, this rank is WAITING for another, or all see that they are DIFFERENT."""
    flags, data, answer = places[0], buffer.ctypes.data, DONE
    if state[STAGE] == MEET:
        answer = meet(state, flags, places[1:3], regions, bounds, data, buffer.size, plan, scale)
    if state[STAGE] == LEAVE:
        answer = DONE if all_have(flags, LEFT, state[CALL], plan[SPINS], plan[YIELDS]) else WAITING
    elif state[STAGE] >= FIRST_PIECE:
        answer = run_pieces(state, flags, places[3:5], bounds, data, plan, scale)
    return answer


@jit
def begin(state: Any, places: Any, regions: Any, bounds: Any, plan: Any, scale: float, buffer: Any, target: int) -> int:
    """Begin a call, and go on with it as `go_on` does.

    ``places`` are, by rank, the lines of flags, the two slots, and the two halves of the staging area: (5, ranks).
    ``buffer`` is seen as bytes; ``target`` is the address of the array for all, or 0.
    """
    state[CALL] += 1
    state[STAGE], state[PIECE] = MEET, 0
    state[TARGET] = target if target != 0 else buffer.ctypes.data
    rank, number = plan[RANK], state[CALL]
    if plan[MODE] == REDUCE | GATHER and buffer.size <= plan[SLOT]:
        copy_bytes(buffer.ctypes.data, places[1 + number % 2, rank], buffer.size)
    brought = state[BRING:SCRATCH]
    for word in range(COMPARED):
        brought[word] = plan[BRINGS + word]
    brought[SCALE : SCALE + 1].view(np.float64)[0] = scale
    find_region(regions, buffer.ctypes.data, buffer.size, brought)
    write_down(places[0, rank], number % 2, brought)
    store_release(places[0, rank] + 8 * ARRIVED, number)
    answer: int = go_on(state, places, regions, bounds, plan, scale, buffer)
    return answer
