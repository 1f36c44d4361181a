"""Lock-free protocol of a collective through shared memory: layout, flags, and the order of accesses.

The loops are compiled and run without Python's lock. Each rank owns, in memory that all ranks can read,

    a line of flags   its progress, and a record of its call: two, for calls of even and of odd number
    two slots         the whole of a small buffer, reduced by every rank; used in turn
    two halves        of a staging area: row q holds elements that rank q owns; used in turn

A call begins with a barrier at which every rank records its call and compares the records of all. Then

    small     every rank reduces all slots to its own buffer
    direct    buffers in shared memory: the owner of a range reduces it from all buffers into all
    staged    private buffers, by pieces: the owner of a row reduces it from all staging areas, the others copy it out

Nothing is overwritten that is still read. A rank writes the slot (and the record) of call e after the barrier of call
e-1, and whoever reached that barrier had left call e-2, the last user. The half of piece k was last used by piece
k-2: its rows of other ranks are written after all ranks have finished piece k-2; its own row is written after all
have staged piece k, which they do after they have copied out piece k-2.

The loop stops waiting after a time, so that Python can handle signals, let MPI progress, and check whether all ranks
are alive. Called again with the same state, it resumes. All sizes are in bytes; the plan has the address of the code
that knows the dtype (`kernels.address_of`). ``bounds`` are the first and last byte of each rank's range, (2, ranks).
"""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.intrinsics import array_at, call, copy_bytes, load_acquire, pause, store_release, yield_core
from hpcdist.arrays.jit import jit

LINE_BYTES: Final = 256  # more than a cache line: cores fetch them by pairs
# Words of 8 bytes in a line of flags. Only their rank writes them, and they only grow: no lock, no reset, and a value
# that was reached stays so.
ARRIVED: Final = 0  # the number of the call
LEFT: Final = 1
STAGED: Final = 2  # the number of pieces, over all calls
FINISHED: Final = 3
RECORDS: Final = 8  # first word of the record of a call of even number; RECORD_WORDS further for the others
RECORD_WORDS: Final = 8
COUNT: Final = 0  # words of a record
KIND: Final = 1
SCALE: Final = 2
RANGES: Final = 3
COMPARED: Final = 4  # so many must be equal on all ranks
REGION: Final = 4
OFFSET: Final = 5

REDUCE: Final = 1  # bits of what a call does
GATHER: Final = 2
ELSEWHERE: Final = 4  # the reduction goes to one array for all ranks, and not to their buffers

STAGE: Final = 0  # words of the state of a call under way
PIECE: Final = 1
BEFORE: Final = 2  # pieces of all calls before
CALL: Final = 3  # number of this call
TARGET: Final = 4  # address that results go to: that of the own buffer, or of the array for all
OWN_RECORD: Final = 8  # the record of this rank's call: RECORD_WORDS
SCRATCH: Final = OWN_RECORD + RECORD_WORDS  # two words more than there are ranks

MODE: Final = 0  # words of the plan, which calls alike have in common
RANK: Final = 1
SLOT: Final = 2  # bytes
ROW: Final = 3  # bytes
PIECES: Final = 4
CODE: Final = 5  # address of the reduction; the next two are what it is called with
OP: Final = 6
BLOCKS: Final = 7
SPINS: Final = 8
YIELDS: Final = 9
PLAN_RECORD: Final = 10  # the first COMPARED words of the record
PLAN_WORDS: Final = PLAN_RECORD + COMPARED

MEET: Final = 1  # stages of a call
LEAVE: Final = 2
FIRST_PIECE: Final = 3
REDUCE_PIECE: Final = 4
FETCH_PIECE: Final = 5

DONE: Final = 0  # what the loop returns
WAITING: Final = 1
DIFFERENT: Final = 2


@jit
def has_reached(address: int, value: int, spins: int, yields: int) -> bool:
    """Wait until the counter at ``address`` has reached ``value``; after a time, return False."""
    # First spin, which costs the least time; then offer the core to other ranks; then let Python look for dead ones.
    left = spins
    # Acquire, against the release store of the writer: its data are visible once its counter is.
    while load_acquire(address) < value:
        if left > 0:
            pause()
        elif left > -yields:
            yield_core()
        else:
            return False
        left -= 1
    return True


@jit
def all_reached(flags: Any, word: int, value: int, spins: int, yields: int) -> bool:
    """Wait until the flag of every rank has reached ``value``; after a time, return False."""
    for rank in range(flags.size):  # noqa: SIM110 - numba compiles no generators
        if not has_reached(flags[rank] + 8 * word, value, spins, yields):
            return False
    return True


@jit
def reduce_to(inputs: Any, outputs: Any, nbytes: int, plan: Any, scale: float) -> None:
    """Reduce ``nbytes`` at each of the addresses ``inputs`` to each of ``outputs``."""
    first, second = inputs.ctypes.data, outputs.ctypes.data
    call(plan[CODE], (first, inputs.size, second, outputs.size, nbytes, plan[OP], scale, plan[BLOCKS]))


@jit
def stage_piece(mode: int, rank: int, piece: int, row: int, area: int, bounds: Any, data: int) -> None:
    """Copy what the other ranks are to reduce to the rows of ``area``, each of ``row`` bytes."""
    # The own row is not staged: its owner reads its operand from the buffer, and leaves the result in that row.
    if mode & REDUCE:
        for other in range(bounds.shape[1]):
            first = bounds[0, other] + piece * row
            nbytes = min(row, bounds[1, other] - first)
            if other != rank and nbytes > 0:
                copy_bytes(data + first, area + other * row, nbytes)


@jit
def reduce_piece(
    piece: int, areas: Any, bounds: Any, data: int, target: int, scratch: Any, plan: Any, scale: float
) -> None:
    """Reduce the own row of all ``areas`` and the own data, to the data and, for the others to fetch, the own area."""
    mode, rank, row = plan[MODE], plan[RANK], plan[ROW]
    first = bounds[0, rank] + piece * row
    nbytes = min(row, bounds[1, rank] - first)
    if nbytes <= 0:
        return
    inputs, outputs = scratch[: areas.size], scratch[areas.size :]  # addresses: one for each rank, and two more
    outputs[0], outputs[1] = target + first, areas[rank] + rank * row
    if mode & REDUCE:
        for other in range(areas.size):
            inputs[other] = data + first if other == rank else areas[other] + rank * row
        reduce_to(inputs, outputs[: 2 if mode & GATHER else 1], nbytes, plan, scale)
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
def run_pieces(state: Any, flags: Any, staging: Any, bounds: Any, data: int, plan: Any, scale: float) -> int:
    """Continue the staged part of a call, from where ``state`` says; return DONE or WAITING."""
    mode, rank, row, spins, yields = plan[MODE], plan[RANK], plan[ROW], plan[SPINS], plan[YIELDS]
    if state[STAGE] == FIRST_PIECE and plan[PIECES] > 0:
        stage_piece(mode, rank, 0, row, staging[state[BEFORE] % 2, rank], bounds, data)
        store_release(flags[rank] + 8 * STAGED, state[BEFORE] + 1)
        state[STAGE] = REDUCE_PIECE
    while state[PIECE] < plan[PIECES]:
        piece = state[PIECE]
        number = state[BEFORE] + piece + 1  # of this piece, over all calls, from 1: what the flags count
        areas, next_areas = staging[(number - 1) % 2], staging[number % 2]
        if state[STAGE] == REDUCE_PIECE:
            if not all_reached(flags, STAGED, number, spins, yields):
                return WAITING
            reduce_piece(piece, areas, bounds, data, state[TARGET], state[SCRATCH:], plan, scale)
            store_release(flags[rank] + 8 * FINISHED, number)
            if piece + 1 < plan[PIECES]:  # the next one is made ready before anybody is waited for
                stage_piece(mode, rank, piece + 1, row, next_areas[rank], bounds, data)
                store_release(flags[rank] + 8 * STAGED, number + 1)
            state[STAGE] = FETCH_PIECE
        # Also without a gather: the next piece but one overwrites this half, which all must have read by then.
        if not all_reached(flags, FINISHED, number, spins, yields):
            return WAITING
        if mode & GATHER:
            fetch_piece(rank, piece, row, areas, bounds, data)
        state[PIECE] += 1
        state[STAGE] = REDUCE_PIECE
    state[BEFORE] += plan[PIECES]
    return DONE


@jit
def record_call(line: int, parity: int, record: Any) -> None:
    """Copy the ``record`` of this rank to its line of flags, where the others read it."""
    words = array_at(line, RECORDS + 2 * RECORD_WORDS, record)
    for word in range(record.size):
        words[RECORDS + parity * RECORD_WORDS + word] = record[word]


@jit
def calls_match(flags: Any, parity: int, record: Any) -> bool:
    """Return whether the calls of all ranks are alike, wherever their buffers lie."""
    for rank in range(flags.size):
        words = array_at(flags[rank], RECORDS + 2 * RECORD_WORDS, record)
        for word in range(COMPARED):
            if words[RECORDS + parity * RECORD_WORDS + word] != record[word]:
                return False
    return True


@jit
def all_in_regions(flags: Any, parity: int, record: Any) -> bool:
    """Return whether the buffers of all ranks lie at the same place of the same shared region."""
    for rank in range(flags.size):
        words = array_at(flags[rank], RECORDS + 2 * RECORD_WORDS, record)
        for word in range(REGION, OFFSET + 1):
            if words[RECORDS + parity * RECORD_WORDS + word] != record[word]:
                return False
    return bool(record[REGION] >= 0)


@jit
def find_region(regions: Any, address: int, nbytes: int, record: Any) -> None:
    """Write to ``record`` in which region the own buffer lies, and where: -1 when it is ordinary memory.

    A row of ``regions`` is the first address and the end of the own part, then the first address of every rank's.
    """
    record[REGION], record[OFFSET] = -1, 0
    for row in range(regions.shape[0]):
        if regions[row, 0] <= address and address + nbytes <= regions[row, 1]:
            record[REGION], record[OFFSET] = row, address - regions[row, 0]


@jit
def reduce_in_regions(buffers: Any, bounds: Any, target: int, scratch: Any, plan: Any, scale: float) -> None:
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
def barrier(
    state: Any, flags: Any, slots: Any, regions: Any, bounds: Any, data: int, nbytes: int, plan: Any, scale: float
) -> int:
    """Wait until all ranks have begun the call, compare their records, and choose how it continues."""
    rank, number = plan[RANK], state[CALL]
    parity, record = number % 2, state[OWN_RECORD:SCRATCH]
    if not all_reached(flags, ARRIVED, number, plan[SPINS], plan[YIELDS]):
        return WAITING
    if not calls_match(flags, parity, record):
        return DIFFERENT
    if plan[MODE] == REDUCE | GATHER and nbytes <= plan[SLOT]:
        # Every rank reduces all slots. It need not wait until the others have read its own: the next call writes the
        # other slot, and the one after that comes behind the barrier of the next.
        state[SCRATCH] = data
        reduce_to(slots[parity], state[SCRATCH : SCRATCH + 1], nbytes, plan, scale)
        return DONE
    if all_in_regions(flags, parity, record):
        buffers = regions[record[REGION], 2:] + record[OFFSET]
        reduce_in_regions(buffers, bounds, state[TARGET], state[SCRATCH:], plan, scale)
        # Others may still read or write this rank's buffer: the call returns to its owner after a second barrier.
        store_release(flags[rank] + 8 * LEFT, number)
        state[STAGE] = LEAVE
    else:
        state[STAGE] = FIRST_PIECE
    return WAITING


@jit
def advance(state: Any, places: Any, regions: Any, bounds: Any, plan: Any, scale: float, buffer: Any) -> int:
    """Continue a call; return DONE, WAITING where a rank is late, or DIFFERENT where their calls are not alike."""
    flags, data, answer = places[0], buffer.ctypes.data, DONE
    if state[STAGE] == MEET:
        answer = barrier(state, flags, places[1:3], regions, bounds, data, buffer.size, plan, scale)
    if state[STAGE] == LEAVE:
        answer = DONE if all_reached(flags, LEFT, state[CALL], plan[SPINS], plan[YIELDS]) else WAITING
    elif state[STAGE] >= FIRST_PIECE:
        answer = run_pieces(state, flags, places[3:5], bounds, data, plan, scale)
    return answer


@jit
def start_call(
    state: Any, places: Any, regions: Any, bounds: Any, plan: Any, scale: float, buffer: Any, target: int
) -> int:
    """Begin a call, and continue it as `advance` does.

    ``places`` are, by rank, the lines of flags, the two slots, and the two halves of the staging area: (5, ranks).
    ``buffer`` is seen as bytes; ``target`` is the address of the array for all, or 0.
    """
    state[CALL] += 1
    state[STAGE], state[PIECE] = MEET, 0
    state[TARGET] = target if target != 0 else buffer.ctypes.data
    rank, number = plan[RANK], state[CALL]
    if plan[MODE] == REDUCE | GATHER and buffer.size <= plan[SLOT]:
        copy_bytes(buffer.ctypes.data, places[1 + number % 2, rank], buffer.size)
    record = state[OWN_RECORD:SCRATCH]
    for word in range(COMPARED):
        record[word] = plan[PLAN_RECORD + word]
    record[SCALE : SCALE + 1].view(np.float64)[0] = scale  # its bits are compared, as an integer
    find_region(regions, buffer.ctypes.data, buffer.size, record)
    record_call(places[0, rank], number % 2, record)
    # Release: slot and record are visible to whoever sees the number.
    store_release(places[0, rank] + 8 * ARRIVED, number)
    answer: int = advance(state, places, regions, bounds, plan, scale, buffer)
    return answer


_SAMPLE: Final = np.zeros(LINE_BYTES // 8, np.int64)  # a line of flags


def _call_of_nothing() -> tuple[Any, ...]:
    """Return the arguments of a call without bytes by the only rank of a node."""
    state, places = np.zeros(SCRATCH + 3, np.int64), np.full((5, 1), _SAMPLE.ctypes.data)
    bounds, plan = np.zeros((2, 1), np.int64), np.zeros(PLAN_WORDS, np.int64)
    return state, places, np.zeros((0, 3), np.int64), bounds, plan, 1.0, np.empty(0, np.uint8)


start_call.sample(lambda: (*_call_of_nothing(), 0))
advance.sample(_call_of_nothing)
