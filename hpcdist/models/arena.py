"""Arena of activation memory: allocated in the first step and reused in later ones.

For CUDA graphs, `Arena.repeat` and `ArenaSaved.restore` replay a recorded call at the same addresses.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, Ledger
from hpcdist.arrays.ranges import ALIGN_BYTES, align_up
from hpcdist.models.documents import Documents
from hpcdist.models.stage import Draw

# A free block serves requests down to 1 / MAX_WASTE of its size, so that a smaller last batch needs no new memory. A
# free block grows for requests of up to MAX_WASTE times its size, so that varying sizes do not each leave a block.
# Blocks only grow, so a repeated step soon stops allocating.
MAX_WASTE = 2
NOTHING: Final = np.empty(0, np.uint8)


@dataclass(frozen=True)
class BlockUse:
    """Record of the memory blocks that were taken from and returned to an `Arena`. `Arena.repeat` replays it."""

    taken: frozenset[int]  # indices of the blocks that `Arena.take` returned
    changes: tuple[tuple[int, int], ...]  # (index of the block, change of the number of users)
    scratch: tuple[Array, ...]  # all scratch arrays of the arena


class Arena:
    """Memory pool for the activations of the stages of one rank. Not thread-safe."""

    def __init__(self, ledger: Ledger | None = None, on: str = "cpu") -> None:
        self._ledger = ledger
        self._on = on
        self._free: list[tuple[int, int]] = []  # (size, index of the block), ascending
        self._blocks: list[Array] = []
        self._uses: list[int] = []  # number of users of each block; 0: free
        self._starts: list[tuple[int, int]] = []  # (address, index of the block), ascending
        self._scratch: dict[str, Array] = {}
        self._live: dict[tuple[int, int], ArenaSaved] = {}
        self._recorded: set[int] | None = None  # blocks taken since `begin_record`
        self._uses_before: list[int] = []
        self._fixed = set[int]()  # blocks for `repeat`, which must not grow

    def saved(self, layer: int, microbatch: int = 0) -> "ArenaSaved":
        """Return the `Saved` object of layer ``layer`` and micro-batch ``microbatch``. The first call creates it."""
        key = (layer, microbatch)
        if key not in self._live:
            self._live[key] = ArenaSaved(self, key)
        return self._live[key]

    def take(self, nbytes: int) -> int:
        """Reserve a free block of at least ``nbytes`` bytes, or allocate one. Return the index of the block."""
        slot = bisect_left(self._free, (nbytes, -1))
        if slot < len(self._free) and self._free[slot][0] <= max(MAX_WASTE * nbytes, ALIGN_BYTES):
            index = self._free.pop(slot)[1]
            self._uses[index] = 1
        else:
            larger = self._growing(nbytes)
            index = len(self._blocks) if larger is None else larger
            if larger is None:
                self._blocks.append(NOTHING)
                self._uses.append(0)
            else:
                self._starts.remove((backend.address(self._blocks[index]), index))
            self._blocks[index] = NOTHING  # free the old block first, to limit the peak
            self._blocks[index] = self._allocate(nbytes)
            self._uses[index] = 1
            insort(self._starts, (backend.address(self._blocks[index]), index))
        if self._recorded is not None:
            self._recorded.add(index)
        return index

    def _growing(self, nbytes: int) -> int | None:
        # The largest free block that may be enlarged to `nbytes` bytes.
        for slot in reversed(range(bisect_left(self._free, (nbytes, -1)))):
            size, index = self._free[slot]
            if nbytes > MAX_WASTE * size:
                break
            if index not in self._fixed:
                del self._free[slot]
                return index
        return None

    def share(self, index: int) -> None:
        """Add one user to the memory block ``index``. The block is free after each user has called `give`."""
        self._uses[index] += 1

    def give(self, index: int) -> None:
        """Remove one user from the memory block ``index``. A block without users is free."""
        self._uses[index] -= 1
        if not self._uses[index]:
            insort(self._free, (self._blocks[index].nbytes, index))

    def begin_record(self) -> None:
        """Start to record the use of memory blocks, until `end_record`."""
        self._recorded, self._uses_before = set(), list(self._uses)

    def end_record(self) -> BlockUse:
        """End the recording. Return the blocks taken and returned since `begin_record` as a `BlockUse`."""
        assert self._recorded is not None
        before = self._uses_before + [0] * (len(self._uses) - len(self._uses_before))
        changes = [(index, now - then) for index, (now, then) in enumerate(zip(self._uses, before, strict=True))]
        taken, self._recorded = frozenset(self._recorded), None
        self._fixed |= taken
        return BlockUse(taken, tuple(change for change in changes if change[1]), tuple(self._scratch.values()))

    def has_free(self, use: BlockUse) -> bool:
        """Return True if all memory blocks of the recording ``use`` are free now."""
        return not any(self._uses[index] for index in use.taken)

    def repeat(self, use: BlockUse) -> None:
        """Take and free the same memory blocks as in the recording ``use``. All must be free now, see `has_free`."""
        for index, change in use.changes:
            if not self._uses[index]:
                del self._free[bisect_left(self._free, (self._blocks[index].nbytes, index))]
            self._uses[index] += change
            if not self._uses[index]:
                insort(self._free, (self._blocks[index].nbytes, index))

    def find(self, array: Array) -> int | None:
        """Return the index of the block that contains ``array``, or None if ``array`` is not in this arena."""
        first = backend.address(array)
        slot = bisect_right(self._starts, (first, len(self._blocks))) - 1
        if slot < 0:
            return None
        start, index = self._starts[slot]
        return index if first < start + self._blocks[index].nbytes else None

    def view(self, index: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array of shape ``shape`` and dtype ``dtype`` that starts at the first byte of block ``index``."""
        return _shaped(self._blocks[index], shape, dtype)

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a scratch array of shape ``shape``. All scratch arrays with the same ``name`` share memory."""
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        block = self._scratch.get(name)
        if block is None or block.nbytes < nbytes:
            block = self._scratch[name] = self._allocate(nbytes)
        return _shaped(block, shape, dtype)

    def forget(self, key: tuple[int, int], released: "ArenaSaved") -> None:
        """Remove the `ArenaSaved` ``released`` from the arena. ``key``: (layer, micro-batch)."""
        if self._live.get(key) is released:
            del self._live[key]

    def _allocate(self, nbytes: int) -> Array:
        # numpy aligns to 16 bytes only; cache line alignment keeps vector loads from crossing lines.
        size = align_up(max(nbytes, 1), ALIGN_BYTES)
        owner: Any = backend.empty(size + ALIGN_BYTES, np.dtype(np.uint8), self._on)
        if self._ledger is not None:
            self._ledger.track(owner, "activations")
        start = -backend.address(owner) % ALIGN_BYTES
        block: Array = owner[start : start + size]
        return block


@dataclass(frozen=True)
class SavedState:
    """Snapshot of an `ArenaSaved`: names, arrays and objects. The contents of the arrays are not copied."""

    # The replay of a CUDA graph writes the array contents again, at the same addresses.
    values: dict[str, Any]
    taken: tuple[int, ...]
    held: tuple[tuple[str, int | None], ...]
    deferred: dict[str, str]
    draw: Draw | None


class ArenaSaved:
    """Implementation of `hpcdist.models.stage.Saved` whose arrays are in blocks of an `Arena`."""

    def __init__(self, arena: Arena, key: tuple[int, int]) -> None:
        self._arena = arena
        self._key = key
        self.layer = key[0]
        self.draw: Draw | None = None
        self.documents: Documents | None = None
        self.scale = 1.0
        self._values: dict[str, Any] = {}
        self._taken: list[int] = []
        self._held: list[tuple[str, int | None]] = []  # (name, block), see `hold`
        self.deferred: dict[str, str] = {}
        self.graph = 0  # index of the CUDA graph that wrote the entries; 0: no graph

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        index = self._arena.take(prod(shape) * np.dtype(dtype).itemsize)
        self._taken.append(index)
        array = self._arena.view(index, shape, dtype)
        self.keep(name, array)
        return array

    def keep(self, name: str, value: Any) -> None:
        assert name not in self._values, f"{name} of (layer, micro-batch) {self._key} is saved twice: release it first"
        self._values[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._arena.scratch(name, shape, dtype)

    def within(self) -> "ArenaSaved":
        inner = ArenaSaved(self._arena, self._key)
        inner.draw, inner.scale, inner.documents = self.draw, self.scale, self.documents
        return inner

    def owns(self, array: Array) -> bool:
        return self._arena.find(array) in self._taken

    def hold(self, name: str) -> None:
        index = self._arena.find(self._values[name])
        if index is not None:
            self._arena.share(index)
        self._held.append((name, index))

    def state(self) -> SavedState:
        """Return a snapshot of the stored arrays and objects. The array contents are not copied."""
        return SavedState(dict(self._values), tuple(self._taken), tuple(self._held), dict(self.deferred), self.draw)

    def restore(self, state: SavedState) -> None:
        """Restore the arrays and objects of a snapshot, but not the array contents. Call `Arena.repeat` first."""
        self._values, self._taken, self._held = dict(state.values), list(state.taken), list(state.held)
        self.deferred, self.draw = dict(state.deferred), state.draw

    def narrow(self) -> None:
        for index in reversed(self._taken):
            self._arena.give(index)
        self._taken.clear()
        self._values = {name: self._values[name] for name, _ in self._held}

    def release(self) -> None:
        for index in reversed(self._taken):
            self._arena.give(index)
        for _, held in reversed(self._held):
            if held is not None:
                self._arena.give(held)
        self._taken.clear()
        self._held.clear()
        self._values.clear()
        self.deferred.clear()
        self.draw = self.documents = None
        self.graph = 0
        self._arena.forget(self._key, self)


def _shaped(block: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    array: Array = block[: prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
    return array
