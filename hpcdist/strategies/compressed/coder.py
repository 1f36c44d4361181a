"""The gradient coder: payloads of a range of gradients in a message, one for each tensor that it touches.

A tensor, or the piece of it that lies in the range, is encoded by itself, with its own scale, count and stream of
random numbers, so no tensor is measured by another. What is lost of it is kept under its place in the layout: buckets
and shares may be cut anew. A piece that is not finite is sent as NaN and leaves the residuals alone: all ranks learn
of it from the norm of the sum, before anybody touches a weight.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import ALIGN_BYTES, Range
from hpcdist.compression.compressor import Compressor, RandomKey, align, is_finite
from hpcdist.compression.feedback import ErrorFeedback

_LINE: Final = ALIGN_BYTES // np.dtype(np.float32).itemsize  # elements: tensors and shares begin at a multiple


@dataclass(frozen=True)
class CodedUnit:
    """What is encoded by itself: ``where`` in the flat space, ``place`` in bytes of its message."""

    where: Range
    place: Range


@dataclass(frozen=True)
class CodedMessage:
    """The payloads of a range, and their bytes together."""

    units: tuple[CodedUnit, ...]
    nbytes: int


class GradientCoder:
    """Encodes and decodes the gradients of one rank. All of it is local.

    ``rank`` names the streams of this rank among those whose payloads meet. ``feedback`` keeps what is lost, where
    there is one. ``step`` is set before each step to a number that no other step of the run has.
    """

    def __init__(self, layout: Layout, compressor: Compressor, seed: int, rank: int) -> None:
        self.layout, self.compressor = layout, compressor
        self.feedback: ErrorFeedback | None = None
        self.seed, self.rank, self.step = seed, rank, 0
        self.message = lru_cache(maxsize=None)(self._message)

    def _message(self, part: Range) -> CodedMessage:
        """Return how the payloads of ``part`` lie in a message."""
        units, offset = [], 0
        for _, where in self.layout.within(part):
            start = align(offset)
            offset = start + self.compressor.payload_bytes(where.size)
            units.append(CodedUnit(where, Range(start, offset)))
        return CodedMessage(tuple(units), offset)

    def encode(self, values: Array, part: Range, payloads: Array) -> None:
        """Write the payloads of the float32 ``values`` of ``part``, which are kept, to ``payloads`` (nbytes,)."""
        for unit in self.message(part).units:
            self.encode_unit(unit, values[unit.where.shift(-part.start).slice], payloads[unit.place.slice])

    def encode_unit(self, unit: CodedUnit, values: Array, payload: Array) -> None:
        """Write the payload of the ``values`` of one unit."""
        key = self._key(unit)
        if not is_finite(values):
            self.compressor.poison(payload, key)
        elif self.feedback is None:
            self.compressor.encode(values, payload, key)
        else:
            self.feedback.encode(unit.where, values, self.compressor, payload, key)

    def _key(self, unit: CodedUnit) -> RandomKey:
        return RandomKey(self.seed, self.step, self.rank, unit.where.start // _LINE)

    def decode(self, payloads: Array, part: Range, out: Array) -> None:
        """Write what ``payloads`` say of ``part`` to ``out``; padding between tensors is not touched."""
        for unit in self.message(part).units:
            self.compressor.decode(payloads[unit.place.slice], out[unit.where.shift(-part.start).slice])

    def add(self, payloads: Array, part: Range, out: Array) -> None:
        """Add what ``payloads`` say of ``part`` to ``out``."""
        for unit in self.message(part).units:
            self.compressor.add(payloads[unit.place.slice], out[unit.where.shift(-part.start).slice])
