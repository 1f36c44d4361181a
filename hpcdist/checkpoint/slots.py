"""Slots: what a shard holds of each piece, named before a byte of it is there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcdist.arrays.dtypes import dtype_of, name_of
from hpcdist.arrays.piece import Box, Piece, whole_box
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint.manifest import BLOCK_BYTES


@dataclass(frozen=True)
class Slot:
    """Where the elements of one piece will lie. Small, and travels to whoever writes them."""

    kind: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    flat: tuple[int, int]

    @classmethod
    def of(cls, piece: Piece) -> "Slot":
        """Return the slot for ``piece``."""
        flat = piece.flat.start, piece.flat.stop
        return cls(piece.kind, piece.tensor, name_of(piece.array.dtype), piece.global_shape, piece.box, flat)

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return (self.flat[1] - self.flat[0]) * dtype_of(self.dtype).itemsize

    def blocks(self) -> list[int]:
        """Return the bytes of each block of the piece."""
        return [min(BLOCK_BYTES, self.nbytes - start) for start in range(0, self.nbytes, BLOCK_BYTES)]

    def stored_shape(self) -> tuple[int, ...]:
        """Return how a piece is stored: a whole tensor or box in its shape, a flat part of one in one dim."""
        extent = tuple(stop - start for start, stop in self.box)
        if Range(*self.flat) != Range(0, math.prod(extent)):
            return (self.flat[1] - self.flat[0],)
        return self.shape if self.box == whole_box(self.shape) else extent


def named(slots: Sequence[Slot]) -> list[str]:
    """Return the dataset of each slot of one shard: the tensor's name, and for what has it too, where it begins."""
    found: dict[str, None] = {}
    for slot in slots:
        name = f"{slot.kind}/{slot.tensor}"
        if name in found:
            corner = ",".join(str(start) for start, _ in slot.box)
            name = f"{name}@{corner}+{slot.flat[0]}"
        if name in found:
            name = f"{name}-{slot.flat[1]}"
        assert name not in found, f"{name} is saved twice in one shard"
        found[name] = None
    return list(found)


def once(groups: Sequence[Sequence[Slot]]) -> list[list[bool]]:
    """Return, for the slots of each rank, whether it is the first that has the piece: only that one is written."""
    seen: set[Slot] = set()
    wanted = []
    for slots in groups:
        wanted.append([slot not in seen for slot in slots])
        assert len(set(slots)) == len(slots), "a rank saves a piece twice"
        seen.update(slots)
    return wanted
