"""Self-describing copy of a rank's state in memory, with digests that detect damage. Contains no pickle.

head      six int64: 1 + step (0: incomplete), bytes of the pieces, capacity for scalars, bytes of the names, bytes
          of the scalars, 0; then the xxh3-128 digest of everything before the pieces, except unused capacity
digests   xxh3-128 of each MiB of the pieces
scalars   JSON, with spare capacity
names     JSON: the `Slot` of each piece
pieces    each aligned to 64 bytes
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
from hpcdist.checkpoint.manifest import Slot

BLOCK_BYTES: Final = 1 << 20  # unit of copying and digesting: stays in the cache (empirical)
MIN_SCALAR_ROOM: Final = 4096  # capacity for the scalars in bytes
INCOMPLETE: Final = -1  # the step of an incomplete copy
_HEAD: Final = 64
_DIGEST: Final = 16
_STEP, _NBYTES, _ROOM, _NAMES, _SCALARS = range(5)  # indices in the head


_Move = tuple[int, slice, np.ndarray]


def signature(pieces: Sequence[Piece]) -> list[tuple[Any, ...]]:
    """Return a list of the names, ranges, shapes and dtypes of ``pieces``, to compare with other signatures."""
    return [(p.kind, p.tensor, p.flat, p.box, p.global_shape, p.array.dtype) for p in pieces]


class CopyLayout:
    """Layout of an in-memory copy. ``ranges[i]``: bytes of the tensor slice ``pieces[i]``. ``scalars``: JSON text."""

    def __init__(self, pieces: Sequence[Piece], scalars: bytes) -> None:
        self.signature = signature(pieces)
        slots = [Slot.of(piece) for piece in pieces]
        self.text = msgspec.json.encode(slots)
        self.ranges, nbytes = _byte_ranges(slots)
        self.room = max(MIN_SCALAR_ROOM, 2 * len(scalars))
        self.sizes = nbytes, self.room, len(self.text)  # as in `MemoryCopy.lay_out`


class MemoryCopy:
    """Copy of one rank's training state in the byte array ``memory``. All methods are local."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self._head = memory[:_HEAD].view(np.int64)
        self._laid_out = (0, 0, 0)  # the sizes if this process writes the copy; readers use the head
        self._moves: list[list[_Move]] = []

    @property
    def step(self) -> int:
        """Training step after which the state was copied, or `INCOMPLETE`."""
        return int(self._head[_STEP]) - 1  # fresh memory is zero, which means incomplete

    def drop(self) -> None:
        """Mark the copy as incomplete, before a new state with the same layout overwrites it."""
        self.lay_out(*self._laid_out)  # also writes the sizes, since the head may have been damaged in memory

    def finish(self, step: int) -> None:
        """Mark the copy as the complete state after training step ``step``."""
        self._head[_STEP] = step + 1

    def lay_out(self, tensor_bytes: int, scalar_bytes: int, description_bytes: int) -> None:
        """Write the sizes of the sections in bytes to the header, and mark the copy as incomplete."""
        self._laid_out = tensor_bytes, scalar_bytes, description_bytes
        self._head[_STEP] = 0
        self._head[_NBYTES : _NAMES + 1] = self._laid_out

    def prepare(self, layout: CopyLayout, pieces: Sequence[Piece]) -> None:
        """Write the section sizes of ``layout`` to the header, and plan how `fill` copies the tensors ``pieces``."""
        self.lay_out(*layout.sizes)
        self._moves = list(_moves(layout, pieces, self.data))

    def front(self, with_descriptions: bool) -> np.ndarray:
        """Return a view of the bytes before the tensor data. ``with_descriptions``: include the tensor descriptions."""
        nbytes, room, _ = self._sizes()
        return self.memory[: _front(*self._sizes()) if with_descriptions else _texts(nbytes) + room]

    @property
    def data(self) -> np.ndarray:
        """View of the bytes of all tensors in this copy."""
        start = _front(*self._sizes())
        return self.memory[start : start + int(self._head[_NBYTES])]

    def _sizes(self) -> tuple[int, int, int]:
        return int(self._head[_NBYTES]), int(self._head[_ROOM]), int(self._head[_NAMES])

    def fill(self, pieces: Sequence[Piece]) -> Iterator[int]:
        """Copy ``pieces`` and their digests to this memory. After each block, yield the total of copied bytes."""
        data, digests = self.data, self._digests()
        arrays = [piece.array for piece in pieces]
        for index, block in enumerate(cut(Range(0, data.size), BLOCK_BYTES)):
            for number, part, target in self._moves[index]:
                array = arrays[number]
                if isinstance(array, np.ndarray):
                    target[...] = array[part]
                else:
                    _copy_part(array, part, target)
            digests[index] = np.frombuffer(_digest(data[block.slice]), np.uint8)
            yield block.stop

    def write_texts(self, layout: CopyLayout, scalars: bytes, step: int) -> None:
        """Write the JSON text ``scalars``, the tensor descriptions, and a digest of these texts and of ``step``."""
        start = _texts(layout.sizes[0])
        self._head[_SCALARS] = len(scalars)
        self.memory[start : start + len(scalars)] = np.frombuffer(scalars, np.uint8)
        names = start + layout.room
        self.memory[names : names + len(layout.text)] = np.frombuffer(layout.text, np.uint8)
        self.memory[_HEAD - _DIGEST : _HEAD] = np.frombuffer(self._front_digest(step), np.uint8)

    def damage(self) -> str:
        """Return an error text about the first damaged bytes of this complete copy, or "" if all digests match."""
        if not self._is_sound() or self.memory[_HEAD - _DIGEST : _HEAD].tobytes() != self._front_digest(self.step):
            return "its names or scalars do not match their digest"
        data = self.data
        for index, block in enumerate(cut(Range(0, data.size), BLOCK_BYTES)):
            if self._digests()[index].tobytes() != _digest(data[block.slice]):
                return f"bytes {block.start} to {block.stop} do not match their digest ({self._within(block)})"
        return ""

    def scalars(self) -> dict[str, Any]:
        """Return the dict of JSON scalars in this copy."""
        start = _texts(int(self._head[_NBYTES]))
        scalars: dict[str, Any] = json.loads(self.memory[start : start + int(self._head[_SCALARS])].tobytes())
        return scalars

    def pieces(self) -> list[Piece]:
        """Return a list of the tensor slices in this copy, as views of the copy's memory."""
        slots, data = self._slots(), self.data
        return [
            Piece(s.kind, s.tensor, s.shape, s.box, Range(*s.flat), data[where.slice].view(dtype_of(s.dtype)))
            for s, where in zip(slots, _byte_ranges(slots)[0], strict=True)
        ]

    def _slots(self) -> list[Slot]:
        nbytes, room, length = self._sizes()
        start = _texts(nbytes) + room
        return msgspec.json.decode(self.memory[start : start + length].tobytes(), type=list[Slot])

    def _within(self, block: Range) -> str:
        slots = self._slots()
        ranges, _ = _byte_ranges(slots)
        overlapping = [f"{s.kind}/{s.tensor}" for s, where in zip(slots, ranges, strict=True) if where.intersect(block)]
        return ", ".join(overlapping[:3]) + (", ..." if len(overlapping) > 3 else "")

    def _digests(self) -> np.ndarray:
        count = _blocks(int(self._head[_NBYTES]))
        return self.memory[_HEAD : _HEAD + count * _DIGEST].reshape(count, _DIGEST)

    def _is_sound(self) -> bool:
        # No read may go beyond the end of the memory.
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
    # Byte offset of the JSON text with the scalars.
    return _HEAD + _DIGEST * _blocks(nbytes)


def _front(nbytes: int, room: int, names: int) -> int:
    return align_up(_texts(nbytes) + room + names, ALIGN_BYTES)


def memory_bytes(tensor_bytes: int, scalar_bytes: int, description_bytes: int) -> int:
    """Return the size of a `MemoryCopy` in bytes. The arguments are the sizes of the sections in bytes. Local."""
    return _front(tensor_bytes, scalar_bytes, description_bytes) + tensor_bytes


def _byte_ranges(slots: Sequence[Slot]) -> tuple[list[Range], int]:
    starts = list(accumulate((align_up(slot.nbytes, ALIGN_BYTES) for slot in slots), initial=0))
    return [Range(start, start + slot.nbytes) for start, slot in zip(starts, slots, strict=False)], starts[-1]


def _digest(data: np.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(data.data)


def _moves(layout: CopyLayout, pieces: Sequence[Piece], data: np.ndarray) -> Iterator[list[_Move]]:
    # Yield, for each block of BLOCK_BYTES bytes of ``data``, the copies that fill it: (index of the piece, slice of its
    # elements, target view).
    number = 0  # of the first piece that ends after the start of the block
    for block in cut(Range(0, data.size), BLOCK_BYTES):
        moves: list[_Move] = []
        while number < len(pieces) and layout.ranges[number].start < block.stop:
            where, dtype = layout.ranges[number], pieces[number].array.dtype
            inside = where.intersect(block)
            part = inside.shift(-where.start)  # whole elements: pieces and blocks start at multiples of 64 bytes
            if part:
                elements = slice(part.start // dtype.itemsize, part.stop // dtype.itemsize)
                moves.append((number, elements, data[inside.slice].view(dtype)))
            if where.stop > block.stop:
                break
            number += 1
        yield moves


def _copy_part(array: Any, part: slice, target: np.ndarray) -> None:
    if isinstance(array, FileSlice):
        array.read(Range(part.start, part.stop), target)
    else:
        staging.to_host_in_blocks(array[part], lambda where, block: np.copyto(target[where.slice], block))
