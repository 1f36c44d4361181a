"""Where things lie in the memory of a node, and the words that its loops share: constants alone, and the waiting."""

from typing import Any, Final

from hpcdist.arrays.atomics import call, load_acquire, pause, yield_core
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
ELSEWHERE: Final = 4  # the reduction goes to one array for all ranks, and not to their buffers

STAGE: Final = 0  # words of the state of a call under way
PIECE: Final = 1
BEFORE: Final = 2  # pieces of all calls before
CALL: Final = 3  # number of this call
TARGET: Final = 4  # address that results go to: that of the own buffer, or of the array for all
BRING: Final = 8  # what this rank brings: BROUGHT_WORDS
SCRATCH: Final = BRING + BROUGHT_WORDS  # two words more than there are ranks

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
BRINGS: Final = 10  # the first COMPARED words of what is brought
PLAN_WORDS: Final = BRINGS + COMPARED

MEET: Final = 1
LEAVE: Final = 2
FIRST_PIECE: Final = 3
REDUCE_PIECE: Final = 4
FETCH_PIECE: Final = 5

DONE: Final = 0  # what the loop returns
WAITING: Final = 1
DIFFERENT: Final = 2


@jit
def all_have(flags: Any, word: int, value: int, spins: int, yields: int) -> bool:
    """Wait until the flag of every rank has reached ``value``; after a time, return False."""
    for rank in range(flags.size):
        address = flags[rank] + 8 * word
        left = spins
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
def reduce_to(inputs: Any, outputs: Any, nbytes: int, plan: Any, scale: float) -> None:
    """Reduce ``nbytes`` at each of the addresses ``inputs`` to each of ``outputs``."""
    first, second = inputs.ctypes.data, outputs.ctypes.data
    call(plan[CODE], (first, inputs.size, second, outputs.size, nbytes, plan[OP], scale, plan[BLOCKS]))
