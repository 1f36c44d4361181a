"""The memory of a communicator whose ranks share a node: flags, slots, staging areas, and regions for buffers."""

import os
import time
from typing import Any, Final

import numpy as np

from hpcdist.arrays.dtypes import FLOATS, INTEGERS, accumulation_dtype, name_of
from hpcdist.arrays.ranges import ALIGN_BYTES
from hpcdist.collectives import node_kernels as kernels
from hpcdist.collectives import node_machine as machine
from hpcdist.collectives import workspace
from hpcdist.comm.communicator import Communicator, SharedBlock

SLOT_BYTES: Final = 8 << 10  # a buffer up to this is summed by everybody: one meeting instead of two (empirical)
HALF_BYTES: Final = 256 << 10  # of a staging area: with the other half and those of a peer in the second cache

SPINS: Final = 4000  # looks at a flag before the core is offered to others, where each rank has a core of its own
SPINS_CROWDED: Final = 1
YIELDS: Final = 500  # offers before the loop comes back to Python: about a millisecond

_DTYPES: Final = tuple(FLOATS | INTEGERS)  # their places are what the ranks compare


class _Typed:
    """What the loops need for one dtype."""

    __slots__ = ("address", "blocks", "code", "number")

    def __init__(self, dtype: np.dtype) -> None:
        self.number = _DTYPES.index(name_of(dtype)) << 8
        self.code = kernels.address_of(dtype)
        self.blocks = np.empty(2 * kernels.BLOCK, accumulation_dtype(dtype))
        self.address = self.blocks.ctypes.data


class NodeMemory:
    """Made at the first collective of ``comm``. Collective over ``comm``, whose ranks are all on one node."""

    def __init__(self, comm: Communicator) -> None:
        # Not the communicator itself: it is the key under which this is kept, and would never be let go.
        self._rank, self._ranks = comm.rank, comm.size
        self._block = comm.shared(machine.LINE_BYTES + 2 * SLOT_BYTES + 2 * HALF_BYTES)
        self.is_shared = self._block.is_shared
        self._blocks: list[SharedBlock] = [self._block]
        self._typed: dict[np.dtype, _Typed] = {}
        if not self.is_shared:
            return
        workspace.count(self._block.views[comm.rank])
        base = np.array([view.ctypes.data for view in self._block.views], np.int64)
        steps = [0, machine.LINE_BYTES, SLOT_BYTES, SLOT_BYTES, HALF_BYTES]
        self._places = np.array([base + step for step in np.cumsum(steps)])  # (5, ranks)
        self._row = HALF_BYTES // comm.size // ALIGN_BYTES * ALIGN_BYTES
        self._regions = np.zeros((0, 2 + comm.size), np.int64)
        self._state = np.zeros(machine.STATE_WORDS, np.int64)
        self._brought = np.zeros(machine.BROUGHT_WORDS, np.int64)
        self._scratch = np.zeros(comm.size + 2, np.int64)
        crowded = comm.size > len(os.sched_getaffinity(0))
        self._spins = SPINS_CROWDED if any(comm.allgather_object(crowded)) else SPINS

    def region(self, comm: Communicator, nbytes: int) -> np.ndarray:
        """Return ``nbytes`` bytes of this rank that the others can read; plain memory where they cannot. Collective."""
        block = comm.shared(nbytes)
        own = block.views[self._rank]
        if block.is_shared:
            addresses = [view.ctypes.data for view in block.views]
            first = addresses[self._rank]
            row = np.array([[first, first + nbytes, *addresses]], np.int64)
            self._regions = np.concatenate([self._regions, row])
        self._blocks.append(block)
        return own

    def run(
        self, buffer: np.ndarray, op: str, scale: float, mode: int, bounds: np.ndarray, longest: int, digest: int
    ) -> bool:
        """Carry out a collective; return whether all ranks brought the same. Collective.

        ``bounds`` are the first and the last byte of each rank's range, ``longest`` the bytes of the longest of them.
        """
        typed = self._typed.get(buffer.dtype)
        if typed is None:
            typed = self._typed[buffer.dtype] = _Typed(buffer.dtype)
        code = kernels.OPS[op]
        state, brought = self._state, self._brought
        state[machine.STAGE] = machine.BEGIN
        state[machine.CALL] += 1
        state[machine.PIECE] = 0
        pieces = state[machine.PIECES] = -(-longest // self._row)
        brought[machine.COUNT] = buffer.size
        brought[machine.KIND] = typed.number | code << 4 | mode
        brought[machine.SCALE] = hash(scale)
        brought[machine.RANGES] = digest
        arguments = (
            state, brought, mode, self._rank, self._places, SLOT_BYTES, self._row, self._regions, bounds,
            buffer.view(np.uint8), self._scratch, (typed.code, code, scale, typed.address),
            self._spins, YIELDS,
        )  # fmt: skip
        answer = machine.run(*arguments)
        since = time.monotonic() if answer == machine.WAITING else 0.0
        while answer == machine.WAITING:
            self._block.check_alive(since)
            answer = machine.run(*arguments)
        if state[machine.STAGE] >= machine.FIRST_PIECE:
            state[machine.BEFORE] += pieces
        return bool(answer == machine.DONE)

    def brought(self) -> list[str]:
        """Return, for people, what each rank brought to the call under way (local)."""
        parity = int(self._state[machine.CALL]) % 2
        begin = machine.BROUGHT + parity * machine.BROUGHT_WORDS
        return [
            _described(view[: machine.LINE_BYTES].view(np.int64)[begin:][: machine.BROUGHT_WORDS])
            for view in self._block.views
        ]

    def close(self) -> None:
        """Give everything back. Collective."""
        for block in self._blocks:
            block.close()


def _described(words: Any) -> str:
    kind = int(words[machine.KIND])
    op = next(name for name, code in kernels.OPS.items() if code == kind >> 4 & 3)
    what = {machine.REDUCE: "reduce-scatter", machine.GATHER: "all-gather"}.get(kind & 3, "allreduce")
    return f"{what} ({op}) of {words[machine.COUNT]} {_DTYPES[kind >> 8]}"
