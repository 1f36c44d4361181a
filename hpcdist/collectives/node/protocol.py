"""Lock-free protocol of a collective through shared memory: layout, flags, and the order of accesses.

The loops run without the GIL. Each rank owns memory that all ranks can read, with parts that are used alternately:

    a line of flags   progress counters, and the records of two calls
    two slots         the whole of a small buffer
    two halves        of a staging area: row q holds elements that rank q owns

A call begins with a barrier, in which every rank writes the record of its call and compares all records. Then

    small     every rank reduces all slots to its buffer
    direct    buffers in shared memory: the owner of a range reduces it from all buffers into all
    staged    in pieces: the owner of a row reduces it from all staging areas, the others copy it out

The slot and the record of call e are written after the barrier of call e-1; all ranks have then left call e-2. Piece k
reuses the half of piece k-2: the rows of other ranks are written after all ranks have finished piece k-2, and this
rank's row after all ranks have staged piece k.
"""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.intrinsics import array_at, call, copy_bytes, load_acquire, pause, store_release, yield_core
from hpcdist.arrays.jit import jit

LINE_BYTES: Final = 256  # more than a cache line, since cores prefetch pairs of lines
# 8-byte words in a line of flags. Only the owning rank writes them, and they only grow: no lock and no reset.
ARRIVED: Final = 0  # the number of the call
LEFT: Final = 1
STAGED: Final = 2  # the number of pieces, over all calls
FINISHED: Final = 3
RECORDS: Final = 8  # first word of the record of even calls; the record of odd calls is RECORD_WORDS further
RECORD_WORDS: Final = 8
COUNT: Final = 0  # words of a record
KIND: Final = 1
SCALE: Final = 2
RANGES: Final = 3
COMPARED: Final = 4  # number of leading words that must be equal on all ranks
REGION: Final = 4
OFFSET: Final = 5

REDUCE: Final = 1  # mode bits of a call
GATHER: Final = 2
ELSEWHERE: Final = 4  # the result goes to one array shared by all ranks instead of their buffers

STAGE: Final = 0  # words of the state of a call in flight
PIECE: Final = 1
BEFORE: Final = 2  # number of pieces of all earlier calls
CALL: Final = 3  # number of this call
TARGET: Final = 4  # address of the results: this rank's buffer, or the array for all ranks
OWN_RECORD: Final = 8  # the record of this rank's call: RECORD_WORDS
SCRATCH: Final = OWN_RECORD + RECORD_WORDS  # (ranks + 2) words

MODE: Final = 0  # words of a plan, which equal calls share
RANK: Final = 1
SLOT: Final = 2  # bytes
ROW: Final = 3  # bytes
PIECES: Final = 4
CODE: Final = 5  # address of the reduction code; the next two words are its arguments
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

DONE: Final = 0  # return values of the loop
WAITING: Final = 1  # after a limited wait, so that Python can handle signals
DIFFERENT: Final = 2


@jit
def has_reached(address: int, value: int, spins: int, yields: int) -> bool:
    """Return True once the counter at ``address`` reaches ``value``, or False after ``spins`` + ``yields`` polls."""
    # First spin (fastest), then yield the core to other ranks, then return to Python, which detects dead ranks.
    left = spins
    # Acquire, paired with the release store of the writer: its data is visible once the counter is.
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
def _all_reached(flags: Any, word: int, value: int, spins: int, yields: int) -> bool:
    for rank in range(flags.size):  # noqa: SIM110 - numba compiles no generators
        if not has_reached(flags[rank] + 8 * word, value, spins, yields):
            return False
    return True


@jit
def _reduce_to(inputs: Any, outputs: Any, nbytes: int, plan: Any, scale: float) -> None:
    first, second = inputs.ctypes.data, outputs.ctypes.data
    call(plan[CODE], (first, inputs.size, second, outputs.size, nbytes, plan[OP], scale, plan[BLOCKS]))


@jit
def _stage_piece(mode: int, rank: int, piece: int, row: int, area: int, bounds: Any, data: int) -> None:
    # ``bounds``: start and end byte of each rank's range of the buffer at ``data``. Rank q's data goes to offset
    # q * ``row`` of ``area``, if ``mode`` has the bit REDUCE.
    # This rank's row is not staged: this rank reads its operand from the buffer and writes the result to that row.
    if mode & REDUCE:
        for other in range(bounds.shape[1]):
            first = bounds[0, other] + piece * row
            nbytes = min(row, bounds[1, other] - first)
            if other != rank and nbytes > 0:
                copy_bytes(data + first, area + other * row, nbytes)


@jit
def _reduce_piece(
    piece: int, areas: Any, bounds: Any, data: int, target: int, scratch: Any, plan: Any, scale: float
) -> None:
    # reduce-scatter: reduce all ranks' data to ``target``. allreduce: also to this rank's staging area. all-gather:
    # copy from ``target`` to this rank's staging area. ``scratch`` has ranks + 2 words.
    mode, rank, row = plan[MODE], plan[RANK], plan[ROW]
    first = bounds[0, rank] + piece * row
    nbytes = min(row, bounds[1, rank] - first)
    if nbytes <= 0:
        return
    inputs, outputs = scratch[: areas.size], scratch[areas.size :]  # addresses: (ranks,) and (2,)
    outputs[0], outputs[1] = target + first, areas[rank] + rank * row
    if mode & REDUCE:
        for other in range(areas.size):
            inputs[other] = data + first if other == rank else areas[other] + rank * row
        _reduce_to(inputs, outputs[: 2 if mode & GATHER else 1], nbytes, plan, scale)
    else:
        copy_bytes(outputs[0], outputs[1], nbytes)


@jit
def _fetch_piece(rank: int, piece: int, row: int, areas: Any, bounds: Any, data: int) -> None:
    for other in range(areas.size):
        first = bounds[0, other] + piece * row
        nbytes = min(row, bounds[1, other] - first)
        if other != rank and nbytes > 0:
            copy_bytes(areas[other] + other * row, data + first, nbytes)


@jit
def _run_pieces(state: Any, flags: Any, staging: Any, bounds: Any, data: int, plan: Any, scale: float) -> int:
    mode, rank, row, spins, yields = plan[MODE], plan[RANK], plan[ROW], plan[SPINS], plan[YIELDS]
    if state[STAGE] == FIRST_PIECE and plan[PIECES] > 0:
        _stage_piece(mode, rank, 0, row, staging[state[BEFORE] % 2, rank], bounds, data)
        store_release(flags[rank] + 8 * STAGED, state[BEFORE] + 1)
        state[STAGE] = REDUCE_PIECE
    while state[PIECE] < plan[PIECES]:
        piece = state[PIECE]
        number = state[BEFORE] + piece + 1  # number of this piece over all calls, from 1, as counted by the flags
        areas, next_areas = staging[(number - 1) % 2], staging[number % 2]
        if state[STAGE] == REDUCE_PIECE:
            if not _all_reached(flags, STAGED, number, spins, yields):
                return WAITING
            _reduce_piece(piece, areas, bounds, data, state[TARGET], state[SCRATCH:], plan, scale)
            store_release(flags[rank] + 8 * FINISHED, number)
            if piece + 1 < plan[PIECES]:  # stage the next piece before waiting
                _stage_piece(mode, rank, piece + 1, row, next_areas[rank], bounds, data)
                store_release(flags[rank] + 8 * STAGED, number + 1)
            state[STAGE] = FETCH_PIECE
        # Wait also without a gather: piece k+2 overwrites this half, which all ranks must have read by then.
        if not _all_reached(flags, FINISHED, number, spins, yields):
            return WAITING
        if mode & GATHER:
            _fetch_piece(rank, piece, row, areas, bounds, data)
        state[PIECE] += 1
        state[STAGE] = REDUCE_PIECE
    state[BEFORE] += plan[PIECES]
    return DONE


@jit
def _record_call(line: int, parity: int, record: Any) -> None:
    # Two descriptions follow the counters; ``parity`` is the index of the description to overwrite.
    words = array_at(line, RECORDS + 2 * RECORD_WORDS, record)
    for word in range(record.size):
        words[RECORDS + parity * RECORD_WORDS + word] = record[word]


@jit
def _calls_match(flags: Any, parity: int, record: Any) -> bool:
    for rank in range(flags.size):
        words = array_at(flags[rank], RECORDS + 2 * RECORD_WORDS, record)
        for word in range(COMPARED):
            if words[RECORDS + parity * RECORD_WORDS + word] != record[word]:
                return False
    return True


@jit
def _all_in_regions(flags: Any, parity: int, record: Any) -> bool:
    for rank in range(flags.size):
        words = array_at(flags[rank], RECORDS + 2 * RECORD_WORDS, record)
        for word in range(REGION, OFFSET + 1):
            if words[RECORDS + parity * RECORD_WORDS + word] != record[word]:
                return False
    return bool(record[REGION] >= 0)


@jit
def _find_region(regions: Any, address: int, nbytes: int, record: Any) -> None:
    # Row i of ``regions`` ends with the local address of each rank's memory in region i.
    record[REGION], record[OFFSET] = -1, 0
    for row in range(regions.shape[0]):
        if regions[row, 0] <= address and address + nbytes <= regions[row, 1]:
            record[REGION], record[OFFSET] = row, address - regions[row, 0]


@jit
def _reduce_in_regions(buffers: Any, bounds: Any, target: int, scratch: Any, plan: Any, scale: float) -> None:
    # allreduce: reduce this rank's range into all buffers. reduce-scatter: reduce it to ``target``. all-gather: copy
    # each other rank's range from its buffer to this rank's buffer.
    mode, rank = plan[MODE], plan[RANK]
    offset, nbytes = bounds[0, rank], bounds[1, rank] - bounds[0, rank]
    if mode == REDUCE | GATHER:
        inputs = buffers + offset
        _reduce_to(inputs, inputs, nbytes, plan, scale)
    elif mode & REDUCE:
        scratch[0] = target + offset
        _reduce_to(buffers + offset, scratch[:1], nbytes, plan, scale)
    else:
        for other in range(buffers.size):
            if other != rank:
                start = bounds[0, other]
                copy_bytes(buffers[other] + start, buffers[rank] + start, bounds[1, other] - start)


@jit
def _barrier(
    state: Any, flags: Any, slots: Any, regions: Any, bounds: Any, data: int, nbytes: int, plan: Any, scale: float
) -> int:
    rank, number = plan[RANK], state[CALL]
    parity, record = number % 2, state[OWN_RECORD:SCRATCH]
    if not _all_reached(flags, ARRIVED, number, plan[SPINS], plan[YIELDS]):
        return WAITING
    if not _calls_match(flags, parity, record):
        return DIFFERENT
    if plan[MODE] == REDUCE | GATHER and nbytes <= plan[SLOT]:
        # Every rank reduces all slots. No second barrier is needed: the next call writes the other slot, and the call
        # after that starts after the next barrier.
        state[SCRATCH] = data
        _reduce_to(slots[parity], state[SCRATCH : SCRATCH + 1], nbytes, plan, scale)
        return DONE
    if _all_in_regions(flags, parity, record):
        buffers = regions[record[REGION], 2:] + record[OFFSET]
        _reduce_in_regions(buffers, bounds, state[TARGET], state[SCRATCH:], plan, scale)
        # Other ranks may still access this rank's buffer: a second barrier precedes the return to the caller.
        store_release(flags[rank] + 8 * LEFT, number)
        state[STAGE] = LEAVE
    else:
        state[STAGE] = FIRST_PIECE
    return WAITING


@jit
def advance(state: Any, places: Any, regions: Any, bounds: Any, plan: Any, scale: float, buffer: Any) -> int:
    """Continue the collective of `start_call`. Return DONE, WAITING (call again) or DIFFERENT (ranks' calls differ)."""
    flags, data, status = places[0], buffer.ctypes.data, DONE
    if state[STAGE] == MEET:
        status = _barrier(state, flags, places[1:3], regions, bounds, data, buffer.size, plan, scale)
    if state[STAGE] == LEAVE:
        status = DONE if _all_reached(flags, LEFT, state[CALL], plan[SPINS], plan[YIELDS]) else WAITING
    elif state[STAGE] >= FIRST_PIECE:
        status = _run_pieces(state, flags, places[3:5], bounds, data, plan, scale)
    return status


@jit
def start_call(
    state: Any, places: Any, regions: Any, bounds: Any, plan: Any, scale: float, buffer: Any, target: int
) -> int:
    """Start a collective on ``buffer`` in shared memory. Return DONE, WAITING or DIFFERENT, as `advance` does.

    ``state``: int64 array with this rank's progress. ``places`` (5, ranks): addresses of the counters, of two slots
    for small buffers, and of two halves of the staging area. ``regions``: addresses of shared memory that can hold
    buffers. ``bounds`` (2, ranks): start and end byte of each rank's range. ``plan``: words of a `Plan`. ``target``:
    address of the result, or 0 for ``buffer``.
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
    _find_region(regions, buffer.ctypes.data, buffer.size, record)
    _record_call(places[0, rank], number % 2, record)
    # Release: slot and record are visible to a rank that reads the number.
    store_release(places[0, rank] + 8 * ARRIVED, number)
    status: int = advance(state, places, regions, bounds, plan, scale, buffer)
    return status


_SAMPLE: Final = np.zeros(LINE_BYTES // 8, np.int64)  # a line of flags


def _call_of_nothing() -> tuple[Any, ...]:
    state, places = np.zeros(SCRATCH + 3, np.int64), np.full((5, 1), _SAMPLE.ctypes.data)
    bounds, plan = np.zeros((2, 1), np.int64), np.zeros(PLAN_WORDS, np.int64)
    return state, places, np.zeros((0, 3), np.int64), bounds, plan, 1.0, np.empty(0, np.uint8)


start_call.sample(lambda: (*_call_of_nothing(), 0))
advance.sample(_call_of_nothing)
