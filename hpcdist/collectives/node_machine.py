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
"""

from typing import Any, Final

from hpcdist.arrays.atomics import array_at, load_acquire, pause, store_release, yield_core
from hpcdist.arrays.jit import jit
from hpcdist.collectives.node_kernels import WHOLE, copy, reduce_any, reduce_in_place

LINE_BYTES: Final = 256  # more than a cache line: cores fetch them by pairs
ARRIVED: Final = 0  # words of 8 bytes: the number of the call
LEFT: Final = 1
STAGED: Final = 2  # the number of pieces, over all calls
FINISHED: Final = 3
BROUGHT: Final = 8  # for calls of even number; BROUGHT_WORDS further for the others
BROUGHT_WORDS: Final = 8
COUNT: Final = 0  # words of what was brought
KIND: Final = 1
SCALE: Final = 2
RANGES: Final = 3
COMPARED: Final = 4  # so many must be equal on all ranks
REGION: Final = 4
OFFSET: Final = 5

REDUCE: Final = 1  # bits of what a call does
GATHER: Final = 2

STAGE: Final = 0  # words of the state of a call under way
PIECE: Final = 1
PIECES: Final = 2  # of this call
BEFORE: Final = 3  # pieces of all calls before
CALL: Final = 4  # number of this call
LAGGARD: Final = 5  # who was waited for when the loop gave up
STATE_WORDS: Final = 6

BEGIN: Final = 0  # stages of a call
MEET: Final = 1
LEAVE: Final = 2
FIRST_PIECE: Final = 3
REDUCE_PIECE: Final = 4
FETCH_PIECE: Final = 5

DONE: Final = 0  # what the loop returns
WAITING: Final = 1
DIFFERENT: Final = 2


@jit
def await_flag(flags: Any, word: int, value: int, spins: int, yields: int) -> int:
    """Return -1 once the flag of every rank has reached ``value``; after a time, a rank whose flag has not."""
    for rank in range(flags.size):
        address = flags[rank] + 8 * word
        left = spins
        while load_acquire(address) < value:
            if left > 0:
                pause()
            elif left > -yields:
                yield_core()
            else:
                return rank
            left -= 1
    return -1


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
def work_in_place(
    mode: int, rank: int, addresses: Any, starts: Any, stops: Any, op: int, scale: Any, width: int,
    data: Any, halves: Any, total: Any, outputs: Any,
) -> None:  # fmt: skip
    """Reduce the own range of all buffers, or fetch the others'."""
    own, size = starts[rank] * data.itemsize, stops[rank] - starts[rank]
    if mode == REDUCE | GATHER and width == WHOLE:
        reduce_in_place(addresses + own, size, op, scale, data, total)
    elif mode == REDUCE | GATHER:
        reduce_any(addresses + own, addresses + own, size, op, scale, width, data, halves, total)
    elif mode == REDUCE:
        outputs[0] = addresses[rank] + own
        reduce_any(addresses + own, outputs[:1], size, op, scale, width, data, halves, total)
    else:
        for other in range(addresses.size):
            if other != rank:
                theirs = array_at(addresses[other] + starts[other] * data.itemsize, stops[other] - starts[other], data)
                copy(theirs, data[starts[other] : stops[other]])


@jit
def stage_piece(mode: int, rank: int, piece: int, row: int, area: int, starts: Any, stops: Any, data: Any) -> None:
    """Copy what the other ranks are to reduce to the rows of ``area``, each of ``row`` elements."""
    if mode & REDUCE:
        for other in range(starts.size):
            first = starts[other] + piece * row
            count = min(row, stops[other] - first)
            if other != rank and count > 0:
                copy(data[first : first + count], array_at(area + other * row * data.itemsize, count, data))


@jit
def reduce_piece(
    mode: int, rank: int, piece: int, row: int, areas: Any, starts: Any, stops: Any, op: int, scale: Any, width: int,
    data: Any, halves: Any, total: Any, inputs: Any, outputs: Any,
) -> None:  # fmt: skip
    """Reduce the own row of all ``areas`` and the own data, to the data and, for the others to fetch, the own area."""
    first = starts[rank] + piece * row
    count = min(row, stops[rank] - first)
    if count <= 0:
        return
    behind = rank * row * data.itemsize
    outputs[0] = data.ctypes.data + first * data.itemsize
    outputs[1] = areas[rank] + behind
    if mode & REDUCE:
        for other in range(areas.size):
            inputs[other] = outputs[0] if other == rank else areas[other] + behind
        targets = outputs[: 2 if mode & GATHER else 1]
        reduce_any(inputs, targets, count, op, scale, width, data, halves, total)
    else:
        copy(data[first : first + count], array_at(outputs[1], count, data))


@jit
def fetch_piece(rank: int, piece: int, row: int, areas: Any, starts: Any, stops: Any, data: Any) -> None:
    """Copy the rows that the other ranks own from their areas."""
    for other in range(areas.size):
        first = starts[other] + piece * row
        count = min(row, stops[other] - first)
        if other != rank and count > 0:
            copy(array_at(areas[other] + other * row * data.itemsize, count, data), data[first : first + count])


@jit
def run_pieces(
    state: Any, mode: int, rank: int, op: int, scale: Any, width: int, flags: Any, staging: Any, row: int,
    starts: Any, stops: Any, data: Any, halves: Any, total: Any, inputs: Any, outputs: Any, spins: int, yields: int,
) -> int:  # fmt: skip
    """Go on with the staged part of a call."""
    if state[STAGE] == FIRST_PIECE and state[PIECES] > 0:
        stage_piece(mode, rank, 0, row, staging[state[BEFORE] % 2, rank], starts, stops, data)
        store_release(flags[rank] + 8 * STAGED, state[BEFORE] + 1)
        state[STAGE] = REDUCE_PIECE
    while state[PIECE] < state[PIECES]:
        piece = state[PIECE]
        number = state[BEFORE] + piece + 1
        areas, next_areas = staging[(number - 1) % 2], staging[number % 2]
        if state[STAGE] == REDUCE_PIECE:
            state[LAGGARD] = await_flag(flags, STAGED, number, spins, yields)
            if state[LAGGARD] >= 0:
                return WAITING
            reduce_piece(
                mode, rank, piece, row, areas, starts, stops, op, scale, width, data, halves, total, inputs, outputs
            )
            store_release(flags[rank] + 8 * FINISHED, number)
            if piece + 1 < state[PIECES]:  # the next one is made ready before anybody is waited for
                stage_piece(mode, rank, piece + 1, row, next_areas[rank], starts, stops, data)
                store_release(flags[rank] + 8 * STAGED, number + 1)
            state[STAGE] = FETCH_PIECE
        state[LAGGARD] = await_flag(flags, FINISHED, number, spins, yields)
        if state[LAGGARD] >= 0:
            return WAITING
        if mode & GATHER:
            fetch_piece(rank, piece, row, areas, starts, stops, data)
        state[PIECE] += 1
        state[STAGE] = REDUCE_PIECE
    return DONE


@jit
def run(
    state: Any, brought: Any, mode: int, rank: int, op: int, scale: Any, width: int, flags: Any, slots: Any,
    slot_bytes: int, staging: Any, row: int, regions: Any, starts: Any, stops: Any, data: Any, halves: Any, total: Any,
    inputs: Any, outputs: Any, spins: int, yields: int,
) -> int:  # fmt: skip
    """Go on with a call until it is DONE, this rank is WAITING for another, or all see that they are DIFFERENT."""
    call = state[CALL]
    parity = call % 2
    small = mode == REDUCE | GATHER and data.size * data.itemsize <= slot_bytes
    if state[STAGE] == BEGIN:
        if small:
            copy(data, array_at(slots[parity, rank], data.size, data))
        find_region(regions, data.ctypes.data, data.size * data.itemsize, brought)
        write_down(flags[rank], parity, brought)
        store_release(flags[rank] + 8 * ARRIVED, call)
        state[STAGE] = MEET
    if state[STAGE] == MEET:
        state[LAGGARD] = await_flag(flags, ARRIVED, call, spins, yields)
        if state[LAGGARD] >= 0:
            return WAITING
        if not brought_alike(flags, parity, brought):
            return DIFFERENT
        if small:
            outputs[0] = data.ctypes.data
            reduce_any(slots[parity], outputs[:1], data.size, op, scale, width, data, halves, total)
            return DONE
        if all_in_place(flags, parity, brought):
            addresses = regions[brought[REGION], 2:] + brought[OFFSET]
            work_in_place(mode, rank, addresses, starts, stops, op, scale, width, data, halves, total, outputs)
            store_release(flags[rank] + 8 * LEFT, call)
            state[STAGE] = LEAVE
        else:
            state[STAGE] = FIRST_PIECE
    if state[STAGE] == LEAVE:
        state[LAGGARD] = await_flag(flags, LEFT, call, spins, yields)
        return WAITING if state[LAGGARD] >= 0 else DONE
    answer: int = run_pieces(
        state, mode, rank, op, scale, width, flags, staging, row, starts, stops, data, halves, total, inputs, outputs,
        spins, yields,
    )  # fmt: skip
    return answer
