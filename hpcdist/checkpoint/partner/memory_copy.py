"""Self-describing copy of a rank's state in memory, with digests that prove that it is still intact.

    head      six int64: 1 + the step (0: not complete), bytes of the pieces, room for scalars, bytes of the names and
              of the scalars, 0; then the xxh3-128 digest of all in front of the pieces but free room
    digests   xxh3-128 of each MiB of the pieces
    scalars   JSON, with room to grow
    names     JSON: the `Slot` of each piece
    pieces    one behind the other, each at a multiple of 64 bytes

A rank that can read the memory of one that has died, or is sent it, needs nothing else. There is no pickle in it.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.filestore import FileSlice
from hpcdist.arrays.gpu import staging
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import ALIGN_BYTES, Range, align_up, cut
from hpcdist.checkpoint.format.manifest import Slot

BLOCK_BYTES: Final = 1 << 20  # copied and digested at a time: it is then still in the cache (empirical)
MIN_SCALAR_ROOM: Final = 4096  # for the scalars
INCOMPLETE: Final = -1  # the step of a copy that is not complete
_HEAD: Final = 64
_DIGEST: Final = 16
_STEP, _NBYTES, _ROOM, _NAMES, _SCALARS = range(5)  # places in the head


_Move = tuple[int, slice, np.ndarray]


def signature(pieces: Sequence[Piece]) -> list[tuple[Any, ...]]:
    """Return a value that is equal where pieces are named and cut alike; cheap, as each step compares it (local)."""
    return [(p.kind, p.tensor, p.flat, p.box, p.global_shape, p.array.dtype) for p in pieces]


class CopyLayout:
    """Layout of a copy of ``pieces``, computed once: the place of each, and their slots as JSON."""

    def __init__(self, pieces: Sequence[Piece], scalars: bytes) -> None:
        self.signature = signature(pieces)
        slots = [Slot.of(piece) for piece in pieces]
        self.text = msgspec.json.encode(slots)
        self.places, self._nbytes = _places(slots)
        self.room = max(MIN_SCALAR_ROOM, 2 * len(scalars))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of the pieces, room for scalars, and bytes of the names."""
        return self._nbytes, self.room, len(self.text)

    @property
    def memory_bytes(self) -> int:
        """Bytes of a copy."""
        return memory_bytes(*self.sizes)


class MemoryCopy:
    """Copy of a rank's state in ``memory``, bytes of this rank or of memory that ranks share. All of it is local."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self._head = memory[:_HEAD].view(np.int64)
        self._laid_out = (0, 0, 0)  # where it is written; who only reads goes by the head
        self._moves: list[list[_Move]] = []

    @property
    def step(self) -> int:
        """The step after which the state was this; `INCOMPLETE` while it is not complete."""
        return int(self._head[_STEP]) - 1  # fresh memory is zero, and no copy of step 0

    def drop(self) -> None:
        """Mark the copy as incomplete: it will be overwritten by a newer one of the same layout."""
        self.lay_out(*self._laid_out)  # the sizes too, since the head may have been damaged in memory

    def finish(self, step: int) -> None:
        """Mark the copy as complete: it is all of the state after ``step``."""
        self._head[_STEP] = step + 1

    def lay_out(self, nbytes: int, room: int, names: int) -> None:
        """Write the `CopyLayout.sizes` of what will be here into the head, and mark it as incomplete."""
        self._laid_out = nbytes, room, names
        self._head[_STEP] = 0
        self._head[_NBYTES : _NAMES + 1] = self._laid_out

    def prepare(self, names: CopyLayout, pieces: Sequence[Piece]) -> None:
        """Lay out memory for copies of ``pieces``, which ``names`` is of, to be taken here."""
        self.lay_out(*names.sizes)
        self._moves = list(_moves(names, pieces, self.data))

    def front(self, names: bool) -> np.ndarray:
        """Return the bytes in front of the pieces, with the names or without."""
        nbytes, room, _ = self._sizes()
        return self.memory[: _front(*self._sizes()) if names else _texts(nbytes) + room]

    @property
    def data(self) -> np.ndarray:
        """The pieces."""
        start = _front(*self._sizes())
        return self.memory[start : start + int(self._head[_NBYTES])]

    def _sizes(self) -> tuple[int, int, int]:
        return int(self._head[_NBYTES]), int(self._head[_ROOM]), int(self._head[_NAMES])

    def fill(self, pieces: Sequence[Piece]) -> Iterator[int]:
        """Copy ``pieces``; yield how many bytes of `data` are there and digested, block after block."""
        data, digests = self.data, self._digests()
        arrays = [piece.array for piece in pieces]
        for index, block in enumerate(cut(Range(0, data.size), BLOCK_BYTES)):
            for number, part, place in self._moves[index]:
                array = arrays[number]
                if isinstance(array, np.ndarray):
                    place[...] = array[part]
                else:
                    _copy_part(array, part, place)
            digests[index] = np.frombuffer(_digest(data[block.slice]), np.uint8)
            yield block.stop

    def tell(self, names: CopyLayout, scalars: bytes, step: int) -> None:
        """Write names and scalars in front of the pieces, and the digest of all that (`finish` sets the step).

        All of it is written anew, so that nothing that was damaged since the last time gets a digest that fits.
        """
        start = _texts(names.sizes[0])
        self._head[_SCALARS] = len(scalars)
        self.memory[start : start + len(scalars)] = np.frombuffer(scalars, np.uint8)
        self.memory[start + names.room : start + names.room + len(names.text)] = np.frombuffer(names.text, np.uint8)
        self.memory[_HEAD - _DIGEST : _HEAD] = np.frombuffer(self._front_digest(step), np.uint8)

    def damage(self) -> str:
        """Return what of a complete copy does not match its digest, or ""."""
        if not self._is_sound() or self.memory[_HEAD - _DIGEST : _HEAD].tobytes() != self._front_digest(self.step):
            return "its names or scalars do not match their digest"
        data = self.data
        for index, block in enumerate(cut(Range(0, data.size), BLOCK_BYTES)):
            if self._digests()[index].tobytes() != _digest(data[block.slice]):
                return f"bytes {block.start} to {block.stop} do not match their digest ({self._within(block)})"
        return ""

    def scalars(self) -> dict[str, Any]:
        """Return the scalars."""
        start = _texts(int(self._head[_NBYTES]))
        scalars: dict[str, Any] = json.loads(self.memory[start : start + int(self._head[_SCALARS])].tobytes())
        return scalars

    def pieces(self) -> list[Piece]:
        """Return views of the pieces."""
        slots, data = self._slots(), self.data
        return [
            Piece(s.kind, s.tensor, s.shape, s.box, Range(*s.flat), data[where.slice].view(dtype_of(s.dtype)))
            for s, where in zip(slots, _places(slots)[0], strict=True)
        ]

    def _slots(self) -> list[Slot]:
        nbytes, room, length = self._sizes()
        start = _texts(nbytes) + room
        return msgspec.json.decode(self.memory[start : start + length].tobytes(), type=list[Slot])

    def _within(self, block: Range) -> str:
        """Return which pieces have bytes in ``block``, for people."""
        slots = self._slots()
        overlapping = [
            f"{s.kind}/{s.tensor}" for s, where in zip(slots, _places(slots)[0], strict=True) if where.intersect(block)
        ]
        return ", ".join(overlapping[:3]) + (", ..." if len(overlapping) > 3 else "")

    def _digests(self) -> np.ndarray:
        """Return a view of the digests of the blocks, (blocks, 16) uint8."""
        count = _blocks(int(self._head[_NBYTES]))
        return self.memory[_HEAD : _HEAD + count * _DIGEST].reshape(count, _DIGEST)

    def _is_sound(self) -> bool:
        """Whether the numbers in the head can be true, so that nothing beyond the memory is read."""
        sizes = self._sizes()
        within = all(0 <= size <= self.memory.size for size in (*sizes, int(self._head[_SCALARS])))
        return within and self._head[_SCALARS] <= self._head[_ROOM] and memory_bytes(*sizes) <= self.memory.size

    def _front_digest(self, step: int) -> bytes:
        digest = xxhash.xxh3_128(step.to_bytes(8, "little", signed=True))
        digest.update(self._head[_NBYTES : _SCALARS + 2].data)
        nbytes, room, length = self._sizes()
        start = _texts(nbytes)
        digest.update(self.memory[_HEAD : start + int(self._head[_SCALARS])].data)
        digest.update(self.memory[start + room : start + room + length].data)
        return digest.digest()


def _blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES)


def _texts(nbytes: int) -> int:
    """Return where the scalars begin in a copy of ``nbytes`` bytes of pieces; behind their room come the names."""
    return _HEAD + _DIGEST * _blocks(nbytes)


def _front(nbytes: int, room: int, names: int) -> int:
    return align_up(_texts(nbytes) + room + names, ALIGN_BYTES)


def memory_bytes(nbytes: int, room: int, names: int) -> int:
    """Return the bytes of a copy with these `CopyLayout.sizes` (local)."""
    return _front(nbytes, room, names) + nbytes


def _places(slots: Sequence[Slot]) -> tuple[list[Range], int]:
    """Return where the bytes of each piece lie, and the bytes of all."""
    starts = list(accumulate((align_up(slot.nbytes, ALIGN_BYTES) for slot in slots), initial=0))
    return [Range(start, start + slot.nbytes) for start, slot in zip(starts, slots, strict=False)], starts[-1]


def _digest(data: np.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(data.data)


def _moves(names: CopyLayout, pieces: Sequence[Piece], data: np.ndarray) -> Iterator[list[_Move]]:
    """Yield for each block what is copied into it: which piece, which of its elements, and where to."""
    number = 0  # of the first piece that is not behind the block
    for block in cut(Range(0, data.size), BLOCK_BYTES):
        moves: list[_Move] = []
        while number < len(pieces) and names.places[number].start < block.stop:
            where, dtype = names.places[number], pieces[number].array.dtype
            inside = where.intersect(block)
            part = inside.shift(-where.start)  # of whole elements: places and blocks begin at multiples of 64 bytes
            if part:
                elements = slice(part.start // dtype.itemsize, part.stop // dtype.itemsize)
                moves.append((number, elements, data[inside.slice].view(dtype)))
            if where.stop > block.stop:
                break
            number += 1
        yield moves


def _copy_part(array: Any, part: slice, place: np.ndarray) -> None:
    """Copy what is not in memory of the host: a part of a file, or of an array of a GPU through pinned memory."""
    if isinstance(array, FileSlice):
        array.read(Range(part.start, part.stop), place)
    else:
        staging.to_host_in_blocks(array[part], lambda where, block: np.copyto(place[where.slice], block))
