"""Arena of activation memory: allocated in the first step, used again in every later one."""

from bisect import bisect_left, bisect_right, insort
from math import prod
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.ranges import ALIGN_BYTES, align_up
from hpcdist.models.documents import Documents
from hpcdist.models.stage import Draw

# A free block serves requests down to 1 / MAX_WASTE of its size: uneven last batches need no memory of their own. It
# grows to requests of up to MAX_WASTE times its size, and then still serves those that it was made for: sizes that vary
# from step to step do not leave a block each. Blocks only grow, so a step that is repeated comes to an end of it.
MAX_WASTE = 2
NOTHING: Final = np.empty(0, np.uint8)


class Arena:
    """Hands out memory to the stages of one rank and takes it back. Not for several threads at once."""

    def __init__(self, ledger: Ledger | None = None, on: str = "cpu") -> None:
        self._ledger = ledger
        self._on = on
        self._free: list[tuple[int, int]] = []  # (size, index of the block), ascending
        self._blocks: list[Array] = []
        self._uses: list[int] = []  # of each block: 0 where it is free
        self._starts: list[tuple[int, int]] = []  # (address, index of the block), ascending
        self._scratch: dict[str, Array] = {}
        self._live: dict[tuple[int, int], ArenaSaved] = {}

    def saved(self, layer: int, microbatch: int = 0) -> "ArenaSaved":
        """Return the `Saved` of a stage and micro-batch: a new one, or the one that was not released yet."""
        key = (layer, microbatch)
        if key not in self._live:
            self._live[key] = ArenaSaved(self, key)
        return self._live[key]

    def take(self, nbytes: int) -> int:
        """Return the index of a block of at least ``nbytes``.

        It is the smallest free one that fits, else the largest smaller one, which grows, or a new one.
        """
        place = bisect_left(self._free, (nbytes, -1))
        if place < len(self._free) and self._free[place][0] <= max(MAX_WASTE * nbytes, ALIGN_BYTES):
            index = self._free.pop(place)[1]
            self._uses[index] = 1
            return index
        if place and nbytes <= MAX_WASTE * self._free[place - 1][0]:
            index = self._free.pop(place - 1)[1]
            self._starts.remove((_address(self._blocks[index]), index))
        else:
            index = len(self._blocks)
            self._blocks.append(NOTHING)
            self._uses.append(0)
        self._blocks[index] = NOTHING  # a block goes before a larger one comes: both at once would be a peak of memory
        self._blocks[index] = self._allocate(nbytes)
        self._uses[index] = 1
        insort(self._starts, (_address(self._blocks[index]), index))
        return index

    def share(self, index: int) -> None:
        """Count one more user of a block, which is free once all have given it back."""
        self._uses[index] += 1

    def give(self, index: int) -> None:
        """Take a block back."""
        self._uses[index] -= 1
        if not self._uses[index]:
            insort(self._free, (self._blocks[index].nbytes, index))

    def find(self, array: Array) -> int | None:
        """Return the index of the block that ``array`` lies in, None where it is no memory that `take` gave."""
        address = _address(array)
        place = bisect_right(self._starts, (address, len(self._blocks))) - 1
        if place < 0:
            return None
        start, index = self._starts[place]
        return index if address < start + self._blocks[index].nbytes else None

    def view(self, index: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return the beginning of a block as an array."""
        return _shaped(self._blocks[index], shape, dtype)

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return the temporary called ``name``; it grows to the largest shape that was asked for."""
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        block = self._scratch.get(name)
        if block is None or block.nbytes < nbytes:
            block = self._scratch[name] = self._allocate(nbytes)
        return _shaped(block, shape, dtype)

    def forget(self, key: tuple[int, int], released: "ArenaSaved") -> None:
        """Drop the record of a `Saved` that was ``released``, unless it was made by another one of that key."""
        if self._live.get(key) is released:
            del self._live[key]

    def _allocate(self, nbytes: int) -> Array:
        # numpy aligns to 16 bytes only; blocks that start on a cache line keep vector loads from crossing two.
        size = align_up(max(nbytes, 1), ALIGN_BYTES)
        owner: Any = backend.empty(size + ALIGN_BYTES, np.dtype(np.uint8), self._on)
        if self._ledger is not None:
            self._ledger.track(owner, "activations")
        start = -_address(owner) % ALIGN_BYTES
        block: Array = owner[start : start + size]
        return block


class ArenaSaved:
    """`hpcdist.models.stage.Saved` over the blocks of an arena."""

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

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return uninitialised memory that is kept under ``name`` until `release`."""
        index = self._arena.take(prod(shape) * np.dtype(dtype).itemsize)
        self._taken.append(index)
        array = self._arena.view(index, shape, dtype)
        self.keep(name, array)
        return array

    def keep(self, name: str, value: Any) -> None:
        """Keep ``value``, an array that somebody else owns or a plain object."""
        assert name not in self._values, f"{name} of (layer, micro-batch) {self._key} is saved twice: release it first"
        self._values[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return uninitialised memory that any stage overwrites when it asks for the same ``name``."""
        return self._arena.scratch(name, shape, dtype)

    def within(self) -> "ArenaSaved":
        """Return another one of the same stage, draw and documents, with own memory, that the caller releases."""
        inner = ArenaSaved(self._arena, self._key)
        inner.draw, inner.scale, inner.documents = self.draw, self.scale, self.documents
        return inner

    def owns(self, array: Array) -> bool:
        """Whether ``array`` lies in memory that `empty` of this one gave."""
        return self._arena.find(array) in self._taken

    def hold(self, name: str) -> None:
        """Keep what is under ``name`` through `narrow`, and its memory until `release`, whoever took it."""
        index = self._arena.find(self._values[name])
        if index is not None:
            self._arena.share(index)
        self._held.append((name, index))

    def narrow(self) -> None:
        """Give back all but what is held."""
        for index in reversed(self._taken):
            self._arena.give(index)
        self._taken.clear()
        self._values = {name: self._values[name] for name, _ in self._held}

    def release(self) -> None:
        """Give the memory back; the arrays handed out must not be used afterwards."""
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
        self._arena.forget(self._key, self)


def _address(array: Any) -> int:
    return int(array.data.ptr if backend.is_device(array) else array.ctypes.data)


def _shaped(block: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    array: Array = block[: prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
    return array
