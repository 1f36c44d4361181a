"""The staged part of a collective through shared memory: buffers that nobody else can see, piece by piece.

The owner of a row reduces it from all staging areas, and the others fetch the result.
"""

from typing import Any

from hpcdist.arrays.atomics import copy_bytes, store_release
from hpcdist.arrays.jit import jit
from hpcdist.collectives.node_words import (
    BEFORE,
    DONE,
    FETCH_PIECE,
    FINISHED,
    FIRST_PIECE,
    GATHER,
    MODE,
    PIECE,
    PIECES,
    RANK,
    REDUCE,
    REDUCE_PIECE,
    ROW,
    SCRATCH,
    SPINS,
    STAGE,
    STAGED,
    TARGET,
    WAITING,
    YIELDS,
    all_have,
    reduce_to,
)


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
    piece: int, areas: Any, bounds: Any, data: int, target: int, scratch: Any, plan: Any, scale: float
) -> None:
    """Reduce the own row of all ``areas`` and the own data, to the data and, for the others to fetch, the own area."""
    mode, rank, row = plan[MODE], plan[RANK], plan[ROW]
    first = bounds[0, rank] + piece * row
    nbytes = min(row, bounds[1, rank] - first)
    if nbytes <= 0:
        return
    inputs, outputs = scratch[: areas.size], scratch[areas.size :]
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
    """Go on with the staged part of a call."""
    mode, rank, row, spins, yields = plan[MODE], plan[RANK], plan[ROW], plan[SPINS], plan[YIELDS]
    if state[STAGE] == FIRST_PIECE and plan[PIECES] > 0:
        stage_piece(mode, rank, 0, row, staging[state[BEFORE] % 2, rank], bounds, data)
        store_release(flags[rank] + 8 * STAGED, state[BEFORE] + 1)
        state[STAGE] = REDUCE_PIECE
    while state[PIECE] < plan[PIECES]:
        piece = state[PIECE]
        number = state[BEFORE] + piece + 1
        areas, next_areas = staging[(number - 1) % 2], staging[number % 2]
        if state[STAGE] == REDUCE_PIECE:
            if not all_have(flags, STAGED, number, spins, yields):
                return WAITING
            reduce_piece(piece, areas, bounds, data, state[TARGET], state[SCRATCH:], plan, scale)
            store_release(flags[rank] + 8 * FINISHED, number)
            if piece + 1 < plan[PIECES]:  # the next one is made ready before anybody is waited for
                stage_piece(mode, rank, piece + 1, row, next_areas[rank], bounds, data)
                store_release(flags[rank] + 8 * STAGED, number + 1)
            state[STAGE] = FETCH_PIECE
        if not all_have(flags, FINISHED, number, spins, yields):
            return WAITING
        if mode & GATHER:
            fetch_piece(rank, piece, row, areas, bounds, data)
        state[PIECE] += 1
        state[STAGE] = REDUCE_PIECE
    state[BEFORE] += plan[PIECES]
    return DONE
