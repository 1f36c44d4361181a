"""The memory of a communicator whose ranks share a node: flags, slots, staging areas, and regions for buffers."""

import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hpcdist.arrays.dtypes import FLOATS, INTEGERS, accumulation_dtype, name_of
from hpcdist.arrays.ranges import ALIGN_BYTES, Range, split
from hpcdist.collectives import node_kernels as kernels
from hpcdist.collectives import node_machine, node_words, workspace
from hpcdist.comm.communicator import Communicator, SharedBlock
from hpcdist.errors import CommunicationError, UsageError

SLOTS_BYTES: Final = 64 << 10  # of all ranks: what fits a slot is summed by everybody, in one meeting (empirical)
HALF_BYTES: Final = 256 << 10  # of a staging area: with the other half and those of a peer in the second cache

SPINS: Final = 4000  # looks at a flag before the core is offered to others, where each rank has a core of its own
SPINS_CROWDED: Final = 1
YIELDS: Final = 500  # offers before the loop comes back to Python: about a millisecond

PLANS_KEPT: Final = 4096  # of calls that differ in size, dtype, op or ranges

_DTYPES: Final = tuple(FLOATS | INTEGERS)  # their places are what the ranks compare


def slot_bytes(ranks: int) -> int:
    """Return the size of a slot of one of so many ranks (local)."""
    return SLOTS_BYTES // ranks // ALIGN_BYTES * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Plan:
    """What calls alike have in common, as compiled loops take it; ``bounds`` are (2, ranks), in bytes."""

    words: np.ndarray
    bounds: np.ndarray


class NodeMemory:
    """Made at the first collective of ``comm``. Collective over ``comm``, whose ranks are all on one node."""

    def __init__(self, comm: Communicator) -> None:
        # Not the communicator itself: it is the key under which this is kept, and would never be let go.
        self._rank, self._ranks = comm.rank, comm.size
        self._slot, self._half = slot_bytes(comm.size), HALF_BYTES
        self._block = comm.shared(node_words.LINE_BYTES + 2 * self._slot + 2 * self._half)
        self.is_shared = self._block.is_shared
        self._blocks: list[SharedBlock] = [self._block]
        if not self.is_shared:
            return
        workspace.count(self._block.views[comm.rank])
        base = np.array([view.ctypes.data for view in self._block.views], np.int64)
        steps = [0, node_words.LINE_BYTES, self._slot, self._slot, self._half]
        self._places = np.array([base + step for step in np.cumsum(steps)])  # (5, ranks)
        self._regions = np.zeros((0, 2 + comm.size), np.int64)
        self._state = np.zeros(node_words.SCRATCH + comm.size + 2, np.int64)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._blocks_of: dict[int, np.ndarray] = {}  # by dtype: what the reduction works in
        self._common: list[tuple[int, int]] = []
        self._given_up: BaseException | None = None
        cores = set().union(*comm.allgather_object(os.sched_getaffinity(0)))
        self._spins = SPINS_CROWDED if comm.size > len(cores) else SPINS

    def common(self, comm: Communicator, nbytes: int) -> np.ndarray:
        """Return ``nbytes`` bytes that are the same for all ranks, or memory of their own. Collective."""
        rank = comm.rank if not self.is_shared else 0
        block = comm.shared(nbytes if comm.rank == rank else 0)
        self._blocks.append(block)
        if not block.is_shared:
            return np.zeros(nbytes, np.uint8)
        self._common.append((block.views[0].ctypes.data, nbytes))
        return block.views[0]

    def is_common(self, address: int, nbytes: int) -> bool:
        """Whether the memory is some that `common` returned (local)."""
        return any(first <= address and address + nbytes <= first + size for first, size in self._common)

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
        self,
        buffer: np.ndarray,
        op: str,
        scale: float,
        mode: int,
        ranges: Sequence[Range] | None,
        target: int = 0,
    ) -> bool:
        """Carry out a collective; return whether all ranks brought the same. Collective. None: balanced ranges.

        ``target`` is the address of an array for all ranks that takes the result, or 0.
        """
        if self._given_up is not None:
            raise CommunicationError(
                "an earlier collective in this shared memory was given up half-way, and the ranks are out of step; "
                "end the job, or call collectives.release on all ranks"
            ) from self._given_up
        ends = None if ranges is None else tuple((part.start, part.stop) for part in ranges)
        key = (buffer.size, buffer.dtype.num, op, mode, ends)
        plan = self._plans.get(key) or self._plan(key, buffer, ranges)
        arguments = (
            self._state, self._places, self._regions, plan.bounds, plan.words, scale, buffer.view(np.uint8)
        )  # fmt: skip
        try:
            answer = node_machine.begin(*arguments, target)
            if answer == node_words.WAITING:
                since = time.monotonic()
                while answer == node_words.WAITING:
                    self._block.check_alive(since)
                    answer = node_machine.go_on(*arguments)
        except BaseException as error:  # a signal's among them: the next call would count on a meeting that never was
            self._given_up = error
            raise
        return bool(answer == node_words.DONE)

    def _plan(self, key: tuple[Any, ...], buffer: np.ndarray, ranges: Sequence[Range] | None) -> Plan:
        _, _, op, mode, _ = key
        parts = split(buffer.size, self._ranks, buffer.itemsize) if ranges is None else ranges
        _check_disjoint(parts)
        bounds = np.array([(part.start, part.stop) for part in parts], np.int64).T.copy() * buffer.itemsize
        row = self._half // self._ranks // ALIGN_BYTES * ALIGN_BYTES
        blocks = self._blocks_of.get(buffer.dtype.num)
        if blocks is None:
            blocks = np.empty(2 * kernels.BLOCK, accumulation_dtype(buffer.dtype))
            self._blocks_of[buffer.dtype.num] = blocks
        words = np.zeros(node_words.PLAN_WORDS, np.int64)
        words[: node_words.BRINGS] = (
            mode, self._rank, self._slot, row, -(-int((bounds[1] - bounds[0]).max()) // row),
            kernels.address_of(buffer.dtype), kernels.OPS[op], blocks.ctypes.data, self._spins, YIELDS,
        )  # fmt: skip
        kind = _DTYPES.index(name_of(buffer.dtype)) << 8 | kernels.OPS[op] << 4 | mode
        words[node_words.BRINGS :] = buffer.size, kind, 0, zlib.crc32(bounds.tobytes())  # the scale is that of a call
        if len(self._plans) >= PLANS_KEPT:
            self._plans.clear()
        plan = self._plans[key] = Plan(words, bounds)
        return plan

    def brought(self) -> list[str]:
        """Return, for people, what each rank brought to the call under way (local)."""
        parity = int(self._state[node_words.CALL]) % 2
        begin = node_words.BROUGHT + parity * node_words.BROUGHT_WORDS
        return [
            _described(view[: node_words.LINE_BYTES].view(np.int64)[begin:][: node_words.BROUGHT_WORDS])
            for view in self._block.views
        ]

    def close(self) -> None:
        """Give everything back. Collective."""
        for block in self._blocks:
            block.close()


def _check_disjoint(ranges: Sequence[Range]) -> None:
    """Raise UsageError when two ranks would own the same element (local)."""
    kept = sorted(part for part in ranges if part)
    if any(part.stop > after.start for part, after in zip(kept, kept[1:], strict=False)):
        raise UsageError(f"the ranges of two ranks overlap: {[(part.start, part.stop) for part in ranges]}")


def _described(words: Any) -> str:
    kind, scale = int(words[node_words.KIND]), float(words[node_words.SCALE : node_words.SCALE + 1].view(np.float64)[0])
    op = next(name for name, code in kernels.OPS.items() if code == kind >> 4 & 3)
    what = {node_words.REDUCE: "reduce-scatter", node_words.GATHER: "all-gather"}.get(kind & 7, "allreduce")
    times = "" if scale == 1 else f" times {scale!r}"
    ranges = "" if what == "allreduce" else f" by ranges {int(words[node_words.RANGES]):08x}"
    return f"{what} ({op}{times}) of {words[node_words.COUNT]} {_DTYPES[kind >> 8]}{ranges}"
