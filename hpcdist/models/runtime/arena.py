"""Arena of activation memory: allocated in the first step, used again in every later one.

A call that was recorded can be left out later: `Arena.repeat` takes the same blocks, where they are free, and
`ArenaSaved.restore` what the call has kept there. So a CUDA graph finds its memory at the same addresses.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
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


@dataclass(frozen=True)
class BlockUse:
    """Blocks that a call took, and by how many it changed the users of blocks.

    It refers to the scratch memory of its time, which is freed once a larger one is asked for.
    """

    taken: frozenset[int]
    changes: tuple[tuple[int, int], ...]  # (index of the block, users more or less)
    scratch: tuple[Array, ...]


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
        self._recorded: set[int] | None = None  # blocks that were taken since `begin_record`
        self._uses_before: list[int] = []
        self._fixed = set[int]()  # blocks that `repeat` takes: they do not grow

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
        else:
            larger = self._growing(nbytes)
            index = len(self._blocks) if larger is None else larger
            if larger is None:
                self._blocks.append(NOTHING)
                self._uses.append(0)
            else:
                self._starts.remove((backend.address(self._blocks[index]), index))
            self._blocks[index] = NOTHING  # it goes before a larger one comes: both at once would be a peak of memory
            self._blocks[index] = self._allocate(nbytes)
            self._uses[index] = 1
            insort(self._starts, (backend.address(self._blocks[index]), index))
        if self._recorded is not None:
            self._recorded.add(index)
        return index

    def _growing(self, nbytes: int) -> int | None:
        """Take the largest free block that may grow to ``nbytes`` out of the free ones; None: there is none."""
        for place in reversed(range(bisect_left(self._free, (nbytes, -1)))):
            size, index = self._free[place]
            if nbytes > MAX_WASTE * size:
                break
            if index not in self._fixed:
                del self._free[place]
                return index
        return None

    def share(self, index: int) -> None:
        """Count one more user of a block, which is free once all have given it back."""
        self._uses[index] += 1

    def give(self, index: int) -> None:
        """Take a block back."""
        self._uses[index] -= 1
        if not self._uses[index]:
            insort(self._free, (self._blocks[index].nbytes, index))

    def begin_record(self) -> None:
        """Record the blocks that are taken and given back from now on."""
        self._recorded, self._uses_before = set(), list(self._uses)

    def end_record(self) -> BlockUse:
        """Return what was recorded."""
        assert self._recorded is not None
        before = self._uses_before + [0] * (len(self._uses) - len(self._uses_before))
        changes = [(index, now - then) for index, (now, then) in enumerate(zip(self._uses, before, strict=True))]
        taken, self._recorded = frozenset(self._recorded), None
        self._fixed |= taken
        return BlockUse(taken, tuple(change for change in changes if change[1]), tuple(self._scratch.values()))

    def has_free(self, use: BlockUse) -> bool:
        """Return whether all blocks that were taken in ``use`` are free."""
        return not any(self._uses[index] for index in use.taken)

    def repeat(self, use: BlockUse) -> None:
        """Take, share and give back blocks as was recorded; those that were taken are free."""
        for index, change in use.changes:
            if not self._uses[index]:
                del self._free[bisect_left(self._free, (self._blocks[index].nbytes, index))]
            self._uses[index] += change
            if not self._uses[index]:
                insort(self._free, (self._blocks[index].nbytes, index))

    def find(self, array: Array) -> int | None:
        """Return the index of the block that ``array`` lies in, None where it is no memory that `take` gave."""
        first = backend.address(array)
        place = bisect_right(self._starts, (first, len(self._blocks))) - 1
        if place < 0:
            return None
        start, index = self._starts[place]
        return index if first < start + self._blocks[index].nbytes else None

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
        start = -backend.address(owner) % ALIGN_BYTES
        block: Array = owner[start : start + size]
        return block


@dataclass(frozen=True)
class SavedState:
    """References of an `ArenaSaved`, whose blocks are in the `BlockUse` of the same call."""

    values: dict[str, Any]
    taken: tuple[int, ...]
    held: tuple[tuple[str, int | None], ...]
    deferred: dict[str, str]
    draw: Draw | None


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
        self.graph = 0  # the number of the graph that has written what is kept here; 0: none has

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

    def state(self) -> SavedState:
        """Return what is kept here, for `restore`."""
        return SavedState(dict(self._values), tuple(self._taken), tuple(self._held), dict(self.deferred), self.draw)

    def restore(self, state: SavedState) -> None:
        """Keep what ``state`` says, whose blocks `Arena.repeat` has taken."""
        self._values, self._taken, self._held = dict(state.values), list(state.taken), list(state.held)
        self.deferred, self.draw = dict(state.deferred), state.draw

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
        self.graph = 0
        self._arena.forget(self._key, self)


def _shaped(block: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    array: Array = block[: prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
    return array
