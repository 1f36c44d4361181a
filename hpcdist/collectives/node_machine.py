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

Here everything is bytes; ``reduction`` is the address of the code that knows the dtype (`node_kernels.address_of`), and
what it is called with beside places: op, scale, and the address of its blocks. ``bounds`` are the first and the last
byte of each rank's range, (2, ranks).
"""

from typing import Any, Final

from hpcdist.arrays.atomics import array_at, call, copy_bytes, load_acquire, pause, store_release, yield_core
from hpcdist.arrays.jit import jit

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
def reduce_to(inputs: Any, outputs: Any, nbytes: int, reduction: Any) -> None:
    """Reduce ``nbytes`` at each of the addresses ``inputs`` to each of ``outputs``."""
    code, op, scale, blocks = reduction
    places = (inputs.ctypes.data, inputs.size, outputs.ctypes.data, outputs.size)
    call(code, (places[0], places[1], places[2], places[3], nbytes, op, scale, blocks))


@jit
def work_in_place(mode: int, rank: int, buffers: Any, bounds: Any, reduction: Any) -> None:
    """Reduce the own range of all ``buffers``, or fetch the others'."""
    own, nbytes = bounds[0, rank], bounds[1, rank] - bounds[0, rank]
    if mode & REDUCE:
        inputs = buffers + own
        reduce_to(inputs, inputs if mode & GATHER else inputs[rank : rank + 1].copy(), nbytes, reduction)
    else:
        for other in range(buffers.size):
            if other != rank:
                start = bounds[0, other]
                copy_bytes(buffers[other] + start, buffers[rank] + start, bounds[1, other] - start)


@jit
def stage_piece(mode: int, rank: int, piece: int, row: int, area: int, bounds: Any, data: int) -> None:
    """Copy what the other ranks are to reduce to the rows of ``area``, each of ``row`` bytes."""
    if mode & REDUCE:
        for other in range(bounds.shape[1]):
            first = bounds[0, other] + piece * row
            nbytes = min(row, bounds[1, other] - first)
            if other != rank and nbytes > 0:
                copy_bytes(data + first, area + other * row, nbytes)


@jit
def reduce_piece(
    mode: int, rank: int, piece: int, row: int, areas: Any, bounds: Any, data: int, scratch: Any, reduction: Any
) -> None:
    """Reduce the own row of all ``areas`` and the own data, to the data and, for the others to fetch, the own area."""
    first = bounds[0, rank] + piece * row
    nbytes = min(row, bounds[1, rank] - first)
    if nbytes <= 0:
        return
    inputs, outputs = scratch[: areas.size], scratch[areas.size :]
    outputs[0], outputs[1] = data + first, areas[rank] + rank * row
    if mode & REDUCE:
        for other in range(areas.size):
            inputs[other] = outputs[0] if other == rank else areas[other] + rank * row
        reduce_to(inputs, outputs[: 2 if mode & GATHER else 1], nbytes, reduction)
    else:
        copy_bytes(outputs[0], outputs[1], nbytes)


@jit
def fetch_piece(rank: int, piece: int, row: int, areas: Any, bounds: Any, data: int) -> None:
    """Copy the rows that the other ranks own from their areas."""
    for other in range(areas.size):
        first = bounds[0, other] + piece * row
        nbytes = min(row, bounds[1, other] - first)
        if other != rank and nbytes > 0:
            copy_bytes(areas[other] + other * row, data + first, nbytes)


@jit
def run_pieces(
    state: Any, mode: int, rank: int, flags: Any, staging: Any, row: int, bounds: Any, data: int, scratch: Any,
    reduction: Any, spins: int, yields: int,
) -> int:  # fmt: skip
    """Go on with the staged part of a call."""
    if state[STAGE] == FIRST_PIECE and state[PIECES] > 0:
        stage_piece(mode, rank, 0, row, staging[state[BEFORE] % 2, rank], bounds, data)
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
            reduce_piece(mode, rank, piece, row, areas, bounds, data, scratch, reduction)
            store_release(flags[rank] + 8 * FINISHED, number)
            if piece + 1 < state[PIECES]:  # the next one is made ready before anybody is waited for
                stage_piece(mode, rank, piece + 1, row, next_areas[rank], bounds, data)
                store_release(flags[rank] + 8 * STAGED, number + 1)
            state[STAGE] = FETCH_PIECE
        state[LAGGARD] = await_flag(flags, FINISHED, number, spins, yields)
        if state[LAGGARD] >= 0:
            return WAITING
        if mode & GATHER:
            fetch_piece(rank, piece, row, areas, bounds, data)
        state[PIECE] += 1
        state[STAGE] = REDUCE_PIECE
    return DONE


@jit
def run(
    state: Any, brought: Any, mode: int, rank: int, places: Any, slot_bytes: int, row: int, regions: Any, bounds: Any,
    data: Any, scratch: Any, reduction: Any, spins: int, yields: int,
) -> int:  # fmt: skip
    """Go on with a call until it is DONE, this rank is WAITING for another, or all see that they are DIFFERENT.

    ``places`` are, by rank, the lines of flags, the two slots, and the two halves of the staging area: (5, ranks).
    ``data`` is the buffer as bytes, ``scratch`` has two words more than there are ranks.
    """
    flags, slots, number = places[0], places[1:3], state[CALL]
    parity, address = number % 2, data.ctypes.data
    small = mode == REDUCE | GATHER and data.size <= slot_bytes
    if state[STAGE] == BEGIN:
        if small:
            copy_bytes(address, slots[parity, rank], data.size)
        find_region(regions, address, data.size, brought)
        write_down(flags[rank], parity, brought)
        store_release(flags[rank] + 8 * ARRIVED, number)
        state[STAGE] = MEET
    if state[STAGE] == MEET:
        state[LAGGARD] = await_flag(flags, ARRIVED, number, spins, yields)
        if state[LAGGARD] >= 0:
            return WAITING
        if not brought_alike(flags, parity, brought):
            return DIFFERENT
        if small:
            scratch[0] = address
            reduce_to(slots[parity], scratch[:1], data.size, reduction)
            return DONE
        if all_in_place(flags, parity, brought):
            work_in_place(mode, rank, regions[brought[REGION], 2:] + brought[OFFSET], bounds, reduction)
            store_release(flags[rank] + 8 * LEFT, number)
            state[STAGE] = LEAVE
        else:
            state[STAGE] = FIRST_PIECE
    if state[STAGE] == LEAVE:
        state[LAGGARD] = await_flag(flags, LEFT, number, spins, yields)
        return WAITING if state[LAGGARD] >= 0 else DONE
    answer: int = run_pieces(
        state, mode, rank, flags, places[3:5], row, bounds, address, scratch, reduction, spins, yields
    )
    return answer
