"""Counters in the shared memory of a node, each written by one rank and awaited by the others.

A rank that raises a counter publishes everything that it wrote before; a rank that has waited for the counter may
read it (release and acquire). No message is sent. The parameter server with shared memory uses them.
"""

import os
import time
from typing import Final

import numpy as np

from hpcdist.arrays.intrinsics import load_acquire, pause, store_release, yield_core
from hpcdist.arrays.jit import jit
from hpcdist.arrays.ranges import align_up
from hpcdist.collectives.node.protocol import LINE_BYTES
from hpcdist.comm.communicator import Communicator

SPINS: Final = 4000  # looks at a counter before the core is offered to others, where each rank has one of its own
YIELDS: Final = 500  # offers before Python is asked whether all live: about a millisecond
PAUSE_SHARE: Final = 0.05  # of the time waited so far: what a long wait sleeps between two looks,
LONGEST_PAUSE_S: Final = 1e-3  # at most
_WORD_BYTES: Final = 8


@jit
def raise_word(address: int, value: int) -> None:
    """Store a counter after everything written before."""
    store_release(address, value)


@jit
def wait_for_word(address: int, value: int, spins: int, yields: int) -> bool:
    """Wait until a counter is at least ``value``; after a time, return False."""
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


def _samples() -> tuple[int, int]:
    return _SAMPLE.ctypes.data, 1


_SAMPLE: Final = np.zeros(1, np.int64)
raise_word.sample(_samples)
wait_for_word.sample(lambda: (*_samples(), 0, 0))


class NodeFlags:
    """``words`` counters of each rank of ``comm``, which are on one node. Making it is collective, all else local.

    Where memory cannot be shared, ``is_shared`` says so, and nothing else may be called.
    """

    def __init__(self, comm: Communicator, words: int) -> None:
        self._block = comm.shared(align_up(max(1, words) * _WORD_BYTES, LINE_BYTES))
        self.is_shared = self._block.is_shared
        self._at = [view.ctypes.data for view in self._block.views]
        self._own = self._at[comm.rank]
        cores = set().union(*comm.allgather_object(os.sched_getaffinity(0)))
        self._spins = 1 if comm.size > len(cores) else SPINS

    def raise_to(self, word: int, value: int) -> None:
        """Give the own counter ``word`` a value above the one before."""
        raise_word(self._own + _WORD_BYTES * word, value)

    def wait(self, rank: int, word: int, value: int) -> None:
        """Return when the counter ``word`` of ``rank`` is at least ``value``.

        MPI progresses meanwhile. Raises CommunicationError when a rank of the node has died.
        """
        address = self._at[rank] + _WORD_BYTES * word
        if wait_for_word(address, value, self._spins, YIELDS):
            return
        since = time.monotonic()
        while not wait_for_word(address, value, 0, 1):
            self._block.check_alive(since)
            # A server waits as long as a backward takes: the core is for those that compute.
            time.sleep(min(LONGEST_PAUSE_S, PAUSE_SHARE * (time.monotonic() - since)))

    def close(self) -> None:
        """Give the memory back. Collective."""
        self._block.close()
